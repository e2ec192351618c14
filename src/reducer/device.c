/*
 * Buckets on devices: which streams wait for which. Gradients are written on the streams that were
 * current where each was reported, by several threads of autograd's; a bucket goes to the group on
 * the stream of who hands it over, once that waits for all of them; and in the end the stream of
 * who finishes waits for the group's work. The host waits for none of it, so a work may still run
 * when its round is over: it is kept until it is known how it ended.
 *
 *     autograd's threads   --grad 7--.   --grad 5--.
 *     the one that hands over        `-> grad 6 ---`-> all_reduce on the group's stream --.
 *     the one that finishes                                        what follows  <--------'
 */
#include <tddp/cuda.h>

#include "reducer/reducer.h"

/* --- what is asked for ----------------------------------------------------------------------- */

static tddp_status check_ops(const tddp_device_memory_ops *ops)
{
    if (ops->size != sizeof *ops || !ops->allocate || !ops->release || !ops->copy || !ops->zero ||
        !ops->cast || !ops->stream) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "opts.device lacks a call, or its size is %zu: expected %zu and all calls",
                         ops->size, sizeof *ops);
    }
    return TDDP_OK;
}

tddp_status tddp_reducer_check_device(const tddp_device_memory_ops *ops, const tddp_param *params,
                                      size_t count)
{
    for (size_t i = 0; i < count && !ops; i++) {
        if (params[i].device_type != TDDP_CPU) {
            return tddp_fail(
                TDDP_UNSUPPORTED,
                "parameter \"%s\" (number %zu) is on %s: buckets there need opts.device, "
                "which tells how memory is had on devices; or move the model to the CPU",
                params[i].name ? params[i].name : "(no name)", i,
                tddp_device_type_name(params[i].device_type));
        }
    }
    return ops ? check_ops(ops) : TDDP_OK;
}

tddp_status tddp_reducer_check_hook(const tddp_reducer *reducer, const tddp_comm_hook *hook)
{
    for (size_t i = 0; i < reducer->count; i++) {
        const tddp_param *param = &reducer->params[i];
        if (param->sparse ||
            (tddp_comm_hook_takes(hook, param->device_type) &&
             (param->device_type == TDDP_CPU || !tddp_comm_hook_on_caller(hook)))) {
            continue;
        }
        const char *why = tddp_comm_hook_on_caller(hook)
                              ? "runs on the thread that called backward, and gradients there are "
                                "ready on others"
                              : "computes in the CPU's memory";
        return tddp_fail(
            TDDP_UNSUPPORTED,
            "the communication hook \"%s\" %s, but parameter \"%s\" is on %s: use no "
            "hook, allreduce, noop, fp16_compress, bf16_compress or post_local_sgd for "
            "it, or move the model to the CPU",
            tddp_comm_hook_name(hook), why, param->name, tddp_device_type_name(param->device_type));
    }
    return TDDP_OK;
}

/* --- streams --------------------------------------------------------------------------------- */

static bool on_device(const tddp_reducer_bucket *bucket)
{
    return bucket->buffer.device_type != TDDP_CPU;
}

static void *current(const tddp_reducer *reducer, int32_t device)
{
    return reducer->device.stream(reducer->device.user, device);
}

/* What is put on `stream` from now on waits for what lies on `earlier` now. On the device. */
static tddp_status follow(const tddp_cuda *cuda, tddp_cuda_stream stream, tddp_cuda_stream earlier)
{
    tddp_cuda_event event = NULL;
    tddp_status status =
        tddp_cuda_check(cuda, cuda->cudaEventCreateWithFlags(&event, TDDP_CUDA_NO_TIMING),
                        "cudaEventCreateWithFlags");
    if (status == TDDP_OK) {
        status = tddp_cuda_follow(cuda, event, stream, earlier);
        (void)cuda->cudaEventDestroy(event); /* CUDA keeps what a stream still waits for */
    }
    return status;
}

/* Makes `stream` the only one that the bucket has, which waits for those it had. */
static tddp_status draw_together(tddp_reducer_bucket *bucket, void *stream)
{
    const size_t count = bucket->stream_count;
    const tddp_cuda *cuda;
    tddp_cuda_place before;
    if (count == 1 && bucket->streams[0] == stream) {
        return TDDP_OK;
    }
    bucket->stream_count = 1;
    tddp_status status = tddp_cuda_get(&cuda);
    status = status ? status : tddp_cuda_enter(cuda, bucket->buffer.device_index, &before);
    if (status == TDDP_OK) {
        for (size_t k = 0; k < count && status == TDDP_OK; k++) {
            if (bucket->streams[k] != stream) {
                status = follow(cuda, stream, bucket->streams[k]);
            }
        }
        tddp_cuda_leave(cuda, &before);
    }
    bucket->streams[0] = stream;
    return status;
}

