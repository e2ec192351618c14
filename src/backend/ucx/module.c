/*
 * The backend table "ucx": tddp_coll over a worker of UCX. Any thread, as backend.h describes.
 */
#include <stdlib.h>
#include <unistd.h>

#include "backend/ucx/ucx.h"

typedef struct group {
    tddp_ucx *ucx;
    tddp_coll *coll;
} group;

/* In a child of the process that made it, nothing of UCX's may be touched. */
static void destroy(void *context)
{
    group *self = context;
    if (self->ucx && self->ucx->owner != getpid()) {
        return;
    }
    tddp_coll_destroy(self->coll);
    tddp_ucx_free(self->ucx);
    free(self);
}

static tddp_status create(const tddp_backend_opts *opts, const tddp_wait *wait, void **context)
{
    group *self = calloc(1, sizeof *self);
    if (!self) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
    }
    tddp_status status = tddp_ucx_open(opts, wait, &self->ucx);
    if (status == TDDP_OK) {
        const tddp_coll_opts coll = {.size = sizeof coll,
                                     .transport = &tddp_ucx_transport,
                                     .context = self->ucx,
                                     .rank = opts->rank,
                                     .world_size = opts->world_size,
                                     .names = opts->names};
        status = tddp_coll_create(&coll, &self->coll);
    }
    if (status) {
        destroy(self);
        return status;
    }
    *context = self;
    return TDDP_OK;
}

static void abort_group(void *context)
{
    tddp_ucx_abort(((group *)context)->ucx);
}

static tddp_status run(void *context, const tddp_op *op)
{
    group *self = context;
    atomic_store(&self->ucx->sequence, op->sequence);
    return tddp_coll_run(self->coll, op);
}

static tddp_status post(void *context, const tddp_op *op, void **request)
{
    return tddp_coll_post(((group *)context)->coll, op, request);
}

static tddp_status finish(void *context, void *request, int *source)
{
    return tddp_coll_finish(((group *)context)->coll, request, source);
}

static tddp_status probe(void *context, void *request, int *source)
{
    return tddp_coll_probe(((group *)context)->coll, request, source);
}

static void report_failure(void *context, tddp_status status, const char *text)
{
    tddp_ucx_report_failure(((group *)context)->ucx, status, text);
}

static struct tddp_eventcount *events(void *context)
{
    return ((group *)context)->ucx->events;
}

static tddp_status check_peer(void *context, int rank)
{
    return tddp_ucx_check_peer(((group *)context)->ucx, rank, 0);
}

static const tddp_backend_v1 backend = {
    .abi = TDDP_BACKEND_ABI,
    .size = sizeof(tddp_backend_v1),
    .name = "ucx",
    .device_types = 1u << TDDP_CPU,
    .create = create,
    .abort = abort_group,
    .destroy = destroy,
    .post = post,
    .finish = finish,
    .traits = TDDP_BACKEND_SHARES_HOSTS | TDDP_BACKEND_RESUMES,
    .report_failure = report_failure,
    .events = events,
    .check_peer = check_peer,
    .probe = probe,
    .drop = tddp_coll_drop,
    .op_count = TDDP_OP_COUNT,
    .run = {[TDDP_OP_ALL_REDUCE] = run,
            [TDDP_OP_BROADCAST] = run,
            [TDDP_OP_BARRIER] = run,
            [TDDP_OP_ALL_GATHER] = run,
            [TDDP_OP_REDUCE_SCATTER] = run,
            [TDDP_OP_REDUCE] = run,
            [TDDP_OP_GATHER] = run,
            [TDDP_OP_SCATTER] = run,
            [TDDP_OP_ALL_TO_ALL] = run},
};

TDDP_API const tddp_backend_v1 *tddp_backend_query(uint32_t core_abi);
const tddp_backend_v1 *tddp_backend_query(uint32_t core_abi)
{
    return core_abi == TDDP_BACKEND_ABI ? &backend : NULL;
}
