/* Groups over the `fake` backend: results, argument checks, order, shutdown. */
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "events.h"
#include "ranks.h"

static void every_collective(int rank, int world_size, tddp_store *store, void *data)
{
    (void)data;
    tddp_group *group = make_group("fake", rank, world_size, store, 20000);
    float x[3] = {(float)rank, 1, -2};
    CHECK_OK(tddp_all_reduce(group, buffer_of(x, 3, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0, NULL));
    CHECK_DOUBLE(x[0], world_size * (world_size - 1) / 2, 0);
    CHECK_DOUBLE(x[2], -2 * world_size, 0);
    double y = rank + 1;
    CHECK_OK(tddp_all_reduce(group, buffer_of(&y, 1, TDDP_FLOAT64), TDDP_REDUCE_AVG, 0, NULL));
    CHECK_DOUBLE(y, (world_size + 1) / 2.0, 1e-15);
    y = rank + 1;
    CHECK_OK(
        tddp_all_reduce(group, buffer_of(&y, 1, TDDP_FLOAT64), TDDP_REDUCE_PREMUL_SUM, 3, NULL));
    CHECK_DOUBLE(y, 3 * world_size * (world_size + 1) / 2.0, 1e-12);
    int64_t b[2] = {rank, rank * 10};
    CHECK_OK(tddp_broadcast(group, buffer_of(b, 2, TDDP_INT64), world_size - 1, NULL));
    CHECK_INT(b[1], (world_size - 1) * 10);
    int32_t mine[2] = {rank, -rank};
    int32_t all[2 * MAX_RANKS];
    size_t world = (size_t)world_size;
    CHECK_OK(tddp_all_gather(group, buffer_of(mine, 2, TDDP_INT32),
                             buffer_of(all, 2 * world, TDDP_INT32), NULL));
    for (int i = 0; i < world_size; i++) {
        CHECK_INT(all[2 * i], i);
        CHECK_INT(all[2 * i + 1], -i);
    }
    int32_t part[2];
    CHECK_OK(tddp_reduce_scatter(group, buffer_of(all, 2 * world, TDDP_INT32),
                                 buffer_of(part, 2, TDDP_INT32), TDDP_REDUCE_SUM, 0, NULL));
    CHECK_INT(part[0], rank * world_size);
    CHECK_INT(part[1], -rank * world_size);
    CHECK_OK(tddp_barrier(group, NULL));
    CHECK_OK(tddp_all_reduce(group, buffer_of(NULL, 0, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0, NULL));
    tddp_group_shutdown(group, 1000);
    tddp_group_release(group);
}

TEST(collectives_on_one_to_four_ranks)
{
    for (int ranks = 1; ranks <= 4; ranks++) {
        run_ranks(ranks, every_collective, NULL);
    }
}

TEST(attributes_of_a_group)
{
    tddp_store *store;
    tddp_group *group = lone_group(NULL, 5000, &store);
    CHECK_INT(tddp_group_rank(group), 0);
    CHECK_INT(tddp_group_world_size(group), 1);
    CHECK_TEXT(tddp_group_name(group), "default_pg");
    CHECK_TEXT(tddp_group_backend(group), "fake");
    CHECK_INT(tddp_group_timeout(group), 5000);
    CHECK_OK(tddp_group_set_timeout(group, 700));
    CHECK_INT(tddp_group_timeout(group), 700);
    CHECK_STATUS(tddp_group_set_timeout(group, 0), TDDP_INVALID_ARGUMENT);
    tddp_store *part = tddp_group_store(group);
    CHECK_OK(tddp_store_set(part, (tddp_slice){"mine", 4}, (tddp_slice){"1", 1}, NULL));
    tddp_store_release(part);
    CHECK_INT(tddp_group_closed(group), 0);
    tddp_group_shutdown(group, 0);
    CHECK_INT(tddp_group_closed(group), 1);
    CHECK(tddp_group_store(group) == NULL);
    drop(group, store);
}

static void expect_create(tddp_group_opts opts, tddp_status status, const char *text)
{
    tddp_group *group = NULL;
    CHECK_STATUS(tddp_group_create(&opts, NULL, &group), status);
    CHECK_CONTAINS(tddp_error_message(), text);
    CHECK(group == NULL);
}

TEST(options_are_checked)
{
    tddp_store *store;
    CHECK_OK(tddp_hash_store_create(5000, &store));
    tddp_group_opts good = TDDP_GROUP_OPTS_INIT;
    good.backend = "fake";
    good.store = store;
    tddp_group_opts opts = good;
    opts.rank = 1;
    expect_create(opts, TDDP_INVALID_ARGUMENT, "rank 1: expected 0 to 0");
    opts = good;
    opts.world_size = 0;
    expect_create(opts, TDDP_INVALID_ARGUMENT, "world_size 0");
    opts = good;
    opts.store = NULL;
    expect_create(opts, TDDP_INVALID_ARGUMENT, "store is NULL");
    opts = good;
    opts.backend = NULL;
    expect_create(opts, TDDP_INVALID_ARGUMENT, "backend is NULL");
    opts = good;
    opts.backend = "none-such";
    expect_create(opts, TDDP_UNAVAILABLE, "no backend \"none-such\"");
    opts = good;
    opts.name = "";
    expect_create(opts, TDDP_INVALID_ARGUMENT, "name is empty");
    opts = good;
    opts.size = 8;
    expect_create(opts, TDDP_INVALID_ARGUMENT, "TDDP_GROUP_OPTS_INIT");
    tddp_group *group;
    CHECK_STATUS(tddp_group_create(NULL, NULL, &group), TDDP_INVALID_ARGUMENT);
    tddp_store_release(store);
}

TEST(options_of_newer_programs_are_accepted)
{
    struct {
        tddp_group_opts known;
        int64_t unknown;
    } opts;
    tddp_store *store;
    tddp_group *group;
    CHECK_OK(tddp_hash_store_create(5000, &store));
    tddp_group_opts_init(&opts.known, sizeof opts);
    CHECK_INT(opts.known.size, sizeof opts);
    CHECK_INT(opts.known.world_size, 1);
    CHECK_INT(opts.known.timeout_ms, TDDP_GROUP_DEFAULT_TIMEOUT_MS);
    CHECK_INT(opts.known.device_index, -1);
    opts.known.backend = "fake";
    opts.known.store = store;
    CHECK_OK(tddp_group_create(&opts.known, NULL, &group));
    tddp_group_release(group);
    opts.unknown = 1;
    CHECK_STATUS(tddp_group_create(&opts.known, NULL, &group), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "TDDP_GROUP_OPTS_INIT");
    tddp_store_release(store);
}

TEST(arguments_of_operations_are_checked)
{
    tddp_store *store;
    tddp_group *group = lone_group(NULL, 5000, &store);
    float x[4] = {1, 2, 3, 4};
    tddp_buffer good = buffer_of(x, 4, TDDP_FLOAT32);
    tddp_work *work = NULL;
    CHECK_STATUS(tddp_all_reduce(NULL, good, TDDP_REDUCE_SUM, 0, &work), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "all_reduce: group is NULL");
    CHECK_STATUS(tddp_all_reduce(group, buffer_of(x, 4, (tddp_dtype)40), TDDP_REDUCE_SUM, 0, &work),
                 TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "dtype 40: expected 0 to 13");
    CHECK_STATUS(tddp_broadcast(group, buffer_of(NULL, 4, TDDP_FLOAT32), 0, &work),
                 TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "is NULL, but has 4 elements");
    CHECK_STATUS(tddp_broadcast(group, good, 1, &work), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "root 1: expected 0 to 0");
    CHECK_STATUS(tddp_broadcast(group, buffer_of(x, SIZE_MAX / 2, TDDP_FLOAT64), 0, &work),
                 TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_all_reduce(group, buffer_of(x, 4, TDDP_INT32), TDDP_REDUCE_AVG, 0, &work),
                 TDDP_UNSUPPORTED);
    CHECK_STATUS(tddp_all_reduce(group, good, (tddp_reduce_op)99, 0, &work), TDDP_INVALID_ARGUMENT);
    tddp_buffer gpu = good;
    gpu.device_type = TDDP_CUDA;
    /* Where there is CUDA, its memory is copied. */
    CHECK_INT(setenv("TDDP_CUDART_LIBRARY", "/nonexistent/libcudart.so", 1), 0);
    CHECK_STATUS(tddp_all_reduce(group, gpu, TDDP_REDUCE_SUM, 0, &work), TDDP_UNSUPPORTED);
    CHECK_CONTAINS(tddp_error_message(), "takes no cuda memory");
    CHECK_STATUS(tddp_all_gather(group, buffer_of(x, 1, TDDP_FLOAT32),
                                 buffer_of(x + 2, 2, TDDP_FLOAT32), &work),
                 TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "output 2: expected 1 times as many");
    CHECK_STATUS(tddp_all_gather(group, buffer_of(x, 1, TDDP_FLOAT32),
                                 buffer_of(x + 2, 1, TDDP_INT32), &work),
                 TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_reduce_scatter(group, buffer_of(x, 2, TDDP_FLOAT32),
                                     buffer_of(x + 1, 2, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0, &work),
                 TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "overlap");
    CHECK_OK(tddp_reduce_scatter(group, buffer_of(x, 2, TDDP_FLOAT32),
                                 buffer_of(x, 2, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0, NULL));
    CHECK(work == NULL);
    drop(group, store);
}

typedef struct order {
    int count;
    uint64_t seen[16];
    tddp_work *works[16];
} order;

static void note_order(void *data)
{
    order *self = data;
    /* Only the progress thread and, for works that are done, this one come here. */
    self->seen[self->count] = tddp_work_sequence(self->works[self->count]);
    self->count++;
}

static void many_in_order(int rank, int world_size, tddp_store *store, void *data)
{
    (void)data;
    tddp_group *group = make_group("fake", rank, world_size, store, 20000);
    order seen = {0};
    int32_t x[16];
    for (int i = 0; i < 16; i++) {
        x[i] = rank + i;
        CHECK_OK(tddp_all_reduce(group, buffer_of(&x[i], 1, TDDP_INT32), TDDP_REDUCE_MAX, 0,
                                 &seen.works[i]));
        CHECK_INT(tddp_work_sequence(seen.works[i]), i + 1);
        CHECK_INT(tddp_work_kind(seen.works[i]), TDDP_OP_ALL_REDUCE);
    }
    CHECK_OK(tddp_work_wait(seen.works[15], NULL));
    for (int i = 0; i < 16; i++) {
        CHECK_INT(tddp_work_completed(seen.works[i]), 1);
        CHECK_OK(tddp_work_status(seen.works[i]));
        CHECK_INT(x[i], world_size - 1 + i);
        CHECK_OK(tddp_work_on_done(seen.works[i], note_order, &seen));
        CHECK_STATUS(tddp_work_on_done(seen.works[i], note_order, &seen), TDDP_INVALID_ARGUMENT);
        CHECK_INT(seen.seen[i], i + 1);
    }
    for (int i = 0; i < 16; i++) {
        tddp_work_release(seen.works[i]);
    }
    tddp_group_release(group);
}

TEST(works_finish_in_order)
{
    run_ranks(3, many_in_order, NULL);
}

TEST(shutdown_twice_with_works_still_held)
{
    tddp_store *store;
    tddp_group *group = lone_group(NULL, 5000, &store);
    float x = 1;
    tddp_work *work;
    CHECK_OK(tddp_all_reduce(group, buffer_of(&x, 1, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0, &work));
    tddp_group_retain(group);
    tddp_group_shutdown(group, 1000);
    tddp_group_shutdown(group, 1000);
    tddp_group_release(group);
    CHECK_STATUS(tddp_barrier(group, NULL), TDDP_GROUP_CLOSED);
    CHECK_CONTAINS(tddp_error_message(), "is destroyed");
    drop(group, store);
    CHECK_OK(tddp_work_wait(work, NULL));
    tddp_work_release(work);
    tddp_group_release(NULL);
    tddp_group_shutdown(NULL, 0);
    tddp_work_release(NULL);
}

static void *shut_down(void *group)
{
    tddp_group_shutdown(group, 1000);
    CHECK_INT(tddp_group_closed(group), 1);
    return NULL;
}

TEST(shutdown_from_two_threads)
{
    tddp_store *store;
    tddp_group *group = lone_group(NULL, 5000, &store);
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) {
        CHECK_INT(pthread_create(&threads[i], NULL, shut_down, group), 0);
    }
    for (int i = 0; i < 2; i++) {
        CHECK_INT(pthread_join(threads[i], NULL), 0);
    }
    drop(group, store);
}

static void twice(int rank, int world_size, tddp_store *store, void *data)
{
    (void)data;
    for (int i = 0; i < 3; i++) {
        tddp_group *group = make_group("fake", rank, world_size, store, 20000);
        int32_t x = rank + i;
        CHECK_OK(tddp_all_reduce(group, buffer_of(&x, 1, TDDP_INT32), TDDP_REDUCE_MAX, 0, NULL));
        CHECK_INT(x, world_size - 1 + i);
        tddp_group_release(group);
    }
}

TEST(a_name_may_be_reused_after_the_shutdown)
{
    run_ranks(3, twice, NULL);
}

TEST(two_processes_with_one_rank_are_refused)
{
    tddp_store *store;
    tddp_group *group = lone_group(NULL, 5000, &store);
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    opts.backend = "fake";
    opts.store = store;
    expect_create(opts, TDDP_INVALID_ARGUMENT, "rank 0 of group \"default_pg\" is taken");
    opts.name = "another";
    tddp_group *other;
    CHECK_OK(tddp_group_create(&opts, NULL, &other));
    tddp_group_release(other);
    drop(group, store);
}

TEST(missing_ranks_are_named)
{
    tddp_store *store;
    CHECK_OK(tddp_hash_store_create(5000, &store));
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    opts.backend = "fake";
    opts.store = store;
    opts.rank = 1;
    opts.world_size = 3;
    opts.timeout_ms = 150;
    expect_create(opts, TDDP_TIMEOUT, "in vain for rank(s) 0, 2 of 3");
    /* The rank may be claimed again. */
    expect_create(opts, TDDP_TIMEOUT, "in vain for rank(s) 0, 2 of 3");
    tddp_cancel *cancel;
    CHECK_OK(tddp_cancel_create(&cancel));
    tddp_cancel_trigger(cancel);
    tddp_wait wait = {10000, cancel};
    tddp_group *group;
    CHECK_STATUS(tddp_group_create(&opts, &wait, &group), TDDP_CANCELED);
    tddp_cancel_free(cancel);
    tddp_store_release(store);
}

TEST(a_forked_child_only_frees_memory)
{
    tddp_store *store;
    tddp_group *group = lone_group(NULL, 5000, &store);
    setenv("TDDP_FAKE", "", 1);
    float x = 1;
    tddp_work *work;
    CHECK_OK(tddp_all_reduce(group, buffer_of(&x, 1, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0, &work));
    CHECK_OK(tddp_work_wait(work, NULL));
    pid_t child = CHECK_FORK();
    if (child == 0) {
        CHECK_STATUS(tddp_barrier(group, NULL), TDDP_FORKED);
        CHECK_CONTAINS(tddp_error_message(), "was made by process");
        CHECK_INT(tddp_group_closed(group), 1);
        CHECK_OK(tddp_work_wait(work, NULL));
        tddp_group_shutdown(group, 1000);
        _exit(0);
    }
    int status = -1;
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK_INT(status, 0);
    CHECK_OK(tddp_barrier(group, NULL));
    tddp_work_release(work);
    drop(group, store);
}
