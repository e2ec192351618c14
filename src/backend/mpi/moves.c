/*
 * broadcast, and what moves parts: by MPI's own collective where parts are equal and lie end to end
 * on all ranks, which they may not know of each other; else by messages between each two ranks.
 */
#include <stdlib.h>
#include <string.h>

#include "backend/mpi/mpi.h"

static tddp_status broadcast(tddp_mpi *self, const tddp_op *op, const tddp_mpi_limits *limits)
{
    const size_t bytes = tddp_buffer_bytes(&op->output);
    tddp_status status = TDDP_OK;
    for (size_t at = 0; at < bytes && status == TDDP_OK; at += TDDP_MPI_MOST) {
        const int piece = (int)(bytes - at < TDDP_MPI_MOST ? bytes - at : TDDP_MPI_MOST);
        MPI_Request request;
        int code = MPI_Ibcast((char *)op->output.data + at, piece, MPI_BYTE, op->root,
                              self->collectives, &request);
        status = tddp_mpi_wait(limits, code, &request, 1, "broadcast");
    }
    return status;
}

/* --- between each two ranks ------------------------------------------------------------------ */

/* A part may be both sent to a rank and received from it: then what is sent is copied. */
typedef struct exchange {
    tddp_mpi *group;
    MPI_Request *requests;
    int started;
    char *copies;
    int code;
} exchange;

static void start_receive(exchange *self, const tddp_buffer *part, size_t at, int peer)
{
    const size_t left = tddp_buffer_bytes(part) - at;
    const int piece = (int)(left < TDDP_MPI_MOST ? left : TDDP_MPI_MOST);
    if (self->code == MPI_SUCCESS) {
        self->code = MPI_Irecv((char *)part->data + at, piece, MPI_BYTE, peer, 0,
                               self->group->collectives, &self->requests[self->started++]);
    }
}

static void start_send(exchange *self, const void *data, size_t bytes, size_t at, int peer)
{
    const int piece = (int)(bytes - at < TDDP_MPI_MOST ? bytes - at : TDDP_MPI_MOST);
    if (self->code == MPI_SUCCESS) {
        self->code = MPI_Isend((const char *)data + at, piece, MPI_BYTE, peer, 0,
                               self->group->collectives, &self->requests[self->started++]);
    }
}

static size_t pieces_of(const tddp_buffer *part)
{
    return (tddp_buffer_bytes(part) + TDDP_MPI_MOST - 1) / TDDP_MPI_MOST;
}

static tddp_status prepare(tddp_mpi *self, const tddp_op *op, exchange *out)
{
    size_t requests = 0;
    size_t copied = 0;
    for (int peer = 0; peer < self->size; peer++) {
        const tddp_buffer to = tddp_op_sends(op, self->rank, peer);
        const tddp_buffer from = tddp_op_receives(op, self->rank, peer);
        requests += pieces_of(&to) + pieces_of(&from);
        copied += to.data == from.data ? tddp_buffer_bytes(&to) : 0;
    }
    *out = (exchange){.group = self,
                      .requests = malloc((requests + 1) * sizeof(MPI_Request)),
                      .copies = malloc(copied + 1),
                      .code = MPI_SUCCESS};
    if (!out->requests || !out->copies) {
        free(out->requests);
        free(out->copies);
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory: %zu bytes", copied);
    }
    return TDDP_OK;
}

static void start(exchange *self, const tddp_op *op)
{
    const int rank = self->group->rank;
    const int size = self->group->size;
    char *copy = self->copies;
    /* Each begins with the rank after its own, so that not all send to one. */
    for (int step = 1; step < size; step++) {
        const int peer = (rank + step) % size;
        const tddp_buffer to = tddp_op_sends(op, rank, peer);
        const tddp_buffer from = tddp_op_receives(op, rank, peer);
        const void *data = to.data;
        if (to.data == from.data && to.count > 0) {
            memcpy(copy, to.data, tddp_buffer_bytes(&to));
            data = copy;
            copy += tddp_buffer_bytes(&to);
        }
        for (size_t at = 0; at < tddp_buffer_bytes(&from); at += TDDP_MPI_MOST) {
            start_receive(self, &from, at, peer);
        }
        for (size_t at = 0; at < tddp_buffer_bytes(&to); at += TDDP_MPI_MOST) {
            start_send(self, data, tddp_buffer_bytes(&to), at, peer);
        }
    }
}

static tddp_status move_parts(tddp_mpi *self, const tddp_op *op, const tddp_mpi_limits *limits)
{
    exchange all;
    tddp_status status = prepare(self, op, &all);
    if (status) {
        return status;
    }
    const tddp_buffer to = tddp_op_sends(op, self->rank, self->rank);
    const tddp_buffer from = tddp_op_receives(op, self->rank, self->rank);
    if (from.count > 0 && to.count > 0 && to.data != from.data) {
        memcpy(from.data, to.data, tddp_buffer_bytes(&to));
    }
    start(&all, op);
    status = tddp_mpi_wait(limits, all.code, all.requests, all.started, tddp_op_name(op->kind));
    if (!tddp_mpi_given_up()) {
        free(all.requests);
        free(all.copies);
    }
    return status;
}

/* --- equal parts ----------------------------------------------------------------------------- */

static bool are_equal(const tddp_mpi *self, const tddp_buffer *parts)
{
    for (int rank = 1; rank < self->size; rank++) {
        if (parts[rank].count != parts[0].count) {
            return false;
        }
    }
    return true;
}

/* Sizes are known to all ranks, addresses are not: parts that do not lie end to end are packed. */
static tddp_status all_gather_equal(tddp_mpi *self, const tddp_op *op,
                                    const tddp_mpi_limits *limits)
{
    const size_t each = tddp_buffer_bytes(&op->input);
    char *packed = op->output.data ? NULL : malloc(each * (size_t)self->size + 1);
    char *into = op->output.data ? op->output.data : packed;
    if (!into) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory: %zu bytes", each * (size_t)self->size);
    }
    const bool in_place = op->input.data == into + (size_t)self->rank * each;
    MPI_Request request;
    int code = MPI_Iallgather(in_place ? MPI_IN_PLACE : op->input.data, (int)each, MPI_BYTE, into,
                              (int)each, MPI_BYTE, self->collectives, &request);
    tddp_status status = tddp_mpi_wait(limits, code, &request, 1, "all_gather");
    for (int rank = 0; packed && status == TDDP_OK && rank < self->size; rank++) {
        memcpy(op->output_parts[rank].data, packed + (size_t)rank * each, each);
    }
    if (!tddp_mpi_given_up()) {
        free(packed);
    }
    return status;
}

tddp_status tddp_mpi_move(tddp_mpi *self, const tddp_op *op, const tddp_mpi_limits *limits)
{
    if (op->kind == TDDP_OP_BROADCAST) {
        return broadcast(self, op, limits);
    }
    if (op->kind == TDDP_OP_ALL_GATHER && are_equal(self, op->output_parts) &&
        op->input.count > 0 && tddp_buffer_bytes(&op->input) <= TDDP_MPI_MOST) {
        return all_gather_equal(self, op, limits);
    }
    return move_parts(self, op, limits);
}
