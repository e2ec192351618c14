/*
 * Messages of tags of 47 bits and any size as MPI's, whose tags have 15 bits or more and whose
 * counts are ints. Any thread; MPI's own functions for messages are called by requests.c.
 *
 * MPI matches messages of one sender, communicator and tag in their order. So of tddp_coll's tags
 * only those must stay different that may be posted in different orders at both ends
 * (tddp/transport.h): a program's own have a communicator of their own, all others share one.
 */
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>

#include "backend/mpi/mpi.h"

enum { LOW_BITS = 3, KINDS = 1 << TDDP_TRANSPORT_KIND_BITS, BLOCK_BYTES = 1 << 20 };

static tddp_status set_tag(const tddp_mpi *self, uint64_t tag, tddp_mpi_message *out)
{
    const int kind = (int)(tag >> (TDDP_TRANSPORT_TAG_BITS - TDDP_TRANSPORT_KIND_BITS));
    const uint64_t tags = (uint64_t)self->largest_tag + 1;
    if (kind == TDDP_TRANSPORT_PROGRAM_TAG) {
        if ((uint32_t)tag >= tags) {
            return tddp_fail(TDDP_UNSUPPORTED, "tag %" PRIu32 ": expected at most %d with this MPI",
                             (uint32_t)tag, self->largest_tag);
        }
        out->comm = self->program;
        out->tag = (int)tag;
        return TDDP_OK;
    }
    const int low = (int)(tag % (1 << LOW_BITS));
    const int folded = (int)((tag >> LOW_BITS) % (tags / KINDS >> LOW_BITS));
    out->comm = self->internal;
    out->tag = (folded * KINDS + kind) << LOW_BITS | low;
    return TDDP_OK;
}

/* A count of bytes, or where that has no room in an int, one of a type made for it. */
static tddp_status set_size(size_t bytes, tddp_mpi_message *out)
{
    if (bytes <= INT_MAX) {
        out->count = (int)bytes;
        out->type = MPI_BYTE;
        return TDDP_OK;
    }
    const size_t rest = bytes % BLOCK_BYTES;
    int counts[] = {(int)(bytes / BLOCK_BYTES), (int)rest};
    MPI_Aint offsets[] = {0, (MPI_Aint)(bytes - rest)};
    MPI_Datatype types[] = {MPI_BYTE, MPI_BYTE};
    int code = MPI_Type_contiguous(BLOCK_BYTES, MPI_BYTE, &types[0]);
    if (code == MPI_SUCCESS) {
        code = MPI_Type_create_struct(2, counts, offsets, types, &out->type);
        (void)MPI_Type_free(&types[0]);
    }
    out->count = 1;
    return tddp_mpi_check(code ? code : MPI_Type_commit(&out->type), "a type for a large message");
}

static tddp_status check_group(const tddp_mpi *self)
{
    if (tddp_mpi_is_abandoned()) {
        return tddp_mpi_begin(); /* says so */
    }
    return atomic_load(&self->closed) ? tddp_fail(TDDP_GROUP_FAILED, "closed by this rank")
                                      : TDDP_OK;
}

static tddp_status post(tddp_mpi *self, bool sends, tddp_mpi_message *message, uint64_t tag,
                        size_t bytes, void **out)
{
    tddp_status status = check_group(self);
    status = status ? status : set_tag(self, tag, message);
    tddp_mpi_transfer *made = status ? NULL : calloc(1, sizeof *made);
    if (!made) {
        return status ? status : tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
    }
    made->group = self;
    made->sends = sends;
    status = set_size(bytes, message);
    if (status == TDDP_OK) {
        status = tddp_mpi_start(made, message);
        if (message->type != MPI_BYTE) {
            (void)MPI_Type_free(&message->type); /* once the message is complete */
        }
    }
    if (status) {
        free(made);
        return status;
    }
    *out = made;
    return TDDP_OK;
}

tddp_status tddp_mpi_send(void *context, int peer, uint64_t tag, const void *data, size_t bytes,
                          void **transfer)
{
    /* A message has one pointer for both directions; a send doesn't write. */
    tddp_mpi_message message = {.data = (void *)(uintptr_t)data, .peer = peer};
    return post(context, true, &message, tag, bytes, transfer);
}

tddp_status tddp_mpi_recv(void *context, int peer, uint64_t tag, void *data, size_t bytes,
                          void **transfer)
{
    tddp_mpi_message message = {.data = data,
                                .peer = peer == TDDP_ANY_SOURCE ? MPI_ANY_SOURCE : peer};
    return post(context, false, &message, tag, bytes, transfer);
}

tddp_status tddp_mpi_test(void *context, void *transfer, int *complete, int *source)
{
    const tddp_mpi_transfer *self = transfer;
    *complete = atomic_load(&self->complete);
    if (!*complete) {
        tddp_status status = check_group(context);
        *complete = status != TDDP_OK;
        return status;
    }
    if (source && !self->sends) {
        *source = self->source;
    }
    return tddp_mpi_check(self->code, "a message");
}

void tddp_mpi_release(void *context, void *transfer)
{
    (void)context;
    tddp_mpi_end(transfer);
    free(transfer);
}
