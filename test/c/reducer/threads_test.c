/* Several threads mark gradients ready at once, in each mode. */
#include "recording_hook.h"

enum { COUNT = 16, THREADS = 4, ITERATIONS = 30, UNUSED = 5 };

typedef struct marker {
    tddp_reducer *reducer;
    size_t first;
    size_t times; /* how often it marks each parameter ready */
    bool skip_one;
    int all;
} marker;

static void *mark_every_fourth(void *data)
{
    marker *mine = data;
    for (size_t i = mine->first; i < COUNT; i += THREADS) {
        for (size_t n = 0; n < mine->times && !(mine->skip_one && i == UNUSED); n++) {
            int all = 0;
            fill(mine->reducer, i, (float)i);
            CHECK_OK(tddp_reducer_mark_ready(mine->reducer, i, &all));
            mine->all += all;
        }
    }
    return NULL;
}

/* Several threads mark gradients ready, while this one launches buckets. */
static void run_threaded_iteration(tddp_reducer *reducer, size_t times, bool skip_one,
                                   int expected_all)
{
    const size_t unused[] = {UNUSED};
    pthread_t threads[THREADS];
    marker markers[THREADS];
    int all = 0;
    CHECK_OK(tddp_reducer_rebuild(reducer, NULL, &all));
    CHECK_OK(tddp_reducer_prepare(reducer));
    if (skip_one) {
        CHECK_OK(tddp_reducer_set_unused(reducer, unused, 1, NULL));
        fill(reducer, UNUSED, (float)UNUSED);
    }
    for (size_t t = 0; t < THREADS; t++) {
        markers[t] = (marker){reducer, t, times, skip_one, 0};
        CHECK_OK(tddp_thread_start(&threads[t], "test", mark_every_fourth, &markers[t]));
    }
    for (int n = 0; n < 20; n++) {
        CHECK_OK(tddp_reducer_hand_over(reducer, &all));
    }
    all = 0;
    for (size_t t = 0; t < THREADS; t++) {
        pthread_join(threads[t], NULL);
        all += markers[t].all;
    }
    CHECK_INT(all, expected_all);
    CHECK_OK(tddp_reducer_finish(reducer, NULL));
    for (size_t i = 0; i < COUNT; i++) {
        check_filled(reducer, i, (float)i);
        CHECK_INT(tddp_reducer_used(reducer, i), !(skip_one && i == UNUSED));
    }
}

static void iterations(int rank, int world_size, int port, bool find_unused, bool static_graph,
                       recording_hook *recorder, int on_caller)
{
    tddp_group *group = join("fake", rank, world_size, port);
    tddp_reducer_opts opts = buckets_of(32, 64);
    opts.find_unused = find_unused;
    opts.static_graph = static_graph;
    tddp_reducer *reducer = make_vectors(group, COUNT, &opts);
    if (recorder) {
        tddp_comm_hook *hook = make_hook(recorder, "recording", on_caller);
        CHECK_OK(tddp_reducer_set_hook(reducer, hook));
        tddp_comm_hook_release(hook);
    }
    int repeats = world_size > 1 ? ITERATIONS / 10 : ITERATIONS;
    for (int n = 0; n < repeats; n++) {
        if (recorder) {
            recorder->events[0] = '\0';
        }
        run_threaded_iteration(reducer, static_graph ? 3 : 1, find_unused,
                               !(static_graph && n == 0));
    }
    tddp_reducer_free(reducer);
    leave(group);
}

TEST(threads_with_unused_parameters)
{
    iterations(rank, world_size, port, true, false, NULL, 0);
}

MULTI_TEST(threads_of_two_ranks_with_unused_parameters, 2, 30)
{
    iterations(rank, world_size, port, true, false, NULL, 0);
}

TEST(threads_with_a_static_graph)
{
    iterations(rank, world_size, port, false, true, NULL, 0);
}

MULTI_TEST(threads_of_two_ranks_with_a_static_graph, 2, 30)
{
    iterations(rank, world_size, port, false, true, NULL, 0);
}

TEST(threads_with_a_hook)
{
    recording_hook recorder = {.stages = 2, .fail_at = -1, .world_size = 1};
    iterations(rank, world_size, port, false, false, &recorder, 0);
}

MULTI_TEST(threads_of_two_ranks_with_an_on_caller_hook, 2, 30)
{
    recording_hook recorder = {.stages = 2, .fail_at = -1, .world_size = 2};
    iterations(rank, world_size, port, true, false, &recorder, 1);
}
