/* The nth allocation fails, for every n, through all operations: each says so or works, nothing
 * leaks (a sanitizer looks), nothing hangs. And no thread can be started. */
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include "events.h"
#include "pair.h"

/* From base's private header: the nth allocation from now fails. */
bool tddp_fail_allocation(long nth);

static float memory[2][16];

static tddp_buffer floats(int rank, size_t at, size_t count)
{
    return buffer_of(&memory[rank][at], count, TDDP_FLOAT32);
}

/* Whether an outcome is one that a lack of memory may have; what fails first fails the group. */
static int is_fit(tddp_status status)
{
    return status == TDDP_OK || status == TDDP_OUT_OF_MEMORY || status == TDDP_GROUP_FAILED;
}

/* Every collective on a group of one. */
enum { STEPS = 12 };

static tddp_status step(tddp_group *group, int number)
{
    const tddp_buffer in = floats(0, 0, 3);
    const tddp_buffer out = floats(0, 4, 3);
    const tddp_buffer several[3] = {floats(0, 0, 2), floats(0, 3, 1), floats(0, 5, 3)};
    const tddp_op_args steps[STEPS] = {
        {.kind = TDDP_OP_ALL_REDUCE, .output = in},
        {.kind = TDDP_OP_ALL_REDUCE,
         .outputs = several,
         .output_count = 3,
         .reduce = TDDP_REDUCE_AVG},
        {.kind = TDDP_OP_REDUCE, .output = in, .reduce = TDDP_REDUCE_PREMUL_SUM, .premul = 2},
        {.kind = TDDP_OP_BROADCAST, .output = in},
        {.kind = TDDP_OP_BARRIER},
        {.kind = TDDP_OP_ALL_GATHER, .input = in, .output = out},
        {.kind = TDDP_OP_ALL_GATHER, .input = in, .outputs = &out, .output_count = 1},
        {.kind = TDDP_OP_GATHER, .input = in, .outputs = &out, .output_count = 1},
        {.kind = TDDP_OP_SCATTER, .output = out, .inputs = &in, .input_count = 1},
        {.kind = TDDP_OP_REDUCE_SCATTER, .input = in, .output = out},
        {.kind = TDDP_OP_REDUCE_SCATTER, .output = out, .inputs = &in, .input_count = 1},
        {.kind = TDDP_OP_ALL_TO_ALL,
         .inputs = &in,
         .input_count = 1,
         .outputs = &out,
         .output_count = 1},
    };
    tddp_op_args args = steps[number];
    args.size = sizeof args;
    args.description = "described";
    return tddp_submit(group, &args, NULL);
}

TEST(making_and_ending_a_group)
{
    int failures = 0;
    bool failed = true;
    for (long nth = 1; failed; nth++) {
        tddp_store *store;
        tddp_group *group = NULL;
        tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
        CHECK_OK(tddp_hash_store_create(5000, &store));
        opts.backend = "fake";
        opts.store = store;
        tddp_fail_allocation(nth);
        char text[512];
        tddp_status status = tddp_group_create(&opts, NULL, &group);
        snprintf(text, sizeof text, "%s", status ? tddp_error_message() : "");
        tddp_group_shutdown(group, 1000);
        tddp_group_release(group);
        failed = tddp_fail_allocation(0);
        failures += status != TDDP_OK;
        if (status) {
            CHECK_CONTAINS(text, "out of memory");
            /* Its place is free again. */
            CHECK_OK(tddp_group_create(&opts, NULL, &group));
            tddp_group_release(group);
        }
        tddp_store_release(store);
        CHECK(nth < 500);
    }
    CHECK(failures > 10);
}

/* For each collective, until the failing allocation lies beyond it. */
MULTI_TEST(every_collective, 1, 60)
{
    int failures = 0;
    for (int number = 0; number < STEPS; number++) {
        tddp_status status = TDDP_INTERNAL;
        for (long nth = 1; status; nth++) {
            tddp_store *store;
            CHECK_OK(tddp_hash_store_create(5000, &store));
            tddp_group *group = make_group("fake", 0, 1, store, 5000);
            tddp_fail_allocation(nth);
            status = step(group, number);
            tddp_fail_allocation(0);
            CHECK(status == TDDP_OK || status == TDDP_OUT_OF_MEMORY);
            if (status) {
                failures++;
                CHECK_CONTAINS(tddp_error_message(), "out of memory");
                /* Refused before it was queued, or the first failure of the group. */
                CHECK(is_fit(tddp_barrier(group, NULL)));
            }
            tddp_group_shutdown(group, 1000);
            tddp_group_release(group);
            tddp_store_release(store);
            CHECK(nth < 200);
        }
    }
    CHECK(failures >= STEPS);
}

