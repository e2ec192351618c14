/* What goes wrong: ranks that differ, ranks that end, calls that are abandoned. */
#include <signal.h>
#include <sys/wait.h>

#include "model.h"

static void check_mismatch(model *mine, const tddp_unit_opts *opts, const char *text)
{
    CHECK_STATUS(tddp_sharder_add(mine->sharder, opts, NULL), TDDP_MISMATCH);
    CHECK_CONTAINS(tddp_error_message(), text);
}

/* All ranks report the first difference, and can use the group afterwards. */
MULTI_TEST(ranks_whose_units_differ, 3, 60)
{
    model mine = {.group = join("shm", rank, world_size, port)};
    open_model(&mine);
    const int last = rank == world_size - 1;
    int64_t dims[PARAMS];
    tddp_param params[PARAMS];
    unit_params(0, dims, params);
    tddp_unit_opts opts = TDDP_UNIT_OPTS_INIT;
    opts.name = "layer";
    opts.shard_group = mine.group;
    opts.params = params;
    opts.param_count = PARAMS;
    dims[1] = 40 + last; /* as many elements once they are padded */
    check_mismatch(&mine, &opts,
                   "parameter \"b\" of unit \"layer\" (number 1) is float32 [40] on rank 0, but "
                   "float32 [41] on rank 2: every rank must build the same model");
    dims[1] = 40;
    params[2].name = last ? "d" : "c";
    check_mismatch(
        &mine, &opts,
        "\"c\" of unit \"layer\" (number 2) is float32 [3] on rank 0, but float32 [3] on "
        "rank 2 (\"d\" there)");
    params[2].name = "c";
    opts.param_count = PARAMS - (size_t)last;
    check_mismatch(
        &mine, &opts,
        "rank 0 has 3 parameters of unit \"layer\", rank 2 has 2: \"c\" (number 2) is the "
        "first that only rank 0 has");
    opts.param_count = PARAMS;
    opts.reduce_dtype = last ? TDDP_BFLOAT16 : TDDP_FLOAT32;
    check_mismatch(&mine, &opts,
                   "rank 0 has unit \"layer\", gathered as float32, reduced as float32, resharded "
                   "after forward; rank 2 has unit \"layer\", gathered as float32, reduced as "
                   "bfloat16, resharded after forward: every rank must give the same options");
    opts.reduce_dtype = TDDP_FLOAT32;
    CHECK_OK(tddp_sharder_add(mine.sharder, &opts, NULL));
    end(&mine);
}

TEST(wrong_arguments)
{
    model mine = {.group = join("shm", rank, world_size, port)};
    open_model(&mine);
    int64_t dims[PARAMS];
    tddp_param params[PARAMS];
    unit_params(0, dims, params);
    tddp_unit_opts opts = TDDP_UNIT_OPTS_INIT;
    opts.name = "layer";
    opts.shard_group = mine.group;
    CHECK_STATUS(tddp_sharder_add(mine.sharder, &opts, NULL), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "no parameter");
    opts.params = params;
    opts.param_count = PARAMS;
    opts.shard_group = NULL;
    CHECK_STATUS(tddp_sharder_add(mine.sharder, &opts, NULL), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "no group");
    opts.shard_group = mine.group;
    params[2].sparse = 1;
    CHECK_STATUS(tddp_sharder_add(mine.sharder, &opts, NULL), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "\"c\" of unit \"layer\" is sparse");
    params[2].sparse = 0;
    params[2].dtype = TDDP_FLOAT64;
    CHECK_STATUS(tddp_sharder_add(mine.sharder, &opts, NULL), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "expected one dtype");
    params[2].dtype = TDDP_FLOAT32;
    params[0].device_type = TDDP_CUDA;
    params[1].device_type = TDDP_CUDA;
    params[2].device_type = TDDP_CUDA;
    CHECK_STATUS(tddp_sharder_add(mine.sharder, &opts, NULL), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "ops.device");
    tddp_sharder_ops ops = {sizeof ops, NULL, NULL, cast_shard, reduced, NULL, NULL, NULL};
    tddp_sharder *other = NULL;
    CHECK_STATUS(tddp_sharder_create(&ops, &other), TDDP_INVALID_ARGUMENT);
    opts.offload = 1;
    CHECK_STATUS(tddp_sharder_add(mine.sharder, &opts, NULL), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "ops.load_shard");
    end(&mine);
}

/* Units of other names at one time are an error that shows both. */
MULTI_TEST(ranks_whose_units_differ_in_order, 2, 60)
{
    model mine;
    begin(&mine, rank, world_size, port);
    CHECK_STATUS(tddp_sharder_before_forward(mine.sharder, (size_t)rank, NULL), TDDP_MISMATCH);
    CHECK_CONTAINS(tddp_error_message(), "unit 0");
    CHECK_CONTAINS(tddp_error_message(), "unit 1");
    CHECK(mine.placed[rank] == NULL);
    tddp_sharder_free(mine.sharder);
    tddp_group_shutdown(mine.group, 5000);
    tddp_group_release(mine.group);
}

/* --- ranks that end -------------------------------------------------------------------------- */

