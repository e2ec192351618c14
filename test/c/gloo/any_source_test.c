/*
 * Receives from any source beside others with the same tag, over one host and, by
 * test/c/CMakeLists.txt, over several made-up ones: there messages of a rank's own host go through
 * shared memory, all others through Gloo.
 */
#include <dirent.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fixture.h"

enum { LARGE = 300000, EACH = 5, TAG = 6 };

enum { POSTED, LEFT, DONE }; /* events */

static char out[LARGE];
static char in[LARGE];

/* Message `i` of a rank: small and large ones in turn. */
static tddp_buffer message_of(char *memory, int rank, int i)
{
    const size_t bytes = i % 2 ? LARGE - (size_t)i : 8;
    memset(memory, rank * 16 + i, bytes);
    return bytes_of(memory, bytes);
}

static void check_message(const char *memory, int rank, int i)
{
    CHECK_INT(memory[0], rank * 16 + i);
    CHECK_INT(memory[i % 2 ? LARGE - i - 1 : 7], rank * 16 + i);
}

static void receive_message(tddp_group *group, int from, int i)
{
    tddp_buffer buffer = message_of(in, 0, i);
    CHECK_INT(wait_for_source(post_recv(group, buffer, from, TAG)), from);
    check_message(in, from, i);
}

/* What comes to a receive from any source does not depend on where its sender is; later receives
 * from one source get its messages in their order. */
MULTI_TEST(then_from_each_source, 4, 30)
{
    world here = open_world(rank, world_size, port, 20000);
    if (rank == 0) {
        int first = wait_for_source(post_recv(here.group, message_of(in, 0, 0), -1, TAG));
        check_message(in, first, 0);
        for (int peer = 3; peer > 0; peer--) {
            for (int i = peer == first; i < EACH; i++) {
                receive_message(here.group, peer, i);
            }
        }
    } else {
        for (int i = 0; i < EACH; i++) {
            CHECK_OK(tddp_send(here.group, message_of(out, rank, i), 0, TAG, NULL));
        }
    }
    close_world(here);
}

/* One receive from any source gets what a known rank sends alone: each other in turn. */
MULTI_TEST(from_each_host_in_turn, 4, 30)
{
    world here = open_world(rank, world_size, port, 20000);
    for (int i = 0; i < EACH; i++) {
        for (int sender = 1; sender < world_size; sender++) {
            if (rank == 0) {
                const int from = wait_for_source(
                    post_recv(here.group, message_of(in, 0, i), TDDP_ANY_SOURCE, TAG));
                CHECK_INT(from, sender);
                check_message(in, sender, i);
            } else if (rank == sender) {
                CHECK_OK(tddp_send(here.group, message_of(out, rank, i), 0, TAG, NULL));
            }
            CHECK_OK(tddp_barrier(here.group, NULL));
        }
    }
    close_world(here);
}

/* Other tags are not concerned. */
MULTI_TEST(with_several_tags, 4, 30)
{
    enum { TAGS = 4 };
    world here = open_world(rank, world_size, port, 20000);
    int32_t value = rank;
    for (uint32_t tag = 0; tag < TAGS; tag++) {
        if (rank == 0) {
            int32_t got[3] = {0};
            tddp_work *works[3];
            for (int i = 0; i < 3; i++) {
                const int peer = tag % 2 ? i + 1 : TDDP_ANY_SOURCE;
                works[i] = post_recv(here.group, buffer_of(&got[i], 1, TDDP_INT32), peer, tag);
            }
            int sum = 0;
            for (int i = 0; i < 3; i++) {
                const int source = wait_for_source(works[i]);
                CHECK_INT(got[i], source);
                sum += got[i];
            }
            CHECK_INT(sum, 6);
        } else {
            CHECK_OK(tddp_send(here.group, buffer_of(&value, 1, TDDP_INT32), 0, tag, NULL));
        }
    }
    close_world(here);
}

