/*
 * Sends and receives over shared memory: every dtype, sizes from zero to several MiB, tags,
 * wildcard sources, many requests at once, more than the rings hold. Failures are in losses_test.c.
 */
#include "backend/shm/p2p_region.h"
#include "messages.h"

/* --- values ---------------------------------------------------------------------------------- */

/* Every rank sends to its successor and receives from its predecessor; from registered memory if
 * `registered`. */
static void exchange_in_ring(const shm_rank *it, tddp_dtype dtype, size_t count, int message,
                             bool registered)
{
    int next = (it->rank + 1) % it->size;
    int before = (it->rank + it->size - 1) % it->size;
    size_t bytes = count * tddp_dtype_size(dtype);
    tddp_group_memory *memory = NULL;
    char *out = NULL;
    if (registered && bytes > 0) {
        CHECK_OK(tddp_group_memory_create(it->group, bytes, &memory));
        CHECK_INT(tddp_group_memory_shared(memory), 1);
        out = tddp_group_memory_data(memory);
    } else {
        out = alloc_bytes(bytes);
    }
    uint8_t *in = alloc_bytes(bytes + 1);
    fill(out, bytes, it->rank, message);
    memset(in, 0, bytes + 1);
    tddp_work *sent = post_send(it, shm_buffer(out, count, dtype), next, 0);
    CHECK_INT(wait_for_source(post_recv(it, shm_buffer(in, count, dtype), before, 0)), before);
    CHECK_OK(wait_and_release(sent));
    check_bytes(in, bytes, before, message);
    CHECK_INT(in[bytes], 0);
    free(in);
    if (memory) {
        tddp_group_memory_release(memory);
    } else {
        free(out);
    }
}

static void dtypes_and_sizes(shm_rank *it)
{
    static const size_t sizes[] = {0,     1,         3,         40,     41,
                                   1001,  1024,      1025,      8193,   EAGER - 1,
                                   EAGER, EAGER + 1, 3 * EAGER, 300007, 4 * EAGER + 1};
    int message = 0;
    for (int dtype = 0; dtype <= TDDP_BOOL; dtype++) {
        for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
            size_t element = tddp_dtype_size((tddp_dtype)dtype);
            exchange_in_ring(it, (tddp_dtype)dtype, sizes[s] / element, message, s % 2 == 1);
            message++;
        }
    }
    exchange_in_ring(it, TDDP_UINT8, LARGE_BYTES, message, false);
    exchange_in_ring(it, TDDP_UINT8, LARGE_BYTES, message, true);
}

IN_BOTH_MODES(dtypes_and_sizes, dtypes_and_sizes, 2)
IN_BOTH_MODES(dtypes_and_sizes, dtypes_and_sizes, 3)
IN_BOTH_MODES(dtypes_and_sizes, dtypes_and_sizes, 4)

static void without_an_arena(shm_rank *it)
{
    for (int message = 0; message < 20; message++) {
        exchange_in_ring(it, TDDP_FLOAT32, (size_t)message * 9000, message, false);
    }
}

TEST(messages_without_an_arena)
{
    CHECK_INT(setenv("TDDP_SHM_ARENA", "0", 1), 0);
    run_shm_groups(SHM_PROCESSES, 2, without_an_arena, NULL);
}

/* --- matching -------------------------------------------------------------------------------- */

static void tags(shm_rank *it)
{
    static const uint32_t sent[] = {5, 3, 0, UINT32_MAX, 7};
    static const uint32_t received[] = {UINT32_MAX, 7, 5, 0, 3};
    enum { COUNT = 5, BYTES = 200000 };
    uint8_t *memory = alloc_bytes((size_t)COUNT * BYTES);
    for (size_t bytes = 10; bytes <= BYTES; bytes *= 20000) {
        tddp_work *works[COUNT];
        for (int i = 0; i < COUNT; i++) {
            uint8_t *place = memory + (size_t)i * BYTES;
            if (it->rank == 0) {
                fill(place, bytes, 0, (int)sent[i]);
                works[i] = post_send(it, bytes_of(place, bytes), 1, sent[i]);
            } else {
                CHECK_OK(tddp_recv(it->group, bytes_of(place, bytes), 0, received[i], NULL));
                check_bytes(place, bytes, 0, (int)received[i]);
            }
        }
        for (int i = 0; i < COUNT && it->rank == 0; i++) {
            CHECK_OK(wait_and_release(works[i]));
        }
    }
    free(memory);
}

