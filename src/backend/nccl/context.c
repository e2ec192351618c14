/* Which communicator an operation has, and their list. */
#include "backend/nccl/context.h"

#include <stdio.h>

tddp_status tddp_nccl_device_of(const tddp_nccl_context *self, const tddp_op *op, int *device)
{
    const tddp_buffer *buffer = op->input.device_type == TDDP_CUDA ? &op->input : &op->output;
    int found = buffer->device_index;
    if (op->kind == TDDP_OP_BARRIER) {
        found = self->device < 0 ? 0 : self->device;
    }
    if (found < 0 || found >= TDDP_NCCL_MAX_DEVICES) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "device %d: expected 0 to %d", found,
                         TDDP_NCCL_MAX_DEVICES - 1);
    }
    if (self->bound && found != self->device) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "memory on cuda:%d: expected cuda:%d, the device that this group was made "
                         "for",
                         found, self->device);
    }
    *device = found;
    return TDDP_OK;
}

/* Of all ranks: numbered, since ranks may use different devices. With the lock held. */
static void describe_of_all(tddp_nccl_context *self, tddp_nccl_communicator_opts *opts)
{
    const bool first = self->created == 0 && !self->bound;
    opts->rank = self->rank;
    opts->size = self->size;
    opts->has_id = first;
    opts->id = self->first_id;
    (void)snprintf(opts->key, sizeof opts->key, "nccl/%d", self->created++);
}

/* Of two, for both directions. */
static void describe_of_two(const tddp_nccl_context *self, int peer,
                            tddp_nccl_communicator_opts *opts)
{
    const bool lower = self->rank < peer;
    opts->rank = lower ? 0 : 1;
    opts->size = 2;
    (void)snprintf(opts->key, sizeof opts->key, "nccl/%d and %d", lower ? self->rank : peer,
                   lower ? peer : self->rank);
}

/* With the lock held. */
static tddp_status make(tddp_nccl_context *self, const tddp_op *op, int device, bool of_two,
                        tddp_nccl_communicator **out)
{
    tddp_nccl_communicator_opts opts = {.device = device, .store = self->store};
    if (atomic_load(&self->aborted)) {
        return tddp_nccl_fail_aborted("connecting");
    }
    if (of_two) {
        describe_of_two(self, op->peer, &opts);
    } else {
        describe_of_all(self, &opts);
    }
    tddp_status status = tddp_nccl_communicator_create(self->libraries, &opts, out);
    if (status == TDDP_OK) {
        (*out)->next = self->list;
        self->list = *out;
    }
    return status;
}

tddp_status tddp_nccl_communicator_for(tddp_nccl_context *self, const tddp_op *op, int device,
                                       tddp_nccl_communicator **out)
{
    const bool of_two = tddp_op_is_p2p(op->kind) && !op->batched;
    tddp_status status = TDDP_OK;
    pthread_mutex_lock(&self->mutex);
    tddp_nccl_communicator **slot = of_two ? &self->of_two[op->peer] : &self->of_all[device];
    if (!*slot) {
        status = make(self, op, device, of_two, slot);
    }
    *out = *slot;
    pthread_mutex_unlock(&self->mutex);
    if (status == TDDP_OK && (*out)->opts.device != device) {
        status = tddp_fail(TDDP_INVALID_ARGUMENT,
                           "memory on cuda:%d: expected cuda:%d, that of earlier messages between "
                           "ranks %d and %d; use a batch, or another group",
                           device, (*out)->opts.device, self->rank, op->peer);
    }
    return status;
}

tddp_nccl_communicator *tddp_nccl_communicators(tddp_nccl_context *self)
{
    pthread_mutex_lock(&self->mutex);
    tddp_nccl_communicator *list = self->list;
    pthread_mutex_unlock(&self->mutex);
    return list;
}
