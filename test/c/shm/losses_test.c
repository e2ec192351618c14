/*
 * Failed messages over shared memory: mismatched, not sent, or with a peer that dies or leaves. The
 * error names the peer, before any timeout. And more of them than there is room for.
 */
#include "backend/shm/p2p_request.h"
#include "messages.h"

enum { DONE, RANK_0 }; /* events */

typedef struct difference {
    size_t sent;
    size_t received;
    tddp_dtype dtype; /* that is received; float32 is sent */
    const char *theirs;
    const char *mine;
} difference;

static void differ(shm_rank *it)
{
    const difference *how = it->data;
    void *memory = alloc_bytes(2000000);
    tddp_buffer sent = shm_buffer(memory, how->sent, TDDP_FLOAT32);
    tddp_buffer received = shm_buffer(memory, how->received, how->dtype);
    /* A small message completes before the receiver looks at it. */
    bool small = how->sent * sizeof(float) <= EAGER;
    if (it->rank == 0) {
        CHECK_STATUS(tddp_recv(it->group, received, 1, 3, NULL), TDDP_MISMATCH);
    } else {
        tddp_status status = tddp_send(it->group, sent, 0, 3, NULL);
        CHECK_INT(status == TDDP_OK, small);
        CHECK_STATUS(small ? tddp_barrier(it->group, NULL) : status, TDDP_MISMATCH);
    }
    CHECK_CONTAINS(tddp_error_message(), how->theirs);
    CHECK_CONTAINS(tddp_error_message(), how->mine);
    /* A rank that has ended would be reported instead of the mismatch. */
    CHECK_MEET(DONE, it->size);
    free(memory);
}

TEST(mismatched_messages)
{
    static difference hows[] = {
        {12, 10, TDDP_FLOAT32, "rank 1 sends 12 elements of float32",
         "rank 0 receives 10 elements of float32 with tag 3"},
        {12, 12, TDDP_INT32, "rank 1 sends 12 elements of float32",
         "rank 0 receives 12 elements of int32 with tag 3"},
        {500, 5, TDDP_FLOAT32, "rank 1 sends 500 elements of float32",
         "rank 0 receives 5 elements of float32 with tag 3"},
        {500000, 2, TDDP_FLOAT32, "rank 1 sends 500000 elements of float32",
         "rank 0 receives 2 elements of float32"},
        {0, 500000, TDDP_FLOAT32, "rank 1 sends 0 elements of float32",
         "rank 0 receives 500000 elements of float32"},
    };
    for (size_t i = 0; i < sizeof hows / sizeof *hows; i++) {
        run_shm_groups(SHM_PROCESSES, 2, differ, &hows[i]);
    }
}

/* Only rank 0 has a short timeout. */
static void times_out(shm_rank *it)
{
    tddp_group *group = it->group;
    uint8_t byte = 0;
    void *much = alloc_bytes(LARGE_BYTES);
    CHECK_OK(tddp_barrier(group, NULL));
    if (it->rank == 0) {
        double start = shm_now();
        CHECK_OK(tddp_group_set_timeout(group, 300));
        switch (*(int *)it->data) {
        case 0:
            CHECK_STATUS(tddp_recv(group, bytes_of(&byte, 1), 1, 77, NULL), TDDP_TIMEOUT);
            CHECK_CONTAINS(tddp_error_message(),
                           "not done after 300 ms; rank 1 has not sent it with tag 77");
            break;
        case 1:
            CHECK_STATUS(tddp_send(group, bytes_of(much, LARGE_BYTES), 1, 5, NULL), TDDP_TIMEOUT);
            CHECK_CONTAINS(tddp_error_message(),
                           "not done after 300 ms; rank 1 has not received it with tag 5");
            break;
        default:
            CHECK_STATUS(tddp_recv(group, bytes_of(&byte, 1), TDDP_ANY_SOURCE, 5, NULL),
                         TDDP_TIMEOUT);
            CHECK_CONTAINS(tddp_error_message(), "no rank has sent one with tag 5");
            break;
        }
        CHECK(shm_now() - start > 0.25);
    }
    CHECK_MEET(DONE, it->size);
    free(much);
}

MULTI_TEST(requests_time_out, 1, 60)
{
    for (int i = 0; i < 3; i++) {
        run_shm_groups(SHM_PROCESSES, 3, times_out, &i);
    }
}

