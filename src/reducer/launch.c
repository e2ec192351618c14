/*
 * Launches ready buckets and waits for them. Without a hook a bucket is averaged in place by an
 * all_reduce. With a hook, launching a bucket runs stage 0. finish() runs the later stages, bucket
 * after bucket, each after the work of the previous stage has completed:
 *
 *     launch:   stage 0 of bucket 0, 1, 2
 *     finish:   wait 0, stage 1 of 0; wait 1, stage 1 of 1; wait 2, ...; wait 0, stage 2 of 0
 *
 * All ranks make these calls in the same order, so that the hook's operations match. A wait that
 * ends early leaves its position in `next_to_wait`, and the next finish() continues from there.
 *
 * finish() submits the last average, which it executes on its own thread at once. With fewer than
 * two cores for each rank (`launch_in_finish`) it submits all averages: the group's progress thread
 * would only compete with backward for a core. The reducer's lock is released meanwhile. A finish()
 * that ends early has submitted all ready buckets.
 */
#include <sched.h>
#include <string.h>
#include <unistd.h>

#include "reducer/reducer.h"

/* --- hook and divisor ------------------------------------------------------------------------ */

static tddp_status check_before_first_gradient(const tddp_reducer *reducer)
{
    if (reducer->phase == TDDP_REDUCER_LAUNCHED || reducer->ready_count > 0 ||
        reducer->finished > 0 || reducer->current_times.first_ready_ns != 0) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "a communication hook after the first gradient: expected before the first "
                         "backward");
    }
    return TDDP_OK;
}

tddp_status tddp_reducer_set_hook(tddp_reducer *reducer, tddp_comm_hook *hook)
{
    if (!hook) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "no communication hook: expected one");
    }
    tddp_status status = TDDP_OK;
    pthread_mutex_lock(&reducer->lock);
    if (reducer->hook) {
        status = tddp_fail(TDDP_INVALID_ARGUMENT,
                           "a second communication hook, \"%s\", after \"%s\": expected one for "
                           "each model",
                           tddp_comm_hook_name(hook), tddp_comm_hook_name(reducer->hook));
    } else if (reducer->next_divisor != reducer->world_size) {
        status = tddp_fail(TDDP_INVALID_ARGUMENT,
                           "a communication hook while sums are divided by %d of %d ranks: "
                           "expected no divisor, because a hook divides by itself",
                           reducer->next_divisor, reducer->world_size);
    } else {
        status = check_before_first_gradient(reducer);
    }
    if (status == TDDP_OK) {
        status = tddp_reducer_check_hook(reducer, hook);
    }
    if (status == TDDP_OK) {
        reducer->hook = tddp_comm_hook_retain(hook);
    }
    pthread_mutex_unlock(&reducer->lock);
    return status;
}

tddp_status tddp_reducer_set_divisor(tddp_reducer *reducer, int ranks)
{
    if (ranks < 1 || ranks > reducer->world_size) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "gradients divided by %d: expected 1 to %d", ranks,
                         reducer->world_size);
    }
    if (reducer->hook) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "gradients divided by %d, but the communication hook \"%s\" divides them: "
                         "expected no hook",
                         ranks, tddp_comm_hook_name(reducer->hook));
    }
    pthread_mutex_lock(&reducer->lock);
    reducer->next_divisor = ranks;
    pthread_mutex_unlock(&reducer->lock);
    return TDDP_OK;
}

bool tddp_reducer_hook_on_caller(const tddp_reducer *reducer)
{
    return reducer->hook && tddp_comm_hook_on_caller(reducer->hook);
}

/* --- launching ------------------------------------------------------------------------------- */

/* For paths that submit no operation, which would fail on a forked or destroyed group. */
static tddp_status check_group(const tddp_reducer *reducer)
{
    if (reducer->owner != getpid()) {
        return tddp_fail(TDDP_FORKED,
                         "the process group \"%s\" was made by process %d, this is its child "
                         "%d: create the group and the model again here",
                         tddp_group_name(reducer->group), (int)reducer->owner, (int)getpid());
    }
    if (tddp_group_closed(reducer->group)) {
        return tddp_fail(TDDP_GROUP_CLOSED, "the process group \"%s\" is destroyed",
                         tddp_group_name(reducer->group));
    }
    return TDDP_OK;
}

bool tddp_reducer_oversubscribed(const tddp_group *group)
{
    cpu_set_t allowed;
    if (strcmp(tddp_group_carrier(group), "shm") != 0 ||
        sched_getaffinity(0, sizeof allowed, &allowed)) {
        return false;
    }
    const int limit = tddp_core_limit();
    const int cores = CPU_COUNT(&allowed) < limit ? CPU_COUNT(&allowed) : limit;
    return cores < 2 * tddp_group_world_size(group);
}

