/*
 * Sends and receives: small and large ones, in order, from one source and from any, probed, each
 * rank interrupted at moments of its own; differences in size and dtype; requests that are dropped.
 */
#include <stdlib.h>
#include <string.h>

#include "mailbox.h"

enum { MESSAGES = 24, TAG = 7, LARGEST = 300000 };

/* Message `i` from one rank to another. */
static size_t bytes_of(int from, int i)
{
    static const size_t sizes[] = {0, 1, 8, 65536, 65537, LARGEST};
    return sizes[(from + i) % (int)(sizeof sizes / sizeof *sizes)];
}

static unsigned char *make_bytes(size_t bytes, int value)
{
    unsigned char *data = malloc(bytes + 1);
    CHECK(data);
    memset(data, value, bytes);
    data[bytes] = 0x5a;
    return data;
}

static void check_bytes(const unsigned char *data, size_t bytes, int value)
{
    for (size_t i = 0; i < bytes; i++) {
        CHECK_INT(data[i], value);
    }
    CHECK_INT(data[bytes], 0x5a);
}

typedef struct pending {
    tddp_op op;
    void *request;
    unsigned char *data;
} pending;

static void post(coll_rank *it, pending *one, tddp_op_kind kind, int peer, uint32_t tag,
                 size_t bytes, int value)
{
    one->data = make_bytes(bytes, value);
    one->op = coll_message(kind, peer, tag, coll_buffer(one->data, bytes, TDDP_UINT8));
    CHECK_OK(tddp_coll_post(it->coll, &one->op, &one->request));
}

static int finish(coll_rank *it, pending *one)
{
    int source = -2;
    CHECK_OK(coll_finish(it, &one->op, one->request, &source));
    return source;
}

enum { MOST = 2 * 5 * MESSAGES };

/* Tries to finish a request without waiting. Number `i` of those to and from a peer. */
static bool try_to_finish(coll_rank *it, pending *one, int i)
{
    tddp_cancel token = TDDP_CANCEL_AT_ONCE;
    int source = -2;
    one->op.cancel = &token;
    const tddp_status status = tddp_coll_finish(it->coll, one->request, &source);
    if (status == TDDP_CANCELED) {
        return false;
    }
    CHECK_OK(status);
    if (one->op.kind == TDDP_OP_RECV) {
        CHECK_INT(source, one->op.peer);
        check_bytes(one->data, one->op.output.count, source + i);
    }
    free(one->data);
    one->request = NULL;
    return true;
}

/* Everyone sends to everyone, and tries all requests in turn, in an order of its own. */
static void exchange(coll_rank *it)
{
    pending *all = calloc(MOST, sizeof *all);
    CHECK(all);
    unsigned count = 0;
    for (int i = 0; i < MESSAGES; i++) {
        for (int step = 1; step < it->size; step++) {
            const int to = (it->rank + step) % it->size;
            const int from = (it->rank - step + it->size) % it->size;
            const uint32_t tag = TAG + (uint32_t)i % 3;
            post(it, &all[count++], TDDP_OP_SEND, to, tag, bytes_of(it->rank, i), it->rank + i);
            post(it, &all[count++], TDDP_OP_RECV, from, tag, bytes_of(from, i), 0);
        }
    }
    for (unsigned left = count; left > 0;) {
        const uint32_t seen = tddp_eventcount_read(it->end->events);
        const unsigned first = coll_random(&it->seed, count);
        const unsigned before = left;
        for (unsigned i = 0; i < count; i++) {
            const unsigned which = (first + i) % count;
            pending *one = &all[which];
            left -= one->request && try_to_finish(it, one, (int)which / 2 / (it->size - 1));
        }
        if (left == before) {
            coll_await_event(it, seen);
        }
    }
    free(all);
}

TEST(everyone_sends_to_everyone)
{
    for (int size = 2; size <= 5; size++) {
        for (unsigned seed = 0; seed < 6; seed++) {
            run_ranks(size, seed, exchange, NULL);
        }
    }
}

