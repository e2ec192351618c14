/* Messages over UCX: which receive gets which, of all sizes, and what happens without one. */
#include <sys/mman.h>

#include "ranks.h"

enum { TAG = 7, OTHER_TAG = 8, MIB = 1024 * 1024 };

/* From a byte to what moves by rendezvous. */
static const size_t sizes[] = {1, 0, 200, 9000, 70000, 3, MIB, 65536, 5 * MIB, 0, 17};
enum { COUNT = sizeof sizes / sizeof *sizes };

MULTI_TEST(messages_of_a_tag_arrive_in_order, 2, 30)
{
    tddp_ucx *ucx = open_rank(rank, world_size, port);
    uint8_t *data[2 * COUNT];
    void *transfers[2 * COUNT];
    for (int early = 0; early < 2; early++) {
        /* The receives are posted before the sends, or after them. */
        if (rank == early) {
            meet(ucx, OTHER_TAG);
        }
        for (unsigned i = 0; i < 2 * COUNT; i++) {
            const size_t bytes = sizes[i % COUNT];
            data[i] = calloc(1, bytes + 1);
            if (rank == 0) {
                fill(data[i], bytes, i);
                transfers[i] = post_send(ucx, 1, TAG, data[i], bytes);
            } else {
                transfers[i] = post_recv(ucx, 0, TAG, data[i], bytes);
            }
        }
        if (rank != early) {
            meet(ucx, OTHER_TAG);
        }
        for (unsigned i = 0; i < 2 * COUNT; i++) {
            CHECK_OK(end_with(ucx, transfers[i], 1 - rank));
            check_filled(data[i], sizes[i % COUNT], i);
            free(data[i]);
        }
    }
    tddp_ucx_free(ucx);
}

MULTI_TEST(tags_are_apart, 2, 20)
{
    tddp_ucx *ucx = open_rank(rank, world_size, port);
    const uint64_t tags[] = {0, 1, UINT64_C(1) << 63, ~UINT64_C(0), UINT64_C(0x8000000000000001)};
    enum { TAGS = sizeof tags / sizeof *tags };
    if (rank == 0) {
        for (int i = 0; i < TAGS; i++) {
            send_to(ucx, 1, tags[i], &i, sizeof i);
        }
    } else {
        for (int i = TAGS; i-- > 0;) {
            int got = -1;
            recv_from(ucx, 0, tags[i], &got, sizeof got);
            CHECK_INT(got, i);
        }
    }
    tddp_ucx_free(ucx);
}

MULTI_TEST(any_source_takes_the_first, 4, 20)
{
    tddp_ucx *ucx = open_rank(rank, world_size, port);
    if (rank == 0) {
        int seen = 0;
        for (int i = 1; i < world_size; i++) {
            uint8_t got[9000];
            int source = -1;
            void *transfer = post_recv(ucx, TDDP_ANY_SOURCE, TAG, got, sizeof got);
            CHECK_OK(await(ucx, transfer, TDDP_ANY_SOURCE, i % 2, &source));
            ops->release(ucx, transfer);
            check_filled(got, sizeof got, (unsigned)source);
            seen |= 1 << source;
        }
        CHECK_INT(seen, 0xe);
    } else {
        uint8_t data[9000];
        fill(data, sizeof data, (unsigned)rank);
        send_to(ucx, 0, TAG, data, sizeof data);
    }
    meet(ucx, OTHER_TAG);
    tddp_ucx_free(ucx);
}

MULTI_TEST(receives_match_in_the_order_in_which_they_were_posted, 2, 20)
{
    tddp_ucx *ucx = open_rank(rank, world_size, port);
    if (rank == 0) {
        int got[3] = {0};
        int source[3] = {-1, -1, -1};
        void *first = post_recv(ucx, TDDP_ANY_SOURCE, TAG, &got[0], sizeof(int));
        void *second = post_recv(ucx, 1, TAG, &got[1], sizeof(int));
        void *third = post_recv(ucx, TDDP_ANY_SOURCE, TAG, &got[2], sizeof(int));
        meet(ucx, OTHER_TAG);
        CHECK_OK(await(ucx, third, 1, false, &source[2]));
        CHECK_OK(await(ucx, second, 1, true, &source[1]));
        CHECK_OK(await(ucx, first, 1, true, &source[0]));
        for (int i = 0; i < 3; i++) {
            CHECK_INT(got[i], i + 1);
            CHECK_INT(source[i], 1);
        }
        ops->release(ucx, first);
        ops->release(ucx, second);
        ops->release(ucx, third);
    } else {
        meet(ucx, OTHER_TAG);
        for (int i = 1; i <= 3; i++) {
            send_to(ucx, 0, TAG, &i, sizeof i);
        }
    }
    tddp_ucx_free(ucx);
}

