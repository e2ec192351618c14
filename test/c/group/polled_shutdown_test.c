/* A message of a polled group whose call is under way while the group is shut down. */
#include <stdatomic.h>

#include "events.h"
#include "group/group.h"
#include "ranks.h"

/* A backend whose messages end when it is aborted, and whose first look at one can be held. */
static struct {
    tddp_eventcount events;
    atomic_int looks; /* at messages */
    atomic_int held;  /* the first look ends when it is 0 */
    atomic_int aborted;
} poller;

static tddp_status create(const tddp_backend_opts *opts, const tddp_wait *wait, void **context)
{
    (void)opts;
    (void)wait;
    *context = &poller;
    return TDDP_OK;
}

static void abort_all(void *context)
{
    (void)context;
    atomic_store(&poller.aborted, 1);
    tddp_eventcount_notify(&poller.events);
}

static void destroy(void *context)
{
    (void)context;
}

static tddp_status post(void *context, const tddp_op *op, void **request)
{
    (void)context;
    *request = (void *)(uintptr_t)op;
    return TDDP_OK;
}

static tddp_status finish(void *context, void *request, int *source)
{
    const tddp_op *op = request;
    (void)context;
    (void)source;
    if (atomic_fetch_add(&poller.looks, 1) == 0) {
        CHECK_UNTIL(!atomic_load(&poller.held));
        return tddp_fail(TDDP_CANCELED, "not yet");
    }
    while (!atomic_load(&poller.aborted)) {
        if (op->cancel && tddp_cancel_triggered(op->cancel)) {
            return tddp_fail(TDDP_CANCELED, "not yet");
        }
    }
    return tddp_fail(TDDP_GROUP_FAILED, "aborted");
}

static tddp_eventcount *events(void *context)
{
    (void)context;
    return &poller.events;
}

static tddp_status run(void *context, const tddp_op *op)
{
    (void)context;
    (void)op;
    return TDDP_OK;
}

static const tddp_backend_v1 backend = {
    .abi = TDDP_BACKEND_ABI,
    .size = sizeof backend,
    .name = "poller",
    .device_types = 1u << TDDP_CPU,
    .create = create,
    .abort = abort_all,
    .destroy = destroy,
    .post = post,
    .finish = finish,
    .events = events,
    .op_count = TDDP_OP_COUNT,
    .run = {[TDDP_OP_BARRIER] = run},
};

static tddp_work *work;

static void *receive(void *group)
{
    static float got;
    tddp_buffer buffer = {&got, 1, TDDP_FLOAT32, TDDP_CPU, 0, NULL};
    CHECK_OK(tddp_recv(group, buffer, 0, 0, &work));
    return NULL;
}

static void *shut_down(void *group)
{
    tddp_group_shutdown(group, 0);
    return NULL;
}

static void end_in_a_call(int rank, int world_size, tddp_store *store, void *data)
{
    pthread_t threads[2];
    (void)data;
    tddp_group *group = make_group("poller", rank, world_size, store, 20000);
    if (rank == 1) {
        atomic_store(&poller.held, 1);
        CHECK_INT(pthread_create(&threads[0], NULL, receive, group), 0);
        CHECK_UNTIL(atomic_load(&poller.looks) > 0);
        CHECK_INT(pthread_create(&threads[1], NULL, shut_down, group), 0);
        CHECK_UNTIL(atomic_load(&poller.aborted));
        atomic_store(&poller.held, 0);
        CHECK_INT(pthread_join(threads[0], NULL), 0);
        CHECK_INT(pthread_join(threads[1], NULL), 0);
        CHECK_STATUS(tddp_work_wait(work, NULL), TDDP_GROUP_CLOSED);
        tddp_work_release(work);
    }
    tddp_group_release(group);
}

TEST(a_shutdown_ends_a_message_whose_call_is_under_way)
{
    CHECK_OK(tddp_backend_register(&backend));
    run_ranks(2, end_in_a_call, NULL);
}