IN_BOTH_MODES(tags_match_in_any_order, tags, 2)

static size_t size_of_message(int message)
{
    return message % 3 == 0 ? 100000 : message % 3 == 1 ? 8 : 0;
}

/* With one tag, messages match in the order of the calls, in whatever order the requests are
 * finished. */
static void in_order(shm_rank *it)
{
    enum { COUNT = 48, BYTES = 100000 };
    uint8_t *memory = alloc_bytes((size_t)COUNT * BYTES);
    for (int turn = 0; turn < 3; turn++) {
        tddp_work *works[COUNT];
        for (int i = 0; i < COUNT; i++) {
            uint8_t *place = memory + (size_t)i * BYTES;
            size_t bytes = size_of_message(i);
            if (it->rank == 0) {
                fill(place, bytes, turn, i);
                works[i] = post_send(it, bytes_of(place, bytes), 1, 9);
            } else {
                memset(place, 0, bytes);
                works[i] = post_recv(it, bytes_of(place, bytes), 0, 9);
            }
        }
        for (int k = 0; k < COUNT; k++) {
            int i = turn == 0 ? COUNT - 1 - k : turn == 1 ? k : (k * 29 + 7) % COUNT;
            CHECK_OK(wait_and_release(works[i]));
            if (it->rank == 1) {
                check_bytes(memory + (size_t)i * BYTES, size_of_message(i), turn, i);
            }
        }
    }
    free(memory);
}

IN_BOTH_MODES(many_in_flight_match_in_order, in_order, 2)

/* Each receive has its own memory, since its message's source isn't known before. */
static void from_any_source(shm_rank *it)
{
    enum { EACH = 6 };
    size_t bytes = *(size_t *)it->data;
    int others = it->size - 1;
    uint8_t *memory = alloc_bytes(bytes * EACH * SHM_MAX_RANKS);
    if (it->rank > 0) {
        for (int i = 0; i < EACH; i++) {
            fill(memory, bytes, it->rank, i);
            CHECK_OK(tddp_send(it->group, bytes_of(memory, bytes), 0, 4, NULL));
        }
    } else {
        tddp_work *works[EACH * SHM_MAX_RANKS];
        int seen[SHM_MAX_RANKS] = {0};
        for (int i = 0; i < EACH * others; i++) {
            tddp_buffer place = bytes_of(memory + bytes * (size_t)i, bytes);
            works[i] = post_recv(it, place, TDDP_ANY_SOURCE, 4);
        }
        for (int i = 0; i < EACH * others; i++) {
            int source = wait_for_source(works[i]);
            CHECK(source > 0 && source < it->size);
            check_bytes(memory + bytes * (size_t)i, bytes, source, seen[source]++);
        }
        for (int peer = 1; peer < it->size; peer++) {
            CHECK_INT(seen[peer], EACH);
        }
    }
    CHECK_OK(tddp_barrier(it->group, NULL));
    free(memory);
}

TEST(messages_from_any_source)
{
    static size_t sizes[] = {0, 8, 5000, 150001};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        run_shm_groups(SHM_THREADS, 2, from_any_source, &sizes[i]);
        run_shm_groups(SHM_PROCESSES, 4, from_any_source, &sizes[i]);
    }
}

/* A thousand messages of all protocols each way, none of which is waited for at first. */
static void many_at_once(shm_rank *it)
{
    enum { COUNT = 1000, MOST = 100003, POSTED = 0 };
    static const size_t sizes[] = {8, 5000, MOST};
    int peer = 1 - it->rank;
    char *out = alloc_bytes((size_t)COUNT * MOST);
    char *in = alloc_bytes((size_t)COUNT * MOST);
    tddp_work *works[2 * COUNT];
    for (int i = 0; i < COUNT; i++) {
        tddp_buffer place = bytes_of(in + (size_t)i * MOST, sizes[i % 3]);
        works[i] = post_recv(it, place, peer, (uint32_t)i % 5);
    }
    CHECK_MEET(POSTED, it->size);
    CHECK_INT(check_threads_named("tddp-blocking"), 0);
    CHECK_INT(check_threads_named("tddp-progress"), it->mode == SHM_PROCESSES ? 1 : 2);
    for (int i = 0; i < COUNT; i++) {
        tddp_buffer place = bytes_of(out + (size_t)i * MOST, sizes[i % 3]);
        fill(place.data, place.count, it->rank, i);
        works[COUNT + i] = post_send(it, place, peer, (uint32_t)i % 5);
    }
    CHECK_INT(check_threads_named("tddp-progress"), it->mode == SHM_PROCESSES ? 1 : 2);
    for (int i = 2 * COUNT - 1; i >= 0; i--) {
        CHECK_OK(wait_and_release(works[i]));
    }
    for (int i = 0; i < COUNT; i++) {
        check_bytes(in + (size_t)i * MOST, sizes[i % 3], peer, i);
    }
    CHECK_OK(tddp_barrier(it->group, NULL));
    free(out);
    free(in);
}

