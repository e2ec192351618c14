/*
 * The `fake` backend by its table, without a group: what is posted and finished when, what an abort
 * ends, what the ranks' calls must agree on.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <tddp/backend.h>

#include "events.h"

typedef struct ends {
    const tddp_backend_v1 *backend;
    tddp_store *store;
    void *contexts[2];
} ends;

static ends make_ends(const char *faults)
{
    ends self = {0};
    setenv("TDDP_FAKE", faults, 1);
    CHECK_OK(tddp_backend_find("fake", &self.backend));
    CHECK_OK(tddp_hash_store_create(5000, &self.store));
    for (int rank = 0; rank < 2; rank++) {
        tddp_backend_opts opts = {.size = sizeof opts,
                                  .rank = rank,
                                  .world_size = 2,
                                  .store = self.store,
                                  .timeout_ms = 5000,
                                  .device_index = -1,
                                  .same_host = 1,
                                  .group = "pair"};
        CHECK_OK(self.backend->create(&opts, NULL, &self.contexts[rank]));
    }
    return self;
}

static void drop_ends(ends *self)
{
    self->backend->destroy(self->contexts[0]);
    self->backend->destroy(self->contexts[1]);
    tddp_store_release(self->store);
}

static tddp_op message(tddp_op_kind kind, int32_t *data, int peer, uint32_t tag)
{
    static uint64_t sequence;
    tddp_buffer buffer = {data, 1, TDDP_INT32, TDDP_CPU, 0, NULL};
    tddp_op op = {
        .kind = kind, .sequence = ++sequence, .peer = peer, .tag = tag, .timeout_ms = 2000};
    *(kind == TDDP_OP_SEND ? &op.input : &op.output) = buffer;
    return op;
}

TEST(messages_match_in_the_order_of_posting_not_of_finishing)
{
    ends self = make_ends("");
    int32_t sent[3] = {10, 11, 12};
    int32_t got[3] = {0};
    tddp_op ops[2][3];
    void *requests[2][3];
    int source = TDDP_ANY_SOURCE;
    for (int i = 0; i < 3; i++) {
        ops[0][i] = message(TDDP_OP_SEND, &sent[i], 1, 4);
        ops[1][i] = message(TDDP_OP_RECV, &got[i], 0, 4);
        CHECK_OK(self.backend->post(self.contexts[0], &ops[0][i], &requests[0][i]));
        CHECK_OK(self.backend->post(self.contexts[1], &ops[1][i], &requests[1][i]));
    }
    for (int i = 2; i >= 0; i--) {
        CHECK_OK(self.backend->finish(self.contexts[0], requests[0][i], &source));
        CHECK_INT(source, TDDP_ANY_SOURCE);
    }
    for (int i = 2; i >= 0; i--) {
        CHECK_OK(self.backend->finish(self.contexts[1], requests[1][i], &source));
        CHECK_INT(source, 0);
        CHECK_INT(got[i], sent[i]);
    }
    drop_ends(&self);
}

typedef struct waiter {
    ends *self;
    void *request;
    tddp_status status;
    int event;
} waiter;

static void *finish_one(void *data)
{
    waiter *waiting = data;
    int source;
    check_will_block(waiting->event);
    waiting->status =
        waiting->self->backend->finish(waiting->self->contexts[1], waiting->request, &source);
    return NULL;
}

TEST(abort_ends_current_and_later_operations)
{
    ends self = make_ends("");
    int32_t got[2];
    tddp_op ops[2] = {message(TDDP_OP_RECV, &got[0], TDDP_ANY_SOURCE, 0),
                      message(TDDP_OP_RECV, &got[1], 0, 1)};
    waiter waiters[2];
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) {
        ops[i].timeout_ms = 60000;
        waiters[i].self = &self;
        waiters[i].event = i;
        CHECK_OK(self.backend->post(self.contexts[1], &ops[i], &waiters[i].request));
        CHECK_INT(pthread_create(&threads[i], NULL, finish_one, &waiters[i]), 0);
    }
    CHECK_AWAIT_BLOCKED(0);
    CHECK_AWAIT_BLOCKED(1);
    self.backend->abort(self.contexts[1]);
    for (int i = 0; i < 2; i++) {
        CHECK_INT(pthread_join(threads[i], NULL), 0);
        CHECK_STATUS(waiters[i].status, TDDP_GROUP_FAILED);
    }
    tddp_op op = {.kind = TDDP_OP_BARRIER, .sequence = 1, .timeout_ms = 60000};
    CHECK_STATUS(self.backend->run[TDDP_OP_BARRIER](self.contexts[1], &op), TDDP_GROUP_FAILED);
    drop_ends(&self);
}

TEST(a_timeout_names_the_missing_ranks)
{
    ends self = make_ends("");
    tddp_op op = {.kind = TDDP_OP_BARRIER, .sequence = 1, .timeout_ms = 50};
    CHECK_STATUS(self.backend->run[TDDP_OP_BARRIER](self.contexts[0], &op), TDDP_TIMEOUT);
    CHECK_CONTAINS(tddp_error_message(), "not done after 50 ms: waiting for rank(s) 1");
    int32_t got;
    void *request;
    int source;
    tddp_op receives = message(TDDP_OP_RECV, &got, 1, 3);
    receives.timeout_ms = 50;
    CHECK_OK(self.backend->post(self.contexts[0], &receives, &request));
    CHECK_STATUS(self.backend->finish(self.contexts[0], request, &source), TDDP_TIMEOUT);
    CHECK_CONTAINS(tddp_error_message(), "tag 3 within 50 ms: waiting for rank(s) 1");
    drop_ends(&self);
}

/* Only texts that both have are compared. */
TEST(fingerprints_are_compared_if_both_have_one)
{
    const uint32_t theirs[3] = {7, 0, 8};
    for (int i = 0; i < 3; i++) {
        ends self = make_ends("");
        int32_t sent = 1;
        int32_t got = 0;
        void *requests[2];
        int source;
        tddp_op ops[2] = {message(TDDP_OP_SEND, &sent, 1, 0), message(TDDP_OP_RECV, &got, 0, 0)};
        ops[0].fingerprint = 7;
        ops[1].fingerprint = theirs[i];
        CHECK_OK(self.backend->post(self.contexts[0], &ops[0], &requests[0]));
        CHECK_OK(self.backend->post(self.contexts[1], &ops[1], &requests[1]));
        CHECK_OK(self.backend->finish(self.contexts[0], requests[0], &source));
        CHECK_STATUS(self.backend->finish(self.contexts[1], requests[1], &source),
                     i == 2 ? TDDP_MISMATCH : TDDP_OK);
        CHECK_INT(got, i != 2);
        drop_ends(&self);
    }
}

TEST(a_context_frees_unfinished_messages)
{
    ends self = make_ends("");
    int32_t number = 5;
    int source;
    int64_t before;
    int64_t after;
    CHECK_OK(tddp_store_num_keys(self.store, NULL, &before));
    for (int i = 0; i < 10; i++) {
        void *requests[2];
        tddp_op ops[2] = {message(TDDP_OP_SEND, &number, 1, (uint32_t)i),
                          message(TDDP_OP_RECV, &number, i % 2 ? 0 : TDDP_ANY_SOURCE, (uint32_t)i)};
        for (int k = 0; k < 2; k++) {
            CHECK_OK(self.backend->post(self.contexts[k], &ops[k], &requests[k]));
        }
        for (int k = 0; k < 2; k++) {
            CHECK_OK(self.backend->finish(self.contexts[k], requests[k], &source));
        }
    }
    CHECK_OK(tddp_store_num_keys(self.store, NULL, &after));
    CHECK_INT(after, before);
    drop_ends(&self);
}
