/*
 * The streams of buckets on devices. Autograd's threads write gradients on their current streams.
 * The thread that launches a bucket has its current stream wait for all of these, and submits the
 * bucket on it; finish() has its thread's current stream wait for the group's work. The host waits
 * for none of them, so a work may still be pending when its iteration is finished: the bucket keeps
 * it until its status is known.
 *
 *     autograd's threads     --grad 7--.   --grad 5--.
 *     the launching thread             `-> grad 6 ---`-> all_reduce on the group's stream --.
 *     the finishing thread                                     later kernels  <-------------'
 */
#include <tddp/cuda.h>

#include "base/options.h"
#include "reducer/reducer.h"

/* --- checks ---------------------------------------------------------------------------------- */

static tddp_status read_ops(const tddp_device_memory_ops *ops, tddp_device_memory_ops *out)
{
    tddp_status status =
        tddp_opts_read("sizeof(tddp_device_memory_ops)", ops,
                       TDDP_OPTS_UNTIL(tddp_device_memory_ops, stream), out, sizeof *out);
    if (status != TDDP_OK) {
        return status;
    }
    if (!out->allocate || !out->release || !out->copy || !out->zero || !out->cast || !out->stream) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "opts.device lacks a callback: expected all of them");
    }
    return TDDP_OK;
}

tddp_status tddp_reducer_read_device(const tddp_device_memory_ops *ops, const tddp_param *params,
                                     size_t count, tddp_device_memory_ops *out)
{
    for (size_t i = 0; i < count && !ops; i++) {
        if (params[i].device_type != TDDP_CPU) {
            return tddp_fail(
                TDDP_UNSUPPORTED,
                "parameter \"%s\" (number %zu) is on %s: buckets there need opts.device, "
                "which allocates memory on devices; or move the model to the CPU",
                params[i].name ? params[i].name : "(no name)", i,
                tddp_device_type_name(params[i].device_type));
        }
    }
    return ops ? read_ops(ops, out) : TDDP_OK;
}

tddp_status tddp_reducer_check_hook(const tddp_reducer *reducer, const tddp_comm_hook *hook)
{
    for (size_t i = 0; i < reducer->count; i++) {
        const tddp_param *param = &reducer->params[i];
        if (param->sparse || tddp_comm_hook_takes(hook, param->device_type)) {
            continue;
        }
        return tddp_fail(
            TDDP_UNSUPPORTED,
            "the communication hook \"%s\" computes in the CPU's memory, but parameter \"%s\" is "
            "on "
            "%s: use no hook, allreduce, noop, fp16_compress, bf16_compress or post_local_sgd for "
            "it, or move the model to the CPU",
            tddp_comm_hook_name(hook), param->name, tddp_device_type_name(param->device_type));
    }
    return TDDP_OK;
}

/* --- streams --------------------------------------------------------------------------------- */

static bool on_device(const tddp_reducer_bucket *bucket)
{
    return bucket->buffer.device_type != TDDP_CPU;
}

static void *current_stream(const tddp_reducer *reducer, int32_t device)
{
    return reducer->device.stream(reducer->device.user, device);
}

/* Makes later work on `stream` wait for the work that is on `earlier` now. */
static tddp_status stream_wait(const tddp_cuda *cuda, tddp_cuda_stream stream,
                               tddp_cuda_stream earlier)
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

/* Makes `stream` wait for the bucket's streams and replace them. */
static tddp_status join_onto(tddp_reducer_bucket *bucket, void *stream)
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
                status = stream_wait(cuda, stream, bucket->streams[k]);
            }
        }
        tddp_cuda_leave(cuda, &before);
    }
    bucket->streams[0] = stream;
    return status;
}

void tddp_reducer_reset_streams(const tddp_reducer *reducer, tddp_reducer_bucket *bucket)
{
    if (on_device(bucket)) {
        bucket->streams[0] = current_stream(reducer, bucket->buffer.device_index);
        bucket->stream_count = 1;
    }
}