MULTI_TEST(large_messages_between_all, 4, 60)
{
    enum { BYTES = 3 * MIB + 5 };
    tddp_ucx *ucx = open_rank(rank, world_size, port);
    uint8_t *in[4];
    uint8_t *out[4];
    void *transfers[8] = {NULL};
    for (int peer = 0; peer < 4; peer++) {
        in[peer] = calloc(1, BYTES);
        out[peer] = malloc(BYTES);
        fill(out[peer], BYTES, (unsigned)(4 * rank + peer));
        if (peer != rank) {
            transfers[peer] = post_recv(ucx, peer, TAG, in[peer], BYTES);
            transfers[4 + peer] = post_send(ucx, peer, TAG, out[peer], BYTES);
        }
    }
    for (int peer = 0; peer < 4; peer++) {
        if (peer != rank) {
            CHECK_OK(end_with(ucx, transfers[peer], peer));
            CHECK_OK(end_with(ucx, transfers[4 + peer], peer));
            check_filled(in[peer], BYTES, (unsigned)(4 * peer + rank));
        }
        free(in[peer]);
        free(out[peer]);
    }
    tddp_ucx_free(ucx);
}

MULTI_TEST(sixty_four_mib, 2, 60)
{
    enum { BYTES = 64 * MIB };
    tddp_ucx *ucx = open_rank(rank, world_size, port);
    uint8_t *data = malloc(BYTES);
    if (rank == 0) {
        fill(data, BYTES, 5);
        send_to(ucx, 1, TAG, data, BYTES);
    } else {
        recv_from(ucx, 0, TAG, data, BYTES);
        check_filled(data, BYTES, 5);
    }
    free(data);
    tddp_ucx_free(ucx);
}

MULTI_TEST(a_message_that_is_too_large_is_an_error, 2, 20)
{
    tddp_ucx *ucx = open_rank(rank, world_size, port);
    static uint8_t data[MIB];
    for (size_t bytes = 100; bytes <= MIB; bytes = bytes * 10000 > MIB ? MIB + 1 : bytes * 10000) {
        if (rank == 0) {
            send_to(ucx, 1, TAG, data, bytes);
        } else {
            CHECK_STATUS(end_with(ucx, post_recv(ucx, 0, TAG, data, bytes - 1), 0), TDDP_PROTOCOL);
            CHECK_CONTAINS(tddp_error_message(), "bytes from rank 0: expected at most 99");
        }
    }
    tddp_ucx_free(ucx);
}

/* --- transfers that are released before they are complete ------------------------------------ */

MULTI_TEST(a_receive_without_a_message_is_canceled, 2, 20)
{
    tddp_ucx *ucx = open_rank(rank, world_size, port);
    int value = 41;
    if (rank == 0) {
        int canceled[2] = {0, 0};
        ops->release(ucx, post_recv(ucx, 1, TAG, &canceled[0], sizeof(int)));
        ops->release(ucx, post_recv(ucx, TDDP_ANY_SOURCE, TAG, &canceled[1], sizeof(int)));
        meet(ucx, OTHER_TAG);
        recv_from(ucx, 1, TAG, &value, sizeof value);
        CHECK_INT(value, 42);
        CHECK_INT(canceled[0] + canceled[1], 0);
    } else {
        meet(ucx, OTHER_TAG);
        value++;
        send_to(ucx, 0, TAG, &value, sizeof value);
    }
    tddp_ucx_free(ucx);
}

