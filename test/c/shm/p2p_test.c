/* Sends and receives over shared memory: every dtype, sizes from nothing to several MiB, tags, any
 * source, many at once, more than the rings hold, and how they end badly. */
#include "ranks.h"

enum { EAGER = 64 * 1024, MOST = 5 * 1024 * 1024 + 16 };

/* Bytes that tell the sender, the message and the place. */
static uint8_t byte_of(int sender, int message, size_t at)
{
    return (uint8_t)(at * 7 + (at >> 8) + (size_t)sender * 31 + (size_t)message * 5 + 1);
}

static void fill(void *data, size_t bytes, int sender, int message)
{
    for (size_t i = 0; i < bytes; i++) {
        ((uint8_t *)data)[i] = byte_of(sender, message, i);
    }
}

static void check_bytes(const void *data, size_t bytes, int sender, int message)
{
    for (size_t i = 0; i < bytes; i++) {
        if (((const uint8_t *)data)[i] != byte_of(sender, message, i)) {
            check_failed(__FILE__, __LINE__, "message %d of rank %d: byte %zu of %zu is %d, not %d",
                         message, sender, i, bytes, ((const uint8_t *)data)[i],
                         byte_of(sender, message, i));
        }
    }
}

static void *room_for(size_t bytes)
{
    void *memory = malloc(bytes ? bytes : 1);
    CHECK(memory != NULL);
    return memory;
}

static tddp_buffer bytes_of(void *data, size_t bytes)
{
    return shm_buffer(data, bytes, TDDP_UINT8);
}

static tddp_work *begin_send(const shm_rank *it, tddp_buffer buffer, int peer, uint32_t tag)
{
    tddp_work *work;
    CHECK_OK(tddp_send(it->group, buffer, peer, tag, &work));
    return work;
}

static tddp_work *begin_recv(const shm_rank *it, tddp_buffer buffer, int peer, uint32_t tag)
{
    tddp_work *work;
    CHECK_OK(tddp_recv(it->group, buffer, peer, tag, &work));
    return work;
}

static tddp_status end(tddp_work *work)
{
    tddp_status status = tddp_work_wait(work, NULL);
    tddp_work_release(work);
    return status;
}

static int end_from(tddp_work *work)
{
    CHECK_OK(tddp_work_wait(work, NULL));
    int source = tddp_work_source(work);
    tddp_work_release(work);
    return source;
}

/* Both ways of having ranks. */
#define WAYS(name, body, size)                           \
    MULTI_TEST(name##_of_##size##_threads, 1, 60)        \
    {                                                    \
        run_shm_groups(SHM_THREADS, size, body, NULL);   \
    }                                                    \
    MULTI_TEST(name##_of_##size##_processes, 1, 60)      \
    {                                                    \
        run_shm_groups(SHM_PROCESSES, size, body, NULL); \
    }

/* --- values ---------------------------------------------------------------------------------- */

/* Everyone sends to the next rank and receives from the one before; from registered memory where
 * `registered`. */
static void round_the_ring(const shm_rank *it, tddp_dtype dtype, size_t count, int message,
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
        out = room_for(bytes);
    }
    uint8_t *in = room_for(bytes + 1);
    fill(out, bytes, it->rank, message);
    memset(in, 0, bytes + 1);
    tddp_work *sent = begin_send(it, shm_buffer(out, count, dtype), next, 0);
    CHECK_INT(end_from(begin_recv(it, shm_buffer(in, count, dtype), before, 0)), before);
    CHECK_OK(end(sent));
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
            round_the_ring(it, (tddp_dtype)dtype, sizes[s] / element, message, s % 2 == 1);
            message++;
        }
    }
    round_the_ring(it, TDDP_UINT8, MOST, message, false);
    round_the_ring(it, TDDP_UINT8, MOST, message, true);
}

WAYS(dtypes_and_sizes, dtypes_and_sizes, 2)
WAYS(dtypes_and_sizes, dtypes_and_sizes, 3)
WAYS(dtypes_and_sizes, dtypes_and_sizes, 4)

