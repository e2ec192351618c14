/*
 * all_reduce, reduce and reduce_scatter. Runs on the operation's thread; can be left at any wait
 * and resumed.
 *
 *     inline    the data travel with the call; each receiver combines all ranks' data
 *     staged    through staging, in chunks; each receiver combines all ranks' data
 *     sliced    through staging, in chunks, of each of which each rank combines a slice
 *     direct    each rank combines a slice of all ranks' memory in place; no rank returns before
 *               all have finished
 *
 * A slice of reduce_scatter is the rank's part, whichever the algorithm; parts may differ in size,
 * and need not be contiguous. All algorithms combine the same sources in the same order, so the
 * bits of the result don't depend on the algorithm. A rank's own source is its memory, not its
 * staging.
 *
 * While chunk k is combined, chunk k + 1 is already in staging, so that ranks of about equal speed
 * seldom wait for each other:
 *
 *     copy(0) enter sync | copy(1) publish(2) combine(0) | copy(2) publish(3) wait(2)
 * combine(1)|...
 *
 * A rank that has published s has copied all chunks up to s - 1 and combined all up to s - 3.
 * Before copy(k + 1) a rank has waited until all others published k: they have finished chunk k -
 * 3, so chunk k + 1 may overwrite it. Therefore four chunks in staging are enough, without waiting
 * for space. Others may read the last chunks after this rank has returned: the next operation uses
 * the other staging half.
 *
 * "sliced" writes the result of a slice over the sources in the other ranks' staging:
 *
 *     copy(0) enter sync | copy(1) combine(0) publish(2) | copy(2) wait(2) combine(1) publish(3)
 *     copy_back(0) | copy(3) wait(3) combine(2) publish(4) copy_back(1) | ... | wait copy_back
 *
 * A rank that has published s has combined its slice of chunks up to s - 2. Before copy(k + 1) all
 * others have finished chunk k - 2, also in this rank's staging, and this rank has copied back
 * chunk k - 3. The time goes into moving cache lines between cores: here each line moves there and
 * back, half of what it takes if each rank reads all the others' data.
 */
#include <string.h>

#include "backend/arith/arith.h"
#include "backend/shm/algorithms.h"

enum {
    LINE = 64,
    STAGING_CHUNKS = 4,
    MAX_CHUNK = TDDP_SHM_STAGING_BYTES / STAGING_CHUNKS,
    MIN_CHUNK = 64 * 1024,
    MIN_CHUNKS = 4, /* of an operation, so that copying and combining overlap */
};

/* cursor->stage; cursor->index is the chunk. */
enum {
    STAGE_START,
    STAGE_SYNCED,
    STAGE_COPY,     /* to copy the next chunk to staging */
    STAGE_WAIT,     /* it is copied */
    STAGE_FINISHED, /* this rank has finished, others may not have */
};

typedef struct reduction {
    tddp_shm *shm;
    const tddp_op *op;
    tddp_shm_cursor *cursor;
    int rank;
    int size;
    int root;      /* the only rank that receives the result; -1: all do */
    bool scatters; /* reduce_scatter */
    size_t bytes;
    char *staging; /* this rank's half, known before the sync */
    size_t chunk;  /* bytes of a chunk in staging */
    size_t chunks;
    tddp_shm_algorithm algorithm;
    /* The direct algorithm is used if all ranks' memory is registered. Ranks with registered
     * memory then copy nothing before the sync has shown that some other's isn't. */
    bool may_be_direct;
} reduction;

/* What one rank combines of a chunk, or of all data if the algorithm has no chunks. */
typedef struct slice {
    char *data;    /* in this rank's memory */
    size_t offset; /* in each rank's chunk, payload or memory */
    size_t bytes;
} slice;

static size_t min_of(size_t a, size_t b)
{
    return a < b ? a : b;
}

static bool receives_result(const reduction *self, int rank)
{
    return self->root < 0 || self->root == rank;
}

/* Whether each rank combines another slice. */
static bool has_slices(const reduction *self)
{
    return self->scatters || self->algorithm == TDDP_SHM_SLICED ||
           self->algorithm == TDDP_SHM_DIRECT;
}

static bool has_chunks(const reduction *self)
{
    return self->algorithm == TDDP_SHM_STAGED || self->algorithm == TDDP_SHM_SLICED;
}