void tddp_reducer_record_stream(tddp_reducer *reducer, size_t index)
{
    const size_t b = reducer->on_devices ? reducer->layout.buffer_of[index] : TDDP_FLAT_NO_BUFFER;
    if (b == TDDP_FLAT_NO_BUFFER || !on_device(&reducer->buckets[b])) {
        return;
    }
    tddp_reducer_bucket *bucket = &reducer->buckets[b];
    void *here = current_stream(reducer, bucket->buffer.device_index);
    for (size_t k = 0; k < bucket->stream_count; k++) {
        if (bucket->streams[k] == here) {
            return;
        }
    }
    if (bucket->stream_count < TDDP_REDUCER_STREAMS) {
        bucket->streams[bucket->stream_count++] = here;
        return;
    }
    tddp_status status = join_onto(bucket, here);
    if (status != TDDP_OK) {
        (void)tddp_reducer_set_failure(reducer, status);
    }
}

tddp_status tddp_reducer_join_streams(tddp_reducer *reducer, tddp_reducer_bucket *bucket)
{
    if (!on_device(bucket)) {
        return TDDP_OK;
    }
    bucket->buffer.stream = current_stream(reducer, bucket->buffer.device_index);
    return join_onto(bucket, bucket->buffer.stream);
}

/* --- the end of an iteration ----------------------------------------------------------------- */

/* Under the lock. */
static void poll_stream_work(tddp_reducer *reducer, tddp_reducer_bucket *bucket)
{
    tddp_work *work = bucket->stream_work;
    if (work && tddp_work_completed(work)) {
        tddp_status status = tddp_work_status(work);
        if (status != TDDP_OK) {
            (void)tddp_reducer_set_failure(reducer, status);
        }
        bucket->stream_work = NULL;
        tddp_work_release(work);
    }
}

void tddp_reducer_poll_stream_works(tddp_reducer *reducer)
{
    for (size_t b = 0; reducer->on_devices && b < reducer->layout.buffer_count; b++) {
        poll_stream_work(reducer, &reducer->buckets[b]);
    }
}

/* Under the lock: keeps the work until its status is known. The host may be iterations ahead of the
 * device; an earlier work, which the group completes first, is detached. */
static void keep_stream_work(tddp_reducer *reducer, tddp_reducer_bucket *bucket, tddp_work *work)
{
    poll_stream_work(reducer, bucket);
    if (bucket->stream_work) {
        tddp_reducer_detach_bucket_work(reducer, reducer->layout.memory, bucket->stream_work);
    }
    bucket->stream_work = work;
}

static tddp_status order_work(tddp_reducer *reducer, tddp_reducer_bucket *bucket, void *here,
                              const tddp_reducer_deadline *deadline, bool *done)
{
    const tddp_wait wait = tddp_reducer_remaining(deadline);
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
        (void)tddp_reducer_set_failure(reducer, status);
    }
    if (!over) {
        keep_stream_work(reducer, bucket, work);
    }
    pthread_mutex_unlock(&reducer->lock);
    if (over) {
        tddp_work_release(work);
    }
    return status;
}

tddp_status tddp_reducer_order_bucket(tddp_reducer *reducer, tddp_reducer_bucket *bucket,
                                      const tddp_reducer_deadline *deadline, bool *done)
{
    *done = true;
    void *here = current_stream(reducer, bucket->buffer.device_index);
    if (bucket->work) {
        tddp_status status = order_work(reducer, bucket, here, deadline, done);
        if (!*done) {
            return status;
        }
    }
    /* Also without an operation: from now on this thread's stream uses the gradients. */
    pthread_mutex_lock(&reducer->lock);
    tddp_status status = reducer->failure;
    if (status == TDDP_OK && !bucket->skipped) {
        status = tddp_reducer_join_streams(reducer, bucket);
        if (status != TDDP_OK) {
            (void)tddp_reducer_set_failure(reducer, status);
        }
    }
    pthread_mutex_unlock(&reducer->lock);
    return status;
}
