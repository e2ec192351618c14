/*
 * Creation and destruction of a reducer. Creation compares the parameters over the ranks before it
 * allocates buckets. A reducer may be freed while buckets are pending: their operations then keep
 * the memory until they complete.
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "reducer/reducer.h"

static bool has_gradient(tddp_dtype dtype)
{
    switch (dtype) {
    case TDDP_FLOAT16:
    case TDDP_BFLOAT16:
    case TDDP_FLOAT32:
    case TDDP_FLOAT64:
    case TDDP_COMPLEX64:
    case TDDP_COMPLEX128:
        return true;
    default:
        return false;
    }
}

static tddp_status check_param(const tddp_param *param, size_t index)
{
    const char *name = param->name ? param->name : "(no name)";
    if (!has_gradient(param->dtype)) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "parameter \"%s\" (number %zu) is %s: only floating point and complex "
                         "parameters have gradients; make it a buffer",
                         name, index, tddp_dtype_name(param->dtype));
    }
    if (param->ndim > 0 && !param->dims) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "parameter \"%s\" (number %zu) has no dims", name,
                         index);
    }
    return TDDP_OK;
}

static tddp_status check(tddp_group *group, const tddp_param *params, size_t count)
{
    if (!group) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "no process group: expected one to reduce over");
    }
    if (count > 0 && !params) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "params is NULL: expected %zu parameters", count);
    }
    tddp_status status = TDDP_OK;
    for (size_t i = 0; i < count && status == TDDP_OK; i++) {
        status = check_param(&params[i], i);
    }
    return status;
}

static tddp_status copy_params(tddp_reducer *reducer, const tddp_param *params)
{
    for (size_t i = 0; i < reducer->count; i++) {
        tddp_param *copy = &reducer->params[i];
        int64_t *dims = tddp_alloc_array(params[i].ndim, sizeof *dims);
        *copy = params[i];
        copy->dims = dims;
        copy->name =
            params[i].name ? tddp_copy_string(params[i].name) : tddp_format("parameter %zu", i);
        if (!dims || !copy->name) {
            return TDDP_OUT_OF_MEMORY;
        }
        if (copy->ndim) {
            memcpy(dims, params[i].dims, copy->ndim * sizeof *dims);
        }
    }
    return TDDP_OK;
}

tddp_status tddp_reducer_make_buckets(const tddp_flat_layout *layout, tddp_reducer_bucket **out)
{
    tddp_reducer_bucket *buckets = tddp_alloc_array(layout->buffer_count, sizeof *buckets);
    if (!buckets) {
        return TDDP_OUT_OF_MEMORY;
    }
    for (size_t b = 0; b < layout->buffer_count; b++) {
        buckets[b].buffer = layout->buffers[b].buffer;
    }
    *out = buckets;
    return TDDP_OK;
}

/* Before the first backward the order in which gradients become ready is unknown, so there is one
 * bucket per dtype and device, the one of the last parameters first. With find_unused the order may
 * differ between iterations: then the buckets have the limits' sizes, and are never rebuilt. */
static tddp_status first_layout(tddp_reducer *reducer)
{
    static const size_t unlimited = SIZE_MAX;
    const size_t *limits = reducer->find_unused ? reducer->limits : &unlimited;
    size_t limit_count = reducer->find_unused ? reducer->limit_count : 1;
    size_t buckets = 0;
    size_t *bucket_of = tddp_alloc_array(reducer->count, sizeof *bucket_of);
    if (!bucket_of) {
        return TDDP_OUT_OF_MEMORY;
    }
    tddp_status status = TDDP_OK;
    if (reducer->count > 0) {
        status = tddp_flat_plan(reducer->params, reducer->count, limits, limit_count, bucket_of,
                                &buckets);
    }
    if (status != TDDP_OK) {
        free(bucket_of);
        return status;
    }
    for (size_t i = 0; i < reducer->count; i++) {
        if (bucket_of[i] != TDDP_FLAT_NO_BUFFER) {
            bucket_of[i] = buckets - 1 - bucket_of[i];
        }
    }
    status = tddp_flat_layout_make(reducer->group, &reducer->device, reducer->params, NULL,
                                   reducer->count, bucket_of, buckets, &reducer->layout);
    return status == TDDP_OK ? tddp_reducer_make_buckets(&reducer->layout, &reducer->buckets)
                             : status;
}

static tddp_status fill(tddp_reducer *reducer, const tddp_param *params,
                        const tddp_reducer_opts *opts)
{
    reducer->find_unused = opts->find_unused && !opts->static_graph;
    reducer->static_graph = opts->static_graph;
    reducer->skip_unused = opts->skip_unused;
    reducer->describe = opts->describe;

    for (size_t i = 0; i < reducer->count; i++) {
        reducer->on_devices = reducer->on_devices || params[i].device_type != TDDP_CPU;
    }
    reducer->limit_count = opts->limit_count;
    reducer->limits = tddp_alloc_array(opts->limit_count, sizeof *reducer->limits);
    reducer->params = tddp_alloc_array(reducer->count, sizeof *reducer->params);
    reducer->ready = tddp_alloc_array(reducer->count, sizeof *reducer->ready);
    reducer->order = tddp_alloc_array(reducer->count, sizeof *reducer->order);
    reducer->last_order = tddp_alloc_array(reducer->count, sizeof *reducer->last_order);
    if (!reducer->limits || !reducer->params || !reducer->ready || !reducer->order ||
        !reducer->last_order) {
        return TDDP_OUT_OF_MEMORY;
    }
    memcpy(reducer->limits, opts->limits, opts->limit_count * sizeof *reducer->limits);
    tddp_status status = tddp_reducer_unused_init(reducer);
    if (status == TDDP_OK) {
        status = tddp_reducer_calls_init(reducer);
    }
    return status == TDDP_OK ? copy_params(reducer, params) : status;
}