/* Rank 1 dies while rank 0 sends to it or receives. */
static void dies(shm_rank *it)
{
    uint8_t byte = 0;
    void *much = alloc_bytes(LARGE_BYTES);
    CHECK_OK(tddp_barrier(it->group, NULL));
    if (it->rank == 1) {
        CHECK_AWAIT_BLOCKED(RANK_0);
        kill(getpid(), SIGKILL);
    } else if (it->rank == 0) {
        check_will_block(RANK_0);
        int what = *(int *)it->data;
        tddp_status status =
            what == 0   ? tddp_recv(it->group, bytes_of(&byte, 1), 1, 0, NULL)
            : what == 1 ? tddp_recv(it->group, bytes_of(&byte, 1), 2, 0, NULL)
            : what == 2 ? tddp_recv(it->group, bytes_of(&byte, 1), TDDP_ANY_SOURCE, 0, NULL)
                        : tddp_send(it->group, bytes_of(much, LARGE_BYTES), 1, 0, NULL);
        CHECK_STATUS(status, TDDP_PEER_LOST);
        CHECK_CONTAINS(tddp_error_message(), "lost rank 1 (");
        check_signal(DONE);
    } else {
        CHECK_AWAIT(DONE, 1);
    }
    free(much);
}

MULTI_TEST(a_rank_dies, 1, 60)
{
    for (int i = 0; i < 4; i++) {
        shm_run((shm_job){.mode = SHM_PROCESSES,
                          .size = 3,
                          .body = dies,
                          .data = &i,
                          .grouped = true,
                          .may_die = true});
    }
}

/* A send that needs no receiver also reports a rank that died before. */
static void is_dead(shm_rank *it)
{
    uint8_t byte = 0;
    CHECK_OK(tddp_barrier(it->group, NULL));
    if (it->rank == 1) {
        kill(getpid(), SIGKILL);
    }
    CHECK_AWAIT_END(1);
    CHECK_STATUS(tddp_send(it->group, bytes_of(&byte, 1), 1, 0, NULL), TDDP_PEER_LOST);
    CHECK_CONTAINS(tddp_error_message(), "lost rank 1 (");
}

TEST(a_send_to_a_dead_rank)
{
    shm_run((shm_job){
        .mode = SHM_PROCESSES, .size = 2, .body = is_dead, .grouped = true, .may_die = true});
}

/* A rank that leaves has completed its sends: the others receive them and continue. */
static void leaves(shm_rank *it)
{
    uint8_t x[50000];
    CHECK_OK(tddp_barrier(it->group, NULL));
    if (it->rank > 0) {
        if (it->rank > 1) {
            CHECK_AWAIT_END(it->rank - 1);
        }
        fill(x, sizeof x, it->rank, 0);
        CHECK_OK(tddp_send(it->group, bytes_of(x, sizeof x), 0, 0, NULL));
        return;
    }
    for (int i = 1; i < it->size; i++) {
        CHECK_INT(wait_for_source(post_recv(it, bytes_of(x, sizeof x), TDDP_ANY_SOURCE, 0)), i);
        check_bytes(x, sizeof x, i, 0);
    }
    CHECK_AWAIT_END(it->size - 1);
    CHECK_STATUS(tddp_recv(it->group, bytes_of(x, 1), TDDP_ANY_SOURCE, 0, NULL), TDDP_PEER_LOST);
    CHECK_CONTAINS(tddp_error_message(),
                   "rank 1 has left the group; rank 2 has left the group; rank 3 has left");
}

TEST(ranks_leave_one_by_one)
{
    run_shm_groups(SHM_PROCESSES, 4, leaves, NULL);
}

/* Unmatched requests block neither collectives nor the group's shutdown. */
static void shut_down(shm_rank *it)
{
    uint8_t *memory = alloc_bytes(LARGE_BYTES);
    tddp_work *works[4];
    works[0] = post_recv(it, bytes_of(memory, 100), 1 - it->rank, 1);
    works[1] = post_recv(it, bytes_of(memory + 1000, 200000), 1 - it->rank, 2);
    works[2] = post_recv(it, bytes_of(memory + 300000, 100), TDDP_ANY_SOURCE, 3);
    works[3] = post_send(it, bytes_of(memory + 400000, 200000), 1 - it->rank, 4);
    CHECK_OK(tddp_barrier(it->group, NULL));
    tddp_group_shutdown(it->group, 0);
    for (int i = 0; i < 4; i++) {
        /* The first rank to leave is lost for the other. */
        tddp_status status = wait_and_release(works[i]);
        CHECK(status == TDDP_GROUP_CLOSED || status == TDDP_PEER_LOST ||
              status == TDDP_GROUP_FAILED);
    }
    free(memory);
}

IN_BOTH_MODES(shutdown_cancels_posted_requests, shut_down, 2)

/* --- collectives ----------------------------------------------------------------------------- */

static void *die_later(void *data)
{
    usleep(*(unsigned *)data);
    kill(getpid(), SIGKILL);
    return NULL;
}

