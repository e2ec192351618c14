/* Messages that are launched as one. */
#include "backend/nccl/batch.h"

#include <stdio.h>
#include <stdlib.h>

#include "backend/nccl/failures.h"

enum { SENT = 1, RECEIVED = 2 };

#define GIVEN_UP "another message of its batch was given up"

struct tddp_nccl_batch {
    pthread_mutex_t mutex; /* guards what follows; not held while the batch is launched */
    pthread_cond_t changed;
    int references; /* of its messages */
    bool launching; /* a thread does, or has */
    bool launched;  /* with this outcome: */
    tddp_status status;
    char text[TDDP_NCCL_TEXT_BYTES];
    size_t size;
    size_t count; /* requests so far */
    tddp_nccl_request *requests[];
};

static tddp_status begin(size_t size, tddp_nccl_batch **out)
{
    tddp_nccl_batch *made = calloc(1, sizeof *made + size * sizeof *made->requests);
    if (!made) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory");
    }
    tddp_status status = tddp_cond_init(&made->changed);
    if (status) {
        free(made);
        return status;
    }
    pthread_mutex_init(&made->mutex, NULL);
    made->size = size;
    *out = made;
    return TDDP_OK;
}

tddp_status tddp_nccl_batch_add(tddp_nccl_context *context, tddp_nccl_request *request,
                                tddp_nccl_batch **out)
{
    const tddp_op *op = request->op;
    tddp_status status = TDDP_OK;
    pthread_mutex_lock(&context->mutex);
    if (op->batch_index == 0) {
        status = begin(op->batch, &context->unfilled);
    }
    tddp_nccl_batch *batch = context->unfilled;
    if (status == TDDP_OK) {
        pthread_mutex_lock(&batch->mutex);
        batch->requests[batch->count++] = request;
        batch->references++;
        if (batch->count == batch->size) {
            context->unfilled = NULL;
        }
        pthread_mutex_unlock(&batch->mutex);
        *out = batch;
    }
    pthread_mutex_unlock(&context->mutex);
    return status;
}

/* --- launching ------------------------------------------------------------------------------- */

static tddp_status launch(tddp_nccl_batch *self, tddp_nccl_context *context)
{
    const tddp_nccl_request *first = self->requests[0];
    tddp_nccl_communicator *communicator = first->communicator;
    const tddp_nccl_limits limits = {first->deadline_ns, NULL};
    if (self->count < self->size) {
        return tddp_fail(TDDP_GROUP_FAILED, "%s", GIVEN_UP);
    }
    for (size_t i = 1; i < self->size; i++) {
        if (self->requests[i]->communicator != communicator) {
            return tddp_fail(TDDP_INVALID_ARGUMENT,
                             "message %zu of a batch is on cuda:%d: expected cuda:%d, that of the "
                             "first one",
                             i, self->requests[i]->communicator->opts.device,
                             communicator->opts.device);
        }
    }
    tddp_status status = tddp_nccl_connect(communicator, limits);
    if (status == TDDP_OK && first->op->turn) {
        status = tddp_nccl_turn_await(first->op->turn, &context->aborted, first->deadline_ns);
    }
    if (status == TDDP_OK) {
        status = tddp_nccl_launch_batch(self->requests, self->size);
    }
    pthread_mutex_lock(&context->mutex);
    for (size_t i = 0; i < self->size && status == TDDP_OK; i++) {
        const tddp_op *op = self->requests[i]->op;
        context->batched[op->peer] |= op->kind == TDDP_OP_SEND ? SENT : RECEIVED;
    }
    pthread_mutex_unlock(&context->mutex);
    return status;
}

tddp_status tddp_nccl_batch_launch(tddp_nccl_batch *self, tddp_nccl_context *context)
{
    pthread_mutex_lock(&self->mutex);
    if (!self->launching) {
        self->launching = true;
        pthread_mutex_unlock(&self->mutex);
        tddp_status status = launch(self, context);
        pthread_mutex_lock(&self->mutex);
        self->launched = true;
        self->status = status;
        (void)snprintf(self->text, sizeof self->text, "%s", status ? tddp_error_message() : "");
        pthread_cond_broadcast(&self->changed);
    }
    /* The thread that launches has a deadline. */
    while (!self->launched) {
        pthread_cond_wait(&self->changed, &self->mutex);
    }
    tddp_status status = self->status ? tddp_fail(self->status, "%s", self->text) : TDDP_OK;
    pthread_mutex_unlock(&self->mutex);
    return status;
}

bool tddp_nccl_batch_launches_at_once(tddp_nccl_batch *self, tddp_nccl_context *context)
{
    pthread_mutex_lock(&self->mutex);
    const bool launched = self->launched;
    bool at_once = !self->launching && self->count == self->size;
    pthread_mutex_unlock(&self->mutex);
    if (launched || !at_once) {
        return launched;
    }
    pthread_mutex_lock(&context->mutex);
    for (size_t i = 0; i < self->size && at_once; i++) {
        const tddp_op *op = self->requests[i]->op;
        const int way = op->kind == TDDP_OP_SEND ? SENT : RECEIVED;
        at_once = (context->batched[op->peer] & way) != 0;
    }
    pthread_mutex_unlock(&context->mutex);
    const tddp_op *first = self->requests[0]->op;
    return at_once && !atomic_load(&context->aborted) &&
           (!first->turn || tddp_nccl_turn_has_come(first->turn));
}

/* --- the end --------------------------------------------------------------------------------- */

void tddp_nccl_batch_leave(tddp_nccl_batch *self, tddp_nccl_context *context)
{
    pthread_mutex_lock(&context->mutex);
    if (context->unfilled == self) {
        context->unfilled = NULL;
    }
    pthread_mutex_unlock(&context->mutex);
    pthread_mutex_lock(&self->mutex);
    while (self->launching && !self->launched) {
        pthread_cond_wait(&self->changed, &self->mutex);
    }
    if (!self->launched) {
        self->launching = self->launched = true;
        self->status = TDDP_GROUP_FAILED;
        (void)snprintf(self->text, sizeof self->text, "%s", GIVEN_UP);
    }
    const bool last = --self->references == 0;
    pthread_mutex_unlock(&self->mutex);
    if (last) {
        pthread_cond_destroy(&self->changed);
        pthread_mutex_destroy(&self->mutex);
        free(self);
    }
}