static void without_an_arena(shm_rank *it)
{
    for (int message = 0; message < 20; message++) {
        round_the_ring(it, TDDP_FLOAT32, (size_t)message * 9000, message, false);
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
    uint8_t *memory = room_for((size_t)COUNT * BYTES);
    for (size_t bytes = 10; bytes <= BYTES; bytes *= 20000) {
        tddp_work *works[COUNT];
        for (int i = 0; i < COUNT; i++) {
            uint8_t *place = memory + (size_t)i * BYTES;
            if (it->rank == 0) {
                fill(place, bytes, 0, (int)sent[i]);
                works[i] = begin_send(it, bytes_of(place, bytes), 1, sent[i]);
            } else {
                CHECK_OK(tddp_recv(it->group, bytes_of(place, bytes), 0, received[i], NULL));
                check_bytes(place, bytes, 0, (int)received[i]);
            }
        }
        for (int i = 0; i < COUNT && it->rank == 0; i++) {
            CHECK_OK(end(works[i]));
        }
    }
    free(memory);
}

WAYS(tags_match_in_any_order, tags, 2)

static size_t size_of_message(int message)
{
    return message % 3 == 0 ? 100000 : message % 3 == 1 ? 8 : 0;
}

/* One tag: the order of the calls decides, however they are finished. */
static void in_order(shm_rank *it)
{
    enum { COUNT = 48, BYTES = 100000 };
    uint8_t *memory = room_for((size_t)COUNT * BYTES);
    for (int turn = 0; turn < 3; turn++) {
        tddp_work *works[COUNT];
        for (int i = 0; i < COUNT; i++) {
            uint8_t *place = memory + (size_t)i * BYTES;
            size_t bytes = size_of_message(i);
            if (it->rank == 0) {
                fill(place, bytes, turn, i);
                works[i] = begin_send(it, bytes_of(place, bytes), 1, 9);
            } else {
                memset(place, 0, bytes);
                works[i] = begin_recv(it, bytes_of(place, bytes), 0, 9);
            }
        }
        for (int k = 0; k < COUNT; k++) {
            int i = turn == 0 ? COUNT - 1 - k : turn == 1 ? k : (k * 29 + 7) % COUNT;
            CHECK_OK(end(works[i]));
            if (it->rank == 1) {
                check_bytes(memory + (size_t)i * BYTES, size_of_message(i), turn, i);
            }
        }
    }
    free(memory);
}

WAYS(many_in_flight_match_in_order, in_order, 2)

/* In memory of their own: whose message comes in which receive is not known before. */
static void from_any_source(shm_rank *it)
{
    enum { EACH = 6 };
    size_t bytes = *(size_t *)it->data;
    int others = it->size - 1;
    uint8_t *memory = room_for(bytes * EACH * SHM_MAX_RANKS);
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
            works[i] = begin_recv(it, place, TDDP_ANY_SOURCE, 4);
        }
        for (int i = 0; i < EACH * others; i++) {
            int source = end_from(works[i]);
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

/* A receive from one rank waits its turn behind those that may take that rank's messages. */
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
            works[i] = begin_recv(it, shm_buffer(&x[i], 1, TDDP_INT32), from[i], 0);
        }
        for (int i = 2; i >= 0; i--) {
            CHECK_INT(end_from(works[i]), 1);
            CHECK_INT(x[i], i);
        }
    }
    CHECK_OK(tddp_barrier(it->group, NULL));
}

WAYS(open_receives_keep_their_turn, turns, 2)

/* --- much at once ---------------------------------------------------------------------------- */

static void both_ways(shm_rank *it)
{
    uint8_t *out = room_for(MOST);
    uint8_t *in = room_for(MOST);
    for (int turn = 0; turn < 4; turn++) {
        /* The sends first on both sides: neither waits for the other's receive. */
        fill(out, MOST, it->rank, turn);
        tddp_work *sent = begin_send(it, bytes_of(out, MOST), 1 - it->rank, 1);
        usleep(turn == it->rank ? 30000 : 0);
        tddp_work *received = begin_recv(it, bytes_of(in, MOST), 1 - it->rank, 1);
        CHECK_OK(end(received));
        CHECK_OK(end(sent));
        check_bytes(in, MOST, 1 - it->rank, turn);
    }
    free(out);
    free(in);
}

WAYS(large_messages_both_ways_at_once, both_ways, 2)

/* More than a ring, or the parcels of a size, hold; received in another order. */
static void overflow(shm_rank *it)
{
    enum { COUNT = 700 };
    static const size_t sizes[] = {8, 1000, 30000};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        size_t bytes = sizes[s];
        uint8_t *memory = room_for(bytes * COUNT);
        tddp_work *works[COUNT];
        for (int i = 0; i < COUNT && it->rank == 0; i++) {
            fill(memory + bytes * (size_t)i, bytes, 0, i);
            works[i] = begin_send(it, bytes_of(memory + bytes * (size_t)i, bytes), 1, (uint32_t)i);
        }
        CHECK_OK(tddp_barrier(it->group, NULL));
        for (int i = COUNT - 1; i >= 0; i--) {
            if (it->rank == 0) {
                CHECK_OK(end(works[i]));
            } else {
                CHECK_OK(tddp_recv(it->group, bytes_of(memory, bytes), 0, (uint32_t)i, NULL));
                check_bytes(memory, bytes, 0, i);
            }
        }
        free(memory);
    }
}

