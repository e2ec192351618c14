/*
 * Groups that end at any moment, while threads call. On each rank, a thread of a process, threads
 * call everything there is, one of them or two shut the group down, interrupts end waits, and the
 * calls go on after the end. Every call returns what it may return, sums and messages that are
 * returned as good are right, what is called after the end is refused, and nothing reads memory
 * that is gone (a sanitizer looks).
 *
 * A seed draws a program. TDDP_ENDINGS says how many, TDDP_ENDINGS_SEED with which to begin; by
 * default the same few each time.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <tddp/backend.h>

#include "endings/endings.h"

enum { AFTERWARDS = 6 /* calls */ };

/* --- threads --------------------------------------------------------------------------------- */

/* Calls until the group has ended, and a few times more: operations are refused then. */
static void *run_caller(void *data)
{
    caller *self = data;
    uint64_t agreed = endings_stream_of(self->member->program->seed, 50, self->number);
    int afterwards = 0;
    while (afterwards < AFTERWARDS) {
        const bool over = atomic_load(&self->member->over);
        self->last = TDDP_OK;
        (void)endings_call(self, &agreed);
        if (over &&
            (self->number == 0 || (self->number == 1 && self->member->program->ranks > 1))) {
            CHECK(self->last != TDDP_OK);
        }
        afterwards += over;
    }
    return NULL;
}

static void *shut_down(void *data)
{
    member *self = data;
    uint64_t state = endings_stream_of(self->program->seed, self->rank, 60);
    static const int drains[] = {0, 0, 1, 30};
    (void)usleep(endings_below(&state, 4000));
    tddp_group_shutdown(self->group, drains[endings_below(&state, 4)]);
    atomic_store(&self->over, true);
    return NULL;
}

static tddp_group *open_group(const member *self, const char *name)
{
    const plan *program = self->program;
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    tddp_group *group;
    opts.backend = program->carrier->backend;
    opts.name = name;
    opts.store = self->store;
    opts.rank = self->rank;
    opts.world_size = program->ranks;
    opts.timeout_ms = ENDINGS_TIMEOUT_MS;
    opts.device_index = program->carrier->bound ? 0 : -1;
    opts.device_bound = program->carrier->bound;
    CHECK_OK(tddp_group_create(&opts, NULL, &group));
    return group;
}

static void *run_member(void *data)
{
    member *self = data;
    pthread_t threads[ENDINGS_CALLERS];
    pthread_t enders[2];
    caller callers[ENDINGS_CALLERS] = {0};
    uint64_t state = endings_stream_of(self->program->seed, self->rank, 61);
    const int shutdowns = 1 + (endings_below(&state, 3) == 0);
    char name[32];
    (void)snprintf(name, sizeof name, "of %llu", (unsigned long long)self->program->seed);
    self->group = open_group(self, name);
    for (int i = 0; i < ENDINGS_CALLERS; i++) {
        callers[i].member = self;
        callers[i].number = i;
        callers[i].state = endings_stream_of(self->program->seed, self->rank, i);
        CHECK_OK(tddp_cancel_create(&callers[i].cancel));
        CHECK_INT(pthread_create(&threads[i], NULL, run_caller, &callers[i]), 0);
    }
    for (int i = 0; i < shutdowns; i++) {
        CHECK_INT(pthread_create(&enders[i], NULL, shut_down, self), 0);
    }
    while (!atomic_load(&self->over)) {
        /* An interrupt, as of a signal, which ends a wait. */
        tddp_cancel *cancel = callers[endings_below(&state, ENDINGS_CALLERS)].cancel;
        tddp_cancel_trigger(cancel);
        (void)usleep(endings_below(&state, 700));
        tddp_cancel_reset(cancel);
    }
    for (int i = 0; i < shutdowns; i++) {
        CHECK_INT(pthread_join(enders[i], NULL), 0);
    }
    for (int i = 0; i < ENDINGS_CALLERS; i++) {
        CHECK_INT(pthread_join(threads[i], NULL), 0);
        tddp_cancel_free(callers[i].cancel);
    }
    tddp_group_release(self->group);
    for (int i = 0; i < ENDINGS_CALLERS; i++) {
        for (piece *each = callers[i].pieces, *after; each; each = after) {
            after = each->next;
            free(each);
        }
    }
    return NULL;
}

