/*
 * Messages. A header of fixed size is matched by the tag, and says what follows; the payload is
 * then received from that rank by the number of the message, so that the order in which threads
 * wait does not matter.
 */
#include <inttypes.h>
#include <stdlib.h>

#include "backend/mpi/mpi.h"

typedef struct header {
    uint64_t count;
    uint32_t dtype;
    uint32_t number; /* of the messages between these ranks: the payload's tag */
} header;

typedef struct message {
    const tddp_op *op;
    tddp_mpi_limits limits;
    header head;
    MPI_Request header_request;
    int pieces;
    MPI_Request payload[]; /* of a send */
} message;

/* MPI promises tags up to 32767. */
enum { NUMBERS = 32768 };

static int piece_of(size_t bytes, int piece)
{
    const size_t left = bytes - (size_t)piece * TDDP_MPI_MOST;
    return (int)(left < TDDP_MPI_MOST ? left : TDDP_MPI_MOST);
}

static tddp_status check_tag(const tddp_mpi *self, uint32_t tag)
{
    int *most = NULL;
    int found = 0;
    if (MPI_Comm_get_attr(self->headers, MPI_TAG_UB, &most, &found) || !found ||
        tag > (uint32_t)*most) {
        return tddp_fail(TDDP_UNSUPPORTED, "tag %" PRIu32 ": expected at most %d with this MPI",
                         tag, found ? *most : 32767);
    }
    return TDDP_OK;
}

static tddp_status start_send(tddp_mpi *self, message *out)
{
    const tddp_buffer *data = &out->op->input;
    const uint32_t number = atomic_fetch_add(&self->sent[out->op->peer], 1) % NUMBERS;
    out->head = (header){data->count, data->dtype, number};
    int code = MPI_Isend(&out->head, sizeof out->head, MPI_BYTE, out->op->peer, (int)out->op->tag,
                         self->headers, &out->header_request);
    for (int i = 0; i < out->pieces; i++) {
        out->payload[i] = MPI_REQUEST_NULL;
    }
    for (int i = 0; i < out->pieces && code == MPI_SUCCESS; i++) {
        code = MPI_Isend((const char *)data->data + (size_t)i * TDDP_MPI_MOST,
                         piece_of(tddp_buffer_bytes(data), i), MPI_BYTE, out->op->peer, (int)number,
                         self->payloads, &out->payload[i]);
    }
    return tddp_mpi_check(code, "send");
}

tddp_status tddp_mpi_post(void *context, const tddp_op *op, void **request)
{
    tddp_mpi *self = context;
    tddp_status status = tddp_mpi_begin();
    if (status == TDDP_OK) {
        status = check_tag(self, op->tag);
    }
    if (status) {
        return status;
    }
    const bool sends = op->kind == TDDP_OP_SEND;
    const size_t pieces =
        sends ? (tddp_buffer_bytes(&op->input) + TDDP_MPI_MOST - 1) / TDDP_MPI_MOST : 0;
    message *made = calloc(1, sizeof *made + pieces * sizeof(MPI_Request));
    if (!made) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
    }
    made->op = op;
    made->limits = tddp_mpi_limits_of(self, op);
    made->pieces = (int)pieces;
    if (sends) {
        status = start_send(self, made);
    } else {
        const int source = op->peer == TDDP_ANY_SOURCE ? MPI_ANY_SOURCE : op->peer;
        status = tddp_mpi_check(MPI_Irecv(&made->head, sizeof made->head, MPI_BYTE, source,
                                          (int)op->tag, self->headers, &made->header_request),
                                "recv");
    }
    if (status) {
        tddp_mpi_give_up();
        return status;
    }
    *request = made;
    return TDDP_OK;
}

static tddp_status finish_send(message *self)
{
    tddp_status status =
        tddp_mpi_wait(&self->limits, MPI_SUCCESS, &self->header_request, 1, "send");
    return status ? status
                  : tddp_mpi_wait(&self->limits, MPI_SUCCESS, self->payload, self->pieces, "send");
}

/* Of a message that is not what was expected: it is received, so that its sender can go on. */
static tddp_status receive_payload(message *self, void *into, size_t bytes, int source)
{
    tddp_status status = TDDP_OK;
    for (int i = 0; (size_t)i * TDDP_MPI_MOST < bytes && status == TDDP_OK; i++) {
        MPI_Request request;
        int code =
            MPI_Irecv((char *)into + (size_t)i * TDDP_MPI_MOST, piece_of(bytes, i), MPI_BYTE,
                      source, (int)self->head.number, self->limits.group->payloads, &request);
        status = tddp_mpi_wait(&self->limits, code, &request, 1, "recv");
    }
    return status;
}

static tddp_status refuse(message *self, int source)
{
    const tddp_buffer *into = &self->op->output;
    const size_t bytes = self->head.count * tddp_dtype_size((tddp_dtype)self->head.dtype);
    void *memory = malloc(bytes + 1);
    tddp_status status = memory ? receive_payload(self, memory, bytes, source) : TDDP_OK;
    if (!tddp_mpi_given_up()) {
        free(memory);
    }
    if (status) {
        return status;
    }
    return tddp_fail(TDDP_MISMATCH,
                     "rank %d sends %" PRIu64
                     " elements of %s, rank %d receives %zu elements of %s with tag %" PRIu32
                     ": both must be the same",
                     source, self->head.count, tddp_dtype_name((tddp_dtype)self->head.dtype),
                     self->limits.group->rank, into->count, tddp_dtype_name(into->dtype),
                     self->op->tag);
}

static tddp_status finish_receive(message *self, int *source)
{
    const tddp_buffer *into = &self->op->output;
    MPI_Status from;
    tddp_status status = tddp_mpi_wait_receive(&self->limits, &self->header_request, &from);
    if (status) {
        return status;
    }
    *source = from.MPI_SOURCE;
    if (self->head.count != into->count || self->head.dtype != (uint32_t)into->dtype) {
        return refuse(self, from.MPI_SOURCE);
    }
    return receive_payload(self, into->data, tddp_buffer_bytes(into), from.MPI_SOURCE);
}

tddp_status tddp_mpi_finish(void *context, void *request, int *source)
{
    (void)context;
    message *self = request;
    tddp_status status =
        self->op->kind == TDDP_OP_SEND ? finish_send(self) : finish_receive(self, source);
    if (!tddp_mpi_given_up()) {
        free(self);
    }
    return status;
}
