/*
 * Each operation in NCCL's calls. What NCCL has no call for is a group of sends and receives, or of
 * broadcasts and reductions, which it carries out as one.
 *
 * Invariant: which calls are made follows from what is equal on all ranks, as the parts' sizes are.
 * Where the parts lie is not: one rank may have them end to end and the next may not.
 */
#include "backend/nccl/operations.h"

#include "backend/nccl/types.h"

/* Of a launch: the channel's mutex is held, and its device is the thread's. */
typedef struct launch {
    const tddp_nccl *nccl;
    const tddp_cuda *cuda;
    tddp_nccl_channel *channel;
    const tddp_op *op;
    int64_t deadline_ns;
} launch;

static size_t bytes_of(const tddp_buffer *buffer)
{
    return buffer->count * tddp_dtype_size(buffer->dtype);
}

/* A call's result; those within a group are told by the group's end. */
static tddp_status check(const launch *self, tddp_nccl_result result, const char *what)
{
    return tddp_nccl_settle(self->channel, result, what, self->deadline_ns);
}

/* --- groups of calls ------------------------------------------------------------------------- */

/* The first failure within it is what it ends with. */
static tddp_nccl_result first_of(tddp_nccl_result one, tddp_nccl_result other)
{
    return one != TDDP_NCCL_SUCCESS && one != TDDP_NCCL_IN_PROGRESS ? one : other;
}

static tddp_status end_group(const launch *self, tddp_nccl_result so_far, const char *what)
{
    tddp_nccl_result result = first_of(so_far, self->nccl->ncclGroupEnd());
    return check(self, result, what);
}

static tddp_nccl_result send_bytes(const launch *self, const tddp_buffer *from, int peer)
{
    return self->nccl->ncclSend(from->data, bytes_of(from), TDDP_NCCL_UINT8, peer,
                                self->channel->comm, self->channel->stream);
}

static tddp_nccl_result receive_bytes(const launch *self, const tddp_buffer *into, int peer)
{
    return self->nccl->ncclRecv(into->data, bytes_of(into), TDDP_NCCL_UINT8, peer,
                                self->channel->comm, self->channel->stream);
}

static tddp_status copy(const launch *self, const void *from, void *into, size_t bytes)
{
    if (from == into || bytes == 0) {
        return TDDP_OK;
    }
    return tddp_cuda_check(
        self->cuda,
        self->cuda->cudaMemcpyAsync(into, from, bytes, TDDP_CUDA_COPY_ANY, self->channel->stream),
        "cudaMemcpyAsync");
}

/* --- equal parts ----------------------------------------------------------------------------- */

static bool all_equal(const launch *self, const tddp_buffer *parts)
{
    for (int rank = 1; rank < self->channel->size; rank++) {
        if (parts[rank].count != parts->count) {
            return false;
        }
    }
    return true;
}

/* Memory in which equal parts lie end to end: theirs if they do (`whole`), else the channel's
 * stream's own until it has got there. */
static tddp_status take_room(const launch *self, const tddp_buffer *whole, void **room)
{
    *room = whole->data;
    if (*room) {
        return TDDP_OK;
    }
    return tddp_cuda_check(
        self->cuda, self->cuda->cudaMallocAsync(room, bytes_of(whole), self->channel->stream),
        "cudaMallocAsync, for parts that do not lie end to end");
}

static tddp_status copy_parts(const launch *self, const tddp_buffer *parts, char *room, bool in)
{
    const size_t each = bytes_of(parts);
    tddp_status status = TDDP_OK;
    for (int rank = 0; rank < self->channel->size && status == TDDP_OK; rank++) {
        char *place = room + (size_t)rank * each;
        status = in ? copy(self, parts[rank].data, place, each)
                    : copy(self, place, parts[rank].data, each);
    }
    return status;
}

/* With the status so far. */
static tddp_status leave_room(const launch *self, const tddp_buffer *whole, void *room,
                              tddp_status status)
{
    if (room == whole->data) {
        return status;
    }
    tddp_cuda_error error = self->cuda->cudaFreeAsync(room, self->channel->stream);
    if (status) {
        (void)self->cuda->cudaGetLastError();
        return status;
    }
    return tddp_cuda_check(self->cuda, error, "cudaFreeAsync");
}

/* --- reductions ------------------------------------------------------------------------------ */

/* NCCL's type and operation; one made for a factor is to be given back. */
static tddp_status find_reduction(const launch *self, tddp_nccl_type *type, int *redop, bool *made)
{
    const tddp_op *op = self->op;
    const tddp_dtype dtype = op->output.dtype;
    *made = false;
    tddp_status status = tddp_nccl_type_to_reduce(
        dtype, op->reduce, self->channel->libraries->nccl_version, type, redop);
    if (status || op->reduce != TDDP_REDUCE_PREMUL_SUM) {
        return status;
    }
    uint64_t factor = 0;
    tddp_nccl_scalar(dtype, op->premul, &factor);
    status = check(self,
                   self->nccl->ncclRedOpCreatePreMulSum(redop, &factor, type->type,
                                                        TDDP_NCCL_HOST_SCALAR, self->channel->comm),
                   "ncclRedOpCreatePreMulSum");
    *made = status == TDDP_OK;
    return status;
}

