/*
 * The backend table "shm". Its slots report failures to the peers. Slots run on the group's
 * threads; abort on any.
 */
#include "backend/shm/control.h"
#include "backend/shm/p2p_region.h"

/* After a failure that leaves ranks out of step, the peers need not wait for this rank. */
static tddp_status report_fatal(tddp_shm *shm, tddp_status status)
{
    if (tddp_shm_is_fatal(status)) {
        tddp_shm_report_failure(shm, status, tddp_error_message());
    }
    return status;
}

#define RUN(name)                                                   \
    static tddp_status run_##name(void *context, const tddp_op *op) \
    {                                                               \
        return report_fatal(context, tddp_shm_##name(context, op)); \
    }

RUN(all_reduce)
RUN(barrier)
RUN(reduce_scatter)
RUN(reduce)
RUN(move)

static tddp_status create(const tddp_backend_opts *opts, const tddp_wait *wait, void **context)
{
    tddp_shm *shm;
    for (int rank = 1; opts->hosts && rank < opts->world_size; rank++) {
        if (opts->hosts[rank] != opts->hosts[0]) {
            return tddp_fail(TDDP_UNAVAILABLE,
                             "rank %d is on another host than rank 0: expected all ranks of a "
                             "group over shared memory on one; use \"gloo\", which takes shared "
                             "memory within hosts",
                             rank);
        }
    }
    if (!opts->hosts && !opts->same_host && opts->world_size > 1) {
        return tddp_fail(TDDP_UNAVAILABLE,
                         "ranks on several hosts: expected all ranks of a group over shared memory "
                         "on one; use \"gloo\", which takes shared memory within hosts");
    }
    tddp_status status = tddp_shm_join(opts, NULL, wait, &shm);
    if (status == TDDP_OK) {
        *context = shm;
    }
    return status;
}

static void abort_all(void *context)
{
    tddp_shm_abort(context);
}

static void destroy(void *context)
{
    tddp_shm_destroy(context);
}

static tddp_status post(void *context, const tddp_op *op, void **request)
{
    return report_fatal(context, tddp_shm_p2p_post(context, op, request));
}

static tddp_status finish(void *context, void *request, int *source)
{
    return report_fatal(context, tddp_shm_p2p_finish(context, request, source));
}

static tddp_eventcount *events(void *context)
{
    return tddp_shm_events(context, tddp_shm_rank(context));
}

static tddp_status allocate(void *context, size_t bytes, void **handle, void **data)
{
    return tddp_shm_allocate(context, bytes, handle, data);
}

static void report_failure(void *context, tddp_status status, const char *text)
{
    tddp_shm_report_failure(context, status, text);
}

const tddp_backend_v1 *tddp_shm_backend(void)
{
    static const tddp_backend_v1 backend = {
        .abi = TDDP_BACKEND_ABI,
        .size = sizeof(tddp_backend_v1),
        .name = "shm",
        .device_types = 1u << TDDP_CPU,
        .create = create,
        .abort = abort_all,
        .destroy = destroy,
        .post = post,
        .finish = finish,
        .allocate = allocate,
        .deallocate = tddp_shm_deallocate,
        .report_failure = report_failure,
        .events = events,
        .op_count = TDDP_OP_COUNT,
        .run = {[TDDP_OP_ALL_REDUCE] = run_all_reduce,
                [TDDP_OP_BROADCAST] = run_move,
                [TDDP_OP_BARRIER] = run_barrier,
                [TDDP_OP_ALL_GATHER] = run_move,
                [TDDP_OP_REDUCE_SCATTER] = run_reduce_scatter,
                [TDDP_OP_REDUCE] = run_reduce,
                [TDDP_OP_GATHER] = run_move,
                [TDDP_OP_SCATTER] = run_move,
                [TDDP_OP_ALL_TO_ALL] = run_move},
    };
    return &backend;
}
