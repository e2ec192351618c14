/* Iterations: what is unsharded when, what is gathered ahead, and where gradients end. */
#include "model.h"

static void layout(int rank, int world_size, int port)
{
    model mine;
    begin(&mine, rank, world_size, port);
    for (size_t u = 0; u < UNITS; u++) {
        size_t count;
        size_t offset;
        tddp_flat_memory *memory = NULL;
        const tddp_flat_slice *slices = tddp_sharder_slices(mine.sharder, u, &count);
        const tddp_buffer shard = tddp_sharder_shard(mine.sharder, u, &offset, &memory);
        CHECK_INT(count, PARAMS);
        CHECK_INT(slices[1].offset, 16);
        CHECK_INT(slices[2].offset, 64);
        /* 80 elements, in multiples of 16 */
        CHECK_INT(shard.count, world_size == 1 ? 80 : world_size == 2 ? 48 : 32);
        CHECK_INT(offset, (size_t)rank * shard.count);
        CHECK_INT(tddp_sharder_unsharded(mine.sharder, u), 0);
        tddp_flat_memory_release(memory);
    }
    end(&mine);
}

static void iterations(int rank, int world_size, int port)
{
    model mine;
    begin(&mine, rank, world_size, port);
    for (int step = 0; step < 3; step++) {
        run_forward(&mine, 1);
        run_backward(&mine, (float)(rank + 1));
    }
    run_forward(&mine, 0);
    for (size_t u = 0; u < UNITS; u++) {
        CHECK_INT(mine.reduced[u], 3);
        check_sums(&mine, u, 3 * (world_size + 1) / 2.0);
        CHECK_INT(tddp_sharder_unsharded(mine.sharder, u), 0);
    }
    end(&mine);
}

static const struct {
    int ranks;
} worlds[] = {{1}, {2}, {3}, {4}};

MULTI_TEST(layout_of_1, 1, 60)
{
    (void)worlds;
    layout(rank, world_size, port);
}
MULTI_TEST(layout_of_2, 2, 60)
{
    layout(rank, world_size, port);
}
MULTI_TEST(layout_of_3, 3, 60)
{
    layout(rank, world_size, port);
}
MULTI_TEST(layout_of_4, 4, 60)
{
    layout(rank, world_size, port);
}
MULTI_TEST(iterations_of_1, 1, 60)
{
    iterations(rank, world_size, port);
}
MULTI_TEST(iterations_of_2, 2, 60)
{
    iterations(rank, world_size, port);
}
MULTI_TEST(iterations_of_3, 3, 60)
{
    iterations(rank, world_size, port);
}
MULTI_TEST(iterations_of_4, 4, 60)
{
    iterations(rank, world_size, port);
}

static size_t in_memory(const model *mine)
{
    size_t count = 0;
    for (size_t u = 0; u < UNITS; u++) {
        count += mine->sharder->units[u].state != TDDP_SHARDED;
    }
    return count;
}

/* From the second iteration on the next unit is on its way while one runs, beside the model's own
 * parameters, and never another one. */
MULTI_TEST(one_unit_is_gathered_ahead, 2, 60)
{
    model mine;
    begin(&mine, rank, world_size, port);
    run_forward(&mine, 1);
    run_backward(&mine, 1);
    const size_t root = UNITS - 1;
    tddp_sharder_begin_forward(mine.sharder);
    CHECK_OK(tddp_sharder_before_forward(mine.sharder, root, NULL));
    CHECK(mine.sharder->units[0].state == TDDP_GATHERING);
    for (size_t u = 0; u < root; u++) {
        CHECK_OK(tddp_sharder_before_forward(mine.sharder, u, NULL));
        CHECK(u + 1 == root || mine.sharder->units[u + 1].state == TDDP_GATHERING);
        CHECK_INT(in_memory(&mine), u + 1 < root ? 3 : 2);
        tddp_sharder_after_forward(mine.sharder, u, 1);
    }
    tddp_sharder_after_forward(mine.sharder, root, 1);
    tddp_sharder_end_forward(mine.sharder);
    CHECK_INT(in_memory(&mine), 1);
    tddp_sharder_begin_backward(mine.sharder);
    CHECK_OK(tddp_sharder_before_backward(mine.sharder, root, NULL));
    for (size_t u = root; u-- > 0;) {
        CHECK(mine.sharder->units[u].state == TDDP_GATHERING);
        CHECK_OK(tddp_sharder_before_backward(mine.sharder, u, NULL));
        CHECK(u == 0 || mine.sharder->units[u - 1].state == TDDP_GATHERING);
        CHECK_INT(in_memory(&mine), u > 0 ? 3 : 2);
        tddp_sharder_after_backward(mine.sharder, u);
    }
    tddp_sharder_after_backward(mine.sharder, root);
    CHECK_INT(in_memory(&mine), 0);
    CHECK_OK(tddp_sharder_finish(mine.sharder, NULL));
    end(&mine);
}

