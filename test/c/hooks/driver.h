/*
 * Runs hooks without a reducer: ranks are threads over the fake backend, buckets are made from
 * lists of shapes, and an iteration calls the hook's stages in the same order as a reducer.
 */
#ifndef TDDP_TEST_HOOKS_DRIVER_H
#define TDDP_TEST_HOOKS_DRIVER_H

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include <tddp.h>

#include "group/ranks.h"
#include "group/values.h"

enum { MOST_GRADIENTS = 8, MOST_BUCKETS = 4, ALIGNMENT = 64 };

/* A gradient's shape; unused dimensions are 0. */
typedef struct shape {
    int64_t dims[3];
} shape;

typedef struct test_bucket {
    tddp_bucket bucket;
    tddp_flat_slice gradients[MOST_GRADIENTS];
    shape shapes[MOST_GRADIENTS];
} test_bucket;

static const tddp_dtype floating[] = {TDDP_FLOAT16, TDDP_BFLOAT16, TDDP_FLOAT32, TDDP_FLOAT64};
enum { FLOATING = 4 };

/* Bucket number `index` of `count` with gradients of these shapes, all zero. It must not move. */
static inline void make_bucket(test_bucket *self, size_t index, size_t count, tddp_dtype dtype,
                               const shape *shapes, size_t gradients)
{
    size_t step = ALIGNMENT / tddp_dtype_size(dtype);
    size_t offset = 0;
    memset(self, 0, sizeof *self);
    CHECK(gradients <= MOST_GRADIENTS);
    for (size_t i = 0; i < gradients; i++) {
        tddp_flat_slice *gradient = &self->gradients[i];
        self->shapes[i] = shapes[i];
        gradient->param = 100 * index + i;
        gradient->dims = self->shapes[i].dims;
        gradient->count = 1;
        while (gradient->ndim < 3 && shapes[i].dims[gradient->ndim] > 0) {
            gradient->count *= (size_t)shapes[i].dims[gradient->ndim++];
        }
        gradient->offset = offset;
        offset += (gradient->count + step - 1) / step * step;
    }
    self->bucket = (tddp_bucket){.index = index,
                                 .count = count,
                                 .layout = 1,
                                 .buffer = buffer_of(room_for(offset), offset, dtype),
                                 .gradient_count = gradients,
                                 .gradients = self->gradients};
}

static inline void free_bucket(test_bucket *self)
{
    free(self->bucket.buffer.data);
}

/* Element `k` of gradient `i`. */
static inline double value_of(const test_bucket *self, size_t i, size_t k)
{
    return get(self->bucket.buffer.dtype, self->bucket.buffer.data, self->gradients[i].offset + k);
}

static inline void set_value(test_bucket *self, size_t i, size_t k, double value)
{
    put(self->bucket.buffer.dtype, self->bucket.buffer.data, self->gradients[i].offset + k, value);
}

/* Checks that the padding between the gradients is zero. */
static inline void check_padding(const test_bucket *self)
{
    const tddp_buffer *buffer = &self->bucket.buffer;
    for (size_t i = 0; i < self->bucket.gradient_count; i++) {
        bool last = i + 1 == self->bucket.gradient_count;
        size_t next = last ? buffer->count : self->gradients[i + 1].offset;
        for (size_t k = self->gradients[i].offset + self->gradients[i].count; k < next; k++) {
            CHECK(get(buffer->dtype, buffer->data, k) == 0.0);
        }
    }
}

/* One iteration: all buckets' stage 0, then each further stage of all after the previous one has
 * completed. Returns the number of stages. */
static inline int run_iteration(tddp_comm_hook *hook, tddp_group *group, test_bucket *buckets,
                                size_t count, uint64_t iteration)
{
    tddp_work *works[MOST_BUCKETS] = {NULL};
    int again[MOST_BUCKETS];
    bool any = true;
    int stage = 0;
    for (size_t b = 0; b < count; b++) {
        buckets[b].bucket.iteration = iteration;
        again[b] = 1;
    }
    for (; any; stage++) {
        any = false;
        for (size_t b = 0; b < count; b++) {
            if (works[b]) {
                CHECK_OK(tddp_work_wait(works[b], NULL));
                tddp_work_release(works[b]);
                works[b] = NULL;
            }
            if (again[b]) {
                CHECK_OK(tddp_comm_hook_run(hook, group, &buckets[b].bucket, stage, &works[b],
                                            &again[b]));
            }
            any = any || works[b] || again[b];
        }
    }
    for (size_t b = 0; b < count; b++) {
        check_padding(&buckets[b]);
    }
    return stage;
}

/* Checks that this buffer is bitwise equal on all ranks. */
static inline void check_same_everywhere(tddp_group *group, tddp_buffer buffer)
{
    int ranks = tddp_group_world_size(group);
    size_t bytes = buffer.count * tddp_dtype_size(buffer.dtype);
    char *all = room_for(bytes * (size_t)ranks);
    tddp_buffer local = buffer_of(buffer.data, bytes, TDDP_UINT8);
    tddp_buffer others = buffer_of(all, bytes * (size_t)ranks, TDDP_UINT8);
    CHECK_OK(tddp_all_gather(group, local, others, NULL));
    for (int rank = 0; rank < ranks; rank++) {
        CHECK(memcmp(all + (size_t)rank * bytes, buffer.data, bytes) == 0);
    }
    free(all);
}

/* Pseudorandom numbers in [-1, 1), equal in each run and on each rank. */
static inline double noise(uint64_t a, uint64_t b)
{
    uint64_t x = (a * 1000003u + b + 1) * UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ (x >> 32)) * UINT64_C(0xd6e8feb86659fd93);
    return (double)(x >> 40) * 0x1p-23 - 1.0;
}

/* Shuts the group down after a barrier. */
static inline void leave(tddp_group *group)
{
    CHECK_OK(tddp_barrier(group, NULL));
    tddp_group_shutdown(group, 5000);
    tddp_group_release(group);
}

#endif