/* The messages of one rank stay in order, whichever is asked. */
static void receive_from_any(coll_rank *it)
{
    if (it->rank > 0) {
        pending sent[MESSAGES];
        for (int i = 0; i < MESSAGES; i++) {
            post(it, &sent[i], TDDP_OP_SEND, 0, TAG, i % 2 ? LARGEST : 8, it->rank * 32 + i);
        }
        for (int i = 0; i < MESSAGES; i++) {
            (void)finish(it, &sent[i]);
            free(sent[i].data);
        }
        return;
    }
    int next[MOST_RANKS] = {0};
    unsigned char *data = make_bytes(LARGEST, 0);
    for (int i = 0; i < MESSAGES * (it->size - 1); i++) {
        /* Its memory is known once its message is. */
        tddp_op op =
            coll_message(TDDP_OP_RECV, TDDP_ANY_SOURCE, TAG, coll_buffer(NULL, 0, TDDP_UINT8));
        void *request;
        int source = -2;
        int again = -2;
        CHECK_OK(tddp_coll_post(it->coll, &op, &request));
        CHECK_OK(tddp_coll_probe(it->coll, request, &source));
        CHECK(source > 0 && source < it->size);
        const size_t bytes = next[source] % 2 ? LARGEST : 8;
        op.output = coll_buffer(data, bytes, TDDP_UINT8);
        CHECK_OK(coll_finish(it, &op, request, &again));
        CHECK_INT(again, source);
        CHECK_INT(data[0], source * 32 + next[source]);
        CHECK_INT(data[bytes - 1], source * 32 + next[source]);
        next[source]++;
    }
    free(data);
}

TEST(from_any_source)
{
    for (int size = 2; size <= 5; size++) {
        for (unsigned seed = 0; seed < 6; seed++) {
            run_ranks(size, seed, receive_from_any, NULL);
        }
    }
}

/* Beside collectives, of which none waits for a message. */
static void beside_collectives(coll_rank *it)
{
    for (int i = 0; i < MESSAGES; i++) {
        pending sent;
        pending received;
        const int to = (it->rank + 1) % it->size;
        const int from = (it->rank - 1 + it->size) % it->size;
        float sum = (float)it->rank;
        post(it, &sent, TDDP_OP_SEND, to, TAG, bytes_of(it->rank, i), i);
        post(it, &received, TDDP_OP_RECV, from, TAG, bytes_of(from, i), 0);
        tddp_op op = coll_op(it, TDDP_OP_ALL_REDUCE);
        op.input = op.output = coll_buffer(&sum, 1, TDDP_FLOAT32);
        coll_run(it, &op);
        CHECK_DOUBLE(sum, it->size * (it->size - 1) / 2, 0);
        CHECK_INT(finish(it, &received), from);
        (void)finish(it, &sent);
        check_bytes(received.data, received.op.output.count, i);
        free(sent.data);
        free(received.data);
    }
}

TEST(beside_other_operations)
{
    for (unsigned seed = 0; seed < 6; seed++) {
        run_ranks(3, seed, beside_collectives, NULL);
    }
}

/* --- differences ----------------------------------------------------------------------------- */

typedef struct difference {
    size_t sent;
    size_t expected;
    tddp_dtype dtype; /* of the receiver; the sender's is float32 */
    const char *text;
} difference;

static void differ(coll_rank *it)
{
    const difference *what = it->data;
    static _Thread_local float memory[LARGEST];
    int source;
    void *request;
    tddp_op op;
    if (it->rank == 0) {
        op = coll_message(TDDP_OP_RECV, 1, 3, coll_buffer(memory, what->expected, what->dtype));
    } else {
        op = coll_message(TDDP_OP_SEND, 0, 3, coll_buffer(memory, what->sent, TDDP_FLOAT32));
    }
    CHECK_OK(tddp_coll_post(it->coll, &op, &request));
    const tddp_status status = coll_finish(it, &op, request, &source);
    if (it->rank == 0) {
        CHECK_STATUS(status, TDDP_MISMATCH);
        CHECK_TEXT(tddp_error_message(), what->text);
    } else if (status) { /* else it was on its way already */
        CHECK_STATUS(status, TDDP_MISMATCH);
        CHECK_CONTAINS(tddp_error_message(), what->text);
    }
}

TEST(sizes_and_dtypes_must_agree)
{
    static const difference differences[] = {
        {8, 10, TDDP_FLOAT32,
         "rank 1 sends 8 elements of float32, rank 0 receives 10 elements of float32 with tag 3: "
         "both must be the same"},
        {12, 12, TDDP_INT32,
         "rank 1 sends 12 elements of float32, rank 0 receives 12 elements of int32 with tag 3: "
         "both must be the same"},
        {50000, 2, TDDP_FLOAT32,
         "rank 1 sends 50000 elements of float32, rank 0 receives 2 elements of float32 with tag "
         "3: both must be the same"},
        {2, 50000, TDDP_FLOAT32,
         "rank 1 sends 2 elements of float32, rank 0 receives 50000 elements of float32 with tag "
         "3: both must be the same"},
    };
    for (size_t i = 0; i < sizeof differences / sizeof *differences; i++) {
        for (unsigned seed = 0; seed < 3; seed++) {
            run_ranks(2, seed, differ, (void *)(uintptr_t)&differences[i]);
        }
    }
}

