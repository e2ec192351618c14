/*
 * A transport of a module: messages, without the operations above it. What is waited for is an
 * event that the transport counts. Compiled for each transport.
 */
#include <sched.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <tddp/meeting.h>
#include <tddp/transport.h>

#include "events.h"
#include "hosted_store.h"

extern const tddp_transport_ops TRANSPORT;
TDDP_API tddp_status tddp_eventcount_create(struct tddp_eventcount **out);
TDDP_API void tddp_eventcount_free(struct tddp_eventcount *events);

static const tddp_transport_ops *const ops = &TRANSPORT;

enum { POSTED, READ, MOST_RANKS = 4, LARGE = 9 * 1024 * 1024 + 3 };

typedef struct world {
    int rank;
    int size;
    tddp_store *store;
    struct tddp_eventcount *events;
    void *context;
} world;

/* --- ranks ----------------------------------------------------------------------------------- */

static void connect_all(world *self, const tddp_backend_opts *opts)
{
    const tddp_meeting_opts meeting_opts = {.store = self->store,
                                            .name = "test",
                                            .rank = self->rank,
                                            .world_size = self->size,
                                            .sender = TDDP_MEETING_ALL};
    const tddp_wait wait = {20000, NULL};
    tddp_slice address;
    tddp_meeting *meeting;
    int peer = -1;
    CHECK_OK(tddp_meeting_open(&meeting_opts, &meeting));
    CHECK_OK(ops->open(opts, &self->context, &address));
    CHECK_OK(tddp_meeting_give(meeting, address, &wait));
    CHECK_OK(tddp_meeting_await(meeting, &wait));
    CHECK_OK(ops->connect(self->context, tddp_meeting_records(meeting), &wait, &peer));
    tddp_meeting_close(meeting);
}

static void *start_send(const world *self, int peer, uint64_t tag, const void *data, size_t bytes)
{
    void *transfer;
    CHECK_OK(ops->send(self->context, peer, tag, data, bytes, &transfer));
    return transfer;
}

static void *start_recv(const world *self, int peer, uint64_t tag, void *data, size_t bytes)
{
    void *transfer;
    CHECK_OK(ops->recv(self->context, peer, tag, data, bytes, &transfer));
    return transfer;
}

static uint32_t count_of(const world *self)
{
    return __atomic_load_n((const uint32_t *)(const void *)self->events, __ATOMIC_ACQUIRE);
}

/* Tests again with each event, and only then. */
static tddp_status await_end(const world *self, void *transfer, int *source)
{
    for (;;) {
        const uint32_t seen = count_of(self);
        int complete = 0;
        if (ops->progress) {
            ops->progress(self->context);
        }
        const tddp_status status = ops->test(self->context, transfer, &complete, source);
        if (status || complete) {
            return status;
        }
        if (ops->arm) {
            ops->arm(self->context);
        }
        while (count_of(self) == seen) {
            sched_yield();
        }
    }
}

/* Returns the source of a receive. */
static int finish(const world *self, void *transfer)
{
    int source = -1;
    CHECK_OK(await_end(self, transfer, &source));
    ops->release(self->context, transfer);
    return source;
}

static world open_world(int rank, int world_size, int port)
{
    world self = {.rank = rank, .size = world_size, .store = open_store(rank, world_size, port)};
    CHECK_OK(tddp_eventcount_create(&self.events));
    const tddp_backend_opts opts = {.size = sizeof opts,
                                    .rank = rank,
                                    .world_size = world_size,
                                    .store = self.store,
                                    .timeout_ms = 20000,
                                    .same_host = 1,
                                    .group = "transport",
                                    .address = "127.0.0.1",
                                    .events = self.events};
    void *hellos[2 * MOST_RANKS] = {NULL};
    connect_all(&self, &opts);
    for (int peer = 0; peer < world_size; peer++) {
        if (peer != rank) { /* as tddp_coll does */
            hellos[2 * peer] = start_recv(&self, peer, 1000, NULL, 0);
            hellos[2 * peer + 1] = start_send(&self, peer, 1000, NULL, 0);
        }
    }
    for (int i = 0; i < 2 * world_size; i++) {
        if (hellos[i]) {
            (void)finish(&self, hellos[i]);
        }
    }
    return self;
}