void tddp_reducer_open_streams(const tddp_reducer *reducer, tddp_reducer_bucket *bucket)
{
    if (on_device(bucket)) {
        bucket->streams[0] = current(reducer, bucket->buffer.device_index);
        bucket->stream_count = 1;
    }
}

void tddp_reducer_wrote(tddp_reducer *reducer, size_t index)
{
    const size_t b = reducer->on_devices ? reducer->layout.buffer_of[index] : TDDP_FLAT_NO_BUFFER;
    if (b == TDDP_FLAT_NO_BUFFER || !on_device(&reducer->buckets[b])) {
        return;
    }
    tddp_reducer_bucket *bucket = &reducer->buckets[b];
    void *here = current(reducer, bucket->buffer.device_index);
    for (size_t k = 0; k < bucket->stream_count; k++) {
        if (bucket->streams[k] == here) {
            return;
        }
    }
    if (bucket->stream_count < TDDP_REDUCER_STREAMS) {
        bucket->streams[bucket->stream_count++] = here;
        return;
    }
    tddp_status status = draw_together(bucket, here);
    if (status != TDDP_OK) {
        (void)tddp_reducer_break(reducer, status);
    }
}

tddp_status tddp_reducer_gather_streams(tddp_reducer *reducer, tddp_reducer_bucket *bucket)
{
    if (!on_device(bucket)) {
        return TDDP_OK;
    }
    bucket->buffer.stream = current(reducer, bucket->buffer.device_index);
    return draw_together(bucket, bucket->buffer.stream);
}

/* --- the end of a round ---------------------------------------------------------------------- */

/* Under the lock. */
static void look(tddp_reducer *reducer, tddp_reducer_bucket *bucket)
{
    tddp_work *work = bucket->ordered;
    if (work && tddp_work_completed(work)) {
        tddp_status status = tddp_work_status(work);
        if (status != TDDP_OK) {
            (void)tddp_reducer_break(reducer, status);
        }
        bucket->ordered = NULL;
        tddp_work_release(work);
    }
}

void tddp_reducer_look_back(tddp_reducer *reducer)
{
    for (size_t b = 0; reducer->on_devices && b < reducer->layout.buffer_count; b++) {
        look(reducer, &reducer->buckets[b]);
    }
}

/* Under the lock: the work is kept until its end is known. The host may be rounds ahead of the
 * device; of those before the last, which the group does in their order, only memory is kept. */
static void keep(tddp_reducer *reducer, tddp_reducer_bucket *bucket, tddp_work *work)
{
    look(reducer, bucket);
    if (bucket->ordered) {
        tddp_reducer_leave_work(reducer, reducer->layout.memory, bucket->ordered);
    }
    bucket->ordered = work;
}

static tddp_status order_work(tddp_reducer *reducer, tddp_reducer_bucket *bucket, void *here,
                              const tddp_reducer_patience *patience, bool *done)
{
    const tddp_wait wait = tddp_reducer_rest_of(patience);
    tddp_work *work = bucket->work;
    tddp_status status = tddp_work_order(work, here, &wait);
    const bool over = tddp_work_completed(work);
    *done = status == TDDP_OK || over;
    if (!*done) {
        return status;
    }
    if (over) {
        status = tddp_work_status(work);
    }
    pthread_mutex_lock(&reducer->lock);
    bucket->work = NULL;
    if (status != TDDP_OK) {
        (void)tddp_reducer_break(reducer, status);
    }
    if (!over) {
        keep(reducer, bucket, work);
    }
    pthread_mutex_unlock(&reducer->lock);
    if (over) {
        tddp_work_release(work);
    }
    return status;
}

tddp_status tddp_reducer_order_bucket(tddp_reducer *reducer, tddp_reducer_bucket *bucket,
                                      const tddp_reducer_patience *patience, bool *done)
{
    *done = true;
    void *here = current(reducer, bucket->buffer.device_index);
    if (bucket->work) {
        tddp_status status = order_work(reducer, bucket, here, patience, done);
        if (!*done) {
            return status;
        }
    }
    /* Also where no operation was: the gradients are this thread's now. */
    pthread_mutex_lock(&reducer->lock);
    tddp_status status = reducer->failure;
    if (status == TDDP_OK && !bucket->skipped) {
        status = tddp_reducer_gather_streams(reducer, bucket);
        if (status != TDDP_OK) {
            (void)tddp_reducer_break(reducer, status);
        }
    }
    pthread_mutex_unlock(&reducer->lock);
    return status;
}