/* The bytes of each rank's part in a chunk of reduce_scatter. */
static size_t part_chunk(const reduction *self)
{
    return self->chunk / (size_t)self->size / LINE * LINE;
}

static slice part_slice(const reduction *self, size_t chunk, int rank)
{
    const tddp_buffer *parts = self->op->input_parts;
    const size_t bytes = tddp_buffer_bytes(&parts[rank]);
    size_t each = part_chunk(self);
    size_t from = min_of(chunk * each, bytes);
    size_t offset = (size_t)rank * each;
    if (!has_chunks(self)) {
        each = bytes;
        from = 0;
        offset = 0;
        for (int before = 0; before < rank; before++) {
            offset += tddp_buffer_bytes(&parts[before]);
        }
    }
    return (slice){(char *)parts[rank].data + from, offset, min_of(each, bytes - from)};
}

static slice slice_of(const reduction *self, size_t chunk, int rank)
{
    if (self->scatters) {
        return part_slice(self, chunk, rank);
    }
    const size_t start = has_chunks(self) ? chunk * self->chunk : 0;
    size_t bytes = has_chunks(self) ? min_of(self->bytes - start, self->chunk) : self->bytes;
    size_t offset = 0;
    if (has_slices(self)) {
        const size_t lines = (bytes + LINE - 1) / LINE;
        const size_t each = (lines + (size_t)self->size - 1) / (size_t)self->size * LINE;
        offset = min_of(each * (size_t)rank, bytes);
        bytes = min_of(bytes - offset, each);
    }
    return (slice){(char *)self->op->output.data + start + offset, offset, bytes};
}

/* After the sync: a rank's registered memory; NULL if it isn't registered. */
static char *memory_of(const reduction *self, int rank)
{
    return (char *)(uintptr_t)(self->scatters ? tddp_shm_input(self->shm, rank)
                                              : tddp_shm_output(self->shm, rank));
}

static size_t staged_at(size_t chunk)
{
    return chunk % STAGING_CHUNKS * MAX_CHUNK;
}

/* Where slices of another rank's data are. */
static char *data_of(const reduction *self, int rank, size_t chunk)
{
    switch (self->algorithm) {
    case TDDP_SHM_INLINE:
        return (char *)(uintptr_t)tddp_shm_payload(self->shm, rank);
    case TDDP_SHM_DIRECT:
        return memory_of(self, rank);
    default:
        return (char *)tddp_shm_staging(self->shm, rank) + staged_at(chunk);
    }
}

/* Combines this rank's slice of a chunk of all ranks, in their order. */
static void combine(const reduction *self, size_t chunk)
{
    const tddp_op *op = self->op;
    const slice own = slice_of(self, chunk, self->rank);
    const void *sources[TDDP_SHM_MAX_RANKS];
    void *results[TDDP_SHM_MAX_RANKS];
    double factors[TDDP_SHM_MAX_RANKS];
    const bool premultiplies = op->reduce == TDDP_REDUCE_PREMUL_SUM;
    const bool writes_back = has_slices(self) && !self->scatters;
    int result_count = 0;
    if (own.bytes == 0 || (!has_slices(self) && !receives_result(self, self->rank))) {
        return;
    }
    for (int rank = 0; rank < self->size; rank++) {
        char *data = rank == self->rank ? own.data : data_of(self, rank, chunk) + own.offset;
        sources[rank] = data;
        if (premultiplies) {
            factors[rank] = tddp_shm_premul(self->shm, rank);
        }
        if (writes_back && receives_result(self, rank)) {
            results[result_count++] = data;
        }
    }
    if (!writes_back) {
        const void *input = self->scatters ? op->input_parts[self->rank].data : op->output.data;
        results[result_count++] = (char *)op->output.data + (own.data - (const char *)input);
    }
    tddp_arith_reduce(&(tddp_arith_job){
        .op = op->reduce,
        .dtype = op->output.dtype,
        .count = own.bytes / tddp_dtype_size(op->output.dtype),
        .sources = sources,
        .source_count = self->size,
        .results = results,
        .result_count = result_count,
        .factors = premultiplies ? factors : NULL,
        .factor = op->reduce == TDDP_REDUCE_AVG ? 1.0 / self->size : 1.0,
        .streaming = self->scatters && self->algorithm == TDDP_SHM_DIRECT &&
                     own.bytes > tddp_shm_cache_bytes(self->shm),
    });
}

