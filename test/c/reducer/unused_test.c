/* Unused parameters: averages, the map of used parameters, skipped buckets, invalid calls. */
#include <stdlib.h>

#include "world.h"

enum { COUNT = 7 };
enum { ENDED_EARLY }; /* events */

static tddp_reducer *make_find_unused(tddp_group *group, size_t count, int skip)
{
    tddp_reducer_opts opts = buckets_of(12, 24);
    opts.find_unused = 1;
    opts.skip_unused = skip;
    return make_vectors(group, count, &opts);
}

/* Whether a rank uses a parameter in a step: no rank uses number 5, and rank 0 none in step 3. */
static bool reaches(int rank, int step, size_t param)
{
    return param != 5 && (param + (size_t)(rank + step)) % 3 != 0 && !(step == 3 && rank == 0);
}

static float gradient_of(int rank, int step, size_t param)
{
    return (float)(rank + 1) * (float)(step + 2) + (float)param;
}

static void run_step(tddp_reducer *reducer, int rank, int world_size, int step)
{
    size_t unused[COUNT];
    size_t unused_count = 0;
    size_t left = 0;
    CHECK_OK(tddp_reducer_prepare(reducer));
    for (size_t i = 0; i < COUNT; i++) {
        bool reached = reaches(rank, step, i);
        left += reached;
        fill_with(reducer, i, reached ? gradient_of(rank, step, i) : 0);
        if (!reached) {
            unused[unused_count++] = i;
        }
    }
    CHECK_OK(tddp_reducer_set_unused(reducer, unused, unused_count, NULL));
    for (size_t n = 0; n < COUNT; n++) {
        size_t i = (n * 3 + (size_t)rank) % COUNT;
        if (reaches(rank, step, i)) {
            mark(reducer, i, --left == 0);
        }
    }
    CHECK_OK(tddp_reducer_finish(reducer, NULL));
    for (size_t i = 0; i < COUNT; i++) {
        double sum = 0;
        int users = 0;
        for (int r = 0; r < world_size; r++) {
            users += reaches(r, step, i);
            sum += reaches(r, step, i) ? gradient_of(r, step, i) : 0;
        }
        check_all(reducer, i, sum / world_size);
        CHECK_INT(tddp_reducer_used(reducer, i), users > 0);
    }
}

static void steps(int rank, int world_size, int port, int skip)
{
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_reducer *reducer = make_find_unused(group, COUNT, skip);
    /* Bytes 4 8 | 12 16 | 20 24 | 28, and the last bucket first. */
    const size_t buckets[] = {3, 3, 2, 2, 1, 1, 0};
    CHECK_INT(tddp_reducer_bucket_count(reducer), 4);
    for (int step = 0; step < 4; step++) {
        int rebuilt = 7;
        CHECK_OK(tddp_reducer_rebuild(reducer, NULL, &rebuilt));
        CHECK_INT(rebuilt, 0);
        run_step(reducer, rank, world_size, step);
        CHECK_INT(tddp_reducer_rounds(reducer), step + 1);
    }
    CHECK_INT(tddp_reducer_rebuilt(reducer), 0);
    for (size_t i = 0; i < COUNT; i++) {
        CHECK_INT(tddp_reducer_bucket_of(reducer, i), buckets[i]);
    }
    tddp_reducer_free(reducer);
    leave(group);
}

MULTI_TEST(one_rank_with_unused_parameters, 1, 30)
{
    steps(rank, world_size, port, 0);
}

MULTI_TEST(two_ranks_with_unused_parameters, 2, 30)
{
    steps(rank, world_size, port, 0);
}

MULTI_TEST(three_ranks_with_unused_parameters, 3, 40)
{
    steps(rank, world_size, port, 0);
}

MULTI_TEST(four_ranks_with_unused_parameters, 4, 60)
{
    steps(rank, world_size, port, 0);
}

MULTI_TEST(three_ranks_skip_unused_buckets, 3, 40)
{
    steps(rank, world_size, port, 1);
}

