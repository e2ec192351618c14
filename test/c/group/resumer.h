/*
 * A backend that records which threads execute its operations, and can hold an operation or fail
 * it. An operation that a thread tries again and again is one run.
 */
#ifndef TDDP_TEST_RESUMER_H
#define TDDP_TEST_RESUMER_H

#include <stdatomic.h>
#include <unistd.h>

#include "args.h"
#include "events.h"
#include "group/group.h"
#include "ranks.h"

enum { MOST_RUNS = 4096 };

typedef struct run {
    pthread_t thread;
    const tddp_op *op;
    uint64_t sequence;
    int awaited;
    int cancelable;
} run;

static struct {
    run runs[MOST_RUNS];
    atomic_int count;
    atomic_int inside; /* threads; never more than one */
    atomic_int held;   /* operations wait until it is 0 */
    atomic_int fails;  /* the status of the next ones; 0: they succeed */
    atomic_int aborted;
    atomic_int destroying;   /* how often it has begun */
    atomic_int destroy_held; /* destroying waits until it is 0 */
    atomic_int destroyed;
    atomic_ullong reduced; /* elements */
} resumer;

static tddp_status resumer_create(const tddp_backend_opts *opts, const tddp_wait *wait,
                                  void **context)
{
    (void)opts;
    (void)wait;
    *context = &resumer;
    return TDDP_OK;
}

static void resumer_abort(void *context)
{
    (void)context;
    atomic_store(&resumer.aborted, 1);
}

static void resumer_destroy(void *context)
{
    (void)context;
    CHECK_INT(atomic_load(&resumer.inside), 0);
    atomic_fetch_add(&resumer.destroying, 1);
    while (atomic_load(&resumer.destroy_held)) {
        usleep(200);
    }
    atomic_fetch_add(&resumer.destroyed, 1);
}

static tddp_status resumer_work(const tddp_op *op)
{
    while (atomic_load(&resumer.held)) {
        if (atomic_load(&resumer.aborted)) {
            return tddp_fail(TDDP_GROUP_FAILED, "aborted");
        }
        if (op->cancel && tddp_cancel_triggered(op->cancel)) {
            return tddp_fail(TDDP_CANCELED, "interrupted");
        }
        usleep(200);
    }
    int fails = atomic_load(&resumer.fails);
    if (fails) {
        return tddp_fail((tddp_status)fails, "failed by the test");
    }
    for (size_t i = 0; op->kind == TDDP_OP_ALL_REDUCE && i < op->output.count; i++) {
        ((float *)op->output.data)[i] += 1;
        atomic_fetch_add(&resumer.reduced, 1);
    }
    return TDDP_OK;
}

static tddp_status resumer_run(void *context, const tddp_op *op)
{
    (void)context;
    CHECK_INT(atomic_fetch_add(&resumer.inside, 1), 0);
    int at = atomic_load(&resumer.count);
    const run *last = &resumer.runs[at > 0 ? at - 1 : 0];
    if (at == 0 || last->sequence != op->sequence || !pthread_equal(last->thread, pthread_self())) {
        CHECK(at < MOST_RUNS);
        resumer.runs[at] = (run){pthread_self(), op, op->sequence, op->awaited, op->cancel != NULL};
        atomic_store(&resumer.count, at + 1);
    }
    tddp_status status = resumer_work(op);
    atomic_fetch_sub(&resumer.inside, 1);
    return status;
}

static tddp_eventcount *resumer_events(void *context)
{
    static tddp_eventcount none;
    (void)context;
    return &none;
}

static const tddp_backend_v1 resumer_backend = {
    .abi = TDDP_BACKEND_ABI,
    .size = sizeof resumer_backend,
    .name = "resumer",
    .device_types = 1u << TDDP_CPU,
    .create = resumer_create,
    .abort = resumer_abort,
    .destroy = resumer_destroy,
    .events = resumer_events,
    .op_count = TDDP_OP_COUNT,
    .run = {[TDDP_OP_ALL_REDUCE] = resumer_run,
            [TDDP_OP_BARRIER] = resumer_run,
            [TDDP_OP_ALL_GATHER] = resumer_run},
};

static tddp_group *resumer_group(tddp_store **store)
{
    const tddp_backend_v1 *known;
    if (tddp_backend_find("resumer", &known)) {
        CHECK_OK(tddp_backend_register(&resumer_backend));
    }
    CHECK_OK(tddp_hash_store_create(5000, store));
    return make_group("resumer", 0, 1, *store, 20000);
}

/* Whether this thread executed the run with this index. */
static inline int ran_here(int at)
{
    CHECK(at < atomic_load(&resumer.count));
    return pthread_equal(resumer.runs[at].thread, pthread_self()) != 0;
}

static inline void await_runs(int count)
{
    CHECK_UNTIL(atomic_load(&resumer.count) >= count);
    CHECK_INT(atomic_load(&resumer.count), count);
}

static float numbers[64];

static inline tddp_buffer floats(size_t at, size_t count)
{
    return buffer_of(&numbers[at], count, TDDP_FLOAT32);
}

static inline tddp_work *begin(tddp_group *group)
{
    tddp_work *work;
    CHECK_OK(tddp_all_reduce(group, floats(0, 2), TDDP_REDUCE_SUM, 0, &work));
    return work;
}

/* Executed on this thread for so long. */
static inline tddp_work *begin_inline(tddp_group *group, int64_t microseconds, tddp_cancel *cancel)
{
    tddp_work *work;
    CHECK_OK(tddp_group_drain(group, NULL));
    CHECK_OK(inline_sum(group, floats(0, 2), microseconds, cancel, &work));
    return work;
}

static inline pthread_t aside(void *(*body)(void *), void *data)
{
    pthread_t thread;
    CHECK_INT(pthread_create(&thread, NULL, body, data), 0);
    return thread;
}

#endif
