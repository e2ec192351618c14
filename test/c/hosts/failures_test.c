/*
 * What ranks on made-up hosts report when others disagree, die, or are late; and which settings
 * turn shared memory off.
 */
#include "member.h"

enum { NOTIFIED, RANK }; /* events; one for each rank from RANK on */

static const int HALVES[] = {0, 0, 1, 1};
static const int TURNS[] = {0, 1, 0, 1};

static tddp_op sum_of(float *data, size_t count)
{
    tddp_buffer buffer = buffer_of(data, count, TDDP_FLOAT32);
    return (tddp_op){.kind = TDDP_OP_ALL_REDUCE, .input = buffer, .output = buffer};
}

/* Whatever this rank reports, it is the mismatch of the two sides, in the words of the call. */
static void check_error(tddp_status status, const char *one, const char *other)
{
    CHECK(status == TDDP_MISMATCH || status == TDDP_PEER_LOST || status == TDDP_GROUP_FAILED);
    if (status == TDDP_MISMATCH) {
        CHECK_CONTAINS(tddp_error_message(), one);
        CHECK_CONTAINS(tddp_error_message(), other);
    }
}

/* The ranks of one host have another size than those of the other one. */
MULTI_TEST(hosts_that_disagree_on_a_size, 4, 20)
{
    static float data[300000];
    member self = join("gloo", HALVES, rank, world_size, port);
    tddp_op before = sum_of(data, 7);
    CHECK_OK(run(&self, &before));
    tddp_op op = sum_of(data, rank >= 2 ? 300000 : 5);
    tddp_status status = run(&self, &op);
    check_error(status, "rank 0 runs all_reduce (operation 2, 5 elements of float32, sum)",
                "rank 2 runs all_reduce (operation 2, 300000 elements of float32, sum)");
    if (rank % 2 == 0) {
        CHECK_STATUS(status, TDDP_MISMATCH);
    }
    part(&self);
}

/* Rank 3 calls something else: its neighbour detects it, and reports it to the other host. */
MULTI_TEST(a_rank_that_calls_something_else, 4, 20)
{
    member self = join("gloo", HALVES, rank, world_size, port);
    static float data[1000];
    tddp_op op = sum_of(data, 1000);
    if (rank == 3) {
        op = (tddp_op){.kind = TDDP_OP_BARRIER};
    }
    tddp_status status = run(&self, &op);
    check_error(status, "all_reduce (operation 1, 1000 elements of float32, sum)",
                "barrier (operation 1)");
    CHECK_STATUS(status, TDDP_MISMATCH);
    part(&self);
}

/* One host reduces, the other gathers: operations of different communicators. */
MULTI_TEST(hosts_that_call_different_operations, 4, 20)
{
    member self = join("gloo", TURNS, rank, world_size, port);
    static float data[100];
    static float memory[400];
    tddp_buffer parts[4];
    tddp_op op = sum_of(data, 100);
    if (rank % 2 == 1) {
        for (int each = 0; each < 4; each++) {
            parts[each] = buffer_of(memory + 100 * each, 100, TDDP_FLOAT32);
        }
        op = (tddp_op){.kind = TDDP_OP_GATHER,
                       .input = buffer_of(data, 100, TDDP_FLOAT32),
                       .output = buffer_of(NULL, 0, TDDP_FLOAT32),
                       .output_parts = rank == 1 ? parts : NULL,
                       .root = 1};
    }
    tddp_status status = run(&self, &op);
    check_error(status, "all_reduce (operation 1, 100 elements of float32, sum)",
                "gather (operation 1");
    if (rank < 2) {
        CHECK_STATUS(status, TDDP_MISMATCH);
    }
    part(&self);
}

/* Rank 0 expects other sizes from the ranks of the other host than they send. */
MULTI_TEST(parts_of_another_host_that_differ, 4, 20)
{
    member self = join("gloo", HALVES, rank, world_size, port);
    static int32_t local[8];
    static int32_t memory[64];
    tddp_buffer parts[4];
    for (int each = 0; each < 4; each++) {
        /* In sum they agree. */
        size_t count = rank >= 2 || each < 2 ? 4 : each == 2 ? 3 : 5;
        parts[each] = buffer_of(memory + 8 * each, count, TDDP_INT32);
    }
    tddp_op op = {.kind = TDDP_OP_ALL_GATHER,
                  .input = buffer_of(local, 4, TDDP_INT32),
                  .output = buffer_of(NULL, 16, TDDP_INT32),
                  .output_parts = parts};
    tddp_status status = run(&self, &op);
    check_error(status,
                "differ on the sizes of the parts in all_gather (operation 1, elements of int32)",
                "");
    if (rank % 2 == 0) {
        CHECK_STATUS(status, TDDP_MISMATCH);
    }
    part(&self);
}

/* --- ends ------------------------------------------------------------------------------------ */

/* Only ranks of its host wait directly for `dying`. */
static void lose(int dying, const int *hosts, int rank, int size, int port)
{
    member self = join("gloo", hosts, rank, size, port);
    static float data[4000];
    tddp_op op = sum_of(data, 4000);
    CHECK_OK(run(&self, &op));
    if (rank == dying) {
        for (int other = 0; other < size; other++) {
            if (other != dying) {
                CHECK_AWAIT_BLOCKED(RANK + other);
            }
        }
        die();
    }
    tddp_op next = sum_of(data, 4000);
    check_will_block(RANK + rank);
    tddp_status status = run(&self, &next);
    CHECK(status == TDDP_PEER_LOST || status == TDDP_GROUP_FAILED);
    CHECK_CONTAINS(tddp_error_message(), "rank ");
    if (hosts[rank] == hosts[dying]) {
        char name[16];
        snprintf(name, sizeof name, "rank %d", dying);
        CHECK_STATUS(status, TDDP_PEER_LOST);
        CHECK_CONTAINS(tddp_error_message(), name);
    }
    part(&self);
}