MULTI_TEST(a_bucket_that_no_rank_uses_is_not_reduced, 2, 30)
{
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_reducer *reducer = make_find_unused(group, COUNT, 1);
    const size_t unused[] = {2, 3, 4, 6}; /* rank 1 uses number 6 */
    CHECK_OK(tddp_reducer_prepare(reducer));
    CHECK_OK(tddp_reducer_set_unused(reducer, unused, rank == 0 ? 4 : 3, NULL));
    CHECK_INT(reducer->launched, 0);
    for (size_t i = 0; i < COUNT; i++) {
        fill_with(reducer, i, (float)rank);
    }
    mark(reducer, 0, 0);
    mark(reducer, 1, 0);
    if (rank == 1) {
        mark(reducer, 6, 0);
    }
    mark(reducer, 5, 1);
    CHECK_OK(tddp_reducer_finish(reducer, NULL));
    for (size_t i = 0; i < COUNT; i++) {
        bool skipped = i == 2 || i == 3;
        check_all(reducer, i, skipped ? rank : 0.5);
        CHECK_INT(tddp_reducer_used(reducer, i), !skipped && i != 4);
    }
    tddp_reducer_free(reducer);
    leave(group);
}

MULTI_TEST(a_forward_without_backward_launches_nothing, 2, 30)
{
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_reducer *reducer = make_find_unused(group, 2, 0);
    const size_t both[] = {0, 1};
    for (int n = 0; n < 3 * rank; n++) {
        CHECK_OK(tddp_reducer_prepare(reducer));
        CHECK_OK(tddp_reducer_set_unused(reducer, both, 2, NULL));
    }
    CHECK_OK(tddp_reducer_prepare(reducer));
    CHECK_OK(tddp_reducer_set_unused(reducer, both, 1, NULL));
    fill_with(reducer, 0, 0);
    fill_with(reducer, 1, (float)rank);
    mark(reducer, 1, 1);
    CHECK_OK(tddp_reducer_finish(reducer, NULL));
    check_all(reducer, 0, 0);
    check_all(reducer, 1, 0.5);
    CHECK_INT(tddp_reducer_rounds(reducer), 1);
    tddp_reducer_free(reducer);
    leave(group);
}

MULTI_TEST(a_gradient_from_before_the_iteration_counts_as_used, 2, 30)
{
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_reducer *reducer = make_find_unused(group, 3, 0);
    const size_t unused[] = {1, 2};
    for (int iteration = 0; iteration < 2; iteration++) {
        if (iteration == 0 && rank == 1) {
            tddp_reducer_note_used(reducer, 2);
            tddp_reducer_note_used(reducer, 77);
        }
        CHECK_OK(tddp_reducer_prepare(reducer));
        CHECK_OK(tddp_reducer_set_unused(reducer, unused, 2, NULL));
        for (size_t i = 0; i < 3; i++) {
            fill_with(reducer, i, (float)rank);
        }
        mark(reducer, 0, 1);
        CHECK_OK(tddp_reducer_finish(reducer, NULL));
        CHECK_INT(tddp_reducer_used(reducer, 0), 1);
        CHECK_INT(tddp_reducer_used(reducer, 1), 0);
        CHECK_INT(tddp_reducer_used(reducer, 2), iteration == 0);
        CHECK_INT(tddp_reducer_used(reducer, 3), 1);
        check_all(reducer, 2, 0.5);
    }
    tddp_reducer_free(reducer);
    leave(group);
}