static void close_world(world *self, int64_t ms)
{
    ops->close(self->context, ms);
    ops->destroy(self->context);
    tddp_eventcount_free(self->events);
    tddp_store_release(self->store);
}

/* --- messages -------------------------------------------------------------------------------- */

static char byte_at(int rank, size_t i)
{
    return (char)((size_t)rank * 31 + i * 7 + i / 4096);
}

static char *message_of(int rank, size_t bytes)
{
    char *data = malloc(bytes + 1);
    CHECK(data);
    for (size_t i = 0; i < bytes; i++) {
        data[i] = byte_at(rank, i);
    }
    return data;
}

static void check_message(const char *data, int rank, size_t bytes)
{
    char *expected = message_of(rank, bytes);
    CHECK(memcmp(data, expected, bytes) == 0);
    free(expected);
}

/* Both directions at once, so that all connections are full. */
static void exchange_all(const world *self, size_t bytes)
{
    char *mine = message_of(self->rank, bytes);
    char *theirs[MOST_RANKS];
    void *sends[MOST_RANKS];
    void *receives[MOST_RANKS];
    for (int peer = 0; peer < self->size; peer++) {
        if (peer != self->rank) {
            theirs[peer] = malloc(bytes + 1);
            CHECK(theirs[peer]);
            sends[peer] = start_send(self, peer, 5, mine, bytes);
            receives[peer] = start_recv(self, peer, 5, theirs[peer], bytes);
        }
    }
    for (int peer = 0; peer < self->size; peer++) {
        if (peer != self->rank) {
            CHECK_INT(finish(self, receives[peer]), peer);
            (void)finish(self, sends[peer]);
            check_message(theirs[peer], peer, bytes);
            free(theirs[peer]);
        }
    }
    free(mine);
}

MULTI_TEST(messages_of_any_size_arrive, 4, 60)
{
    static const size_t sizes[] = {0, 1, 65600, LARGE, 8};
    world self = open_world(rank, world_size, port);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        exchange_all(&self, sizes[i]);
    }
    close_world(&self, 2000);
}

/* Messages of one tag match in the order of posting, those of others beside them; posted before or
 * after the other side. */
MULTI_TEST(messages_match_in_order, 2, 20)
{
    world self = open_world(rank, world_size, port);
    enum { COUNT = 50 };
    for (int first = 0; first < 2; first++) {
        int out[COUNT];
        int in[2][COUNT];
        void *transfers[COUNT];
        for (int i = 0; i < COUNT && rank == 0; i++) {
            out[i] = 100 * first + i;
            transfers[i] = start_send(&self, 1, (uint64_t)(i % 2), &out[i], sizeof out[i]);
        }
        if (rank == first) { /* then the other one has posted before this one */
            check_signal(POSTED);
        }
        CHECK_AWAIT(POSTED, first + 1);
        for (int i = 0; i < COUNT && rank == 1; i++) {
            transfers[i] =
                start_recv(&self, 0, (uint64_t)(i % 2), &in[i % 2][i / 2], sizeof in[0][0]);
        }
        for (int i = 0; i < COUNT; i++) {
            (void)finish(&self, transfers[i]);
        }
        for (int i = 0; i < COUNT && rank == 1; i++) {
            CHECK_INT(in[i % 2][i / 2], 100 * first + i);
        }
    }
    close_world(&self, 2000);
}

MULTI_TEST(a_message_from_any_source, 3, 20)
{
    world self = open_world(rank, world_size, port);
    if (rank > 0) {
        (void)finish(&self, start_send(&self, 0, 9, &rank, sizeof rank));
    } else {
        int seen = 0;
        for (int i = 1; i < world_size; i++) {
            int data = 0;
            const int source =
                finish(&self, start_recv(&self, TDDP_ANY_SOURCE, 9, &data, sizeof data));
            CHECK_INT(data, source);
            seen |= 1 << source;
        }
        CHECK_INT(seen, 6);
    }
    exchange_all(&self, 4);
    close_world(&self, 2000);
}

/* --- ends ------------------------------------------------------------------------------------ */

/* When it is posted, or later. */
static void check_fails(const world *self, bool sends, int peer, void *data, size_t bytes,
                        tddp_status expected)
{
    void *transfer;
    tddp_status status = sends ? ops->send(self->context, peer, 6, data, bytes, &transfer)
                               : ops->recv(self->context, peer, 6, data, bytes, &transfer);
    if (status == TDDP_OK) {
        status = await_end(self, transfer, NULL);
        ops->release(self->context, transfer);
    }
    CHECK_STATUS(status, expected);
    CHECK(*tddp_error_message());
}

