/*
 * The first message of a group, for which the ranks of several hosts connect to each other first
 * (test/c/CMakeLists.txt runs this over made-up hosts too): whatever the other ranks are doing.
 */
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fixture.h"

enum { COUNT = 3000 };

enum { DONE, STOPPED, OUT }; /* events */

/* Whether connections are made when they are needed, not with the group. */
static bool connects_later(void)
{
    const char *layout = getenv("LAYOUT");
    return layout && strcmp(layout, "one") != 0;
}

/* The others are in no operation, and their threads not even in the library. */
MULTI_TEST(the_others_are_busy, 4, 30)
{
    static int32_t data[COUNT];
    world here = open_world(rank, world_size, port, 20000);
    if (rank == 0 || rank == 3) {
        for (int i = 0; i < COUNT; i++) {
            data[i] = rank == 0 ? i : -1;
        }
        tddp_buffer buffer = buffer_of(data, COUNT, TDDP_INT32);
        CHECK_OK(rank == 0 ? tddp_send(here.group, buffer, 3, 1, NULL)
                           : tddp_recv(here.group, buffer, TDDP_ANY_SOURCE, 1, NULL));
        CHECK_INT(data[COUNT - 1], COUNT - 1);
        check_signal(DONE);
    } else {
        CHECK_AWAIT(DONE, 2);
    }
    close_world(here);
}

/* All ranks ask at once, by messages and by an operation that needs the connections too. */
MULTI_TEST(all_ask_at_once, 4, 30)
{
    static int32_t out[4];
    static int32_t in[4];
    int32_t from = -1;
    world here = open_world(rank, world_size, port, 20000);
    tddp_buffer outs[4];
    tddp_buffer ins[4];
    for (int i = 0; i < world_size; i++) {
        out[i] = 10 * rank + i;
        outs[i] = buffer_of(&out[i], 1, TDDP_INT32);
        ins[i] = buffer_of(&in[i], 1, TDDP_INT32);
    }
    tddp_work *sent = post_send(here.group, buffer_of(&out[0], 1, TDDP_INT32), rank ^ 3, 5);
    tddp_work *received = post_recv(here.group, buffer_of(&from, 1, TDDP_INT32), rank ^ 3, 5);
    CHECK_OK(tddp_all_to_all(here.group, outs, ins, 4, NULL));
    for (int i = 0; i < world_size; i++) {
        CHECK_INT(in[i], 10 * i + rank);
    }
    CHECK_OK(end(sent));
    CHECK_OK(end(received));
    CHECK_INT(from, 10 * (rank ^ 3));
    close_world(here);
}

/* Groups that nobody needs connections in cost none; some are made while others connect. */
MULTI_TEST(group_after_group, 4, 60)
{
    world here = open_world(rank, world_size, port, 20000);
    for (int i = 0; i < 6; i++) {
        char name[16];
        int32_t value = rank == 0 ? i : -1;
        tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
        tddp_group *group;
        (void)snprintf(name, sizeof name, "group %d", i);
        opts.backend = WORLD_BACKEND;
        opts.store = here.store;
        opts.parent = here.group;
        opts.rank = rank;
        opts.world_size = world_size;
        opts.timeout_ms = 20000;
        opts.name = name;
        CHECK_OK(tddp_group_create(&opts, NULL, &group));
        if (i % 2 == 0) {
            tddp_buffer buffer = buffer_of(&value, 1, TDDP_INT32);
            if (rank == 0 || rank == 3) {
                CHECK_OK(rank == 0 ? tddp_send(group, buffer, 3, 1, NULL)
                                   : tddp_recv(group, buffer, 0, 1, NULL));
                CHECK_INT(value, i);
            }
            CHECK_OK(tddp_barrier(group, NULL));
        }
        tddp_group_release(group);
    }
    close_world(here);
}

/* --- ends ------------------------------------------------------------------------------------ */

/* Nobody but its host's ranks can see that rank 1 is gone, and they are in no operation. */
MULTI_TEST(a_rank_has_died, 4, 30)
{
    static int32_t data[COUNT];
    world here = open_world(rank, world_size, port, 20000);
    if (rank == 1) {
        die();
    }
    CHECK_AWAIT_END(1);
    if (rank == 0) {
        CHECK_STATUS(tddp_recv(here.group, buffer_of(data, COUNT, TDDP_INT32), 3, 1, NULL),
                     TDDP_PEER_LOST);
        CHECK_CONTAINS(tddp_error_message(), "rank 1");
        check_signal(DONE);
    } else {
        CHECK_AWAIT(DONE, 1);
    }
    abandon_world(here);
}

/* What needs connections to all ranks says so once one has left. */
MULTI_TEST(a_rank_has_left, 4, 30)
{
    static int32_t data[COUNT];
    world here = open_world(rank, world_size, port, 20000);
    CHECK_OK(tddp_barrier(here.group, NULL));
    if (rank == 1) {
        abandon_world(here);
        check_signal(OUT);
        return;
    }
    CHECK_AWAIT(OUT, 1);
    if (rank == 0 || rank == 3) {
        tddp_buffer buffer = buffer_of(data, COUNT, TDDP_INT32);
        tddp_status status = rank == 3 ? tddp_send(here.group, buffer, 0, 1, NULL)
                                       : tddp_recv(here.group, buffer, 3, 1, NULL);
        CHECK_STATUS(status, connects_later() ? TDDP_PEER_LOST : TDDP_OK);
        if (status) {
            const char *text = tddp_error_message();
            CHECK_CONTAINS(text, "rank 1");
            CHECK(strstr(text, "has left the group") || strstr(text, "has destroyed the group"));
        }
        check_signal(DONE);
    }
    CHECK_AWAIT(DONE, 2);
    abandon_world(here);
}

/* A rank that does not run holds up what needs it, for as long as the operation may take. */
MULTI_TEST(a_rank_is_stopped, 4, 30)
{
    static int32_t data[COUNT];
    world here = open_world(rank, world_size, port, 20000);
    CHECK_OK(tddp_barrier(here.group, NULL));
    if (rank == 0) {
        CHECK_AWAIT(STOPPED, 3); /* the others have returned from the barrier */
        CHECK_INT(kill(check_rank_pid(3), SIGSTOP), 0);
        limit_to(here.group, 500);
        /* Posting waits for nobody: it would fail itself. */
        tddp_work *work = post_recv(here.group, buffer_of(data, COUNT, TDDP_INT32), 2, 1);
        CHECK_STATUS(end(work), TDDP_TIMEOUT);
        CHECK_INT(kill(check_rank_pid(3), SIGCONT), 0);
        check_signal(DONE);
    } else {
        check_signal(STOPPED);
        CHECK_AWAIT(DONE, 1);
    }
    abandon_world(here);
}
