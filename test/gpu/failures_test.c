/* Ranks that are killed, or late: the other ends with an error within its timeout. */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "gpu.h"

enum { SHORT_MS = 8000, COUNT = 1 << 20 };

static tddp_status sum(tddp_group *group, tddp_buffer buffer)
{
    return tddp_all_reduce(group, buffer, TDDP_REDUCE_SUM, 0, NULL);
}

/* Until it is killed: in the midst of operations, or on the way to the first. */
static void live_until_killed(int rank, int world_size, int port, int ready, bool connects)
{
    static float data[COUNT];
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, connects ? 0 : -1, SHORT_MS);
    tddp_buffer buffer = {0};
    if (connects) {
        buffer = to_device(data, COUNT, TDDP_FLOAT32);
        CHECK_OK(sum(group, buffer));
    }
    CHECK_INT(write(ready, "r", 1), 1);
    while (connects && sum(group, buffer) == TDDP_OK) {
    }
    for (;;) {
        pause();
    }
}

/* The rank that dies is a child of the one that the frame knows, whose end would be a failure. */
static void be_killed(int rank, int world_size, int port, bool connects)
{
    int ready[2];
    char byte;
    int status;
    CHECK_INT(pipe(ready), 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        (void)close(ready[0]);
        live_until_killed(rank, world_size, port, ready[1], connects);
    }
    (void)close(ready[1]);
    CHECK_INT(read(ready[0], &byte, 1), 1);
    (void)close(ready[0]);
    (void)usleep(300000);
    CHECK_INT(kill(child, SIGKILL), 0);
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

/* No operation lasts longer than its timeout; some time is for what ends the communicator. */
static void check_lost(tddp_group *group, const char *what)
{
    static float data[COUNT];
    tddp_buffer buffer = to_device(data, COUNT, TDDP_FLOAT32);
    double start = seconds_now();
    double began = start;
    tddp_status status;
    do {
        began = seconds_now();
        status = sum(group, buffer);
    } while (status == TDDP_OK && seconds_now() - start < 20);
    double lasted = seconds_now() - began;
    note("- %s: after %.2f s (timeout %.0f s) the other rank has %s: %s", what, lasted,
         SHORT_MS / 1e3, tddp_status_name(status), tddp_error_message());
    CHECK(status != TDDP_OK);
    CHECK(tddp_error_message()[0] != '\0');
    CHECK(lasted < SHORT_MS / 1e3 + 3);
    /* The first failure is the group's: no later operation waits. */
    start = seconds_now();
    CHECK_STATUS(sum(group, buffer), TDDP_GROUP_FAILED);
    CHECK(seconds_now() - start < 1);
}

static void lose_a_rank(int rank, int world_size, int port, bool connects)
{
    live_apart(rank);
    if (rank == 1) {
        be_killed(rank, world_size, port, connects);
        return;
    }
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, connects ? 0 : -1, SHORT_MS);
    check_lost(group, connects ? "a rank is killed amid operations"
                               : "a rank is killed before it connects");
    tddp_group_release(group);
    tddp_store_release(store);
}

MULTI_TEST(a_rank_is_killed_amid_operations, 2, 60)
{
    lose_a_rank(rank, world_size, port, true);
}

MULTI_TEST(a_rank_is_killed_before_it_connects, 2, 60)
{
    lose_a_rank(rank, world_size, port, false);
}

MULTI_TEST(a_rank_that_is_late_is_a_timeout, 2, 60)
{
    float data[3] = {1, 2, 3};
    live_apart(rank);
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, 0, 2000);
    tddp_buffer buffer = to_device(data, 3, TDDP_FLOAT32);
    if (rank == 0) {
        double start = seconds_now();
        CHECK_STATUS(sum(group, buffer), TDDP_TIMEOUT);
        double lasted = seconds_now() - start;
        note("- a rank is late: after %.2f s (timeout 2 s): %s", lasted, tddp_error_message());
        CHECK(lasted > 1.5 && lasted < 5);
    }
    from_device(data, buffer);
    leave(group, store);
}
