/* Communication hooks that are set too late, differ, fail, or are released with pending works. */
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "recording_hook.h"

TEST(a_hook_is_set_once_and_before_the_first_gradient)
{
    tddp_group *group = join("fake", rank, world_size, port);
    bool freed = false;
    recording_hook recorder = {.stages = 1, .fail_at = -1, .freed = &freed};
    recording_hook other = {.stages = 1, .fail_at = -1};
    tddp_reducer *reducer = make_hooked(group, 2, &recorder, 0);
    tddp_comm_hook *hook = make_hook(&other, "other", 0);
    CHECK_STATUS(tddp_reducer_set_hook(reducer, NULL), TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_reducer_set_hook(reducer, hook), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "\"other\", after \"recording\": expected one");
    CHECK_STATUS(tddp_reducer_set_divisor(reducer, 1), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "the communication hook \"recording\" divides them");
    CHECK(!freed);
    tddp_reducer_free(reducer);
    CHECK(freed);
    reducer = make_vectors(group, 2, NULL);
    CHECK_OK(tddp_reducer_prepare(reducer));
    mark(reducer, 1, 0);
    CHECK_STATUS(tddp_reducer_set_hook(reducer, hook), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "before the first backward");
    mark(reducer, 0, 1);
    CHECK_STATUS(tddp_reducer_set_hook(reducer, hook), TDDP_INVALID_ARGUMENT);
    CHECK_OK(tddp_reducer_finish(reducer, NULL));
    CHECK_STATUS(tddp_reducer_set_hook(reducer, hook), TDDP_INVALID_ARGUMENT);
    tddp_reducer_free(reducer);
    tddp_comm_hook_release(hook);
    leave(group);
}

/* A program compiled against a newer version, which has one callback more. */
typedef struct newer_ops {
    tddp_comm_hook_ops ops;
    void (*added)(void);
} newer_ops;

static void do_nothing(void) {}

TEST(hooks_of_other_versions_are_known_by_their_size)
{
    newer_ops newer = {.ops = {.size = sizeof newer, .name = "newer", .run = record}};
    tddp_comm_hook_ops older = newer.ops;
    tddp_comm_hook *hook = NULL;
    (void)rank;
    (void)world_size;
    (void)port;
    CHECK_OK(tddp_comm_hook_make(&newer.ops, NULL, &hook));
    CHECK_TEXT(tddp_comm_hook_name(hook), "newer");
    CHECK_INT(tddp_comm_hook_takes(hook, TDDP_CUDA), 0);
    tddp_comm_hook_release(hook);
    newer.added = do_nothing;
    CHECK_STATUS(tddp_comm_hook_make(&newer.ops, NULL, &hook), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "compiled for a newer libtddp");
    older.size = offsetof(tddp_comm_hook_ops, device_types);
    CHECK_STATUS(tddp_comm_hook_make(&older, NULL, &hook), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "sizeof(tddp_comm_hook_ops)");
    CHECK_STATUS(tddp_comm_hook_make(NULL, NULL, &hook), TDDP_INVALID_ARGUMENT);
    older.size = sizeof older;
    older.run = NULL;
    CHECK_STATUS(tddp_comm_hook_make(&older, NULL, &hook), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "without name or run");
}

/* One bucket of two gradients, of which one is ready. */
static tddp_reducer *mark_one_of_two(tddp_group *group, recording_hook *recorder, int on_caller)
{
    tddp_reducer *reducer = make_hooked(group, 2, recorder, on_caller);
    CHECK_OK(tddp_reducer_prepare(reducer));
    mark(reducer, 1, 0);
    return reducer;
}

static void check_permanent_failure(tddp_reducer *reducer, const char *text)
{
    int number = 0;
    CHECK_STATUS(tddp_reducer_finish(reducer, NULL), TDDP_UNSUPPORTED);
    CHECK_CONTAINS(tddp_error_message(), text);
    CHECK_STATUS(tddp_reducer_prepare(reducer), TDDP_UNSUPPORTED);
    CHECK_CONTAINS(tddp_error_message(), "the gradients of an earlier step were not averaged (");
    CHECK_CONTAINS(tddp_error_message(), text);
    CHECK_STATUS(tddp_reducer_hand_over(reducer, &number), TDDP_UNSUPPORTED);
    CHECK_STATUS(tddp_reducer_shadow(reducer, NULL), TDDP_UNSUPPORTED);
    CHECK_STATUS(tddp_reducer_rebuild(reducer, NULL, &number), TDDP_UNSUPPORTED);
    tddp_reducer_free(reducer);
}