tddp_status tddp_reducer_create(tddp_group *group, const tddp_param *params, size_t count,
                                const tddp_reducer_opts *opts, const tddp_wait *wait,
                                tddp_reducer **out)
{
    tddp_reducer_opts resolved;
    tddp_device_memory_ops device = {0};
    tddp_status status = check(group, params, count);
    if (status == TDDP_OK) {
        status = tddp_reducer_read_options(opts, &resolved);
    }
    if (status == TDDP_OK) {
        status = tddp_reducer_read_device(resolved.device, params, count, &device);
    }
    if (status != TDDP_OK) {
        return status;
    }
    tddp_reducer *reducer = tddp_alloc(sizeof *reducer);
    if (!reducer) {
        return TDDP_OUT_OF_MEMORY;
    }
    pthread_mutex_init(&reducer->lock, NULL);
    reducer->owner = getpid();
    reducer->group = tddp_group_retain(group);
    reducer->rank = tddp_group_rank(group);
    reducer->world_size = tddp_group_world_size(group);
    reducer->divisor = reducer->next_divisor = reducer->world_size;
    reducer->count = count;
    reducer->device = device;
    reducer->launch_in_finish = tddp_reducer_oversubscribed(group);
    status = fill(reducer, params, &resolved);
    if (status == TDDP_OK) {
        char text[TDDP_REDUCER_OPTS_TEXT];
        tddp_reducer_opts_text(&resolved, text);
        status = tddp_flat_verify(group, NULL, reducer->params, count, text, wait);
    }
    if (status == TDDP_OK) {
        status = first_layout(reducer);
    }
    if (status != TDDP_OK) {
        tddp_reducer_free(reducer);
        return status;
    }
    *out = reducer;
    return TDDP_OK;
}

/* The references that a detached work holds. */
typedef struct lease {
    tddp_flat_memory *memory;
    tddp_comm_hook *hook; /* or NULL */
} lease;

static void release_leased(void *data)
{
    lease *held = data;
    tddp_flat_memory_release(held->memory);
    tddp_comm_hook_release(held->hook);
    free(held);
}

void tddp_reducer_detach_bucket_work(const tddp_reducer *reducer, tddp_flat_memory *memory,
                                     tddp_work *work)
{
    tddp_flat_memory_retain(memory);
    if (reducer->hook) {
        tddp_comm_hook_retain(reducer->hook);
    }
    lease *held = tddp_alloc(sizeof *held);
    if (held) {
        *held = (lease){memory, reducer->hook};
        tddp_reducer_detach_work(work, release_leased, held);
    } else { /* a leak is better than memory freed too early */
        tddp_work_release(work);
    }
}

static void detach_works(tddp_reducer *reducer)
{
    for (size_t b = 0; reducer->buckets && b < reducer->layout.buffer_count; b++) {
        const tddp_reducer_bucket *bucket = &reducer->buckets[b];
        if (bucket->work) {
            tddp_reducer_detach_bucket_work(reducer, reducer->layout.memory, bucket->work);
        }
        if (bucket->stream_work) {
            tddp_reducer_detach_bucket_work(reducer, reducer->layout.memory, bucket->stream_work);
        }
    }
    if (reducer->unused.map_work) {
        tddp_reducer_detach_work(reducer->unused.map_work, tddp_flat_numbers_free,
                                 reducer->unused.map);
        reducer->unused.map = NULL;
    }
    if (reducer->rebuild_work) {
        tddp_reducer_detach_work(reducer->rebuild_work, tddp_flat_numbers_free,
                                 reducer->rebuild_order);
        reducer->rebuild_order = NULL;
    }
}

void tddp_reducer_free(tddp_reducer *reducer)
{
    if (!reducer) {
        return;
    }
    /* A forked child doesn't have the progress thread that owns the works. */
    if (reducer->owner == getpid()) {
        detach_works(reducer);
    }
    for (size_t i = 0; reducer->params && i < reducer->count; i++) {
        free((void *)reducer->params[i].name);
        free((void *)reducer->params[i].dims);
    }
    free(reducer->limits);
    free(reducer->params);
    free(reducer->ready);
    free(reducer->order);
    free(reducer->last_order);
    free(reducer->unused.indices);
    free(reducer->unused.used_outside);
    tddp_flat_numbers_free(reducer->unused.map);
    free(reducer->calls.expected);
    free(reducer->calls.counts);
    free(reducer->calls.last_call);
    tddp_flat_numbers_free(reducer->rebuild_order);
    free(reducer->buckets);
    tddp_flat_layout_free(&reducer->layout);
    tddp_comm_hook_release(reducer->hook);
    tddp_group_release_async(reducer->group);
    pthread_mutex_destroy(&reducer->lock);
    free(reducer);
}
