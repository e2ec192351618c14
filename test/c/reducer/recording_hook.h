/* A communication hook that records its calls. */
#ifndef TDDP_TEST_REDUCER_RECORDING_HOOK_H
#define TDDP_TEST_REDUCER_RECORDING_HOOK_H

#include <pthread.h>

#include "args.h"
#include "world.h"

typedef struct recording_hook {
    char events[256]; /* "0.1 ": stage 0 of bucket 1 */
    int stages;       /* the number of its stages */
    int fail_at;      /* stage, or -1 */
    int interrupt_at; /* stage */
    int interrupts;   /* how often that stage is interrupted */
    pthread_t thread; /* of its last call */
    int world_size;
    uint64_t iteration;
    uint64_t layout;
    tddp_reducer *reducer; /* stage 0 of bucket 0 marks parameter `inner` ready; or NULL */
    size_t inner;
    bool *freed;
    bool quiet; /* submits no operation */
} recording_hook;

static inline void scale(tddp_buffer buffer, float factor)
{
    float *values = buffer.data;
    for (size_t k = 0; k < buffer.count; k++) {
        values[k] *= factor;
    }
}

/* Stage 0 sums, stage 1 divides, and each later one doubles and broadcasts from rank 0. */
static inline tddp_status record(void *state, tddp_group *group, const tddp_bucket *bucket,
                                 int stage, tddp_work **work, int *again)
{
    recording_hook *self = state;
    size_t used = strlen(self->events);
    (void)snprintf(self->events + used, sizeof self->events - used, "%d.%zu ", stage,
                   bucket->index);
    self->thread = pthread_self();
    self->iteration = bucket->iteration;
    self->layout = bucket->layout;
    if (stage == self->fail_at) {
        return tddp_fail(TDDP_UNSUPPORTED, "this hook fails in stage %d", stage);
    }
    if (stage == self->interrupt_at && self->interrupts > 0) {
        self->interrupts--;
        return tddp_fail(TDDP_CANCELED, "interrupted at stage %d", stage);
    }
    *again = stage + 1 < self->stages;
    if (self->quiet) {
        return TDDP_OK;
    }
    if (stage == 0) {
        if (self->reducer && bucket->index == 0) { /* deadlocks if the lock is held */
            int all = 0;
            CHECK_OK(tddp_reducer_mark_ready(self->reducer, self->inner, &all));
        }
        tddp_op_args args = sum_args(bucket->buffer);
        args.description = bucket->description;
        return tddp_submit(group, &args, work);
    }
    scale(bucket->buffer, stage == 1 ? 1.0f / (float)self->world_size : 2.0f);
    return stage == 1 ? TDDP_OK : tddp_broadcast(group, bucket->buffer, 0, work);
}

static inline void free_recording_hook(void *state)
{
    *((recording_hook *)state)->freed = true;
}

static inline tddp_comm_hook *make_hook(recording_hook *self, const char *name, int on_caller)
{
    const tddp_comm_hook_ops ops = {
        sizeof ops, name, on_caller, record, self->freed ? free_recording_hook : NULL, NULL, 0};
    tddp_comm_hook *hook = NULL;
    CHECK_OK(tddp_comm_hook_make(&ops, self, &hook));
    return hook;
}

/* A reducer with the hook, which only the reducer references. */
static inline tddp_reducer *make_hooked(tddp_group *group, size_t count, recording_hook *self,
                                        int on_caller)
{
    tddp_reducer_opts opts = buckets_of(12, 24);
    tddp_reducer *reducer = make_vectors(group, count, &opts);
    tddp_comm_hook *hook = make_hook(self, "recording", on_caller);
    CHECK_OK(tddp_reducer_set_hook(reducer, hook));
    tddp_comm_hook_release(hook);
    self->world_size = tddp_group_world_size(group);
    return reducer;
}

#endif
