/*
 * reduce_scatter: each rank combines its own part of what all have. On the thread that runs the
 * operation; may be left at any wait and entered again.
 *
 *     inline    all parts come with the call
 *     staged    reduction.c: a chunk holds a piece of the part of each other rank
 *     direct    from everybody's memory, where it lies; nobody returns before all have read
 *
 * Parts may differ in size between ranks that they are for, and lie apart from each other.
 */
#include "backend/shm/reduction.h"

#include <string.h>

#include "backend/arith/arith.h"

static size_t bytes_of(const tddp_buffer *buffer)
{
    return buffer->count * tddp_dtype_size(buffer->dtype);
}

/* Bytes of each rank's place in a chunk. */
static size_t piece_of(const tddp_shm_reduction *self)
{
    return self->chunk / (size_t)self->size / TDDP_SHM_SLICE_LINE * TDDP_SHM_SLICE_LINE;
}

/* What chunk number `chunk` has of a part. */
static size_t piece_at(const tddp_shm_reduction *self, int part, size_t chunk, size_t *from)
{
    size_t piece = piece_of(self);
    size_t bytes = bytes_of(&self->op->input_parts[part]);
    *from = chunk * piece < bytes ? chunk * piece : bytes;
    return bytes - *from < piece ? bytes - *from : piece;
}

static void copy_pieces(const tddp_shm_reduction *self, size_t chunk)
{
    char *place = tddp_shm_own_place(self, chunk);
    for (int rank = 0; rank < self->size; rank++) {
        size_t from;
        size_t bytes = piece_at(self, rank, chunk, &from);
        if (rank != self->rank && bytes > 0) {
            const char *part = self->op->input_parts[rank].data;
            tddp_arith_copy(place + (size_t)rank * piece_of(self), part + from, bytes, false);
        }
    }
}

static void combine_pieces(const tddp_shm_reduction *self, size_t chunk)
{
    const void *sources[TDDP_SHM_MOST_RANKS];
    size_t from;
    size_t bytes = piece_at(self, self->rank, chunk, &from);
    if (bytes == 0) {
        return;
    }
    for (int rank = 0; rank < self->size; rank++) {
        sources[rank] =
            tddp_shm_chunk_place(self, rank, chunk) + (size_t)self->rank * piece_of(self);
    }
    sources[self->rank] = (const char *)self->op->input_parts[self->rank].data + from;
    void *result = (char *)self->op->output.data + from;
    tddp_shm_combine(self, sources, &result, 1, bytes, false);
}

/* Where the own part begins if all parts lie end to end. */
static size_t own_start(const tddp_shm_reduction *self)
{
    size_t start = 0;
    for (int rank = 0; rank < self->rank; rank++) {
        start += bytes_of(&self->op->input_parts[rank]);
    }
    return start;
}

/* From what lies at `base` for each rank: its whole input. */
static void combine_own(const tddp_shm_reduction *self, const void *(*base)(const tddp_shm *, int),
                        bool streaming)
{
    const void *sources[TDDP_SHM_MOST_RANKS];
    size_t start = own_start(self);
    for (int rank = 0; rank < self->size; rank++) {
        sources[rank] = (const char *)base(self->shm, rank) + start;
    }
    void *result = self->op->output.data;
    tddp_shm_combine(self, sources, &result, 1, bytes_of(&self->op->output), streaming);
}

static tddp_status combine_direct(const tddp_shm_reduction *self)
{
    if (self->course->stage == TDDP_SHM_MET) {
        combine_own(self, tddp_shm_input,
                    bytes_of(&self->op->output) > tddp_shm_cache_bytes(self->shm));
        tddp_shm_publish(self->shm, 1);
        self->course->stage = TDDP_SHM_LEAVES;
    }
    return tddp_shm_await_all(self->shm, 1);
}

/* The input in one piece: as it is, or put together. */
static const void *payload_of(const tddp_op *op, int size, char *room)
{
    if (op->input.data) {
        return op->input.data;
    }
    char *end = room;
    for (int rank = 0; rank < size; rank++) {
        size_t bytes = bytes_of(&op->input_parts[rank]);
        if (bytes > 0) {
            memcpy(end, op->input_parts[rank].data, bytes);
        }
        end += bytes;
    }
    return room;
}

static void set_chunks(tddp_shm_reduction *self)
{
    size_t most = 0;
    for (int rank = 0; rank < self->size; rank++) {
        size_t bytes = bytes_of(&self->op->input_parts[rank]);
        most = bytes > most ? bytes : most;
    }
    self->chunk = TDDP_SHM_CHUNK_MOST;
    self->chunks = (most + piece_of(self) - 1) / piece_of(self);
}

tddp_status tddp_shm_reduce_scatter(tddp_shm *shm, const tddp_op *op)
{
    tddp_shm_reduction self = {.shm = shm,
                               .op = op,
                               .course = tddp_shm_course_of(shm),
                               .rank = tddp_shm_rank(shm),
                               .size = tddp_shm_size(shm),
                               .root = -1,
                               .bytes = bytes_of(&op->input),
                               .copy = copy_pieces,
                               .combine = combine_pieces};
    char room[TDDP_SHM_PAYLOAD_BYTES];
    tddp_shm_algorithm algorithm = tddp_shm_choose(shm, op->kind, self.bytes, false);
    const void *payload = algorithm == TDDP_SHM_INLINE ? payload_of(op, self.size, room) : NULL;
    set_chunks(&self);
    tddp_status status =
        tddp_shm_begin(&self, payload, &op->input, tddp_shm_all_inputs, &algorithm);
    if (status) {
        return status;
    }
    tddp_shm_chose(shm, op->kind, self.bytes, algorithm);
    switch (algorithm) {
    case TDDP_SHM_INLINE:
        combine_own(&self, tddp_shm_payload, false);
        return TDDP_OK;
    case TDDP_SHM_DIRECT:
        return combine_direct(&self);
    default:
        return tddp_shm_pass_chunks(&self);
    }
}