TEST(invalid_unused_parameters_fail)
{
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_reducer *reducer = make_vectors(group, 3, NULL);
    const size_t unused[] = {1, 1, 3};
    int all = 7;
    CHECK_STATUS(tddp_reducer_set_unused(reducer, unused, 1, NULL), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "find_unused");
    tddp_reducer_free(reducer);
    reducer = make_find_unused(group, 3, 0);
    CHECK_STATUS(tddp_reducer_set_unused(reducer, unused, 1, NULL), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "outside an iteration");
    CHECK_OK(tddp_reducer_prepare(reducer));
    CHECK_STATUS(tddp_reducer_set_unused(reducer, unused, 3, NULL), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "parameter number 3: expected 0 to 2");
    CHECK_STATUS(tddp_reducer_set_unused(reducer, unused, 4, NULL), TDDP_INVALID_ARGUMENT);
    CHECK_OK(tddp_reducer_set_unused(reducer, unused, 2, NULL)); /* duplicates are allowed */
    mark(reducer, 0, 0);
    CHECK_STATUS(tddp_reducer_set_unused(reducer, unused, 1, NULL), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "ready already");
    CHECK_STATUS(tddp_reducer_mark_ready(reducer, 1, &all), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "rank 0: \"b\" got a gradient, but was marked unused");
    CHECK_CONTAINS(tddp_error_message(), "static_graph: true");
    CHECK_STATUS(tddp_reducer_prepare(reducer), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "1 of 3 parameters got no gradient");
    CHECK_CONTAINS(tddp_error_message(), ": \"c\". The outputs of forward depend on them");
    CHECK_INT(all, 7);
    mark(reducer, 2, 1);
    CHECK_OK(tddp_reducer_prepare(reducer));
    CHECK_INT(reducer->finished, 1);
    tddp_reducer_free(reducer);
    leave(group);
}

TEST(contradicting_options_are_refused)
{
    tddp_group *group = join("fake", rank, world_size, port);
    const int64_t dim = 3;
    tddp_param param = vector_param(0, &dim, TDDP_FLOAT32);
    tddp_reducer *reducer = NULL;
    tddp_reducer_opts opts = TDDP_REDUCER_OPTS_INIT;
    opts.skip_unused = 1;
    CHECK_STATUS(tddp_reducer_create(group, &param, 1, &opts, NULL, &reducer),
                 TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "skip_unused without find_unused or static_graph");
    opts = buckets_of(1, 2);
    opts.limit_count = 0;
    CHECK_STATUS(tddp_reducer_create(group, &param, 1, &opts, NULL, &reducer),
                 TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "0 bucket limits");
    opts.limits = NULL;
    opts.limit_count = 3;
    CHECK_STATUS(tddp_reducer_create(group, &param, 1, &opts, NULL, &reducer),
                 TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "3 bucket limits but limits is NULL");
    opts.size = 8;
    CHECK_STATUS(tddp_reducer_create(group, &param, 1, &opts, NULL, &reducer),
                 TDDP_INVALID_ARGUMENT);
    CHECK(reducer == NULL);
    tddp_reducer_opts_init(&opts, sizeof opts);
    CHECK_OK(tddp_reducer_create(group, &param, 1, &opts, NULL, &reducer));
    tddp_reducer_free(reducer);
    leave(group);
}

TEST(skip_unused_requires_the_map_before_backward)
{
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_reducer *reducer = make_find_unused(group, 2, 1);
    int all = 7;
    CHECK_OK(tddp_reducer_prepare(reducer));
    CHECK_STATUS(tddp_reducer_mark_ready(reducer, 1, &all), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "rank 0: backward began before the ranks exchanged");
    CHECK_STATUS(tddp_reducer_finish(reducer, NULL), TDDP_INVALID_ARGUMENT);
    CHECK_OK(tddp_reducer_set_unused(reducer, NULL, 0, NULL));
    mark(reducer, 1, 0);
    mark(reducer, 0, 1);
    CHECK_OK(tddp_reducer_finish(reducer, NULL));
    tddp_reducer_free(reducer);
    leave(group);
}