/* Whatever each rank has freed meanwhile: ranks would gather units in other orders. */
MULTI_TEST(ranks_that_free_units_late_gather_the_same_ahead, 2, 60)
{
    model mine;
    begin(&mine, rank, world_size, port);
    run_forward(&mine, 1);
    tddp_sharder_begin_backward(mine.sharder);
    for (size_t k = 0; k < UNITS; k++) {
        const size_t u = UNITS - 1 - k;
        CHECK_OK(tddp_sharder_before_backward(mine.sharder, u, NULL));
        CHECK(u == 0 || mine.sharder->units[u - 1].state == TDDP_GATHERING);
        if (rank == 0) {
            tddp_sharder_after_backward(mine.sharder, u);
        }
    }
    for (size_t u = 0; u < UNITS; u++) {
        tddp_sharder_after_backward(mine.sharder, u);
    }
    CHECK_OK(tddp_sharder_finish(mine.sharder, NULL));
    end(&mine);
}

/* A program that goes another way than in the last iteration. */
MULTI_TEST(what_is_gathered_ahead_and_not_used_is_freed, 2, 60)
{
    model mine;
    begin(&mine, rank, world_size, port);
    run_forward(&mine, 0);
    tddp_sharder_begin_forward(mine.sharder);
    CHECK_OK(tddp_sharder_before_forward(mine.sharder, UNITS - 1, NULL));
    CHECK(mine.sharder->units[0].state == TDDP_GATHERING);
    CHECK_OK(tddp_sharder_before_forward(mine.sharder, 2, NULL));
    check_values(&mine, 2);
    tddp_sharder_after_forward(mine.sharder, 2, 0);
    tddp_sharder_after_forward(mine.sharder, UNITS - 1, 0);
    tddp_sharder_end_forward(mine.sharder);
    CHECK_INT(in_memory(&mine), 0);
    end(&mine);
}

/* Memory is that of two units and two gradients, and of the shards that are on their way. */
MULTI_TEST(blocks_are_shared, 2, 60)
{
    model mine;
    begin(&mine, rank, world_size, port);
    for (int step = 0; step < 4; step++) {
        run_forward(&mine, 1);
        run_backward(&mine, 1);
    }
    const tddp_sharder_bytes bytes = tddp_sharder_memory(mine.sharder);
    const size_t unit = 96 * sizeof(float);
    CHECK_INT(bytes.shards, UNITS * 48 * sizeof(float));
    CHECK(bytes.peak_unsharded <= 6 * unit);
    CHECK(bytes.unsharded <= bytes.peak_unsharded);
    end(&mine);
}

/* Within an iteration it is gathered once; the next one has the values of its time. */
MULTI_TEST(a_kept_unit_is_gathered_again_in_the_next_iteration, 2, 60)
{
    model mine;
    begin(&mine, rank, world_size, port);
    const size_t root = UNITS - 1;
    size_t offset;
    const tddp_buffer shard = tddp_sharder_shard(mine.sharder, root, &offset, NULL);
    tddp_sharder_begin_forward(mine.sharder);
    CHECK_OK(tddp_sharder_before_forward(mine.sharder, 0, NULL));
    CHECK_OK(tddp_sharder_before_forward(mine.sharder, root, NULL));
    tddp_sharder_after_forward(mine.sharder, root, 1);
    for (size_t i = 0; i < shard.count; i++) {
        ((float *)shard.data)[i] = -1;
    }
    CHECK_OK(tddp_sharder_before_forward(mine.sharder, root, NULL));
    check_values(&mine, root);
    tddp_sharder_after_forward(mine.sharder, root, 1);
    tddp_sharder_after_forward(mine.sharder, 0, 1);
    tddp_sharder_end_forward(mine.sharder);
    CHECK_INT(tddp_sharder_unsharded(mine.sharder, root), 1);
    tddp_sharder_begin_forward(mine.sharder);
    CHECK_OK(tddp_sharder_before_forward(mine.sharder, root, NULL));
    CHECK_DOUBLE(mine.placed[root][0], -1, 0);
    CHECK_DOUBLE(mine.placed[root][66], -1, 0);
    tddp_sharder_after_forward(mine.sharder, root, 0);
    end(&mine);
}