/* Until a rank dies, every call has the right result; then all fail soon and name it. */
static void collectives_until_one_dies(shm_rank *it)
{
    enum { BYTES = 700001 };
    unsigned after = *(unsigned *)it->data;
    uint8_t *memory = alloc_bytes((size_t)BYTES * 2 * SHM_MAX_RANKS);
    tddp_buffer inputs[SHM_MAX_RANKS];
    tddp_buffer outputs[SHM_MAX_RANKS];
    tddp_status status = tddp_barrier(it->group, NULL);
    pthread_t killer;
    if (it->rank == 1) {
        /* At any moment of any operation. */
        CHECK_INT(pthread_create(&killer, NULL, die_later, &after), 0);
    }
    for (int turn = 0; status == TDDP_OK; turn++) {
        size_t bytes = turn % 3 == 0 ? 100 : turn % 3 == 1 ? 50000 : BYTES;
        for (int r = 0; r < it->size; r++) {
            inputs[r] = bytes_of(memory + (size_t)r * BYTES, bytes);
            outputs[r] = bytes_of(memory + (size_t)(SHM_MAX_RANKS + r) * BYTES, bytes);
            fill(inputs[r].data, bytes, it->rank, turn + r);
        }
        status = tddp_all_to_all(it->group, inputs, outputs, (size_t)it->size, NULL);
        for (int r = 0; r < it->size && status == TDDP_OK; r++) {
            check_bytes(outputs[r].data, bytes, r, turn + it->rank);
        }
        if (status == TDDP_OK) {
            status = tddp_broadcast(it->group, inputs[0], turn % it->size, NULL);
        }
        if (status == TDDP_OK) {
            check_bytes(inputs[0].data, bytes, turn % it->size, turn);
        }
    }
    CHECK_STATUS(status, TDDP_PEER_LOST);
    CHECK_CONTAINS(tddp_error_message(), "rank 1");
    free(memory);
}

MULTI_TEST(a_rank_dies_between_or_in_collectives, 1, 60)
{
    for (unsigned i = 0; i < 12; i++) {
        unsigned after = 1000 + i * 3300;
        shm_run((shm_job){.mode = SHM_PROCESSES,
                          .size = 3,
                          .body = collectives_until_one_dies,
                          .data = &after,
                          .grouped = true,
                          .may_die = true});
    }
}

/* Large messages that nobody receives are too many at last; those of a group that has failed fail
 * with it. */
static void too_many(shm_rank *it)
{
    enum { MOST = 1 << 17, BYTES = TDDP_SHM_EAGER_BYTES + 1 };
    if (it->rank == 1) {
        CHECK_AWAIT(DONE, 1);
        return;
    }
    tddp_op op = shm_op(it, TDDP_OP_SEND);
    op.peer = 1;
    op.input = shm_buffer(calloc(BYTES, 1), BYTES, TDDP_UINT8);
    void **requests = calloc(MOST, sizeof *requests);
    void *last = NULL;
    size_t count = 0;
    tddp_status status = TDDP_OK;
    while (status == TDDP_OK && count < MOST) {
        status = tddp_shm_p2p_post(it->shm, &op, &requests[count]);
        count += status == TDDP_OK;
    }
    CHECK_STATUS(status, TDDP_OUT_OF_MEMORY);
    CHECK_CONTAINS(tddp_error_message(), "wait for some of them first");
    tddp_shm_abort(it->shm);
    CHECK_STATUS(tddp_shm_p2p_post(it->shm, &op, &last), TDDP_GROUP_FAILED);
    CHECK_TEXT(tddp_error_message(), "aborted");
    for (size_t i = 0; i < count; i++) {
        tddp_shm_p2p_drop(it->shm, requests[i]);
    }
    free(requests);
    free(op.input.data);
    check_signal(DONE);
}

TEST(more_messages_than_there_is_room_for)
{
    run_shm(SHM_THREADS, 2, too_many, NULL);
}

/* --- messages from elsewhere ----------------------------------------------------------------- */

/* As if another thread had it arrive after this one has looked for the last time. */
static bool arrives_too_late(tddp_shm *shm, tddp_shm_request *self)
{
    static int looks;
    if (++looks == 2) {
        CHECK_OK(tddp_shm_p2p_deliver(shm, tddp_shm_size(shm) + 3, self->op->tag, &looks));
    }
    return false;
}

static void time_out_as_it_arrives(shm_rank *it)
{
    char memory[4];
    void *posted;
    void *message;
    int from;
    const tddp_op op = {.kind = TDDP_OP_RECV,
                        .peer = TDDP_ANY_SOURCE,
                        .tag = 7,
                        .timeout_ms = 5,
                        .output = bytes_of(memory, sizeof memory)};
    tddp_shm_p2p_add_foreign(it->shm);
    CHECK_OK(tddp_shm_p2p_post(it->shm, &op, &posted));
    ((tddp_shm_request *)posted)->deadline = tddp_now_ns();
    CHECK_STATUS(tddp_shm_request_wait(it->shm, posted, arrives_too_late), TDDP_TIMEOUT);
    CHECK_TEXT(tddp_error_message(), "not done after 5 ms; no rank has sent one with tag 7");
    CHECK_OK(tddp_shm_p2p_await_message(it->shm, posted, &message, &from));
    CHECK_INT(from, tddp_shm_size(it->shm) + 3);
}

TEST(a_message_of_another_host_arrives_too_late)
{
    run_shm(SHM_THREADS, 1, time_out_as_it_arrives, NULL);
}