static void release_reduction(const launch *self, int redop, bool made)
{
    if (made) {
        (void)self->nccl->ncclRedOpDestroy(redop, self->channel->comm);
    }
}

/* Several buffers, each in place: NCCL puts them into one launch. */
static tddp_status reduce_bundled(const launch *self, tddp_nccl_type type, int redop)
{
    const tddp_op *op = self->op;
    tddp_nccl_result result = self->nccl->ncclGroupStart();
    for (size_t i = 0; i < op->bundled; i++) {
        const tddp_buffer *each = &op->output_parts[i];
        result = first_of(result, self->nccl->ncclAllReduce(
                                      each->data, each->data, each->count * type.each, type.type,
                                      redop, self->channel->comm, self->channel->stream));
    }
    return end_group(self, result, "ncclAllReduce");
}

static tddp_status scatter_equal(const launch *self, tddp_nccl_type type, int redop)
{
    const tddp_op *op = self->op;
    void *room;
    tddp_status status = take_room(self, &op->input, &room);
    if (status) {
        return status;
    }
    if (room != op->input.data) {
        status = copy_parts(self, op->input_parts, room, true);
    }
    if (status == TDDP_OK) {
        status = check(self,
                       self->nccl->ncclReduceScatter(room, op->output.data,
                                                     op->output.count * type.each, type.type, redop,
                                                     self->channel->comm, self->channel->stream),
                       "ncclReduceScatter");
    }
    return leave_room(self, &op->input, room, status);
}

static tddp_status reduce_scatter(const launch *self, tddp_nccl_type type, int redop)
{
    const tddp_op *op = self->op;
    if (op->input.count == 0) {
        return TDDP_OK;
    }
    if (all_equal(self, op->input_parts)) {
        return scatter_equal(self, type, redop);
    }
    tddp_nccl_result result = self->nccl->ncclGroupStart();
    for (int rank = 0; rank < self->channel->size; rank++) {
        const tddp_buffer *part = &op->input_parts[rank];
        result =
            first_of(result, self->nccl->ncclReduce(part->data, op->output.data,
                                                    part->count * type.each, type.type, redop, rank,
                                                    self->channel->comm, self->channel->stream));
    }
    return end_group(self, result, "ncclReduce");
}

static tddp_status reduce(const launch *self)
{
    const tddp_op *op = self->op;
    const tddp_nccl *nccl = self->nccl;
    tddp_nccl_comm comm = self->channel->comm;
    tddp_cuda_stream stream = self->channel->stream;
    tddp_nccl_type type;
    int redop = 0;
    bool made;
    tddp_status status = find_reduction(self, &type, &redop, &made);
    if (status) {
        return status;
    }
    const size_t count = op->output.count * type.each;
    switch (op->kind) {
    case TDDP_OP_ALL_REDUCE:
        status = op->bundled > 0 ? reduce_bundled(self, type, redop)
                                 : check(self,
                                         nccl->ncclAllReduce(op->input.data, op->output.data, count,
                                                             type.type, redop, comm, stream),
                                         "ncclAllReduce");
        break;
    case TDDP_OP_REDUCE:
        status = check(self,
                       nccl->ncclReduce(op->input.data, op->output.data, count, type.type, redop,
                                        op->root, comm, stream),
                       "ncclReduce");
        break;
    default:
        status = reduce_scatter(self, type, redop);
    }
    release_reduction(self, redop, made);
    return status;
}

/* --- moves ----------------------------------------------------------------------------------- */

static tddp_status broadcast(const launch *self)
{
    const tddp_op *op = self->op;
    return check(self,
                 self->nccl->ncclBroadcast(op->input.data, op->output.data, bytes_of(&op->output),
                                           TDDP_NCCL_UINT8, op->root, self->channel->comm,
                                           self->channel->stream),
                 "ncclBroadcast");
}

static tddp_status all_gather_equal(const launch *self)
{
    const tddp_op *op = self->op;
    void *room;
    tddp_status status = take_room(self, &op->output, &room);
    if (status) {
        return status;
    }
    status =
        check(self,
              self->nccl->ncclAllGather(op->input.data, room, bytes_of(&op->input), TDDP_NCCL_UINT8,
                                        self->channel->comm, self->channel->stream),
              "ncclAllGather");
    if (status == TDDP_OK && room != op->output.data) {
        status = copy_parts(self, op->output_parts, room, false);
    }
    return leave_room(self, &op->output, room, status);
}