/* No call, and no time, tells the others: its connection does. */
MULTI_TEST(a_peer_dies, 3, 20)
{
    world self = open_world(rank, world_size, port);
    char data[8];
    if (rank == 1) {
        CHECK_AWAIT(POSTED, 2);
        (void)syscall(SYS_exit_group, 0);
    }
    void *receive = start_recv(&self, 1, 1, data, sizeof data);
    check_signal(POSTED);
    CHECK_STATUS(await_end(&self, receive, NULL), TDDP_PEER_LOST);
    CHECK(*tddp_error_message());
    ops->release(self.context, receive);
    check_fails(&self, false, 1, data, 1, TDDP_PEER_LOST);
    /* The others go on. */
    const int peer = rank == 0 ? 2 : 0;
    int theirs = 0;
    void *send = start_send(&self, peer, 2, &rank, sizeof rank);
    (void)finish(&self, start_recv(&self, peer, 2, &theirs, sizeof theirs));
    (void)finish(&self, send);
    CHECK_INT(theirs, peer);
    CHECK_MEET(READ, 2); /* neither leaves before */
    close_world(&self, 2000);
}

/* What was sent before the peer closed arrives, and nothing more. */
MULTI_TEST(a_peer_closes, 2, 20)
{
    world self = open_world(rank, world_size, port);
    if (rank == 1) {
        char *mine = message_of(1, LARGE);
        (void)finish(&self, start_send(&self, 0, 3, mine, LARGE));
        void *last = start_send(&self, 0, 4, "last", 5);
        ops->close(self.context, 2000);
        ops->release(self.context, last);
        close_world(&self, 0);
        free(mine);
        return;
    }
    char *theirs = malloc(LARGE);
    char word[5];
    CHECK(theirs);
    void *last = start_recv(&self, 1, 4, word, sizeof word);
    (void)finish(&self, start_recv(&self, 1, 3, theirs, LARGE));
    check_message(theirs, 1, LARGE);
    CHECK_INT(finish(&self, last), 1);
    CHECK_TEXT(word, "last");
    check_fails(&self, false, 1, theirs, 1, TDDP_PEER_LOST);
    check_fails(&self, false, TDDP_ANY_SOURCE, theirs, 1, TDDP_PEER_LOST);
    free(theirs);
    close_world(&self, 2000);
}

/* Memory of a canceled receive is not written to, and the sender doesn't wait for ever. */
MULTI_TEST(a_canceled_receive_gets_nothing, 2, 20)
{
    world self = open_world(rank, world_size, port);
    if (rank == 0) {
        char *data = malloc(LARGE);
        CHECK(data);
        void *receive = start_recv(&self, 1, 6, data, LARGE);
        ops->release(self.context, receive);
        free(data); /* a sanitizer sees who writes there */
        check_signal(POSTED);
        CHECK_AWAIT(READ, 1);
        close_world(&self, 0);
    } else {
        char *mine = message_of(1, LARGE);
        CHECK_AWAIT(POSTED, 1);
        void *send = start_send(&self, 0, 6, mine, LARGE);
        check_signal(READ);
        CHECK_STATUS(await_end(&self, send, NULL), TDDP_PEER_LOST);
        ops->release(self.context, send);
        free(mine);
        close_world(&self, 0);
    }
}

MULTI_TEST(closing_ends_transfers, 2, 20)
{
    world self = open_world(rank, world_size, port);
    char data;
    void *receive = start_recv(&self, 1 - rank, 1, &data, 1);
    CHECK_MEET(POSTED, 2);
    if (rank == 0) {
        ops->close(self.context, 100);
        CHECK_STATUS(await_end(&self, receive, NULL), TDDP_GROUP_FAILED);
        check_fails(&self, true, 1, &data, 1, TDDP_GROUP_FAILED);
        check_fails(&self, false, TDDP_ANY_SOURCE, &data, 1, TDDP_GROUP_FAILED);
    } else {
        CHECK_STATUS(await_end(&self, receive, NULL), TDDP_PEER_LOST);
    }
    ops->release(self.context, receive);
    close_world(&self, 100);
}