static void alone(coll_rank *it)
{
    float number = 1;
    void *request;
    tddp_op op = coll_message(TDDP_OP_SEND, 0, 3, coll_buffer(&number, 1, TDDP_FLOAT32));
    CHECK_STATUS(tddp_coll_post(it->coll, &op, &request), TDDP_INVALID_ARGUMENT);
    CHECK_TEXT(tddp_error_message(), "there is no other rank");
}

TEST(one_rank_has_no_peer)
{
    run_ranks(1, 0, alone, NULL);
}

/* --- ends ------------------------------------------------------------------------------------ */

static void receive_until_gone(coll_rank *it)
{
    if (it->rank > 0) {
        pending sent;
        post(it, &sent, TDDP_OP_SEND, 0, TAG, 8, it->rank);
        (void)finish(it, &sent);
        free(sent.data);
        coll_leave(it);
        return;
    }
    /* What a rank has sent before it went arrives, and no more. */
    for (int from = 1; from < it->size; from++) {
        pending received;
        post(it, &received, TDDP_OP_RECV, from, TAG, 8, 0);
        CHECK_INT(finish(it, &received), from);
        check_bytes(received.data, 8, from);
        free(received.data);
    }
    unsigned char data[8];
    for (int peer = TDDP_ANY_SOURCE; peer < it->size; peer++) {
        tddp_op op = coll_message(TDDP_OP_RECV, peer, TAG, coll_buffer(data, 8, TDDP_UINT8));
        void *request;
        int source;
        tddp_status status = peer == 0 ? TDDP_PEER_LOST : tddp_coll_post(it->coll, &op, &request);
        if (status == TDDP_OK) {
            status = coll_finish(it, &op, request, &source);
        }
        CHECK_STATUS(status, TDDP_PEER_LOST);
    }
}

TEST(peers_that_go)
{
    /* Of three ranks the second may be received from after the first has gone. */
    for (unsigned seed = 0; seed < 6; seed++) {
        run_ranks(2, seed, receive_until_gone, NULL);
    }
}

static void time_out(coll_rank *it)
{
    static const char *const texts[] = {
        "not done after 20 ms; rank 1 has not sent it with tag 5",
        "not done after 20 ms; no rank has sent one with tag 5",
        "not done after 20 ms; rank 1 has not received it with tag 5",
    };
    const int which = *(int *)it->data;
    if (it->rank == 1) {
        return;
    }
    static _Thread_local float memory[LARGEST];
    void *request;
    int source;
    tddp_op op = coll_message(which == 2 ? TDDP_OP_SEND : TDDP_OP_RECV, which == 1 ? -1 : 1, 5,
                              coll_buffer(memory, LARGEST, TDDP_FLOAT32));
    op.timeout_ms = 20;
    it->mode = COLL_BLOCKING;
    CHECK_OK(tddp_coll_post(it->coll, &op, &request));
    CHECK_STATUS(coll_finish(it, &op, request, &source), TDDP_TIMEOUT);
    CHECK_CONTAINS(which == 2 ? texts[2] : tddp_error_message(), texts[which]);
}

TEST(timeouts_say_what_was_waited_for)
{
    for (int which = 0; which < 3; which++) {
        run_ranks(2, 3, time_out, &which);
    }
}

/* A posted receive whose message does not come, and one whose message has come. */
static void drop_some(coll_rank *it)
{
    static _Thread_local tddp_op ops[2];
    static _Thread_local unsigned char data[8];
    void *requests[2];
    int source;
    pending sent;
    if (it->rank == 1) {
        post(it, &sent, TDDP_OP_SEND, 0, TAG, 8, 1);
        (void)finish(it, &sent);
        free(sent.data);
        return;
    }
    for (int i = 0; i < 2; i++) {
        ops[i] = coll_message(TDDP_OP_RECV, 1, TAG, coll_buffer(data, 8, TDDP_UINT8));
        CHECK_OK(tddp_coll_post(it->coll, &ops[i], &requests[i]));
    }
    tddp_cancel token = TDDP_CANCEL_AT_ONCE;
    ops[1].cancel = &token;
    CHECK_OK(tddp_coll_probe(it->coll, requests[0], &source));
    CHECK_STATUS(tddp_coll_probe(it->coll, requests[1], &source), TDDP_CANCELED);
    tddp_coll_drop(requests[0]);
    *(void **)it->data = requests[1];
}

TEST(requests_are_dropped_before_and_after_the_end)
{
    void *later = NULL;
    run_ranks(2, 0, drop_some, &later);
    tddp_coll_drop(later);
}
