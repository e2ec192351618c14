/*
 * The backend's table used directly, with operations that a group would refuse: sequence numbers
 * that differ between ranks, a local part whose sizes differ.
 */
#include <stdio.h>
#include <string.h>

#include <tddp/backend.h>
#include <tddp/meeting.h>

#include "world.h"

typedef struct member {
    const tddp_backend_v1 *backend;
    tddp_store *store;
    void *context;
} member;

static member join(int rank, int world_size, int port)
{
    member self = {NULL, open_store(rank, world_size, port), NULL};
    CHECK_OK(tddp_backend_find("gloo", &self.backend));
    tddp_backend_opts opts = {.size = sizeof opts,
                              .rank = rank,
                              .world_size = world_size,
                              .store = self.store,
                              .timeout_ms = 10000,
                              .device_index = -1,
                              .same_host = 1,
                              .group = "direct",
                              .address = "127.0.0.1",
                              .backend = self.backend};
    CHECK_OK(self.backend->create(&opts, NULL, &self.context));
    return self;
}

static tddp_status run(const member *self, tddp_op *op)
{
    op->timeout_ms = 10000;
    tddp_status status = self->backend->run[op->kind](self->context, op);
    if (status) {
        char text[1024];
        snprintf(text, sizeof text, "%s", tddp_error_message());
        self->backend->abort(self->context);
        (void)tddp_fail(status, "%s", text);
    }
    return status;
}

static void part(member *self)
{
    self->backend->destroy(self->context);
    tddp_store_release(self->store);
}

/* Rank 1 has counted one more operation. */
MULTI_TEST(another_sequence_number_is_reported, 2, 20)
{
    member self = join(rank, world_size, port);
    static float data[100000];
    for (int large = 0; large < 2; large++) {
        tddp_buffer buffer = buffer_of(data, large ? 100000 : 4, TDDP_FLOAT32);
        tddp_op op = {.kind = TDDP_OP_ALL_REDUCE,
                      .sequence = (uint64_t)(10 + large),
                      .input = buffer,
                      .output = buffer};
        CHECK_OK(run(&self, &op));
    }
    tddp_buffer buffer = buffer_of(data, 100000, TDDP_FLOAT32);
    tddp_op op = {.kind = rank ? TDDP_OP_BROADCAST : TDDP_OP_ALL_REDUCE,
                  .sequence = rank ? 13 : 12,
                  .input = buffer,
                  .output = buffer};
    CHECK_STATUS(run(&self, &op), TDDP_MISMATCH);
    CHECK_CONTAINS(tddp_error_message(), "rank 0 is at operation 12, all_reduce, 100000 elements "
                                         "of float32, sum");
    CHECK_CONTAINS(tddp_error_message(), "rank 1 is at operation 13, broadcast, 100000 elements "
                                         "of float32, root 0");
    part(&self);
}

/* Only the sequence number differs; the sizes would match. */
MULTI_TEST(the_same_call_with_another_sequence_number_is_reported, 2, 20)
{
    member self = join(rank, world_size, port);
    static int32_t data[50000];
    tddp_buffer buffer = buffer_of(data, 50000, TDDP_INT32);
    tddp_op op = {.kind = TDDP_OP_REDUCE,
                  .sequence = rank ? 1 : 2,
                  .input = buffer,
                  .output = buffer,
                  .root = 1};
    CHECK_STATUS(run(&self, &op), TDDP_MISMATCH);
    CHECK_CONTAINS(tddp_error_message(), "rank 0 is at operation 2, reduce");
    CHECK_CONTAINS(tddp_error_message(), "rank 1 is at operation 1, reduce");
    part(&self);
}

MULTI_TEST(local_parts_must_agree, 1, 20)
{
    member self = join(rank, world_size, port);
    int32_t from[4] = {1, 2, 3, 4};
    int32_t to[4] = {0};
    tddp_buffer input = buffer_of(from, 4, TDDP_INT32);
    tddp_buffer output = buffer_of(to, 3, TDDP_INT32);
    tddp_op op = {.kind = TDDP_OP_ALL_TO_ALL,
                  .sequence = 1,
                  .input = input,
                  .output = output,
                  .input_parts = &input,
                  .output_parts = &output};
    CHECK_STATUS(run(&self, &op), TDDP_MISMATCH);
    CHECK_CONTAINS(tddp_error_message(), "rank 0 sends itself 4 elements and expects 3");
    CHECK_INT(to[0], 0);
    part(&self);
    self = join(rank, world_size, port);
    op.kind = TDDP_OP_REDUCE_SCATTER;
    CHECK_STATUS(run(&self, &op), TDDP_MISMATCH);
    CHECK_CONTAINS(tddp_error_message(), "part 0 of the input has 4 elements, the output 3");
    CHECK_INT(to[0], 0);
    part(&self);
}

/* Point to point is posted, everything else is run. */
MULTI_TEST(the_table_has_every_collective, 1, 20)
{
    const tddp_backend_v1 *backend;
    CHECK_OK(tddp_backend_find("gloo", &backend));
    CHECK_INT(backend->op_count, TDDP_OP_COUNT);
    for (int kind = 0; kind < TDDP_OP_COUNT; kind++) {
        CHECK(tddp_op_is_p2p((tddp_op_kind)kind) || backend->run[kind]);
    }
}

/* However many ranks there are, each publishes one record, of the same size, under the same keys.
 */
MULTI_TEST(a_rank_publishes_one_small_record, 4, 20)
{
    member self = join(rank, world_size, port);
    tddp_blob_list keys;
    tddp_meeting *meeting;
    int own = 0;
    const tddp_meeting_opts opts = {.store = self.store,
                                    .name = "transport",
                                    .rank = rank,
                                    .world_size = world_size,
                                    .sender = TDDP_MEETING_ALL};
    CHECK_OK(tddp_meeting_open(&opts, &meeting));
    CHECK_OK(tddp_meeting_read(meeting, NULL));
    for (int other = 0; other < world_size; other++) {
        const tddp_slice record = tddp_meeting_records(meeting)[other];
        CHECK(record.data != NULL && record.size > 0 && record.size <= 64);
        CHECK_INT(record.size, tddp_meeting_records(meeting)[0].size);
    }
    tddp_meeting_close(meeting);
    CHECK_OK(tddp_store_list_keys(self.store, NULL, &keys));
    for (size_t i = 0; i < keys.count; i++) {
        own += strstr(keys.blobs[i].data, "transport/") != NULL;
    }
    CHECK_INT(own, 3);
    tddp_blob_list_free(&keys);
    part(&self);
}