WAYS(more_than_there_is_room_for, overflow, 2)

typedef struct lane {
    const shm_rank *it;
    uint32_t tag;
} lane;

/* Messages of growing size to and fro on one tag. */
static void *play(void *data)
{
    const lane *self = data;
    const shm_rank *it = self->it;
    enum { TURNS = 60, BYTES = 90000 };
    uint8_t *memory = room_for(BYTES);
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

WAYS(many_threads, many_threads, 2)

static void beside_collectives(shm_rank *it)
{
    enum { TURNS = 30, SIZE = 100000, BYTES = 150000 };
    float *sums = room_for(sizeof(float) * TURNS * SIZE);
    uint8_t *out = room_for(BYTES);
    uint8_t *in = room_for(BYTES);
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
        tddp_work *sent = begin_send(it, bytes_of(out, bytes), next, (uint32_t)i);
        CHECK_OK(tddp_recv(it->group, bytes_of(in, bytes), before, (uint32_t)i, NULL));
        CHECK_OK(end(sent));
        check_bytes(in, bytes, before, i);
    }
    for (int i = 0; i < TURNS; i++) {
        CHECK_OK(end(collectives[i]));
        CHECK_DOUBLE(sums[(size_t)i * SIZE + 4], 3 + 3 * i, 0);
    }
    free(sums);
    free(out);
    free(in);
}

WAYS(beside_collectives, beside_collectives, 3)

/* --- bad ends -------------------------------------------------------------------------------- */

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
    void *memory = room_for(2000000);
    if (it->rank == 0) {
        CHECK_STATUS(
            tddp_recv(it->group, shm_buffer(memory, how->received, how->dtype), 1, 3, NULL),
            TDDP_MISMATCH);
    } else {
        double start = shm_now();
        tddp_status status =
            tddp_send(it->group, shm_buffer(memory, how->sent, TDDP_FLOAT32), 0, 3, NULL);
        if (status == TDDP_OK) {
            /* A small message is gone before anyone looks at it. */
            status = tddp_barrier(it->group, NULL);
        }
        CHECK_STATUS(status, TDDP_MISMATCH);
        CHECK(shm_now() - start < 2);
    }
    CHECK_CONTAINS(tddp_error_message(), how->theirs);
    CHECK_CONTAINS(tddp_error_message(), how->mine);
    free(memory);
}

TEST(messages_that_are_not_expected)
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

/* Rank 0 alone is in a hurry. */
static void nobody_comes(shm_rank *it)
{
    tddp_group *group = it->group;
    uint8_t byte = 0;
    void *much = room_for(MOST);
    CHECK_OK(tddp_barrier(group, NULL));
    if (it->rank == 0) {
        double start = shm_now();
        switch (*(int *)it->data) {
        case 0:
            CHECK_STATUS(tddp_recv(group, bytes_of(&byte, 1), 1, 77, NULL), TDDP_TIMEOUT);
            CHECK_CONTAINS(tddp_error_message(),
                           "not done after 300 ms; rank 1 has not sent it with tag 77");
            break;
        case 1:
            CHECK_STATUS(tddp_send(group, bytes_of(much, MOST), 1, 5, NULL), TDDP_TIMEOUT);
            CHECK_CONTAINS(tddp_error_message(),
                           "not done after 300 ms; rank 1 has not received it with tag 5");
            break;
        default:
            CHECK_STATUS(tddp_recv(group, bytes_of(&byte, 1), TDDP_ANY_SOURCE, 5, NULL),
                         TDDP_TIMEOUT);
            CHECK_CONTAINS(tddp_error_message(), "no rank has sent one with tag 5");
            break;
        }
        CHECK(shm_now() - start > 0.25 && shm_now() - start < 1.5);
    } else {
        usleep(800000);
    }
    free(much);
}

TEST(nobody_comes_in_time)
{
    for (int i = 0; i < 3; i++) {
        shm_run((shm_job){.way = SHM_PROCESSES,
                          .size = 3,
                          .body = nobody_comes,
                          .data = &i,
                          .grouped = true,
                          .timeout_ms = 300});
    }
}

