/*
 * Maps each operation to NCCL calls. Where NCCL has no collective, a group of sends and receives,
 * or of broadcasts and reductions, runs as one.
 *
 * Invariant: the calls depend only on what is equal on all ranks, such as the sizes of parts, but
 * not on their addresses: parts may be contiguous on one rank and not on another.
 */
#include "backend/nccl/operations.h"

#include <stdio.h>

#include "backend/nccl/types.h"

/* A launch: this thread is within the communicator's calls, and its device is current. */
typedef struct launch {
    const tddp_nccl *nccl;
    const tddp_cuda *cuda;
    tddp_nccl_communicator *communicator;
    tddp_nccl_comm comm;
    tddp_cuda_stream stream;
    const tddp_op *op;
    int64_t deadline_ns;
    int rank;
    int size;
} launch;

/* Puts an NCCL call on the communicator's stream. */
#define PUT(self, name, ...) (self)->nccl->name(__VA_ARGS__, (self)->comm, (self)->stream)

/* The same, and waits for the call. */
#define CALL(self, name, ...) check(self, PUT(self, name, __VA_ARGS__), #name)

/* Waits for a call. Errors of calls within a group are reported at its end. */
static tddp_status check(const launch *self, tddp_nccl_result result, const char *what)
{
    return tddp_nccl_wait_call(self->communicator, self->comm, result, what, self->deadline_ns);
}

/* --- groups of calls ------------------------------------------------------------------------- */

/* The first error of a group is its result. */
static tddp_nccl_result first_error(tddp_nccl_result one, tddp_nccl_result other)
{
    return one != TDDP_NCCL_SUCCESS && one != TDDP_NCCL_IN_PROGRESS ? one : other;
}

static tddp_status end_group(const launch *self, tddp_nccl_result so_far, const char *what)
{
    tddp_nccl_result result = first_error(so_far, self->nccl->ncclGroupEnd());
    return check(self, result, what);
}

static tddp_nccl_result send_bytes(const launch *self, const tddp_buffer *from, int peer)
{
    return PUT(self, ncclSend, from->data, tddp_buffer_bytes(from), TDDP_NCCL_UINT8, peer);
}

static tddp_nccl_result receive_bytes(const launch *self, const tddp_buffer *into, int peer)
{
    return PUT(self, ncclRecv, into->data, tddp_buffer_bytes(into), TDDP_NCCL_UINT8, peer);
}

static tddp_status copy(const launch *self, const void *from, void *into, size_t bytes)
{
    if (from == into || bytes == 0) {
        return TDDP_OK;
    }
    return tddp_cuda_check(
        self->cuda,
        self->cuda->cudaMemcpyAsync(into, from, bytes, TDDP_CUDA_COPY_ANY, self->stream),
        "cudaMemcpyAsync");
}

/* --- equal parts ----------------------------------------------------------------------------- */

/* Contiguous memory for equal parts: the parts' own if they are contiguous, else allocated on
 * the stream. */
static tddp_status get_packed(const launch *self, const tddp_buffer *buffer,
                              tddp_cuda_memory *packed)
{
    packed->data = buffer->data;
    if (packed->data) {
        return TDDP_OK;
    }
    tddp_status status =
        tddp_cuda_allocate(self->cuda, tddp_buffer_bytes(buffer), self->stream, packed);
    return status
               ? tddp_fail(status, "%s, for parts that do not lie end to end", tddp_error_message())
               : TDDP_OK;
}

static tddp_status copy_parts(const launch *self, const tddp_buffer *parts, char *packed, bool in)
{
    const size_t each = tddp_buffer_bytes(parts);
    tddp_status status = TDDP_OK;
    for (int rank = 0; rank < self->size && status == TDDP_OK; rank++) {
        char *slot = packed + (size_t)rank * each;
        status = in ? copy(self, parts[rank].data, slot, each)
                    : copy(self, slot, parts[rank].data, each);
    }
    return status;
}

/* Returns the status passed in, or the release's own failure. */
static tddp_status release_packed(const launch *self, const tddp_buffer *buffer,
                                  const tddp_cuda_memory *packed, tddp_status status)
{
    char text[1024];
    if (packed->data == buffer->data) {
        return status;
    }
    (void)snprintf(text, sizeof text, "%s", tddp_error_message());
    tddp_status released = tddp_cuda_release(self->cuda, self->stream, packed);
    return status ? tddp_fail(status, "%s", text) : released;
}

/* --- reductions ------------------------------------------------------------------------------ */

/* NCCL's dtype and operation. `*made`: it was created for a factor, and must be released. */
static tddp_status find_reduction(const launch *self, tddp_nccl_type *type, int *redop, bool *made)
{
    const tddp_op *op = self->op;
    const tddp_dtype dtype = op->output.dtype;
    *made = false;
    tddp_status status = tddp_nccl_type_to_reduce(
        dtype, op->reduce, self->communicator->libraries->nccl_version, type, redop);
    if (status || op->reduce != TDDP_REDUCE_PREMUL_SUM) {
        return status;
    }
    uint64_t factor = 0;
    tddp_nccl_scalar(dtype, op->premul, &factor);
    status = check(self,
                   self->nccl->ncclRedOpCreatePreMulSum(redop, &factor, type->type,
                                                        TDDP_NCCL_HOST_SCALAR, self->comm),
                   "ncclRedOpCreatePreMulSum");
    *made = status == TDDP_OK;
    return status;
}