static void train_and_lose(int rank, int world_size, int port, int in_backward)
{
    model mine;
    begin(&mine, rank, world_size, port);
    run_forward(&mine, 1);
    tddp_sharder_begin_backward(mine.sharder);
    if (in_backward) {
        for (size_t u = UNITS - 1; u > 1; u--) {
            CHECK_OK(tddp_sharder_before_backward(mine.sharder, u, NULL));
            write_gradient(&mine, u, 1);
            tddp_sharder_after_backward(mine.sharder, u);
            CHECK_OK(tddp_sharder_reduce(mine.sharder, u, NULL));
        }
    }
    if (rank == world_size - 1) {
        (void)kill(getpid(), SIGKILL);
    }
    tddp_status status = TDDP_OK;
    for (size_t u = 0; u < UNITS && status == TDDP_OK; u++) {
        status = in_backward ? tddp_sharder_finish(mine.sharder, NULL)
                             : tddp_sharder_before_backward(mine.sharder, u, NULL);
        if (status == TDDP_OK && in_backward) {
            write_gradient(&mine, u, 1);
            status = tddp_sharder_reduce(mine.sharder, u, NULL);
        }
    }
    CHECK(status == TDDP_PEER_LOST || status == TDDP_GROUP_FAILED);
    /* What failed is not taken for a result afterwards. */
    int reduced_before = 0;
    int reduced_after = 0;
    for (size_t u = 0; u < UNITS; u++) {
        reduced_before += mine.reduced[u];
    }
    CHECK_OK(tddp_sharder_finish(mine.sharder, NULL));
    for (size_t u = 0; u < UNITS; u++) {
        reduced_after += mine.reduced[u];
    }
    CHECK_INT(reduced_after, reduced_before);
    tddp_sharder_abandon(mine.sharder);
    for (size_t u = 0; u < UNITS; u++) {
        CHECK(mine.placed[u] == NULL);
    }
    tddp_sharder_free(mine.sharder);
    tddp_group_shutdown(mine.group, 5000);
    tddp_group_release(mine.group);
}

/* The last rank forks the process that takes part, since the test's own must end well. */
static void lose(int rank, int world_size, int port, int in_backward)
{
    if (rank < world_size - 1) {
        train_and_lose(rank, world_size, port, in_backward);
        return;
    }
    const pid_t child = fork();
    if (child == 0) {
        train_and_lose(rank, world_size, port, in_backward);
    }
    int status;
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK(WIFSIGNALED(status));
}

MULTI_TEST(a_rank_ends_amid_gathers, 3, 60)
{
    lose(rank, world_size, port, 0);
}

MULTI_TEST(a_rank_ends_amid_reductions, 3, 60)
{
    lose(rank, world_size, port, 1);
}

/* --- interruptions --------------------------------------------------------------------------- */

/* A wait that ended early is continued by the same call. */
MULTI_TEST(waits_are_resumed, 2, 60)
{
    model mine;
    begin(&mine, rank, world_size, port);
    const tddp_wait at_once = {0, NULL};
    tddp_status status;
    do {
        status = tddp_sharder_before_forward(mine.sharder, 0, &at_once);
    } while (status == TDDP_TIMEOUT);
    CHECK_OK(status);
    check_values(&mine, 0);
    CHECK_INT(mine.sharder->order.count, 1);
    tddp_sharder_after_forward(mine.sharder, 0, 1);
    tddp_sharder_begin_backward(mine.sharder);
    CHECK_OK(tddp_sharder_before_backward(mine.sharder, 0, NULL));
    write_gradient(&mine, 0, 1);
    tddp_sharder_after_backward(mine.sharder, 0);
    CHECK_OK(tddp_sharder_reduce(mine.sharder, 0, NULL));
    do {
        status = tddp_sharder_finish(mine.sharder, &at_once);
    } while (status == TDDP_TIMEOUT);
    CHECK_OK(status);
    check_sums(&mine, 0, 1);
    CHECK_INT(mine.reduced[0], 1);
    end(&mine);
}

/* After an abandoned backward training goes on; gradients that were not reduced are dropped. */
MULTI_TEST(an_abandoned_backward, 2, 60)
{
    model mine;
    begin(&mine, rank, world_size, port);
    run_forward(&mine, 1);
    tddp_sharder_begin_backward(mine.sharder);
    CHECK_OK(tddp_sharder_before_backward(mine.sharder, UNITS - 1, NULL));
    write_gradient(&mine, UNITS - 1, 100);
    CHECK_OK(tddp_sharder_before_backward(mine.sharder, UNITS - 2, NULL));
    write_gradient(&mine, UNITS - 2, 100);
    CHECK_OK(tddp_sharder_reduce(mine.sharder, UNITS - 2, NULL));
    tddp_sharder_abandon(mine.sharder);
    for (size_t u = 0; u < UNITS; u++) {
        CHECK_INT(tddp_sharder_unsharded(mine.sharder, u), 0);
        CHECK_INT(tddp_sharder_has_gradient(mine.sharder, u), 0);
    }
    run_forward(&mine, 1);
    run_backward(&mine, (float)rank);
    for (size_t u = 0; u < UNITS; u++) {
        check_sums(&mine, u, 0.5);
    }
    end(&mine);
}

/* A sharder that is freed while its operations run leaves them their memory. */
MULTI_TEST(freed_amid_operations, 2, 60)
{
    model mine;
    begin(&mine, rank, world_size, port);
    const tddp_wait at_once = {0, NULL};
    if (rank == 0) {
        const tddp_status status = tddp_sharder_before_forward(mine.sharder, 0, &at_once);
        CHECK(status == TDDP_OK || status == TDDP_TIMEOUT);
    } else {
        CHECK_OK(tddp_sharder_before_forward(mine.sharder, 0, NULL));
        check_values(&mine, 0);
    }
    end(&mine);
}