MULTI_TEST(a_failed_hook_fails_all_later_calls, 2, 40)
{
    tddp_group *group = join("fake", rank, world_size, port);
    int all = 7;
    recording_hook at_0 = {.stages = 3, .fail_at = 0};
    tddp_reducer *reducer = mark_one_of_two(group, &at_0, 0);
    CHECK_STATUS(tddp_reducer_mark_ready(reducer, 0, &all), TDDP_UNSUPPORTED);
    check_permanent_failure(reducer, "this hook fails in stage 0");
    reducer = mark_one_of_two(group, &at_0, 1);
    mark(reducer, 0, 1);
    CHECK_STATUS(tddp_reducer_hand_over(reducer, &all), TDDP_UNSUPPORTED);
    check_permanent_failure(reducer, "this hook fails in stage 0");
    recording_hook at_2 = {.stages = 3, .fail_at = 2};
    reducer = mark_one_of_two(group, &at_2, 0);
    mark(reducer, 0, 1);
    CHECK_STATUS(tddp_reducer_finish(reducer, NULL), TDDP_UNSUPPORTED);
    CHECK_CONTAINS(tddp_error_message(), "this hook fails in stage 2");
    check_permanent_failure(reducer, "this hook fails in stage 2");
    CHECK_INT(all, 7);
    leave(group);
}

/* Each rank's operation fails; a rank may get the other's failure first, and then keeps that. */
MULTI_TEST(no_stage_follows_a_failed_operation, 2, 40)
{
    setenv("TDDP_FAKE", "fail_at=2", 1); /* the first compares the ranks */
    tddp_group *group = join("fake", rank, world_size, port);
    recording_hook recorder = {.stages = 3, .fail_at = -1};
    tddp_reducer *reducer = mark_one_of_two(group, &recorder, 0);
    int all;
    tddp_status marked = tddp_reducer_mark_ready(reducer, 0, &all);
    tddp_status first = marked ? marked : tddp_reducer_finish(reducer, NULL);
    CHECK(first == TDDP_NETWORK || first == TDDP_PEER_LOST);
    CHECK_STATUS(tddp_reducer_finish(reducer, NULL), first);
    CHECK_TEXT(recorder.events, "0.0 ");
    CHECK_STATUS(tddp_reducer_prepare(reducer), first);
    tddp_reducer_free(reducer);
    tddp_group_release(group);
}

MULTI_TEST(different_hooks_are_a_mismatch, 2, 40)
{
    tddp_group *group = join("fake", rank, world_size, port);
    recording_hook recorder = {.stages = 1, .fail_at = -1};
    tddp_reducer *reducer = make_vectors(group, 1, NULL);
    tddp_comm_hook *hook = make_hook(&recorder, rank ? "one" : "another", 0);
    CHECK_OK(tddp_reducer_set_hook(reducer, hook));
    tddp_comm_hook_release(hook);
    CHECK_OK(tddp_reducer_prepare(reducer));
    mark(reducer, 0, 1);
    CHECK_STATUS(tddp_reducer_finish(reducer, NULL), TDDP_MISMATCH);
    CHECK_CONTAINS(tddp_error_message(), "through the communication hook one");
    CHECK_CONTAINS(tddp_error_message(), "through the communication hook another");
    tddp_reducer_free(reducer);
    tddp_group_release(group);
}

MULTI_TEST(a_hook_lives_as_long_as_its_works, 2, 40)
{
    setenv("TDDP_FAKE", "delay_ms=300", 1);
    tddp_group *group = join("fake", rank, world_size, port);
    bool freed = false;
    recording_hook recorder = {.stages = 2, .fail_at = -1, .freed = &freed};
    tddp_reducer *reducer = mark_one_of_two(group, &recorder, 0);
    mark(reducer, 0, 1);
    tddp_reducer_free(reducer);
    CHECK(!freed);
    CHECK_OK(tddp_barrier(group, NULL)); /* after the bucket in the queue */
    CHECK(freed);
    CHECK_TEXT(recorder.events, "0.0 ");
    leave(group);
}

TEST(a_hook_fails_on_a_destroyed_group_and_after_fork)
{
    tddp_group *group = join("fake", rank, world_size, port);
    recording_hook recorder = {.stages = 1, .fail_at = -1, .quiet = true};
    tddp_reducer *reducer = mark_one_of_two(group, &recorder, 0);
    int all = 7;
    pid_t child = CHECK_FORK();
    if (child == 0) {
        bool right = tddp_reducer_mark_ready(reducer, 0, &all) == TDDP_FORKED;
        tddp_reducer_free(reducer);
        _exit(right ? 0 : 1);
    }
    int outcome = 1;
    CHECK_INT(waitpid(child, &outcome, 0), child);
    CHECK_INT(outcome, 0);
    tddp_group_shutdown(group, 0);
    CHECK_STATUS(tddp_reducer_mark_ready(reducer, 0, &all), TDDP_GROUP_CLOSED);
    CHECK_TEXT(recorder.events, "");
    tddp_reducer_free(reducer);
    tddp_group_release(group);
}