IN_BOTH_MODES(many_messages_at_once, many_at_once, 2)

/* A large message goes on while its receiver's and sender's waits are interrupted again and again.
 */
static void interrupted(shm_rank *it)
{
    uint8_t *memory = alloc_bytes(LARGE_BYTES);
    fill(memory, LARGE_BYTES, it->rank, 0);
    tddp_buffer buffer = bytes_of(memory, LARGE_BYTES);
    for (int round = 0; round < 5; round++) {
        tddp_work *work = it->rank == 0 ? post_send(it, buffer, 1, 0) : post_recv(it, buffer, 0, 0);
        tddp_cancel *cancel;
        CHECK_OK(tddp_cancel_create(&cancel));
        tddp_cancel_trigger(cancel);
        tddp_status status;
        do {
            status = tddp_work_wait(work, &(tddp_wait){0, NULL});
            if (status == TDDP_TIMEOUT) {
                status = tddp_work_wait(work, &(tddp_wait){1, NULL});
            }
            if (status == TDDP_TIMEOUT) {
                status = tddp_work_wait(work, &(tddp_wait){-1, cancel});
            }
        } while (status == TDDP_TIMEOUT || status == TDDP_CANCELED);
        CHECK_OK(status);
        tddp_work_release(work);
        tddp_cancel_free(cancel);
        check_bytes(memory, LARGE_BYTES, 0, 0);
        memset(memory, 0, it->rank == 0 ? 0 : LARGE_BYTES);
    }
    CHECK_OK(tddp_barrier(it->group, NULL));
    free(memory);
}

IN_BOTH_MODES(a_message_whose_waits_are_interrupted, interrupted, 2)

/* A receive from one rank matches in order with wildcard receives that match that rank's
 * messages too. */
static void turns(shm_rank *it)
{
    int32_t x[3] = {0};
    if (it->rank == 1) {
        for (int32_t i = 0; i < 3; i++) {
            CHECK_OK(tddp_send(it->group, shm_buffer(&i, 1, TDDP_INT32), 0, 0, NULL));
        }
    } else {
        const int from[3] = {TDDP_ANY_SOURCE, 1, TDDP_ANY_SOURCE};
        tddp_work *works[3];
        for (int i = 0; i < 3; i++) {
            works[i] = post_recv(it, shm_buffer(&x[i], 1, TDDP_INT32), from[i], 0);
        }
        for (int i = 2; i >= 0; i--) {
            CHECK_INT(wait_for_source(works[i]), 1);
            CHECK_INT(x[i], i);
        }
    }
    CHECK_OK(tddp_barrier(it->group, NULL));
}

IN_BOTH_MODES(wildcard_receives_match_in_order, turns, 2)

/* --- much at once ---------------------------------------------------------------------------- */

static void both_ways(shm_rank *it)
{
    uint8_t *out = alloc_bytes(LARGE_BYTES);
    uint8_t *in = alloc_bytes(LARGE_BYTES);
    for (int turn = 0; turn < 4; turn++) {
        /* Both sides post their send first: neither waits for the other's receive. */
        fill(out, LARGE_BYTES, it->rank, turn);
        tddp_work *sent = post_send(it, bytes_of(out, LARGE_BYTES), 1 - it->rank, 1);
        usleep(turn == it->rank ? 30000 : 0);
        tddp_work *received = post_recv(it, bytes_of(in, LARGE_BYTES), 1 - it->rank, 1);
        CHECK_OK(wait_and_release(received));
        CHECK_OK(wait_and_release(sent));
        check_bytes(in, LARGE_BYTES, 1 - it->rank, turn);
    }
    free(out);
    free(in);
}

IN_BOTH_MODES(large_messages_both_ways_at_once, both_ways, 2)

