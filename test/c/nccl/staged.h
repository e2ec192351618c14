/*
 * Groups of any backend with buffers of either kind, with the stand-in for CUDA. The buffers'
 * stream writes the input late, and overwrites the output before, so that reading or writing too
 * early is detected.
 */
#ifndef TDDP_TEST_NCCL_STAGED_H
#define TDDP_TEST_NCCL_STAGED_H

#include <stdbool.h>

#include <tddp/backend.h>

#include "args.h"
#include "nccl/world.h"
#include "standin/standin.h"

enum { MAX_RANKS = 4 };

/* The memory and streams of a test. */
typedef struct bench {
    const tddp_cuda *cuda;
    tddp_group *group;
    int rank;
    int ranks;
    tddp_device_type type;
    tddp_cuda_stream stream;
} bench;

static inline int32_t value_of(int rank, int tag, size_t i)
{
    return (int32_t)(1000 * rank + 100 * tag + (int)(i % 97));
}

typedef struct filling {
    int32_t *data;
    size_t count;
    int rank;
    int tag;
} filling;

static inline void fill_now(void *data)
{
    filling *it = data;
    for (size_t i = 0; i < it->count; i++) {
        it->data[i] = it->tag < 0 ? -1 : value_of(it->rank, it->tag, i);
    }
    free(it);
}

static inline tddp_buffer buffer_on(const bench *self, int32_t *data, size_t count)
{
    return (tddp_buffer){.data = count > 0 ? data : NULL,
                         .count = count,
                         .dtype = TDDP_INT32,
                         .device_type = self->type,
                         .stream = self->stream};
}

/* The memory has these values once its stream has got so far; a negative tag: garbage. */
static inline tddp_buffer filled(const bench *self, int32_t *data, size_t count, int tag)
{
    filling *it = malloc(sizeof *it);
    CHECK(it);
    *it = (filling){data, count, self->rank, tag};
    standin_put(self->stream, fill_now, it);
    return buffer_on(self, data, count);
}

static inline tddp_buffer poisoned(const bench *self, int32_t *data, size_t count)
{
    return filled(self, data, count, -1);
}

static inline void check_values(const int32_t *data, size_t count, int rank, int tag)
{
    for (size_t i = 0; i < count; i++) {
        CHECK_INT(data[i], value_of(rank, tag, i));
    }
}

static inline tddp_group *open_on(const char *backend, tddp_store *store, int rank, int ranks)
{
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    tddp_group *group;
    opts.backend = backend;
    opts.store = store;
    opts.rank = rank;
    opts.world_size = ranks;
    opts.timeout_ms = TIMEOUT_MS;
    CHECK_OK(tddp_group_create(&opts, NULL, &group));
    return group;
}

/* Only CUDA memory has streams. */
static inline bench open_bench(const char *backend, tddp_store *store, int rank, int ranks,
                               tddp_device_type type)
{
    bench self = {.rank = rank, .ranks = ranks, .type = type};
    CHECK_OK(tddp_cuda_get(&self.cuda));
    if (type == TDDP_CUDA) {
        CHECK_INT(self.cuda->cudaStreamCreateWithPriority(&self.stream, 1, 0), 0);
    }
    self.group = open_on(backend, store, rank, ranks);
    return self;
}

/* All CUDA resources are freed then. */
static inline void close_bench(bench *self)
{
    tddp_group_shutdown(self->group, 1000);
    tddp_group_release(self->group);
    if (self->stream) {
        CHECK_INT(self->cuda->cudaStreamDestroy(self->stream), 0);
    }
    CHECK_INT(standin_alive(), 0);
}

#endif