/* Several buffers, each in place: NCCL fuses them into one launch. */
static tddp_status reduce_bundled(const launch *self, tddp_nccl_type type, int redop)
{
    const tddp_op *op = self->op;
    tddp_nccl_result result = self->nccl->ncclGroupStart();
    for (size_t i = 0; i < op->bundled; i++) {
        const tddp_buffer *each = &op->output_parts[i];
        result = first_error(result, PUT(self, ncclAllReduce, each->data, each->data,
                                         each->count * type.each, type.type, redop));
    }
    return end_group(self, result, "ncclAllReduce");
}

static tddp_status scatter_equal_parts(const launch *self, tddp_nccl_type type, int redop)
{
    const tddp_op *op = self->op;
    tddp_cuda_memory packed;
    tddp_status status = get_packed(self, &op->input, &packed);
    if (status) {
        return status;
    }
    if (packed.data != op->input.data) {
        status = copy_parts(self, op->input_parts, packed.data, true);
    }
    if (status == TDDP_OK) {
        status = CALL(self, ncclReduceScatter, packed.data, op->output.data,
                      op->output.count * type.each, type.type, redop);
    }
    return release_packed(self, &op->input, &packed, status);
}

static tddp_status reduce_scatter(const launch *self, tddp_nccl_type type, int redop)
{
    const tddp_op *op = self->op;
    size_t each;
    if (op->input.count == 0) {
        return TDDP_OK;
    }
    if (tddp_op_is_uniform(op, self->size, &each)) {
        return scatter_equal_parts(self, type, redop);
    }
    tddp_nccl_result result = self->nccl->ncclGroupStart();
    for (int rank = 0; rank < self->size; rank++) {
        const tddp_buffer *part = &op->input_parts[rank];
        result = first_error(result, PUT(self, ncclReduce, part->data, op->output.data,
                                         part->count * type.each, type.type, redop, rank));
    }
    return end_group(self, result, "ncclReduce");
}

static tddp_status reduce(const launch *self)
{
    const tddp_op *op = self->op;
    tddp_nccl_type type;
    int redop = 0;
    bool made;
    tddp_status status = find_reduction(self, &type, &redop, &made);
    if (status) {
        return status;
    }
    const size_t count = op->output.count * type.each;
    if (op->kind == TDDP_OP_REDUCE_SCATTER) {
        status = reduce_scatter(self, type, redop);
    } else if (op->kind == TDDP_OP_REDUCE) {
        status = CALL(self, ncclReduce, op->input.data, op->output.data, count, type.type, redop,
                      op->root);
    } else if (op->bundled > 0) {
        status = reduce_bundled(self, type, redop);
    } else {
        status =
            CALL(self, ncclAllReduce, op->input.data, op->output.data, count, type.type, redop);
    }
    if (made) {
        (void)self->nccl->ncclRedOpDestroy(redop, self->comm);
    }
    return status;
}

/* --- data movement --------------------------------------------------------------------------- */

static tddp_status broadcast(const launch *self)
{
    const tddp_op *op = self->op;
    return CALL(self, ncclBroadcast, op->input.data, op->output.data,
                tddp_buffer_bytes(&op->output), TDDP_NCCL_UINT8, op->root);
}

static tddp_status all_gather_equal_parts(const launch *self)
{
    const tddp_op *op = self->op;
    tddp_cuda_memory packed;
    tddp_status status = get_packed(self, &op->output, &packed);
    if (status) {
        return status;
    }
    status = CALL(self, ncclAllGather, op->input.data, packed.data, tddp_buffer_bytes(&op->input),
                  TDDP_NCCL_UINT8);
    if (status == TDDP_OK && packed.data != op->output.data) {
        status = copy_parts(self, op->output_parts, packed.data, false);
    }
    return release_packed(self, &op->output, &packed, status);
}

static tddp_status all_gather(const launch *self)
{
    const tddp_op *op = self->op;
    size_t each;
    if (op->output.count == 0) {
        return TDDP_OK;
    }
    if (tddp_op_is_uniform(op, self->size, &each)) {
        return all_gather_equal_parts(self);
    }
    tddp_nccl_result result = self->nccl->ncclGroupStart();
    for (int rank = 0; rank < self->size; rank++) {
        const tddp_buffer *part = &op->output_parts[rank];
        const void *from = rank == self->rank ? op->input.data : part->data;
        result = first_error(result, PUT(self, ncclBroadcast, from, part->data,
                                         tddp_buffer_bytes(part), TDDP_NCCL_UINT8, rank));
    }
    return end_group(self, result, "ncclBroadcast");
}