/* --- messages: both ends in this thread ------------------------------------------------------- */

/* A message there and back, and one from anywhere. Whether all went well. */
static int talk(pair *self)
{
    tddp_work *works[6] = {0};
    tddp_status statuses[6];
    int good = 1;
    statuses[0] = tddp_recv(self->groups[1], floats(1, 0, 2), 0, 0, &works[0]);
    statuses[1] = tddp_send(self->groups[0], floats(0, 0, 2), 1, 0, &works[1]);
    statuses[2] = tddp_recv(self->groups[0], floats(0, 4, 2), 1, 0, &works[2]);
    statuses[3] = tddp_send(self->groups[1], floats(1, 4, 2), 0, 0, &works[3]);
    statuses[4] = tddp_recv(self->groups[0], floats(0, 8, 2), TDDP_ANY_SOURCE, 1, &works[4]);
    statuses[5] = tddp_send(self->groups[1], floats(1, 8, 2), 0, 1, &works[5]);
    for (int i = 0; i < 6; i++) {
        good = good && statuses[i] == TDDP_OK;
    }
    /* What a failed end leaves the other one waiting for ends with the groups. */
    for (int i = 0; i < 6 && good; i++) {
        while (!tddp_work_completed(works[i])) {
            good = good && tddp_work_status(works[0]) == TDDP_OK;
            for (int k = 0; k < 6; k++) {
                good = good && tddp_work_status(works[k]) == TDDP_OK;
            }
            if (!good) {
                break;
            }
            usleep(500);
        }
        good = good && tddp_work_status(works[i]) == TDDP_OK;
    }
    tddp_group_shutdown(self->groups[0], good ? 1000 : 0);
    tddp_group_shutdown(self->groups[1], good ? 1000 : 0);
    for (int i = 0; i < 6; i++) {
        if (works[i]) {
            tddp_status status = tddp_work_wait(works[i], NULL);
            if (status == TDDP_PEER_LOST) {
                /* The other end was the first to fail, or to go after a call that was refused. */
                CHECK(strstr(tddp_error_message(), "out of memory") ||
                      strstr(tddp_error_message(), "has destroyed the group"));
            } else if (!is_fit(status)) {
                CHECK_STATUS(status, TDDP_GROUP_CLOSED);
            }
            tddp_work_release(works[i]);
        } else {
            CHECK(is_fit(statuses[i]) || statuses[i] == TDDP_PEER_LOST);
        }
    }
    return good;
}

/* Until none is left to fail. What fails may be the failure detector's, without which messages
 * work. */
MULTI_TEST(messages, 1, 60)
{
    long nth = 0;
    for (bool failed = true; failed;) {
        pair self = make_pair(5000);
        tddp_fail_allocation(++nth);
        int good = talk(&self);
        failed = tddp_fail_allocation(0);
        CHECK(good || failed);
        drop_pair(&self);
        CHECK(nth < 500);
    }
    CHECK(nth > 12);
}

/* From now on no thread can be started; returns the limit that was there. */
static struct rlimit end_of_threads(void)
{
    struct rlimit before;
    CHECK_INT(getrlimit(RLIMIT_NPROC, &before), 0);
    struct rlimit none = {1, before.rlim_max};
    /* The limit does not count for root. The leak checker wants to look into this process. */
    CHECK(geteuid() != 0 || setresuid(65534, 65534, 65534) == 0);
    CHECK_INT(prctl(PR_SET_DUMPABLE, 1), 0);
    CHECK_INT(setrlimit(RLIMIT_NPROC, &none), 0);
    return before;
}