/* Copies what other ranks combine of a chunk to this rank's staging, or their results back. */
static void copy(const reduction *self, size_t chunk, bool back)
{
    const int slices = has_slices(self) ? self->size : 1;
    for (int rank = 0; rank < slices; rank++) {
        if (has_slices(self) ? rank == self->rank : self->root == self->rank) {
            continue;
        }
        const slice it = slice_of(self, chunk, rank);
        char *staged = self->staging + staged_at(chunk) + it.offset;
        tddp_arith_copy(back ? it.data : staged, back ? staged : it.data, it.bytes, false);
    }
}

/* --- the start ------------------------------------------------------------------------------- */

/* Whether a rank copies its first chunk only after the sync. */
static bool copies_after_sync(const reduction *self, int rank)
{
    return self->may_be_direct && memory_of(self, rank);
}

/* The input as contiguous memory: as it is, or packed into `scratch`. */
static const void *pack_input(const reduction *self, char *scratch)
{
    if (!self->scatters || self->op->input.data) {
        return self->scatters ? self->op->input.data : self->op->output.data;
    }
    for (int rank = 0; rank < self->size; rank++) {
        const slice it = slice_of(self, 0, rank);
        tddp_arith_copy(scratch + it.offset, it.data, it.bytes, false);
    }
    return scratch;
}

/* If ranks share cores, one chunk where the data fit: there a wait costs more than the work. */
static void set_chunks(reduction *self)
{
    size_t bytes = self->bytes;
    self->chunk = bytes / MIN_CHUNKS / LINE * LINE;
    self->chunk = min_of(self->chunk < MIN_CHUNK ? MIN_CHUNK : self->chunk, MAX_CHUNK);
    if (tddp_shm_ranks_per_core(self->shm) > 1 && bytes <= TDDP_SHM_STAGING_BYTES) {
        self->chunk = TDDP_SHM_STAGING_BYTES;
    }
    size_t each = self->chunk;
    if (self->scatters) {
        self->chunk = MAX_CHUNK;
        each = part_chunk(self);
        bytes = 0;
        for (int rank = 0; rank < self->size; rank++) {
            const size_t part = tddp_buffer_bytes(&self->op->input_parts[rank]);
            bytes = part > bytes ? part : bytes;
        }
    }
    self->chunks = (bytes + each - 1) / each;
}

/* Enters, with the data if they are inline and else with the first chunk in staging, and waits for
 * the others. */
static tddp_status enter(reduction *self)
{
    if (self->algorithm == TDDP_SHM_INLINE) {
        char scratch[TDDP_SHM_PAYLOAD_BYTES];
        const bool alone = self->size == 1;
        tddp_shm_enter(self->shm, self->op, alone ? NULL : pack_input(self, scratch),
                       alone ? 0 : self->bytes);
        return tddp_shm_sync(self->shm);
    }
    const tddp_buffer *local = self->scatters ? &self->op->input : &self->op->output;
    if (!tddp_shm_entered(self->shm, self->op)) {
        self->staging = tddp_shm_next_staging(self->shm);
        if (!self->may_be_direct ||
            tddp_shm_offset_of(self->shm, local->data, self->bytes) == TDDP_SHM_NOT_SHARED) {
            copy(self, 0, false);
        }
    }
    tddp_shm_enter(self->shm, self->op, NULL, 0);
    self->staging = tddp_shm_staging(self->shm, self->rank);
    return self->cursor->stage == STAGE_START ? tddp_shm_sync(self->shm) : TDDP_OK;
}

/* Selects the algorithm, once all ranks have entered. */
static tddp_status start(reduction *self)
{
    tddp_shm *shm = self->shm;
    const tddp_op_kind kind = self->op->kind;
    self->algorithm =
        self->size == 1 ? TDDP_SHM_INLINE : tddp_shm_choose(shm, kind, self->bytes, false);
    self->may_be_direct = tddp_shm_choose(shm, kind, self->bytes, true) == TDDP_SHM_DIRECT;
    set_chunks(self);
    tddp_status status = enter(self);
    if (status || self->algorithm == TDDP_SHM_INLINE) {
        return status;
    }
    if (self->cursor->stage == STAGE_START) {
        self->cursor->stage = STAGE_SYNCED;
    }
    if (self->may_be_direct &&
        (self->scatters ? tddp_shm_all_inputs(shm) : tddp_shm_all_outputs(shm))) {
        self->algorithm = TDDP_SHM_DIRECT;
    } else if (self->cursor->stage == STAGE_SYNCED) {
        if (copies_after_sync(self, self->rank)) {
            copy(self, 0, false);
            tddp_shm_publish_step(shm, 1);
        }
        self->cursor->stage = STAGE_COPY;
    }
    return TDDP_OK;
}