/* A message that nobody receives, with a tag that was received from any source before. */
MULTI_TEST(what_is_not_received_ends_with_the_group, 4, 30)
{
    world here = open_world(rank, world_size, port, 20000);
    if (rank == 0) {
        receive_message(here.group, 3, 0);
        tddp_work *any = post_recv(here.group, message_of(in, 0, 0), TDDP_ANY_SOURCE, TAG);
        CHECK_OK(tddp_barrier(here.group, NULL));
        CHECK_INT(wait_for_source(any), 3);
        CHECK_AWAIT(POSTED, 1);
        abandon_world(here);
    } else {
        tddp_work *left = NULL;
        if (rank == 3) {
            CHECK_OK(tddp_send(here.group, message_of(out, rank, 0), 0, TAG, NULL));
        }
        CHECK_OK(tddp_barrier(here.group, NULL));
        if (rank == 3) {
            CHECK_OK(tddp_send(here.group, message_of(out, rank, 0), 0, TAG, NULL));
            left = post_send(here.group, message_of(out, rank, 1), 0, TAG);
            check_signal(POSTED);
        }
        if (left) {
            tddp_status status = end(left); /* rank 0 leaves, or this rank waits in vain */
            CHECK(status == TDDP_PEER_LOST || status == TDDP_GROUP_FAILED);
        }
        abandon_world(here);
    }
}

MULTI_TEST(a_known_source_leaves, 4, 30)
{
    world here = open_world(rank, world_size, port, 20000);
    if (rank == 0) {
        receive_message(here.group, 3, 0);
        int32_t value;
        tddp_work *any = post_recv(here.group, buffer_of(&value, 1, TDDP_INT32), -1, TAG);
        CHECK_INT(wait_for_source(any), 2);
        CHECK_OK(tddp_barrier(here.group, NULL));
        CHECK_STATUS(tddp_recv(here.group, message_of(in, 0, 0), 3, TAG, NULL), TDDP_PEER_LOST);
        CHECK_CONTAINS(tddp_error_message(), "rank 3 has left the group");
        CHECK_MEET(DONE, 3);
    } else {
        int32_t value = rank;
        if (rank == 3) {
            CHECK_OK(tddp_send(here.group, message_of(out, rank, 0), 0, TAG, NULL));
        } else if (rank == 2) {
            CHECK_OK(tddp_send(here.group, buffer_of(&value, 1, TDDP_INT32), 0, TAG, NULL));
        }
        CHECK_OK(tddp_barrier(here.group, NULL));
        if (rank != 3) {
            CHECK_MEET(DONE, 3);
        }
    }
    abandon_world(here);
}

/* A receive from any source waits for those that are left, then for nobody. */
MULTI_TEST(all_leave_but_one, 4, 30)
{
    world here = open_world(rank, world_size, port, 20000);
    /* Connects the ranks of several hosts: those that had left before could not be. */
    if (rank == 0) {
        receive_message(here.group, 3, 0);
    } else if (rank == 3) {
        CHECK_OK(tddp_send(here.group, message_of(out, rank, 0), 0, TAG, NULL));
    }
    if (rank == 0) {
        tddp_work *works[2];
        int32_t got[2] = {0};
        for (int i = 0; i < 2; i++) {
            works[i] = post_recv(here.group, buffer_of(&got[i], 1, TDDP_INT32), -1, TAG);
        }
        check_signal(POSTED);
        CHECK_INT(wait_for_source(works[0]), 3);
        CHECK_STATUS(end(works[1]), TDDP_PEER_LOST);
        CHECK_CONTAINS(tddp_error_message(), "has left the group");
    } else if (rank == 3) {
        int32_t value = rank;
        CHECK_AWAIT(POSTED, 1);
        CHECK_AWAIT(LEFT, 2);
        CHECK_OK(tddp_send(here.group, buffer_of(&value, 1, TDDP_INT32), 0, TAG, NULL));
    } else {
        CHECK_AWAIT(POSTED, 1);
    }
    abandon_world(here);
    if (rank == 1 || rank == 2) {
        check_signal(LEFT);
    }
}