static void run_program(const medium *carrier, uint64_t seed)
{
    uint64_t state = endings_stream_of(seed, 0, 62);
    const plan program = {.carrier = carrier,
                          .seed = seed,
                          .ranks = 1 + (int)endings_below(&state, ENDINGS_RANKS),
                          .disagree = endings_below(&state, 4) == 0,
                          .from_any = carrier->any_source && endings_below(&state, 3) == 0};
    member members[ENDINGS_RANKS] = {0};
    pthread_t threads[ENDINGS_RANKS];
    tddp_store *store;
    CHECK_OK(tddp_hash_store_create(ENDINGS_TIMEOUT_MS, &store));
    for (int rank = 0; rank < program.ranks; rank++) {
        members[rank].program = &program;
        members[rank].store = store;
        members[rank].rank = rank;
        CHECK_INT(pthread_create(&threads[rank], NULL, run_member, &members[rank]), 0);
    }
    for (int rank = 0; rank < program.ranks; rank++) {
        CHECK_INT(pthread_join(threads[rank], NULL), 0);
    }
    tddp_store_release(store);
}

static void carry(medium carrier, int programs)
{
    const tddp_backend_v1 *found[TDDP_DEVICE_TYPES];
    const char *first = getenv("TDDP_ENDINGS_SEED");
    const char *count = getenv("TDDP_ENDINGS");
    if (tddp_backends_find(carrier.backend, found)) {
        check_skip(tddp_error_message());
    }
    CHECK_INT(setenv("TDDP_LOG", "error", 0), 0);
    uint64_t seed = first ? strtoull(first, NULL, 10) : 1;
    for (int left = count ? atoi(count) : programs; left > 0; left--, seed++) {
        if (getenv("TDDP_ENDINGS_SHOW")) {
            fprintf(stderr, "seed %llu\n", (unsigned long long)seed);
        }
        run_program(&carrier, seed);
    }
}

/* Rank 1 is late with each operation. */
MULTI_TEST(over_delays, 1, 900)
{
    CHECK_INT(setenv("LAYOUT", "one", 1), 0);
    CHECK_INT(setenv("TDDP_FAKE", "delay_ms=1,rank=1", 1), 0);
    carry((medium){.backend = "fake", .host = true, .any_source = true}, 8);
}

MULTI_TEST(over_shared_memory, 1, 900)
{
    CHECK_INT(setenv("LAYOUT", "one", 1), 0);
    carry((medium){.backend = "shm", .host = true, .any_source = true}, 8);
}

MULTI_TEST(over_gloo, 1, 900)
{
    CHECK_INT(setenv("TDDP_SHM", "0", 1), 0);
    carry((medium){.backend = "gloo", .host = true, .any_source = true}, 8);
}

MULTI_TEST(over_hosts, 1, 900)
{
    carry((medium){.backend = "gloo", .host = true, .any_source = true}, 8);
}

/* On copies of a device's memory. */
MULTI_TEST(over_staging, 1, 900)
{
    CHECK_INT(setenv("LAYOUT", "one", 1), 0);
    carry((medium){.backend = "shm", .host = true, .device = true, .any_source = true}, 8);
}

MULTI_TEST(over_nccl, 1, 900)
{
    carry((medium){.backend = "nccl", .device = true}, 2);
}

MULTI_TEST(over_bound_nccl, 1, 900)
{
    carry((medium){.backend = "nccl", .device = true, .bound = true}, 2);
}

MULTI_TEST(over_one_for_each_device, 1, 900)
{
    CHECK_INT(setenv("LAYOUT", "one", 1), 0);
    carry((medium){.backend = "cpu:gloo,cuda:nccl", .host = true, .device = true}, 2);
}