MULTI_TEST(a_leader_of_another_host_dies, 4, 20)
{
    lose(2, HALVES, rank, world_size, port);
}

MULTI_TEST(a_rank_of_another_host_that_is_no_leader_dies, 5, 20)
{
    static const int hosts[] = {0, 0, 1, 1, 1};
    lose(4, hosts, rank, world_size, port);
}

MULTI_TEST(a_rank_of_this_host_dies, 4, 20)
{
    lose(3, TURNS, rank, world_size, port);
}

MULTI_TEST(a_late_rank_is_reported, 4, 20)
{
    member self = join("gloo", HALVES, rank, world_size, port);
    self.timeout_ms = rank == 2 ? 300 : TIMEOUT_MS;
    tddp_op op = {.kind = TDDP_OP_BARRIER};
    if (rank == 3) {
        CHECK_AWAIT(NOTIFIED, 3);
    } else {
        tddp_status status = run(&self, &op);
        if (rank == 2) {
            CHECK_STATUS(status, TDDP_TIMEOUT);
            CHECK_CONTAINS(tddp_error_message(), "rank 3");
        } else {
            CHECK(status == TDDP_PEER_LOST || status == TDDP_GROUP_FAILED);
        }
        check_signal(NOTIFIED);
    }
    part(&self);
}

MULTI_TEST(an_abort_ends_an_operation, 4, 20)
{
    member self = join("gloo", HALVES, rank, world_size, port);
    self.table->abort(self.context);
    tddp_op op = {.kind = TDDP_OP_BARRIER};
    /* Its own end, or that of another rank. */
    tddp_status status = run(&self, &op);
    CHECK(status == TDDP_GROUP_FAILED || status == TDDP_PEER_LOST);
    part(&self);
}

/* --- whether there is shared memory ---------------------------------------------------------- */

static const char *logged(void)
{
    static char text[1024];
    return text;
}

static void capture_line(tddp_log_level level, const char *room, const char *text, void *data)
{
    (void)level;
    (void)data;
    if (strcmp(room, "backend") == 0) {
        snprintf((char *)(uintptr_t)logged(), 1024, "%s", text);
    }
}

static void check_without(const int *hosts, const char *setting, int rank, int size, int port,
                          const char *why)
{
    member self;
    tddp_log_set_sink(capture_line, NULL);
    CHECK(setenv("TDDP_SHM", setting, 1) == 0);
    CHECK_OK(try_join(&self, "gloo", hosts, rank, size, port));
    CHECK_TEXT(self.table->name, "gloo");
    if (why && rank == 0) {
        CHECK_CONTAINS(logged(), "group \"made-up\" goes without shared memory");
        CHECK_CONTAINS(logged(), why);
    } else {
        CHECK_TEXT(logged(), "");
    }
    float data[3] = {1, 2, 3};
    tddp_op op = sum_of(data, 3);
    CHECK_OK(run(&self, &op));
    CHECK_DOUBLE(data[2], 3 * size, 0);
    part(&self);
}

MULTI_TEST(a_rank_without_shared_memory_turns_it_off_for_all, 4, 20)
{
    check_without(HALVES, rank == 3 ? "0" : "1", rank, world_size, port, "rank 3");
}

MULTI_TEST(a_rank_without_shared_memory_on_one_host, 2, 20)
{
    static const int one[] = {0, 0};
    check_without(one, rank == 1 ? "0" : "1", rank, world_size, port, "rank 1");
}

MULTI_TEST(all_ranks_without_shared_memory, 2, 20)
{
    static const int one[] = {0, 0};
    check_without(one, "0", rank, world_size, port, NULL);
}

MULTI_TEST(ranks_alone_on_their_hosts_have_none, 2, 20)
{
    static const int alone[] = {0, 1};
    check_without(alone, "1", rank, world_size, port, NULL);
}

MULTI_TEST(an_invalid_setting_is_reported_to_all, 3, 20)
{
    static const int hosts[] = {0, 0, 1};
    member self;
    CHECK(setenv("TDDP_SHM", rank == 1 ? "yes" : "1", 1) == 0);
    CHECK_STATUS(try_join(&self, "gloo", hosts, rank, world_size, port), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "TDDP_SHM=\"yes\": expected 1 or 0");
    CHECK_CONTAINS(tddp_error_message(), "rank 1");
    part(&self);
}

MULTI_TEST(one_host_has_shared_memory_alone, 3, 20)
{
    static const int hosts[] = {0, 0, 0};
    member self;
    CHECK(setenv("TDDP_SHM", "1", 1) == 0);
    CHECK_OK(try_join(&self, "gloo", hosts, rank, world_size, port));
    CHECK_TEXT(self.table->name, "shm");
    float data[3] = {1, 2, 3};
    tddp_op op = sum_of(data, 3);
    CHECK_OK(run(&self, &op));
    CHECK_DOUBLE(data[2], 9, 0);
    part(&self);
}