static tddp_status exchange(const launch *self)
{
    const int local = self->rank;
    const tddp_buffer from = tddp_op_sends(self->op, local, local);
    const tddp_buffer into = tddp_op_receives(self->op, local, local);
    if (from.count > 0 && into.count > 0) {
        tddp_status status = copy(self, from.data, into.data, tddp_buffer_bytes(&from));
        if (status) {
            return status;
        }
    }
    tddp_nccl_result result = self->nccl->ncclGroupStart();
    for (int peer = 0; peer < self->size; peer++) {
        const tddp_buffer out = tddp_op_sends(self->op, local, peer);
        const tddp_buffer in = tddp_op_receives(self->op, local, peer);
        if (peer != local && out.count > 0) {
            result = first_error(result, send_bytes(self, &out, peer));
        }
        if (peer != local && in.count > 0) {
            result = first_error(result, receive_bytes(self, &in, peer));
        }
    }
    return end_group(self, result, "ncclSend and ncclRecv");
}

/* A rank has one element from each other rank when all have arrived. */
static tddp_status barrier(const launch *self)
{
    void *memory = self->communicator->scratch;
    return CALL(self, ncclAllReduce, memory, memory, 1, TDDP_NCCL_INT32, TDDP_NCCL_SUM);
}

static tddp_status collective(const launch *self)
{
    switch (self->op->kind) {
    case TDDP_OP_ALL_REDUCE:
    case TDDP_OP_REDUCE:
    case TDDP_OP_REDUCE_SCATTER:
        return reduce(self);
    case TDDP_OP_BROADCAST:
        return broadcast(self);
    case TDDP_OP_ALL_GATHER:
        return all_gather(self);
    case TDDP_OP_BARRIER:
        return barrier(self);
    default:
        return exchange(self);
    }
}

/* --- putting work on a stream ---------------------------------------------------------------- */

static tddp_status record(const tddp_cuda *cuda, tddp_cuda_event event, tddp_cuda_stream stream)
{
    return tddp_cuda_check(cuda, cuda->cudaEventRecord(event, stream), "cudaEventRecord");
}

/* What precedes the operation on the caller's stream. */
static tddp_status record_before(const launch *self, const tddp_nccl_request *request)
{
    tddp_cuda_stream stream = self->stream;
    tddp_status status =
        tddp_cuda_check(self->cuda, self->cuda->cudaStreamWaitEvent(stream, request->ready, 0),
                        "cudaStreamWaitEvent");
    if (status == TDDP_OK && request->started) {
        status = record(self->cuda, request->started, stream);
    }
    return status;
}

/* Of a batch, on the communicator of all ranks, or one, to the other one of two ranks. */
static tddp_status put_messages(const launch *self, tddp_nccl_request *const *requests,
                                size_t count)
{
    tddp_nccl_result result = self->nccl->ncclGroupStart();
    for (size_t i = 0; i < count; i++) {
        const tddp_op *op = requests[i]->op;
        const int peer = op->batched ? op->peer : 1 - self->rank;
        result =
            first_error(result, op->kind == TDDP_OP_SEND ? send_bytes(self, &op->input, peer)
                                                         : receive_bytes(self, &op->output, peer));
    }
    return end_group(self, result, "ncclSend and ncclRecv");
}

static tddp_status put(launch *self, tddp_nccl_request *const *requests, size_t count)
{
    tddp_status status = TDDP_OK;
    for (size_t i = 0; i < count && status == TDDP_OK; i++) {
        status = record_before(self, requests[i]);
    }
    if (status == TDDP_OK) {
        status =
            tddp_op_is_p2p(self->op->kind) ? put_messages(self, requests, count) : collective(self);
    }
    for (size_t i = 0; i < count && status == TDDP_OK; i++) {
        status = record(self->cuda, requests[i]->done, self->stream);
    }
    for (size_t i = 0; i < count && status == TDDP_OK; i++) {
        requests[i]->launched = true;
    }
    return status;
}

tddp_status tddp_nccl_launch(tddp_nccl_request *const *requests, size_t count)
{
    const tddp_nccl_request *first = requests[0];
    tddp_nccl_communicator *communicator = first->communicator;
    launch it = {.nccl = &communicator->libraries->nccl,
                 .cuda = communicator->libraries->cuda,
                 .communicator = communicator,
                 .stream = communicator->stream,
                 .op = first->op,
                 .deadline_ns = first->deadline_ns,
                 .rank = communicator->opts.rank,
                 .size = communicator->opts.size};
    tddp_cuda_place place;
    tddp_status status = tddp_cuda_enter(it.cuda, communicator->opts.device, &place);
    if (status) {
        return status;
    }
    status = tddp_nccl_begin_calls(communicator, it.deadline_ns, &it.comm);
    if (status == TDDP_OK) {
        status = put(&it, requests, count);
        tddp_nccl_end_calls(communicator);
    }
    tddp_cuda_leave(it.cuda, &place);
    return status;
}
