/* A group of two ranks over the fake backend while system calls and allocations fail. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <tddp/group.h>

#include "base/base.h"
#include "check.h"
#include "faults/scenario.h"

enum { ELEMENTS = 5 };

typedef struct member {
    int rank;
    tddp_store *store;
    tddp_status status;
    char text[256];
} member;

static tddp_buffer buffer_of(float *data, size_t count)
{
    return (tddp_buffer){.data = data, .count = count, .dtype = TDDP_FLOAT32};
}

/* There and back. */
static tddp_status pass_on(tddp_group *group)
{
    float ball = 3;
    if (tddp_group_rank(group) == 0) {
        tddp_status status = tddp_send(group, buffer_of(&ball, 1), 1, 7, NULL);
        ball = 0;
        status = status ? status : tddp_recv(group, buffer_of(&ball, 1), 1, 8, NULL);
        if (status == TDDP_OK) {
            CHECK_DOUBLE(ball, 6.0, 0.0);
        }
        return status;
    }
    tddp_status status = tddp_recv(group, buffer_of(&ball, 1), TDDP_ANY_SOURCE, 7, NULL);
    ball *= 2;
    return status ? status : tddp_send(group, buffer_of(&ball, 1), 0, 8, NULL);
}

/* What goes well is right. */
static tddp_status compute(tddp_group *group)
{
    float rank = (float)tddp_group_rank(group);
    float sum[ELEMENTS];
    float all[2 * ELEMENTS] = {0};
    for (int i = 0; i < ELEMENTS; i++) {
        sum[i] = rank + (float)i;
    }
    tddp_work *work = NULL;
    tddp_status status =
        tddp_all_reduce(group, buffer_of(sum, ELEMENTS), TDDP_REDUCE_SUM, 1.0, &work);
    if (status == TDDP_OK) {
        status = tddp_work_wait(work, NULL);
        while (!tddp_work_completed(work)) {
            (void)!tddp_work_wait(work, NULL); /* Its memory is ours. */
        }
        tddp_work_release(work);
    }
    if (status == TDDP_OK) {
        CHECK_DOUBLE(sum[ELEMENTS - 1], 1.0 + 2.0 * (ELEMENTS - 1), 0.0);
        status = tddp_all_gather(group, buffer_of(&rank, 1), buffer_of(all, 2), NULL);
    }
    if (status == TDDP_OK) {
        CHECK_DOUBLE(all[1], 1.0, 0.0);
        status = tddp_broadcast(group, buffer_of(all, ELEMENTS), 0, NULL);
    }
    status = status ? status : pass_on(group);
    return status ? status : tddp_barrier(group, NULL);
}

static void *take_part(void *data)
{
    member *self = data;
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    tddp_group *group = NULL;
    opts.backend = "fake";
    opts.store = self->store;
    opts.rank = self->rank;
    opts.world_size = 2;
    opts.timeout_ms = scenario_patience_ms;
    self->status = tddp_group_create(&opts, NULL, &group);
    if (self->status == TDDP_OK) {
        self->status = compute(group);
        tddp_group_shutdown(group, scenario_patience_ms);
    }
    (void)snprintf(self->text, sizeof self->text, "%s", tddp_error_message());
    tddp_group_release(group);
    return NULL;
}

/* The first failure of both, with its text. */
static tddp_status both(tddp_store *first, tddp_store *second)
{
    member members[2] = {{.rank = 0, .store = first}, {.rank = 1, .store = second}};
    pthread_t thread;
    tddp_status status = tddp_thread_start(&thread, "rank1", take_part, &members[1]);
    if (status) {
        return status;
    }
    take_part(&members[0]);
    pthread_join(thread, NULL);
    for (int i = 0; i < 2; i++) {
        if (members[i].status) {
            CHECK(members[i].text[0]);
            return tddp_fail(members[i].status, "%s", members[i].text);
        }
    }
    return TDDP_OK;
}

static tddp_status over_hash(void)
{
    tddp_store *store = NULL;
    tddp_status status = tddp_hash_store_create(scenario_patience_ms, &store);
    if (status == TDDP_OK) {
        status = both(store, store);
    }
    tddp_store_release(store);
    return status;
}

static tddp_status over_tcp(void)
{
    tddp_tcp_store_opts opts = TDDP_TCP_STORE_OPTS_INIT;
    tddp_store *host = NULL;
    tddp_store *guest = NULL;
    opts.host = "127.0.0.1";
    opts.is_server = 1;
    opts.timeout_ms = scenario_patience_ms;
    tddp_status status = tddp_tcp_store_open(&opts, NULL, &host);
    if (status == TDDP_OK) {
        opts.is_server = 0;
        opts.port = tddp_tcp_store_port(host);
        status = tddp_tcp_store_open(&opts, NULL, &guest);
    }
    if (status == TDDP_OK) {
        status = both(host, guest);
    }
    tddp_store_release(guest);
    tddp_store_release(host);
    return status;
}

MULTI_TEST(group_survives_failing_allocations, 1, 280)
{
    scenario_fail_allocations(over_hash);
}

MULTI_TEST(group_over_tcp_survives_failing_calls, 1, 280)
{
    scenario_fail_system_calls(over_tcp);
}

TEST(group_over_tcp_stands_interruptions)
{
    scenario_disturb(over_tcp);
}
