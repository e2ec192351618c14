/*
 * What becomes of complete buckets. Without a hook: one all_reduce that averages in place. With one
 * its stage 0 is run when the bucket is handed over, and the later ones by whoever waits for the
 * round, bucket after bucket, each when the work of the stage before is done:
 *
 *     handed over:   stage 0 of bucket 0, 1, 2
 *     finish:        wait 0, stage 1 of 0; wait 1, stage 1 of 1; wait 2, ...; wait 0, stage 2 of 0
 *
 * Every rank makes these calls in this order, so that the operations of the hook match. Where a
 * wait that ended early stopped is kept, and the next finish goes on from there.
 *
 * The last average is submitted by finish(), which follows at once and executes it on its own
 * thread; and so are those before it where no core is free for the group's own thread
 * (`waits_till_end`), which would only take the time of the one that computes. The reducer's lock
 * is released meanwhile. A finish() that ends early has submitted all that is complete.
 */
#include <sched.h>
#include <string.h>
#include <unistd.h>

#include "reducer/reducer.h"

/* --- what is done with buckets --------------------------------------------------------------- */

static tddp_status check_early(const tddp_reducer *reducer)
{
    if (reducer->phase == TDDP_REDUCER_LAUNCHED || reducer->ready_count > 0 ||
        reducer->finished > 0 || reducer->now.first_ready_ns != 0) {
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
                           "a second communication hook, \"%s\": there is \"%s\" already, and one "
                           "model has one",
                           tddp_comm_hook_name(hook), tddp_comm_hook_name(reducer->hook));
    } else if (reducer->next_divisor != reducer->world_size) {
        status = tddp_fail(TDDP_INVALID_ARGUMENT,
                           "a communication hook with sums divided by %d of %d ranks: what is "
                           "divided is the hook's own part",
                           reducer->next_divisor, reducer->world_size);
    } else {
        status = check_early(reducer);
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

bool tddp_reducer_on_caller(const tddp_reducer *reducer)
{
    return reducer->hook && tddp_comm_hook_on_caller(reducer->hook);
}

/* --- handing over ---------------------------------------------------------------------------- */

/* Where nothing is queued, of a group that is gone one is to hear all the same. */
static tddp_status check_group(const tddp_reducer *reducer)
{
    if (reducer->owner != getpid()) {
        return tddp_fail(TDDP_FORKED,
                         "the process group \"%s\" was made by process %d, this is its child %d: "
                         "make the group and the model anew here",
                         tddp_group_name(reducer->group), (int)reducer->owner, (int)getpid());
    }
    if (tddp_group_closed(reducer->group)) {
        return tddp_fail(TDDP_GROUP_CLOSED, "the process group \"%s\" is destroyed",
                         tddp_group_name(reducer->group));
    }
    return TDDP_OK;
}

bool tddp_reducer_no_core_is_free(const tddp_group *group)
{
    cpu_set_t allowed;
    return strcmp(tddp_group_carrier(group), "shm") == 0 &&
           sched_getaffinity(0, sizeof allowed, &allowed) == 0 &&
           CPU_COUNT(&allowed) < 2 * tddp_group_world_size(group);
}

/* Executed here if `finishing`, else queued. */
static tddp_status average(tddp_reducer *reducer, tddp_reducer_bucket *bucket,
                           const char *description, const tddp_reducer_patience *finishing)
{
    if (reducer->world_size == 1) { /* it is in place already */
        return check_group(reducer);
    }
    bool plain = reducer->divisor == reducer->world_size;
    tddp_op_args args = {.size = sizeof args,
                         .kind = TDDP_OP_ALL_REDUCE,
                         .output = bucket->buffer,
                         .reduce = plain ? TDDP_REDUCE_AVG : TDDP_REDUCE_PREMUL_SUM,
                         .premul = plain ? 1.0 : 1.0 / reducer->divisor,
                         .description = description};
    tddp_reducer_inline(finishing, &args);
    return tddp_submit(reducer->group, &args, &bucket->work);
}

/* The host interrupted its own code in the midst of a stage. */
static bool interrupted(const tddp_reducer *reducer, tddp_status status)
{
    return status == TDDP_CANCELED && tddp_reducer_on_caller(reducer);
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
                              reducer->layouts,
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
        bucket->again = status == TDDP_OK && again;
    }
    return status;
}

/* An average that finish() submits. */
static bool left_to_finish(const tddp_reducer *reducer)
{
    return !reducer->hook && !reducer->on_devices &&
           (reducer->waits_till_end || reducer->launched + 1 == reducer->layout.buffer_count);
}

/* With the lock, which is released while this thread runs the hook or executes the average. */
static tddp_status submit(tddp_reducer *reducer, tddp_reducer_bucket *bucket,
                          const char *description, const tddp_reducer_patience *finishing)
{
    bool unlocks = reducer->hook ? tddp_reducer_on_caller(reducer) : finishing != NULL;
    reducer->launching = unlocks;
    if (unlocks) {
        pthread_mutex_unlock(&reducer->lock);
    }
    tddp_status status = reducer->hook ? run_hook(reducer, reducer->launched, description)
                                       : average(reducer, bucket, description, finishing);
    if (unlocks) {
        pthread_mutex_lock(&reducer->lock);
    }
    reducer->launching = false;
    return status;
}

