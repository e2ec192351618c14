/* Peers over UCX that leave, fail, die or abort, and what the others learn. */
#include <signal.h>
#include <sys/syscall.h>

#include "ranks.h"

enum { TAG = 7, OTHER_TAG = 8, LEFT = 0, READY };

static void die(void)
{
    syscall(SYS_exit_group, 0);
}

MULTI_TEST(a_rank_that_leaves_has_sent_everything, 2, 30)
{
    enum { BYTES = 4000, COUNT = 200 }; /* as sends complete before their receives are posted */
    tddp_ucx *ucx = open_rank(rank, world_size, port);
    uint8_t *data = malloc(BYTES);
    if (rank == 0) {
        void *transfers[COUNT];
        for (unsigned i = 0; i < COUNT; i++) {
            fill(data, BYTES, 3);
            transfers[i] = post_send(ucx, 1, TAG, data, BYTES);
        }
        for (unsigned i = 0; i < COUNT; i++) {
            CHECK_OK(end_with(ucx, transfers[i], 1));
        }
        tddp_ucx_free(ucx);
        check_signal(LEFT);
    } else {
        CHECK_AWAIT(LEFT, 1); /* it has only been acknowledged, by the engine's thread */
        for (unsigned i = 0; i < COUNT; i++) {
            recv_from(ucx, 0, TAG, data, BYTES);
            check_filled(data, BYTES, 3);
        }
        CHECK_STATUS(end_with(ucx, post_recv(ucx, 0, TAG, data, BYTES), 0), TDDP_PEER_LOST);
        CHECK_TEXT(tddp_error_message(), "rank 0 has left the group");
        void *transfer;
        tddp_status status = ops->send(ucx, 0, TAG, data, 1, &transfer);
        CHECK_STATUS(status ? status : end_with(ucx, transfer, 0), TDDP_PEER_LOST);
        CHECK_TEXT(tddp_error_message(), "rank 0 has left the group");
        tddp_ucx_free(ucx);
    }
    free(data);
}

MULTI_TEST(a_rank_that_left_before_a_collective_is_missing, 3, 30)
{
    tddp_ucx *ucx = open_rank(rank, world_size, port);
    atomic_store(&ucx->sequence, rank == 0 ? 4 : 5);
    meet(ucx, OTHER_TAG);
    meet(ucx, OTHER_TAG);
    if (rank != 0) {
        char data;
        void *transfer = post_recv(ucx, 0, TAG, &data, 1);
        CHECK_STATUS(end_with(ucx, transfer, 0), TDDP_PEER_LOST);
        CHECK_OK(ops->check_peer(ucx, 3 - rank, 0));
        CHECK_OK(ops->check_peer(ucx, 3 - rank, 4));
        CHECK_STATUS(ops->check_peer(ucx, 3 - rank, 5), TDDP_PEER_LOST);
        CHECK_TEXT(tddp_error_message(), "rank 0 has left the group");
        CHECK_OK(ops->check_peer(ucx, TDDP_ANY_SOURCE, 0));
        CHECK_MEET(READY, 2);
    }
    tddp_ucx_free(ucx);
}

static void lose_rank_0(tddp_ucx *ucx, void *transfer, const char *text)
{
    CHECK_STATUS(end_with(ucx, transfer, 0), TDDP_PEER_LOST);
    CHECK_CONTAINS(tddp_error_message(), text);
    void *none;
    tddp_status status = ops->send(ucx, 0, TAG, text, 1, &none);
    CHECK_STATUS(status ? status : end_with(ucx, none, 0), TDDP_PEER_LOST);
    CHECK_STATUS(ops->check_peer(ucx, 0, 0), TDDP_PEER_LOST);
    CHECK_CONTAINS(tddp_error_message(), text);
}

MULTI_TEST(a_rank_that_dies_is_lost, 2, 30)
{
    tddp_ucx *ucx = open_rank(rank, world_size, port);
    char data;
    meet(ucx, OTHER_TAG);
    if (rank == 0) {
        char token;
        recv_from(ucx, 1, OTHER_TAG, &token, 1);
        die();
    }
    void *transfer = post_recv(ucx, 0, TAG, &data, 1);
    send_to(ucx, 0, OTHER_TAG, "", 1);
    lose_rank_0(ucx, transfer, "lost rank 0 (");
    tddp_ucx_free(ucx);
}

/* Nothing was ever sent between them. */
MULTI_TEST(a_rank_that_never_sent_anything_and_dies_is_lost, 2, 30)
{
    tddp_ucx *ucx = open_rank(rank, world_size, port);
    if (rank == 0) {
        die();
    }
    CHECK_AWAIT_END(0);
    char data;
    lose_rank_0(ucx, post_recv(ucx, 0, TAG, &data, 1), "lost rank 0 (");
    tddp_ucx_free(ucx);
}

