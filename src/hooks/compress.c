/*
 * Compression to float16 or bfloat16, alone or around another hook. Called by one thread of a
 * reducer at a time. Stage 0 casts the bucket to a compressed copy, in the group's memory or on the
 * bucket's device; the operations or the inner hook's stages run on the copy; the last stage casts
 * it back to the bucket. On a device all casts are queued on the current stream.
 */
#include <stdlib.h>

#include "hooks/hooks.h"

typedef struct compress {
    tddp_dtype dtype;
    tddp_comm_hook *inner; /* NULL: the average */
    const char *name;
    tddp_hooks_states states;
} compress;

/* The compressed copy of a bucket. */
typedef struct compressed {
    bool inner_done;  /* no further stage of the inner hook: cast back after its operation */
    bool interrupted; /* the inner hook was, and its stage runs again */
    void *data;
    tddp_group_memory *memory; /* NULL: on a device */
    tddp_device_memory_ops device;
    void *handle; /* of the device's memory */
} compressed;

static void free_compressed(void *state)
{
    compressed *copy = state;
    tddp_group_memory_release(copy->memory);
    if (copy->handle) {
        copy->device.release(copy->device.user, copy->handle);
    }
    free(copy);
}

static tddp_status make_compressed(void *state, tddp_group *group, const tddp_bucket *bucket,
                                   void **out)
{
    (void)state;
    compressed *copy = tddp_alloc(sizeof *copy);
    if (!copy) {
        return TDDP_OUT_OF_MEMORY;
    }
    const tddp_device_memory_ops *device = bucket->device;
    const size_t bytes = tddp_hooks_byte_count(bucket->buffer.count, sizeof(uint16_t));
    tddp_status status;
    if (device) {
        copy->device = *device;
        status = device->allocate(device->user, bucket->buffer.device_index, bytes, &copy->handle,
                                  &copy->data);
    } else {
        status = tddp_group_memory_create(group, bytes, &copy->memory);
        copy->data = status == TDDP_OK ? tddp_group_memory_data(copy->memory) : NULL;
    }
    if (status != TDDP_OK) {
        free(copy);
        return status;
    }
    *out = copy;
    return TDDP_OK;
}

/* The bucket with the copy as its buffer. */
static tddp_bucket compressed_bucket(const compress *self, const tddp_bucket *bucket,
                                     const compressed *copy)
{
    tddp_bucket inner_bucket = *bucket;
    inner_bucket.buffer.data = copy->data;
    inner_bucket.buffer.dtype = self->dtype;
    return inner_bucket;
}

static tddp_status cast(const tddp_bucket *bucket, tddp_buffer from, tddp_buffer into,
                        double divisor)
{
    const tddp_device_memory_ops *device = bucket->device;
    if (!device) {
        tddp_hooks_cast(from, into, divisor);
        return TDDP_OK;
    }
    return from.count == 0 ? TDDP_OK
                           : device->cast(device->user, into.device_index, into.data, into.dtype,
                                          from.data, from.dtype, from.count, divisor);
}

/* Runs the next stage on the copy. Casts the copy back after the last operation. */
static tddp_status run_inner(const compress *self, tddp_group *group, const tddp_bucket *bucket,
                             compressed *copy, int stage, tddp_work **work, int *again)
{
    tddp_bucket inner_bucket = compressed_bucket(self, bucket, copy);
    if (!copy->inner_done) {
        int more = 0;
        tddp_status status =
            self->inner ? tddp_comm_hook_run(self->inner, group, &inner_bucket, stage, work, &more)
                        : tddp_hooks_reduce(group, &inner_bucket, inner_bucket.buffer,
                                            TDDP_REDUCE_SUM, work);
        copy->interrupted = status == TDDP_CANCELED;
        if (status != TDDP_OK) {
            return status;
        }
        copy->inner_done = !more;
        *again = 1;
        if (more || *work) {
            return TDDP_OK;
        }
    }
    *again = 0;
    return cast(bucket, inner_bucket.buffer, bucket->buffer, 1.0);
}

static tddp_status run(void *state, tddp_group *group, const tddp_bucket *bucket, int stage,
                       tddp_work **work, int *again)
{
    compress *self = state;
    void *found = NULL;
    tddp_status status = bucket->device ? tddp_hooks_check(self->name, bucket)
                                        : tddp_hooks_check_host(self->name, bucket);
    if (status != TDDP_OK) {
        return status;
    }
    if (bucket->buffer.dtype == self->dtype) {
        return self->inner ? tddp_comm_hook_run(self->inner, group, bucket, stage, work, again)
                           : tddp_hooks_average(group, bucket, bucket->buffer, work);
    }
    if (stage > 0) {
        status = tddp_hooks_find_state(&self->states, bucket, &found);
    } else {
        status = tddp_hooks_require_state(&self->states, group, bucket, make_compressed,
                                          free_compressed, NULL, &found);
    }
    if (status != TDDP_OK) {
        return status;
    }
    compressed *copy = found;
    if (stage == 0 && !copy->interrupted) {
        int ranks = self->inner ? 1 : tddp_group_world_size(group);
        copy->inner_done = false;
        status = cast(bucket, bucket->buffer, compressed_bucket(self, bucket, copy).buffer, ranks);
        if (status != TDDP_OK) {
            return status;
        }
    }
    return run_inner(self, group, bucket, copy, stage, work, again);
}

static void free_compress(void *state)
{
    compress *self = state;
    tddp_hooks_free_states(&self->states, free_compressed);
    tddp_comm_hook_release(self->inner);
    free(self);
}

/* The devices that the inner hook supports. */
static uint32_t supported_devices(const tddp_comm_hook *inner)
{
    uint32_t types = 1u << TDDP_CPU;
    if (!inner || tddp_comm_hook_takes(inner, TDDP_CUDA)) {
        types |= 1u << TDDP_CUDA;
    }
    return types;
}

/* The settings, with the inner hook's. NULL: out of memory. The caller frees it. */
static char *make_settings(tddp_dtype dtype, const tddp_comm_hook *inner)
{
    const char *inner_settings = inner ? tddp_comm_hook_settings(inner) : "";
    return inner
               ? tddp_format("%s around %s%s%s", tddp_dtype_name(dtype), tddp_comm_hook_name(inner),
                             inner_settings[0] ? ": " : "", inner_settings)
               : tddp_copy_string(tddp_dtype_name(dtype));
}

tddp_status tddp_hook_compress(tddp_dtype dtype, tddp_comm_hook *inner, tddp_comm_hook **out)
{
    if (dtype != TDDP_FLOAT16 && dtype != TDDP_BFLOAT16) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "compress to %s: expected float16 or bfloat16",
                         tddp_dtype_name(dtype));
    }
    char *settings = make_settings(dtype, inner);
    compress *self = settings ? tddp_alloc(sizeof *self) : NULL;
    if (!self) {
        free(settings);
        return TDDP_OUT_OF_MEMORY;
    }
    bool is16 = dtype == TDDP_FLOAT16;
    self->dtype = dtype;
    self->inner = inner ? tddp_comm_hook_retain(inner) : NULL;
    self->name = inner ? (is16 ? "fp16_compress_wrapper" : "bf16_compress_wrapper")
                       : (is16 ? "fp16_compress" : "bf16_compress");
    tddp_comm_hook_ops ops = {sizeof ops,
                              self->name,
                              inner && tddp_comm_hook_on_caller(inner),
                              run,
                              free_compress,
                              settings,
                              supported_devices(inner)};
    tddp_status status = tddp_hooks_make(&ops, self, out);
    free(settings);
    return status;
}