MULTI_TEST(a_unit_in_another_dtype, 2, 60)
{
    model mine = {.group = join("shm", rank, world_size, port)};
    open_model(&mine);
    add_unit(&mine, 0, mine.group, NULL, 1, TDDP_FLOAT64);
    CHECK_OK(tddp_sharder_before_forward(mine.sharder, 0, NULL));
    CHECK(mine.placed[0] != NULL);
    for (size_t i = 0; i < 96; i++) {
        CHECK_DOUBLE(((double *)mine.placed[0])[i], value_of(0, i), 0);
    }
    tddp_sharder_after_forward(mine.sharder, 0, 0);
    end(&mine);
}

/* --- replicas -------------------------------------------------------------------------------- */

/* Two by two: shards in rows, replicas in columns. */
MULTI_TEST(shards_with_replicas, 4, 60)
{
    const int row = rank / 2;
    const int column = rank % 2;
    char name[16];
    (void)snprintf(name, sizeof name, "row %d", row);
    model mine = {.group = join_as("shm", name, column, 2, port)};
    (void)snprintf(name, sizeof name, "column %d", column);
    tddp_group *replicas = join_as("shm", name, row, 2, port);
    open_model(&mine);
    for (size_t u = 0; u < UNITS; u++) {
        add_unit(&mine, u, mine.group, replicas, u + 1 < UNITS, TDDP_FLOAT32);
    }
    run_forward(&mine, 1);
    run_backward(&mine, (float)(rank + 1));
    for (size_t u = 0; u < UNITS; u++) {
        check_sums(&mine, u, 2.5);
    }
    tddp_sharder_free(mine.sharder);
    leave(replicas);
    leave(mine.group);
}

/* Nothing is divided: the shard is the unit, and costs no memory beside it. */
MULTI_TEST(replicas_alone, 3, 60)
{
    model mine = {.group = join("shm", rank, world_size, port)};
    open_model(&mine);
    add_unit(&mine, 0, NULL, mine.group, 0, TDDP_FLOAT32);
    CHECK_OK(tddp_sharder_before_forward(mine.sharder, 0, NULL));
    check_values(&mine, 0);
    size_t offset;
    CHECK(tddp_sharder_shard(mine.sharder, 0, &offset, NULL).data == (void *)mine.placed[0]);
    tddp_sharder_after_forward(mine.sharder, 0, 1);
    CHECK_INT(tddp_sharder_memory(mine.sharder).unsharded, 0);
    tddp_sharder_begin_backward(mine.sharder);
    CHECK_OK(tddp_sharder_before_backward(mine.sharder, 0, NULL));
    void *data = NULL;
    int fresh = 0;
    CHECK_OK(tddp_sharder_gradient(mine.sharder, 0, &data, &fresh));
    CHECK_INT(fresh, 1);
    for (size_t i = 0; i < mine.shard_count[0]; i++) {
        ((float *)data)[i] = (float)rank * (float)i;
    }
    CHECK_OK(tddp_sharder_reduce(mine.sharder, 0, NULL));
    tddp_sharder_after_backward(mine.sharder, 0);
    CHECK_OK(tddp_sharder_finish(mine.sharder, NULL));
    check_sums(&mine, 0, 1);
    end(&mine);
}

/* --- parts ----------------------------------------------------------------------------------- */

MULTI_TEST(parts_are_merged, 2, 60)
{
    model mine = {.group = join("shm", rank, world_size, port)};
    open_model(&mine);
    for (size_t u = 0; u < 2; u++) {
        add_unit(&mine, u, mine.group, NULL, 1, TDDP_FLOAT32);
    }
    tddp_sharder *into = mine.sharder;
    open_model(&mine);
    tddp_sharder *part = mine.sharder;
    for (size_t u = 0; u < 3; u++) {
        add_unit(&mine, u, mine.group, NULL, 1, TDDP_FLOAT32);
    }
    CHECK_OK(tddp_sharder_merge(into, part));
    tddp_sharder_free(part);
    mine.sharder = into;
    for (size_t u = 0; u < 5; u++) {
        CHECK_OK(tddp_sharder_before_forward(into, u, NULL));
        CHECK_DOUBLE(mine.placed[u][64], value_of(u < 2 ? u : u - 2, 64), 0);
        tddp_sharder *other = NULL;
        tddp_sharder_ops ops = {sizeof ops, &mine, place, cast_shard, reduced, NULL, NULL, NULL};
        CHECK_OK(tddp_sharder_create(&ops, &other));
        CHECK_STATUS(tddp_sharder_merge(into, other), TDDP_INVALID_ARGUMENT);
        tddp_sharder_free(other);
        tddp_sharder_after_forward(into, u, 0);
    }
    end(&mine);
}