/* With a deadline this thread executes the operation, else the progress thread. */
static tddp_status average(tddp_reducer *reducer, tddp_reducer_bucket *bucket,
                           const char *description, const tddp_reducer_deadline *deadline)
{
    if (reducer->world_size == 1) { /* the bucket is its own average */
        return check_group(reducer);
    }
    bool plain = reducer->divisor == reducer->world_size;
    tddp_op_args args = {.size = sizeof args,
                         .kind = TDDP_OP_ALL_REDUCE,
                         .output = bucket->buffer,
                         .reduce = plain ? TDDP_REDUCE_AVG : TDDP_REDUCE_PREMUL_SUM,
                         .premul = plain ? 1.0 : 1.0 / reducer->divisor,
                         .description = description};
    tddp_reducer_set_inline(deadline, &args);
    return tddp_submit(reducer->group, &args, &bucket->work);
}

/* Whether the host language interrupted a stage of its hook. */
static bool interrupted(const tddp_reducer *reducer, tddp_status status)
{
    return status == TDDP_CANCELED && tddp_reducer_hook_on_caller(reducer);
}

static tddp_status run_hook(tddp_reducer *reducer, size_t b, const char *description)
{
    tddp_reducer_bucket *bucket = &reducer->buckets[b];
    const tddp_flat_buffer *flat = &reducer->layout.buffers[b];
    tddp_status status = check_group(reducer);
    if (status != TDDP_OK) {
        return status;
    }
    const tddp_bucket seen = {b,
                              reducer->layout.buffer_count,
                              reducer->finished,
                              reducer->layout_number,
                              bucket->buffer,
                              flat->slice_count,
                              flat->slices,
                              bucket->buffer.device_type == TDDP_CPU ? NULL : &reducer->device,
                              description};
    int again = 0;
    status = tddp_comm_hook_run(reducer->hook, reducer->group, &seen, bucket->stage, &bucket->work,
                                &again);
    bucket->interrupted = interrupted(reducer, status);
    if (!bucket->interrupted) {
        bucket->stage++;
        bucket->more_stages = status == TDDP_OK && again;
    }
    return status;
}

/* Whether finish() submits the next bucket's average. */
static bool deferred_to_finish(const tddp_reducer *reducer)
{
    return !reducer->hook && !reducer->on_devices &&
           (reducer->launch_in_finish || reducer->launched + 1 == reducer->layout.buffer_count);
}

/* Under the lock, which is released while this thread runs the hook or executes the average. */
static tddp_status submit(tddp_reducer *reducer, tddp_reducer_bucket *bucket,
                          const char *description, const tddp_reducer_deadline *deadline)
{
    bool unlocks = reducer->hook ? tddp_reducer_hook_on_caller(reducer) : deadline != NULL;
    reducer->launching = unlocks;
    if (unlocks) {
        pthread_mutex_unlock(&reducer->lock);
    }
    tddp_status status = reducer->hook ? run_hook(reducer, reducer->launched, description)
                                       : average(reducer, bucket, description, deadline);
    if (unlocks) {
        pthread_mutex_lock(&reducer->lock);
    }
    reducer->launching = false;
    return status;
}

static tddp_status launch(tddp_reducer *reducer, const tddp_reducer_deadline *deadline)
{
    tddp_reducer_bucket *bucket = &reducer->buckets[reducer->launched];
    if (bucket->skipped) {
        return TDDP_OK;
    }
    tddp_status status = tddp_reducer_join_streams(reducer, bucket);
    if (status != TDDP_OK) {
        return status;
    }
    tddp_reducer_description room;
    const char *description =
        bucket->interrupted ? NULL : tddp_reducer_describe(reducer, reducer->launched, &room);
    if (reducer->current_times.first_launch_ns == 0) {
        reducer->current_times.first_launch_ns = tddp_now_ns();
    }
    return submit(reducer, bucket, description, deadline);
}