static tddp_status all_gather(const launch *self)
{
    const tddp_op *op = self->op;
    if (op->output.count == 0) {
        return TDDP_OK;
    }
    if (all_equal(self, op->output_parts)) {
        return all_gather_equal(self);
    }
    tddp_nccl_result result = self->nccl->ncclGroupStart();
    for (int rank = 0; rank < self->channel->size; rank++) {
        const tddp_buffer *part = &op->output_parts[rank];
        const void *from = rank == self->channel->rank ? op->input.data : part->data;
        result = first_of(
            result, self->nccl->ncclBroadcast(from, part->data, bytes_of(part), TDDP_NCCL_UINT8,
                                              rank, self->channel->comm, self->channel->stream));
    }
    return end_group(self, result, "ncclBroadcast");
}

/* What each rank gives and gets; NULL: nothing. */
static const tddp_buffer *given(const launch *self, int peer)
{
    const tddp_op *op = self->op;
    switch (op->kind) {
    case TDDP_OP_GATHER:
        return op->root == peer ? &op->input : NULL;
    case TDDP_OP_SCATTER:
        return op->root == self->channel->rank ? &op->input_parts[peer] : NULL;
    default:
        return &op->input_parts[peer];
    }
}

static const tddp_buffer *taken(const launch *self, int peer)
{
    const tddp_op *op = self->op;
    switch (op->kind) {
    case TDDP_OP_GATHER:
        return op->root == self->channel->rank ? &op->output_parts[peer] : NULL;
    case TDDP_OP_SCATTER:
        return op->root == peer ? &op->output : NULL;
    default:
        return &op->output_parts[peer];
    }
}

static tddp_status exchange(const launch *self)
{
    const int own = self->channel->rank;
    const tddp_buffer *from = given(self, own);
    const tddp_buffer *into = taken(self, own);
    if (from && into) {
        tddp_status status = copy(self, from->data, into->data, bytes_of(from));
        if (status) {
            return status;
        }
    }
    tddp_nccl_result result = self->nccl->ncclGroupStart();
    for (int peer = 0; peer < self->channel->size; peer++) {
        const tddp_buffer *out = given(self, peer);
        const tddp_buffer *in = taken(self, peer);
        if (peer != own && out && out->count > 0) {
            result = first_of(result, send_bytes(self, out, peer));
        }
        if (peer != own && in && in->count > 0) {
            result = first_of(result, receive_bytes(self, in, peer));
        }
    }
    return end_group(self, result, "ncclSend and ncclRecv");
}

/* Everybody is there when one element from each has come. */
static tddp_status barrier(const launch *self)
{
    void *memory = self->channel->scratch;
    return check(self,
                 self->nccl->ncclAllReduce(memory, memory, 1, TDDP_NCCL_INT32, TDDP_NCCL_SUM,
                                           self->channel->comm, self->channel->stream),
                 "ncclAllReduce");
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

static tddp_status message(const launch *self)
{
    const bool sends = self->op->kind == TDDP_OP_SEND;
    tddp_nccl_result result =
        sends ? send_bytes(self, &self->op->input, 1) : receive_bytes(self, &self->op->output, 0);
    return check(self, result, sends ? "ncclSend" : "ncclRecv");
}

/* --- puttings on a stream -------------------------------------------------------------------- */

static tddp_status record(const tddp_cuda *cuda, tddp_cuda_event event, tddp_cuda_stream stream)
{
    return tddp_cuda_check(cuda, cuda->cudaEventRecord(event, stream), "cudaEventRecord");
}

/* With the channel's mutex held. */
static tddp_status put_between(const launch *self, const tddp_nccl_request *request,
                               tddp_status (*body)(const launch *self))
{
    const tddp_cuda *cuda = self->cuda;
    tddp_cuda_stream stream = self->channel->stream;
    if (!self->channel->comm) {
        return tddp_fail(TDDP_GROUP_FAILED, "aborted");
    }
    tddp_status status = tddp_cuda_check(cuda, cuda->cudaStreamWaitEvent(stream, request->ready, 0),
                                         "cudaStreamWaitEvent");
    if (status == TDDP_OK && request->begun) {
        status = record(cuda, request->begun, stream);
    }
    if (status == TDDP_OK) {
        status = body(self);
    }
    return status ? status : record(cuda, request->done, stream);
}

static tddp_status put(tddp_nccl_request *self, tddp_nccl_channel *channel,
                       tddp_status (*body)(const launch *self))
{
    const launch it = {.nccl = &channel->libraries->nccl,
                       .cuda = channel->libraries->cuda,
                       .channel = channel,
                       .op = self->op,
                       .deadline_ns = self->deadline_ns};
    tddp_cuda_place place;
    tddp_status status = tddp_cuda_enter(it.cuda, channel->device, &place);
    if (status) {
        return status;
    }
    pthread_mutex_lock(&channel->mutex);
    status = put_between(&it, self, body);
    pthread_mutex_unlock(&channel->mutex);
    tddp_cuda_leave(it.cuda, &place);
    self->channel = status ? NULL : channel;
    return status;
}

tddp_status tddp_nccl_launch(tddp_nccl_request *self, tddp_nccl_channel *channel)
{
    return put(self, channel, collective);
}

tddp_status tddp_nccl_launch_message(tddp_nccl_request *self, tddp_nccl_channel *channel)
{
    return put(self, channel, message);
}
