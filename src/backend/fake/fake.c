/*
 * The `fake` backend's table and contexts. One thread creates and destroys a context; abort() may
 * be called on any, and only triggers a cancel token, which all waits watch.
 */
#include <stdlib.h>

#include "backend/fake/context.h"

tddp_status tddp_fake_translate(const tddp_fake_context *self, tddp_status status)
{
    if (status == TDDP_CANCELED && tddp_cancel_triggered(self->cancel)) {
        return tddp_fail(TDDP_GROUP_FAILED, "aborted");
    }
    return status;
}

static void destroy(void *data)
{
    tddp_fake_context *self = data;
    if (self) {
        tddp_fake_p2p_free(&self->p2p);
        tddp_store_release(self->store);
        tddp_cancel_free(self->cancel);
        free(self);
    }
}

static void abort_all(void *data)
{
    tddp_fake_context *self = data;
    tddp_cancel_trigger(self->cancel);
}

static tddp_status create(const tddp_backend_opts *opts, const tddp_wait *wait, void **out)
{
    (void)wait;
    tddp_fake_context *self = tddp_alloc(sizeof *self);
    if (!self) {
        return TDDP_OUT_OF_MEMORY;
    }
    pthread_mutex_init(&self->p2p.mutex, NULL);
    self->rank = opts->rank;
    self->world_size = opts->world_size;
    tddp_status status = tddp_fake_read_faults(opts->rank, &self->faults);
    if (status == TDDP_OK && self->faults.create_fail) {
        status = tddp_fail(TDDP_NETWORK, "asked to fail by TDDP_FAKE");
    }
    if (status == TDDP_OK) {
        status = tddp_cancel_create(&self->cancel);
    }
    if (status) {
        destroy(self);
        return status;
    }
    self->store = tddp_store_retain(opts->store);
    *out = self;
    return TDDP_OK;
}

const tddp_backend_v1 *tddp_fake_backend(void)
{
    static const tddp_backend_v1 backend = {
        .abi = TDDP_BACKEND_ABI,
        .size = sizeof(tddp_backend_v1),
        .name = "fake",
        .device_types = 1u << TDDP_CPU,
        .create = create,
        .abort = abort_all,
        .destroy = destroy,
        .post = tddp_fake_post,
        .finish = tddp_fake_finish,
        .op_count = TDDP_OP_COUNT,
        .run =
            {
                [TDDP_OP_ALL_REDUCE] = tddp_fake_run,
                [TDDP_OP_BROADCAST] = tddp_fake_run,
                [TDDP_OP_BARRIER] = tddp_fake_run,
                [TDDP_OP_ALL_GATHER] = tddp_fake_run,
                [TDDP_OP_REDUCE_SCATTER] = tddp_fake_run,
                [TDDP_OP_REDUCE] = tddp_fake_run,
                [TDDP_OP_GATHER] = tddp_fake_run,
                [TDDP_OP_SCATTER] = tddp_fake_run,
                [TDDP_OP_ALL_TO_ALL] = tddp_fake_run,
            },
    };
    return &backend;
}