/* The next receive of rank 1 gets this. */
static void check_next_message(pair *self, float value)
{
    tddp_work *work;
    memory[0][0] = value;
    memory[1][0] = 0;
    CHECK_OK(tddp_recv(self->groups[1], floats(1, 0, 1), 0, 0, &work));
    CHECK_OK(tddp_send(self->groups[0], floats(0, 0, 1), 1, 0, NULL));
    CHECK_OK(tddp_work_wait(work, NULL));
    CHECK_DOUBLE((double)memory[1][0], (double)value, 0);
    tddp_work_release(work);
}

/* Two ranks that are connected, when no thread is lent. */
static pair make_blocking_pair(void)
{
    go_over_blocking(); /* each call that waits for a message has a thread */
    pair self = make_pair(5000);
    tddp_blocking_idle_ms = 0;
    check_next_message(&self, 3);
    CHECK_UNTIL(check_threads_named("tddp-blocking") == 0);
    return self;
}

/* Without threads to be had, a message is received by those that wait for it. */
TEST(no_more_threads)
{
    pair self = make_blocking_pair();
    const struct rlimit before = end_of_threads();
    check_next_message(&self, 5);
    CHECK_INT(check_threads_named("tddp-blocking"), 0);
    CHECK_INT(setrlimit(RLIMIT_NPROC, &before), 0);
    check_next_message(&self, 17);
    drop_pair(&self);
}

enum { BATCH = 4 };

/* Receives of rank 1, into memory that is gone if they don't begin. */
static tddp_status receive_batch(pair *self, float *into, tddp_work **works)
{
    tddp_op_args messages[BATCH];
    for (size_t i = 0; i < BATCH; i++) {
        messages[i] = (tddp_op_args)TDDP_OP_ARGS_INIT;
        messages[i].kind = TDDP_OP_RECV;
        messages[i].output = buffer_of(&into[i], 1, TDDP_FLOAT32);
        messages[i].peer = 0;
        messages[i].description = "described";
    }
    return tddp_batch_send_recv(self->groups[1], messages, BATCH, works);
}

/* A batch that can't begin has begun nothing: the next receive gets the next message, and nothing
 * is written to the batch's memory. */
static void check_nothing_has_begun(pair *self, float *into, tddp_work *const *works)
{
    for (int i = 0; i < BATCH; i++) {
        CHECK(works[i] == NULL);
    }
    free(into);
    check_next_message(self, 100);
}

TEST(a_batch_without_threads)
{
    pair self = make_blocking_pair();
    tddp_work *works[BATCH];
    float into[BATCH];
    const struct rlimit before = end_of_threads();
    CHECK_OK(receive_batch(&self, into, works));
    for (int i = 0; i < BATCH; i++) {
        memory[0][0] = (float)i;
        CHECK_OK(tddp_send(self.groups[0], floats(0, 0, 1), 1, 0, NULL));
    }
    for (int i = BATCH - 1; i >= 0; i--) {
        CHECK_OK(tddp_work_wait(works[i], NULL));
        CHECK_DOUBLE((double)into[i], i, 0);
        tddp_work_release(works[i]);
    }
    CHECK_INT(setrlimit(RLIMIT_NPROC, &before), 0);
    drop_pair(&self);
}

/* Whichever allocation fails: all messages begin, and each has its outcome, or none does. */
TEST(a_batch_without_enough_memory)
{
    int refused = 0;
    bool failed = true;
    for (long nth = 1; failed; nth++) {
        pair self = make_pair(5000);
        tddp_work *works[BATCH] = {NULL};
        float *into = calloc(BATCH, sizeof *into);
        tddp_fail_allocation(nth);
        tddp_status status = receive_batch(&self, into, works);
        failed = tddp_fail_allocation(0);
        if (status) {
            CHECK_STATUS(status, TDDP_OUT_OF_MEMORY);
            check_nothing_has_begun(&self, into, works);
            refused++;
        } else {
            tddp_group_shutdown(self.groups[1], 0);
            for (int i = 0; i < BATCH; i++) {
                CHECK(tddp_work_completed(works[i]));
                CHECK(tddp_work_status(works[i]) != TDDP_OK);
                tddp_work_release(works[i]);
            }
            free(into);
        }
        drop_pair(&self);
        CHECK(nth < 200);
    }
    CHECK(refused >= BATCH);
}