/* --- the algorithms -------------------------------------------------------------------------- */

static tddp_status run_direct(const reduction *self)
{
    if (self->cursor->stage == STAGE_SYNCED) {
        combine(self, 0);
        tddp_shm_publish_step(self->shm, 1);
        self->cursor->stage = STAGE_FINISHED;
    }
    return tddp_shm_wait_step_all(self->shm, 1);
}

/* Waits until chunk `at` of all ranks is in staging. A rank that combines nothing waits only until
 * the root has space for more. */
static tddp_status wait_chunk(const reduction *self, size_t at)
{
    const uint32_t step = (uint32_t)(at + 1);
    if (!has_slices(self) && !receives_result(self, self->rank)) {
        return at > 0 ? tddp_shm_wait_step(self->shm, self->root, step) : TDDP_OK;
    }
    if (at > 0) {
        return tddp_shm_wait_step_all(self->shm, step);
    }
    tddp_status status = TDDP_OK;
    for (int rank = 0; rank < self->size && status == TDDP_OK; rank++) {
        if (rank != self->rank && copies_after_sync(self, rank)) {
            status = tddp_shm_wait_step(self->shm, rank, step);
        }
    }
    return status;
}

static tddp_status run_chunks(const reduction *self)
{
    tddp_shm_cursor *cursor = self->cursor;
    const bool sliced = self->algorithm == TDDP_SHM_SLICED;
    const bool copies_back = sliced && receives_result(self, self->rank);
    while (cursor->index < self->chunks + copies_back) {
        const size_t at = cursor->index;
        const uint32_t next_step = (uint32_t)(at + 2);
        if (cursor->stage == STAGE_COPY) {
            if (at + 1 < self->chunks) {
                copy(self, at + 1, false);
                if (!sliced) {
                    tddp_shm_publish_step(self->shm, next_step);
                }
            }
            cursor->stage = STAGE_WAIT;
        }
        tddp_status status = wait_chunk(self, at);
        if (status) {
            return status;
        }
        if (at < self->chunks) {
            combine(self, at);
            if (sliced) {
                tddp_shm_publish_step(self->shm, next_step);
            }
        }
        if (at > 0 && copies_back) {
            copy(self, at - 1, true);
        }
        cursor->index = at + 1;
        cursor->stage = STAGE_COPY;
    }
    return TDDP_OK;
}

static tddp_status reduce(tddp_shm *shm, const tddp_op *op, int root)
{
    const bool scatters = op->kind == TDDP_OP_REDUCE_SCATTER;
    reduction self = {.shm = shm,
                      .op = op,
                      .cursor = tddp_shm_cursor_of(shm),
                      .rank = tddp_shm_rank(shm),
                      .size = tddp_shm_size(shm),
                      .root = root,
                      .scatters = scatters,
                      .bytes = tddp_buffer_bytes(scatters ? &op->input : &op->output)};
    tddp_status status = start(&self);
    if (status) {
        return status;
    }
    tddp_shm_log_choice(shm, op->kind, self.bytes, self.algorithm);
    switch (self.algorithm) {
    case TDDP_SHM_INLINE:
        combine(&self, 0);
        return TDDP_OK;
    case TDDP_SHM_DIRECT:
        return run_direct(&self);
    default:
        return run_chunks(&self);
    }
}

tddp_status tddp_shm_all_reduce(tddp_shm *shm, const tddp_op *op)
{
    return reduce(shm, op, -1);
}

tddp_status tddp_shm_reduce(tddp_shm *shm, const tddp_op *op)
{
    return reduce(shm, op, op->root);
}

tddp_status tddp_shm_reduce_scatter(tddp_shm *shm, const tddp_op *op)
{
    return reduce(shm, op, -1);
}
