/*
 * Buckets sent as float16 or bfloat16, by themselves or with another hook working on them. One
 * reducer's threads, one at a time. The halves of a bucket live in its scratch, in memory of the
 * group's or of the bucket's device, from stage 0 until they are cast back; the bucket's own memory
 * is read before and written after. On a device all of it is put on the stream that is current.
 */
#include <stdlib.h>

#include "hooks/hooks.h"

typedef struct compress {
    tddp_dtype dtype;
    tddp_comm_hook *inner; /* NULL: the average */
    const char *name;
    tddp_hooks_table table;
} compress;

/* Of one bucket. */
typedef struct scratch {
    bool over;        /* what works on the halves is done once its operation is */
    bool interrupted; /* and is to be called again with its stage */
    void *data;
    tddp_group_memory *halves;     /* NULL: they are on a device */
    tddp_device_memory_ops device; /* of `handle` */
    void *handle;
} scratch;

static void free_scratch(void *state)
{
    scratch *memory = state;
    tddp_group_memory_release(memory->halves);
    if (memory->handle) {
        memory->device.release(memory->device.user, memory->handle);
    }
    free(memory);
}

static tddp_status make_scratch(void *state, tddp_group *group, const tddp_bucket *bucket,
                                void **out)
{
    (void)state;
    scratch *memory = tddp_alloc(sizeof *memory);
    if (!memory) {
        return TDDP_OUT_OF_MEMORY;
    }
    const tddp_device_memory_ops *device = bucket->device;
    const size_t bytes = tddp_hooks_room(bucket->buffer.count, sizeof(uint16_t));
    tddp_status status;
    if (device) {
        memory->device = *device;
        status = device->allocate(device->user, bucket->buffer.device_index, bytes, &memory->handle,
                                  &memory->data);
    } else {
        status = tddp_group_memory_create(group, bytes, &memory->halves);
        memory->data = status == TDDP_OK ? tddp_group_memory_data(memory->halves) : NULL;
    }
    if (status != TDDP_OK) {
        free(memory);
        return status;
    }
    *out = memory;
    return TDDP_OK;
}

/* The bucket with its halves in place of its own numbers. */
static tddp_bucket narrowed(const compress *self, const tddp_bucket *bucket, const scratch *memory)
{
    tddp_bucket narrow = *bucket;
    narrow.buffer.data = memory->data;
    narrow.buffer.dtype = self->dtype;
    return narrow;
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

/* The next step on the halves; once no operation is left they are cast back. */
static tddp_status step(const compress *self, tddp_group *group, const tddp_bucket *bucket,
                        scratch *memory, int stage, tddp_work **work, int *again)
{
    tddp_bucket narrow = narrowed(self, bucket, memory);
    if (!memory->over) {
        int more = 0;
        tddp_status status =
            self->inner ? tddp_comm_hook_run(self->inner, group, &narrow, stage, work, &more)
                        : tddp_hooks_reduce(group, &narrow, narrow.buffer, TDDP_REDUCE_SUM, work);
        memory->interrupted = status == TDDP_CANCELED;
        if (status != TDDP_OK) {
            return status;
        }
        memory->over = !more;
        *again = 1;
        if (more || *work) {
            return TDDP_OK;
        }
    }
    *again = 0;
    return cast(bucket, narrow.buffer, bucket->buffer, 1.0);
}

static tddp_status run(void *state, tddp_group *group, const tddp_bucket *bucket, int stage,
                       tddp_work **work, int *again)
{
    compress *self = state;
    void *memory = NULL;
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
        status = tddp_hooks_entered(&self->table, bucket, &memory);
    } else {
        status = tddp_hooks_enter(&self->table, group, bucket, make_scratch, free_scratch, NULL,
                                  &memory);
    }
    if (status != TDDP_OK) {
        return status;
    }
    scratch *halves = memory;
    if (stage == 0 && !halves->interrupted) {
        int ranks = self->inner ? 1 : tddp_group_world_size(group);
        halves->over = false;
        status = cast(bucket, bucket->buffer, narrowed(self, bucket, halves).buffer, ranks);
        if (status != TDDP_OK) {
            return status;
        }
    }
    return step(self, group, bucket, halves, stage, work, again);
}

static void free_compress(void *state)
{
    compress *self = state;
    tddp_hooks_clear(&self->table, free_scratch);
    tddp_comm_hook_release(self->inner);
    free(self);
}

/* Where the halves may lie: wherever the hook in it takes them. */
static uint32_t device_types_of(const tddp_comm_hook *inner)
{
    uint32_t types = 1u << TDDP_CPU;
    if (!inner || tddp_comm_hook_takes(inner, TDDP_CUDA)) {
        types |= 1u << TDDP_CUDA;
    }
    return types;
}

/* Of the hook and of the one in it; NULL: no memory. The caller frees it. */
static char *settings_of(tddp_dtype dtype, const tddp_comm_hook *inner)
{
    const char *of_inner = inner ? tddp_comm_hook_settings(inner) : "";
    return inner ? tddp_format("%s around %s%s%s", tddp_dtype_name(dtype),
                               tddp_comm_hook_name(inner), of_inner[0] ? ": " : "", of_inner)
                 : tddp_copy_string(tddp_dtype_name(dtype));
}

tddp_status tddp_hook_compress(tddp_dtype dtype, tddp_comm_hook *inner, tddp_comm_hook **out)
{
    if (dtype != TDDP_FLOAT16 && dtype != TDDP_BFLOAT16) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "compress to %s: expected float16 or bfloat16",
                         tddp_dtype_name(dtype));
    }
    char *settings = settings_of(dtype, inner);
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
                              device_types_of(inner)};
    tddp_status status = tddp_hooks_make(&ops, self, out);
    free(settings);
    return status;
}