static tddp_status launch(tddp_reducer *reducer, const tddp_reducer_patience *finishing)
{
    tddp_reducer_bucket *bucket = &reducer->buckets[reducer->launched];
    if (bucket->skipped) {
        return TDDP_OK;
    }
    tddp_status status = tddp_reducer_gather_streams(reducer, bucket);
    if (status != TDDP_OK) {
        return status;
    }
    tddp_reducer_description room;
    const char *description =
        bucket->interrupted ? NULL : tddp_reducer_describe(reducer, reducer->launched, &room);
    if (reducer->now.first_launch_ns == 0) {
        reducer->now.first_launch_ns = tddp_now_ns();
    }
    return submit(reducer, bucket, description, finishing);
}

tddp_status tddp_reducer_launch_complete(tddp_reducer *reducer,
                                         const tddp_reducer_patience *finishing)
{
    if (reducer->failure != TDDP_OK) {
        return tddp_reducer_broken(reducer);
    }
    if (reducer->launching) { /* another thread does, and sees what is complete now */
        return TDDP_OK;
    }
    while (reducer->launched < reducer->layout.buffer_count &&
           reducer->buckets[reducer->launched].pending == 0) {
        if (!finishing && left_to_finish(reducer)) {
            return TDDP_OK;
        }
        tddp_status status = launch(reducer, finishing);
        if (interrupted(reducer, status)) { /* finish() goes on from here */
            return status;
        }
        reducer->launched++;
        if (status != TDDP_OK) {
            return tddp_reducer_break(reducer, status);
        }
    }
    if (reducer->ready_count < reducer->count) { /* also of those that are in no bucket */
        return TDDP_OK;
    }
    reducer->phase = TDDP_REDUCER_LAUNCHED;
    reducer->settling = 0;
    return tddp_reducer_usage_follow(reducer, finishing);
}

tddp_status tddp_reducer_hand_over(tddp_reducer *reducer, int *all_handed_over)
{
    tddp_status status = TDDP_OK;
    pthread_mutex_lock(&reducer->lock);
    if (reducer->failure != TDDP_OK) {
        status = tddp_reducer_broken(reducer);
    } else if (reducer->phase == TDDP_REDUCER_OPEN) {
        status = tddp_reducer_launch_complete(reducer, NULL);
    }
    int all = reducer->phase == TDDP_REDUCER_LAUNCHED;
    pthread_mutex_unlock(&reducer->lock);
    if (interrupted(reducer, status)) { /* backward goes on: the other ranks need all of it */
        status = TDDP_OK;
    }
    if (status == TDDP_OK) {
        *all_handed_over = all;
    }
    return status;
}

/* --- waiting --------------------------------------------------------------------------------- */

/* False if it was interrupted: the stage is to be run again. */
static bool next_stage(tddp_reducer *reducer, size_t b)
{
    tddp_reducer_bucket *bucket = &reducer->buckets[b];
    if (!bucket->again || reducer->failure != TDDP_OK) {
        return true;
    }
    tddp_status status = run_hook(reducer, b, NULL);
    if (status != TDDP_OK && !bucket->interrupted) {
        pthread_mutex_lock(&reducer->lock);
        (void)tddp_reducer_break(reducer, status);
        pthread_mutex_unlock(&reducer->lock);
    }
    return !bucket->interrupted;
}

static bool under_way(const tddp_reducer *reducer, size_t launched)
{
    bool any = false;
    for (size_t b = 0; b < launched && !any; b++) {
        const tddp_reducer_bucket *bucket = &reducer->buckets[b];
        any = bucket->work || (bucket->again && reducer->failure == TDDP_OK);
    }
    return any;
}

tddp_status tddp_reducer_settle(tddp_reducer *reducer, size_t launched, bool all,
                                const tddp_reducer_patience *patience, bool *done)
{
    do {
        for (; reducer->settling < launched; reducer->settling++) {
            tddp_reducer_bucket *bucket = &reducer->buckets[reducer->settling];
            tddp_status status =
                bucket->buffer.device_type == TDDP_CPU
                    ? tddp_reducer_await_slot(reducer, &bucket->work, patience, done)
                    : tddp_reducer_order_bucket(reducer, bucket, patience, done);
            if (!*done) {
                return status;
            }
            if (all && !next_stage(reducer, reducer->settling)) {
                *done = false;
                return TDDP_CANCELED;
            }
        }
        reducer->settling = 0;
    } while (all && under_way(reducer, launched));
    return tddp_reducer_await_slot(reducer, &reducer->usage.work, patience, done);
}

static tddp_status await_work(tddp_work *work, const tddp_reducer_patience *patience, int *any)
{
    bool done = true;
    tddp_status status = TDDP_OK;
    if (work) {
        *any = 1;
        status = tddp_reducer_await(work, patience, &done);
    }
    return done ? TDDP_OK : status;
}

tddp_status tddp_reducer_await_works(tddp_reducer *reducer, const tddp_wait *wait, int *any)
{
    const tddp_reducer_patience patience = tddp_reducer_patience_of(wait);
    tddp_status status = TDDP_OK;
    int found = 0;
    for (size_t b = 0; b < reducer->layout.buffer_count && status == TDDP_OK; b++) {
        status = await_work(reducer->buckets[b].work, &patience, &found);
    }
    if (status == TDDP_OK) {
        status = await_work(reducer->usage.work, &patience, &found);
    }
    if (status == TDDP_OK) {
        *any = found;
    }
    return status;
}