tddp_status tddp_reducer_launch_ready(tddp_reducer *reducer, const tddp_reducer_deadline *deadline)
{
    if (reducer->failure != TDDP_OK) {
        return tddp_reducer_fail_again(reducer);
    }
    if (reducer->launching) { /* the launching thread will see this bucket too */
        return TDDP_OK;
    }
    while (reducer->launched < reducer->layout.buffer_count &&
           reducer->buckets[reducer->launched].pending == 0) {
        if (!deadline && deferred_to_finish(reducer)) {
            return TDDP_OK;
        }
        tddp_status status = launch(reducer, deadline);
        if (interrupted(reducer, status)) { /* finish() continues with this bucket */
            return status;
        }
        reducer->launched++;
        if (status != TDDP_OK) {
            return tddp_reducer_set_failure(reducer, status);
        }
    }
    if (reducer->ready_count < reducer->count) { /* sparse parameters are in no bucket */
        return TDDP_OK;
    }
    reducer->phase = TDDP_REDUCER_LAUNCHED;
    reducer->next_to_wait = 0;
    return tddp_reducer_submit_used_map(reducer, deadline);
}

tddp_status tddp_reducer_hand_over(tddp_reducer *reducer, int *all_handed_over)
{
    tddp_status status = TDDP_OK;
    pthread_mutex_lock(&reducer->lock);
    if (reducer->failure != TDDP_OK) {
        status = tddp_reducer_fail_again(reducer);
    } else if (reducer->phase == TDDP_REDUCER_PREPARED) {
        status = tddp_reducer_launch_ready(reducer, NULL);
    }
    int all = reducer->phase == TDDP_REDUCER_LAUNCHED;
    pthread_mutex_unlock(&reducer->lock);
    if (interrupted(reducer, status)) { /* backward continues: the other ranks need its buckets */
        status = TDDP_OK;
    }
    if (status == TDDP_OK) {
        *all_handed_over = all;
    }
    return status;
}

/* --- waiting --------------------------------------------------------------------------------- */

/* Returns false if the hook was interrupted: the stage must be run again. */
static bool run_next_stage(tddp_reducer *reducer, size_t b)
{
    tddp_reducer_bucket *bucket = &reducer->buckets[b];
    if (!bucket->more_stages || reducer->failure != TDDP_OK) {
        return true;
    }
    tddp_status status = run_hook(reducer, b, NULL);
    if (status != TDDP_OK && !bucket->interrupted) {
        pthread_mutex_lock(&reducer->lock);
        (void)tddp_reducer_set_failure(reducer, status);
        pthread_mutex_unlock(&reducer->lock);
    }
    return !bucket->interrupted;
}

static bool any_pending(const tddp_reducer *reducer, size_t launched)
{
    bool any = false;
    for (size_t b = 0; b < launched && !any; b++) {
        const tddp_reducer_bucket *bucket = &reducer->buckets[b];
        any = bucket->work || (bucket->more_stages && reducer->failure == TDDP_OK);
    }
    return any;
}

tddp_status tddp_reducer_wait_buckets(tddp_reducer *reducer, size_t launched, bool all,
                                      const tddp_reducer_deadline *deadline, bool *done)
{
    do {
        for (; reducer->next_to_wait < launched; reducer->next_to_wait++) {
            tddp_reducer_bucket *bucket = &reducer->buckets[reducer->next_to_wait];
            tddp_status status =
                bucket->buffer.device_type == TDDP_CPU
                    ? tddp_reducer_wait_and_clear(reducer, &bucket->work, deadline, done)
                    : tddp_reducer_order_bucket(reducer, bucket, deadline, done);
            if (!*done) {
                return status;
            }
            if (all && !run_next_stage(reducer, reducer->next_to_wait)) {
                *done = false;
                return TDDP_CANCELED;
            }
        }
        reducer->next_to_wait = 0;
    } while (all && any_pending(reducer, launched));
    return tddp_reducer_wait_and_clear(reducer, &reducer->unused.map_work, deadline, done);
}

static tddp_status wait_pending(tddp_work *work, const tddp_reducer_deadline *deadline, int *any)
{
    bool done = true;
    tddp_status status = TDDP_OK;
    if (work) {
        *any = 1;
        status = tddp_reducer_wait_work(work, deadline, &done);
    }
    return done ? TDDP_OK : status;
}

tddp_status tddp_reducer_await_works(tddp_reducer *reducer, const tddp_wait *wait, int *any)
{
    const tddp_reducer_deadline deadline = tddp_reducer_deadline_of(wait);
    tddp_status status = TDDP_OK;
    int found = 0;
    for (size_t b = 0; b < reducer->layout.buffer_count && status == TDDP_OK; b++) {
        status = wait_pending(reducer->buckets[b].work, &deadline, &found);
    }
    if (status == TDDP_OK) {
        status = wait_pending(reducer->unused.map_work, &deadline, &found);
    }
    if (status == TDDP_OK) {
        *any = found;
    }
    return status;
}