MULTI_TEST(a_sender_dies, 4, 30)
{
    world here = open_world(rank, world_size, port, 20000);
    if (rank == 0) {
        receive_message(here.group, 1, 0);
        int32_t value;
        tddp_work *any = post_recv(here.group, buffer_of(&value, 1, TDDP_INT32), -1, TAG);
        CHECK_OK(tddp_barrier(here.group, NULL));
        CHECK_STATUS(end(any), TDDP_PEER_LOST);
        CHECK_CONTAINS(tddp_error_message(), "rank 3");
    } else {
        if (rank == 1) {
            CHECK_OK(tddp_send(here.group, message_of(out, rank, 0), 0, TAG, NULL));
        }
        CHECK_OK(tddp_barrier(here.group, NULL));
        if (rank == 3) {
            die();
        }
    }
    CHECK_MEET(DONE, 3);
    abandon_world(here);
}

/* --- threads --------------------------------------------------------------------------------- */

/* A rank on the host of rank 0; 0: it has shared memory with none. */
static int neighbour(void)
{
    const char *layout = getenv("LAYOUT");
    if (!layout || strcmp(layout, "middle") == 0) {
        return 0;
    }
    return strcmp(layout, "turns") == 0 ? 2 : 1;
}

static int threads_of_process(void)
{
    int count = 0;
    DIR *folder = opendir("/proc/self/task");
    CHECK(folder);
    for (const struct dirent *each = readdir(folder); each; each = readdir(folder)) {
        count += each->d_name[0] != '.';
    }
    closedir(folder);
    return count;
}

enum { MESSAGES = 40 };

/* Rank 0 receives from `sender`, or with `any` from any source. */
static void exchange_many(world here, int rank, int sender, bool any)
{
    static int32_t values[MESSAGES];
    tddp_work *works[MESSAGES];
    int32_t first = rank;
    if (rank != 0 && rank != sender) {
        return;
    }
    /* Ranks of several hosts have connected after this. */
    tddp_buffer one = buffer_of(&first, 1, TDDP_INT32);
    CHECK_OK(rank == 0 ? tddp_recv(here.group, one, sender, TAG + 1, NULL)
                       : tddp_send(here.group, one, 0, TAG + 1, NULL));
    CHECK_INT(first, sender);
    const int before = threads_of_process();
    for (int i = 0; i < MESSAGES; i++) {
        tddp_buffer buffer = buffer_of(&values[i], 1, TDDP_INT32);
        values[i] = rank == 0 ? -1 : i;
        if (rank > 0 && i == 0) {
            CHECK_AWAIT(POSTED, 1);
        }
        works[i] = rank == 0 ? post_recv(here.group, buffer, any ? TDDP_ANY_SOURCE : sender, TAG)
                             : post_send(here.group, buffer, 0, TAG);
    }
    CHECK(threads_of_process() <= before + 1); /* that of all groups' progress */
    if (rank == 0) {
        check_signal(POSTED);
    }
    for (int i = 0; i < MESSAGES; i++) {
        CHECK_OK(end(works[i]));
        CHECK_INT(values[i], i);
    }
}

MULTI_TEST(messages_within_a_host_take_no_thread_each, 4, 30)
{
    world here = open_world(rank, world_size, port, 20000);
    if (neighbour() > 0) {
        exchange_many(here, rank, neighbour(), false);
    }
    close_world(here);
}

MULTI_TEST(messages_to_another_host_take_no_thread_each, 4, 30)
{
    world here = open_world(rank, world_size, port, 20000);
    exchange_many(here, rank, 3, false);
    close_world(here);
}

MULTI_TEST(receives_from_any_source_take_no_thread_each, 4, 30)
{
    world here = open_world(rank, world_size, port, 20000);
    exchange_many(here, rank, 3, true);
    close_world(here);
}