/* More messages than a ring has entries, or eager buffers of a size; received in another order. */
static void overflow(shm_rank *it)
{
    enum { COUNT = TDDP_SHM_RING_ENTRIES + 64 };
    static const size_t sizes[] = {8, 1000, 30000};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        size_t bytes = sizes[s];
        uint8_t *memory = alloc_bytes(bytes * COUNT);
        tddp_work *works[COUNT];
        for (int i = 0; i < COUNT && it->rank == 0; i++) {
            fill(memory + bytes * (size_t)i, bytes, 0, i);
            works[i] = post_send(it, bytes_of(memory + bytes * (size_t)i, bytes), 1, (uint32_t)i);
        }
        CHECK_OK(tddp_barrier(it->group, NULL));
        for (int i = COUNT - 1; i >= 0; i--) {
            if (it->rank == 0) {
                CHECK_OK(wait_and_release(works[i]));
            } else {
                CHECK_OK(tddp_recv(it->group, bytes_of(memory, bytes), 0, (uint32_t)i, NULL));
                check_bytes(memory, bytes, 0, i);
            }
        }
        free(memory);
    }
}

IN_BOTH_MODES(more_messages_than_ring_entries, overflow, 2)

typedef struct lane {
    const shm_rank *it;
    uint32_t tag;
} lane;

/* Messages of growing size back and forth with one tag. */
static void *play(void *data)
{
    const lane *self = data;
    const shm_rank *it = self->it;
    enum { TURNS = 60, BYTES = 90000 };
    uint8_t *memory = alloc_bytes(BYTES);
    for (int i = 0; i < TURNS; i++) {
        size_t bytes = ((size_t)i * 7919 * (self->tag + 1)) % BYTES;
        bool sends = (i + it->rank) % 2 == 0;
        int message = i + (int)self->tag;
        if (sends) {
            fill(memory, bytes, it->rank, message);
            CHECK_OK(tddp_send(it->group, bytes_of(memory, bytes), 1 - it->rank, self->tag, NULL));
        } else {
            CHECK_OK(tddp_recv(it->group, bytes_of(memory, bytes), 1 - it->rank, self->tag, NULL));
            check_bytes(memory, bytes, 1 - it->rank, message);
        }
    }
    free(memory);
    return NULL;
}

static void many_threads(shm_rank *it)
{
    enum { THREADS = 12 };
    pthread_t threads[THREADS];
    lane lanes[THREADS];
    for (uint32_t i = 0; i < THREADS; i++) {
        lanes[i] = (lane){it, i};
        CHECK_INT(pthread_create(&threads[i], NULL, play, &lanes[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        CHECK_INT(pthread_join(threads[i], NULL), 0);
    }
}

IN_BOTH_MODES(many_threads, many_threads, 2)

static void beside_collectives(shm_rank *it)
{
    enum { TURNS = 30, SIZE = 100000, BYTES = 150000 };
    float *sums = alloc_bytes(sizeof(float) * TURNS * SIZE);
    uint8_t *out = alloc_bytes(BYTES);
    uint8_t *in = alloc_bytes(BYTES);
    tddp_work *collectives[TURNS];
    int next = (it->rank + 1) % 3;
    int before = (it->rank + 2) % 3;
    for (int i = 0; i < TURNS; i++) {
        float *sum = sums + (size_t)i * SIZE;
        size_t count = i % 2 ? SIZE : 5;
        for (size_t k = 0; k < count; k++) {
            sum[k] = (float)(it->rank + i);
        }
        CHECK_OK(tddp_all_reduce(it->group, shm_buffer(sum, count, TDDP_FLOAT32), TDDP_REDUCE_SUM,
                                 0, &collectives[i]));
        size_t bytes = i % 3 ? 16 : BYTES;
        fill(out, bytes, it->rank, i);
        tddp_work *sent = post_send(it, bytes_of(out, bytes), next, (uint32_t)i);
        CHECK_OK(tddp_recv(it->group, bytes_of(in, bytes), before, (uint32_t)i, NULL));
        CHECK_OK(wait_and_release(sent));
        check_bytes(in, bytes, before, i);
    }
    for (int i = 0; i < TURNS; i++) {
        CHECK_OK(wait_and_release(collectives[i]));
        CHECK_DOUBLE(sums[(size_t)i * SIZE + 4], 3 + 3 * i, 0);
    }
    free(sums);
    free(out);
    free(in);
}

IN_BOTH_MODES(beside_collectives, beside_collectives, 3)