/* The memory is gone as soon as release() has returned. */
MULTI_TEST(a_transfer_that_moves_ends_with_the_rank, 2, 30)
{
    enum { BYTES = 64 * MIB };
    tddp_ucx *ucx = open_rank(rank, world_size, port);
    void *data = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    meet(ucx, OTHER_TAG);
    if (rank == 0) {
        tddp_ucx_transfer *transfer = post_recv(ucx, 1, TAG, data, BYTES);
        while (atomic_load(&transfer->phase) == TDDP_UCX_POSTED) {
            ops->progress(ucx);
        }
        CHECK_INT(atomic_load(&transfer->phase), TDDP_UCX_MOVING);
        ops->report_failure(ucx, TDDP_TIMEOUT, "it took too long");
        ops->release(ucx, transfer);
        munmap(data, BYTES);
        CHECK(!ucx->worker);
        void *none;
        CHECK_STATUS(ops->send(ucx, 1, TAG, &none, 1, &none), TDDP_GROUP_FAILED);
        CHECK_CONTAINS(tddp_error_message(), "it took too long");
        CHECK_STATUS(ops->recv(ucx, 1, TAG, &none, 1, &none), TDDP_GROUP_FAILED);
        CHECK_STATUS(ops->check_peer(ucx, 1, 0), TDDP_GROUP_FAILED);
    } else {
        void *transfer = post_send(ucx, 0, TAG, data, BYTES);
        CHECK_STATUS(end_with(ucx, transfer, 0), TDDP_PEER_LOST);
        munmap(data, BYTES);
        CHECK_CONTAINS(tddp_error_message(), "lost rank 0, which gave up: it took too long");
    }
    tddp_ucx_free(ucx);
}

MULTI_TEST(a_send_that_nobody_receives_ends_with_the_rank, 2, 30)
{
    enum { BYTES = 4 * MIB };
    tddp_ucx *ucx = open_rank(rank, world_size, port);
    uint8_t *data = calloc(1, BYTES);
    meet(ucx, OTHER_TAG);
    if (rank == 0) {
        tddp_ucx_transfer *transfer = post_send(ucx, 1, TAG, data, BYTES);
        char token = 0;
        recv_from(ucx, 1, OTHER_TAG, &token, 1);
        CHECK_INT(atomic_load(&transfer->phase), TDDP_UCX_MOVING);
        ops->release(ucx, transfer);
        free(data);
    } else {
        send_to(ucx, 0, OTHER_TAG, "", 1);
        void *transfer = post_recv(ucx, 0, OTHER_TAG, data, 1);
        CHECK_STATUS(end_with(ucx, transfer, 0), TDDP_PEER_LOST);
        free(data);
    }
    tddp_ucx_free(ucx);
}

/* --- threads --------------------------------------------------------------------------------- */

enum { ROUNDS = 500 };

typedef struct player {
    tddp_ucx *ucx;
    uint64_t tag;
    size_t bytes;
    int spins; /* of so many waits one; 0: none */
} player;

static void *play(void *data)
{
    const player *self = data;
    const int other = 1 - self->ucx->rank;
    uint8_t *in = calloc(1, self->bytes);
    uint8_t *out = calloc(1, self->bytes);
    for (int i = 0; i < ROUNDS; i++) {
        const bool spins = self->spins && i % self->spins == 0;
        void *received = post_recv(self->ucx, other, self->tag, in, self->bytes);
        void *sent = post_send(self->ucx, other, self->tag, out, self->bytes);
        CHECK_OK(await(self->ucx, sent, other, spins, NULL));
        CHECK_OK(await(self->ucx, received, other, spins, NULL));
        CHECK_INT(in[self->bytes - 1], (uint8_t)i);
        ops->release(self->ucx, sent);
        ops->release(self->ucx, received);
        out[self->bytes - 1] = (uint8_t)(i + 1);
    }
    free(in);
    free(out);
    return NULL;
}

MULTI_TEST(threads_that_sleep_and_threads_that_spin, 2, 120)
{
    tddp_ucx *ucx = open_rank(rank, world_size, port);
    player players[] = {{ucx, 1, 8, 0}, {ucx, 2, 8, 3}, {ucx, 3, 40000, 0}, {ucx, 4, 40000, 2}};
    enum { PLAYERS = sizeof players / sizeof *players };
    pthread_t threads[PLAYERS];
    for (int i = 0; i < PLAYERS; i++) {
        CHECK_INT(pthread_create(&threads[i], NULL, play, &players[i]), 0);
    }
    for (int i = 0; i < PLAYERS; i++) {
        CHECK_INT(pthread_join(threads[i], NULL), 0);
    }
    tddp_ucx_free(ucx);
}