MULTI_TEST(a_rank_that_dies_while_data_move_is_lost, 2, 30)
{
    enum { BYTES = 64 * 1024 * 1024 };
    tddp_ucx *ucx = open_rank(rank, world_size, port);
    uint8_t *data = calloc(1, BYTES);
    meet(ucx, OTHER_TAG);
    tddp_ucx_transfer *transfer =
        rank == 0 ? post_send(ucx, 1, TAG, data, BYTES) : post_recv(ucx, 0, TAG, data, BYTES);
    if (rank == 0) {
        ops->progress(ucx);
        CHECK_AWAIT(READY, 1);
        die();
    }
    while (atomic_load(&transfer->phase) == TDDP_UCX_POSTED) {
        ops->progress(ucx);
    }
    check_signal(READY);
    tddp_status status = await(ucx, transfer, 0, false, NULL);
    CHECK(status == TDDP_PEER_LOST || status == TDDP_OK);
    ops->release(ucx, transfer);
    free(data);
    tddp_ucx_free(ucx);
}

MULTI_TEST(a_failure_is_told_with_its_reason, 3, 30)
{
    tddp_ucx *ucx = open_rank(rank, world_size, port);
    meet(ucx, OTHER_TAG);
    meet(ucx, OTHER_TAG);
    if (rank == 0) {
        ops->report_failure(ucx, TDDP_TIMEOUT, "not done after 5 ms");
        ops->report_failure(ucx, TDDP_INTERNAL, "something later");
    } else {
        char data;
        lose_rank_0(ucx, post_recv(ucx, 0, TAG, &data, 1),
                    "lost rank 0, which gave up: not done after 5 ms");
        CHECK_MEET(READY, 2);
    }
    tddp_ucx_free(ucx);
}

static void *abort_when_asleep(void *data)
{
    CHECK_AWAIT_ASLEEP(getpid());
    tddp_ucx_abort(data);
    return NULL;
}

MULTI_TEST(abort_ends_waits_of_other_threads, 2, 30)
{
    tddp_ucx *ucx = open_rank(rank, world_size, port);
    char data;
    meet(ucx, OTHER_TAG);
    void *transfer = post_recv(ucx, 1 - rank, TAG, &data, 1);
    if (rank == 0) {
        pthread_t thread;
        CHECK_INT(pthread_create(&thread, NULL, abort_when_asleep, ucx), 0);
        CHECK_STATUS(end_with(ucx, transfer, 1), TDDP_GROUP_FAILED);
        CHECK_TEXT(tddp_error_message(), "aborted");
        CHECK_INT(pthread_join(thread, NULL), 0);
    } else {
        lose_rank_0(ucx, transfer, "lost rank 0 (");
    }
    tddp_ucx_free(ucx);
}

/* A rank that computes still acknowledges, and a stopped one doesn't hold up who leaves. */
MULTI_TEST(a_stopped_peer_does_not_hold_up_who_leaves, 2, 30)
{
    tddp_ucx *ucx = open_rank(rank, world_size, port);
    meet(ucx, OTHER_TAG);
    if (rank == 0) {
        const pid_t other = check_rank_pid(1);
        CHECK_AWAIT(READY, 1);
        CHECK_INT(kill(other, SIGSTOP), 0);
        CHECK_AWAIT_STOPPED(other);
        tddp_ucx_free(ucx);
        CHECK_INT(kill(other, SIGCONT), 0);
        return;
    }
    check_signal(READY);
    char data;
    lose_rank_0(ucx, post_recv(ucx, 0, TAG, &data, 1), "rank 0");
    tddp_ucx_free(ucx);
}

MULTI_TEST(the_thread_ends_with_the_last_group, 2, 30)
{
    tddp_ucx *ucx[2];
    for (int i = 0; i < 2; i++) {
        ucx[i] = open_rank(rank, world_size, port);
        meet(ucx[i], OTHER_TAG);
        CHECK_MEET(i, 2);
    }
    CHECK_INT(check_threads_named("tddp-ucx"), 1);
    tddp_ucx_free(ucx[0]);
    CHECK_INT(check_threads_named("tddp-ucx"), 1);
    tddp_ucx_free(ucx[1]);
    CHECK_UNTIL(check_threads_named("tddp-ucx") == 0);
}

MULTI_TEST(groups_leave_no_descriptors, 2, 30)
{
    int counts[4];
    for (int i = 0; i < 4; i++) {
        tddp_ucx_descriptors open = {0};
        tddp_ucx *ucx = open_rank(rank, world_size, port);
        meet(ucx, OTHER_TAG);
        CHECK_MEET(i, 2);
        tddp_ucx_free(ucx);
        CHECK_OK(tddp_ucx_list_descriptors(&open));
        counts[i] = open.count;
        free(open.is_open);
        CHECK_MEET(8 + i, 2);
    }
    CHECK_INT(counts[3], counts[1]); /* UCX's own context stays */
}