/* Rank 1 dies while rank 0 is at something with it. */
static void dies(shm_rank *it)
{
    uint8_t byte = 0;
    void *much = room_for(MOST);
    CHECK_OK(tddp_barrier(it->group, NULL));
    if (it->rank == 1) {
        usleep(150000);
        kill(getpid(), SIGKILL);
    } else if (it->rank == 0) {
        double start = shm_now();
        int what = *(int *)it->data;
        tddp_status status =
            what == 0   ? tddp_recv(it->group, bytes_of(&byte, 1), 1, 0, NULL)
            : what == 1 ? tddp_recv(it->group, bytes_of(&byte, 1), 2, 0, NULL)
            : what == 2 ? tddp_recv(it->group, bytes_of(&byte, 1), TDDP_ANY_SOURCE, 0, NULL)
                        : tddp_send(it->group, bytes_of(much, MOST), 1, 0, NULL);
        CHECK_STATUS(status, TDDP_PEER_LOST);
        CHECK(shm_now() - start < 1.2);
        CHECK_CONTAINS(tddp_error_message(), "lost rank 1 (");
    } else {
        usleep(1500000);
    }
    free(much);
}

TEST(a_rank_dies)
{
    for (int i = 0; i < 4; i++) {
        shm_run((shm_job){.way = SHM_PROCESSES,
                          .size = 3,
                          .body = dies,
                          .data = &i,
                          .grouped = true,
                          .may_die = true});
    }
}

/* A rank that died before is told of also by a send that needs nobody. */
static void is_dead(shm_rank *it)
{
    uint8_t byte = 0;
    CHECK_OK(tddp_barrier(it->group, NULL));
    if (it->rank == 1) {
        kill(getpid(), SIGKILL);
    }
    usleep(150000);
    CHECK_STATUS(tddp_send(it->group, bytes_of(&byte, 1), 1, 0, NULL), TDDP_PEER_LOST);
    CHECK_CONTAINS(tddp_error_message(), "lost rank 1 (");
}

TEST(a_rank_is_dead)
{
    shm_run((shm_job){
        .way = SHM_PROCESSES, .size = 2, .body = is_dead, .grouped = true, .may_die = true});
}

/* Who is done and goes has sent what it has sent: the others take it, and go on without. */
static void leaves(shm_rank *it)
{
    uint8_t x[50000];
    CHECK_OK(tddp_barrier(it->group, NULL));
    if (it->rank > 0) {
        usleep((unsigned)it->rank * 100000);
        fill(x, sizeof x, it->rank, 0);
        CHECK_OK(tddp_send(it->group, bytes_of(x, sizeof x), 0, 0, NULL));
        return;
    }
    for (int i = 1; i < it->size; i++) {
        CHECK_INT(end_from(begin_recv(it, bytes_of(x, sizeof x), TDDP_ANY_SOURCE, 0)), i);
        check_bytes(x, sizeof x, i, 0);
    }
    usleep(200000);
    double start = shm_now();
    CHECK_STATUS(tddp_recv(it->group, bytes_of(x, 1), TDDP_ANY_SOURCE, 0, NULL), TDDP_PEER_LOST);
    CHECK(shm_now() - start < 1);
    CHECK_CONTAINS(tddp_error_message(),
                   "rank 1 has left the group; rank 2 has left the group; rank 3 has left");
}

TEST(ranks_leave_one_by_one)
{
    run_shm_groups(SHM_PROCESSES, 4, leaves, NULL);
}

/* A receive that nobody answers does not hold up the collectives, nor the group's end. */
static void taken_back(shm_rank *it)
{
    uint8_t *memory = room_for(MOST);
    tddp_work *works[4];
    works[0] = begin_recv(it, bytes_of(memory, 100), 1 - it->rank, 1);
    works[1] = begin_recv(it, bytes_of(memory + 1000, 200000), 1 - it->rank, 2);
    works[2] = begin_recv(it, bytes_of(memory + 300000, 100), TDDP_ANY_SOURCE, 3);
    works[3] = begin_send(it, bytes_of(memory + 400000, 200000), 1 - it->rank, 4);
    CHECK_OK(tddp_barrier(it->group, NULL));
    double start = shm_now();
    tddp_group_shutdown(it->group, 0);
    CHECK(shm_now() - start < 1);
    for (int i = 0; i < 4; i++) {
        /* The first one to go is lost for the other. */
        tddp_status status = end(works[i]);
        CHECK(status == TDDP_GROUP_CLOSED || status == TDDP_PEER_LOST ||
              status == TDDP_GROUP_FAILED);
    }
    free(memory);
}

WAYS(the_end_takes_back_what_is_posted, taken_back, 2)