/* One rank's wait ends before the other rank gives its part of the map. */
MULTI_TEST(a_wait_for_the_map_that_ends_early_is_continued, 2, 40)
{
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_reducer *reducer = make_find_unused(group, 2, 1);
    const size_t unused[] = {0};
    const tddp_wait soon = {20, NULL};
    int all = 0;
    for (int iteration = 0; iteration < 4; iteration++) {
        CHECK_OK(tddp_reducer_prepare(reducer));
        if (rank == iteration % 2) {
            CHECK_STATUS(tddp_reducer_set_unused(reducer, unused, 1, &soon), TDDP_TIMEOUT);
            CHECK_STATUS(tddp_reducer_mark_ready(reducer, 1, &all), TDDP_INVALID_ARGUMENT);
            check_signal(ENDED_EARLY);
        } else {
            CHECK_AWAIT(ENDED_EARLY, iteration + 1);
            CHECK_OK(tddp_reducer_set_unused(reducer, unused, 1, NULL));
        }
        if (iteration < 2) { /* another forward: waits for the previous one's map */
            CHECK_OK(tddp_reducer_prepare(reducer));
        }
        CHECK_OK(tddp_reducer_set_unused(reducer, unused, 1, NULL));
        fill_with(reducer, 1, (float)rank);
        mark(reducer, 1, 1);
        CHECK_OK(tddp_reducer_finish(reducer, NULL));
        check_all(reducer, 1, 0.5);
        CHECK_INT(tddp_reducer_used(reducer, 0), 0);
    }
    tddp_reducer_free(reducer);
    leave(group);
}

/* One rank frees its reducer before the other gives its part of the map. */
MULTI_TEST(freeing_with_a_pending_map_is_safe, 2, 40)
{
    tddp_group *group = join("fake", rank, world_size, port);
    const size_t unused[] = {0};
    const tddp_wait at_once = {0, NULL};
    for (int iteration = 0; iteration < 2; iteration++) {
        tddp_reducer *reducer = make_find_unused(group, 2, 0);
        CHECK_AWAIT(ENDED_EARLY, rank == iteration ? 0 : iteration + 1);
        CHECK_OK(tddp_reducer_prepare(reducer));
        CHECK_OK(tddp_reducer_set_unused(reducer, unused, 1, NULL));
        mark(reducer, 1, 1);
        if (rank == iteration) {
            CHECK_STATUS(tddp_reducer_finish(reducer, &at_once), TDDP_TIMEOUT);
            CHECK(reducer->unused.map_work != NULL);
            check_signal(ENDED_EARLY);
        } else {
            CHECK_OK(tddp_reducer_finish(reducer, NULL));
        }
        tddp_reducer_free(reducer);
    }
    leave(group);
}

MULTI_TEST(different_options_are_a_mismatch_on_every_rank, 2, 30)
{
    tddp_group *group = join("fake", rank, world_size, port);
    const int64_t dim = 3;
    tddp_param param = vector_param(0, &dim, TDDP_FLOAT32);
    tddp_reducer *reducer = NULL;
    tddp_reducer_opts opts = TDDP_REDUCER_OPTS_INIT;
    opts.find_unused = rank;
    CHECK_STATUS(tddp_reducer_create(group, &param, 1, &opts, NULL, &reducer), TDDP_MISMATCH);
    CHECK_CONTAINS(tddp_error_message(),
                   "find_unused off, static_graph off, skip_unused off; rank 1");
    opts.find_unused = 0;
    opts.static_graph = !rank;
    CHECK_STATUS(tddp_reducer_create(group, &param, 1, &opts, NULL, &reducer), TDDP_MISMATCH);
    CHECK_CONTAINS(tddp_error_message(),
                   "find_unused off, static_graph on, skip_unused off; rank 1");
    leave(group);
}

TEST(an_iteration_with_unused_parameters_allocates_nothing)
{
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_reducer *reducer = make_find_unused(group, 4, 0);
    const size_t unused[] = {3, 0};
    for (int iteration = 0; iteration < 2; iteration++) {
        tddp_fail_allocation(1);
        CHECK_OK(tddp_reducer_prepare(reducer));
        CHECK_OK(tddp_reducer_set_unused(reducer, unused, 2, NULL));
        mark(reducer, 1, 0);
        mark(reducer, 2, 1);
        CHECK_OK(tddp_reducer_finish(reducer, NULL));
        tddp_fail_allocation(0);
    }
    tddp_reducer_free(reducer);
    leave(group);
}
