#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "launch/output/monitor_text.h"
#include "launch/output/monitor_usage.h"

static tddp_launch_view_worker crew[] = {
    {4, 1200, true, "running", "epoch 3 \xc3\xa4\xe6\x97\xa5\xe6\x9c\xac loss 0.5", 1.98, 3U << 29},
    {5, 1201, true, "running", "", -1, 5U << 20},
    {6, 1202, false, "killed by SIGKILL", "out of luck\t\x1b[31m", 0.5, 1},
};

static tddp_launch_view view_of_crew(void)
{
    return (tddp_launch_view){.run_id = "job7",
                              .state = "running",
                              .waits_for = "",
                              .seconds = 3725,
                              .nodes = 2,
                              .min_nodes = 2,
                              .max_nodes = 4,
                              .node_rank = 1,
                              .world_size = 7,
                              .round = 3,
                              .restart = 1,
                              .max_restarts = 2,
                              .workers = crew,
                              .count = 3};
}

static void check_block(const tddp_launch_view *view, int columns, int most, int expected_lines,
                        const char *expected)
{
    tddp_bytes to = {0};
    int lines;
    CHECK_OK(tddp_launch_view_block(view, columns, most, &to, &lines));
    CHECK_OK(tddp_bytes_append(&to, "", 1));
    CHECK_TEXT(to.data, expected);
    CHECK_INT(lines, expected_lines);
    tddp_bytes_free(&to);
}

TEST(a_line_for_each_worker)
{
    tddp_launch_view view = view_of_crew();
    check_block(&view, 120, 20, 5,
                "torchrun job7: running, 1:02:05, node 1 of 2 (--nnodes=2:4), world size 7, round "
                "3, restart 1 of 2\n"
                " rank      pid  state                cpu    memory  last line\n"
                "    4     1200  running             198%   1.5 GiB  epoch 3 "
                "\xc3\xa4\xe6\x97\xa5\xe6\x9c\xac loss 0.5\n"
                "    5     1201  running                -     5 MiB  \n"
                "    6     1202  killed by SIGKILL                   out of luck??[31m");
}

TEST(lines_are_cut_to_the_screen)
{
    tddp_launch_view view = view_of_crew();
    /* The second of two wide characters does not fit. */
    check_block(&view, 64, 20, 5,
                "torchrun job7: running, 1:02:05, node 1 of 2 (--nnodes=2:4), wor\n"
                " rank      pid  state                cpu    memory  last line\n"
                "    4     1200  running             198%   1.5 GiB  epoch 3 \xc3\xa4\xe6\x97\xa5\n"
                "    5     1201  running                -     5 MiB  \n"
                "    6     1202  killed by SIGKILL                   out of luck?");
    check_block(&view, 0, 20, 5, "\n\n\n\n");
}

TEST(a_small_screen_has_fewer_lines)
{
    tddp_launch_view view = view_of_crew();
    view.nodes = 0;
    view.waits_for = "1 of 2 nodes";
    check_block(&view, 70, 4, 4,
                "torchrun job7: running, 1:02:05, --nnodes=2:4, round 3, restart 1 of 2\n"
                "waits: 1 of 2 nodes\n"
                " rank      pid  state                cpu    memory  last line\n"
                "      and 3 more");
    view.max_nodes = 1;
    check_block(&view, 70, 1, 1, "torchrun job7: running, 1:02:05, round 3, restart 1 of 2");
}

TEST(the_same_as_a_line)
{
    char text[512];
    tddp_launch_view view = view_of_crew();
    view.max_nodes = 1;
    tddp_launch_view_line(&view, text, sizeof text);
    CHECK_TEXT(text, "job7: running, 1:02:05, round 3, restart 1 of 2; rank 4 running 198% 1.5 "
                     "GiB; rank 5 running - 5 MiB; rank 6 killed by SIGKILL");
    view.count = 0;
    view.waits_for = "1 of 2 nodes";
    tddp_launch_view_line(&view, text, sizeof text);
    CHECK_TEXT(text, "job7: running, 1:02:05, round 3, restart 1 of 2; waits: 1 of 2 nodes");
    tddp_launch_view_line(&view, text, 10);
    CHECK_INT(strlen(text), 9);
}

TEST(many_workers_in_a_line)
{
    static tddp_launch_view_worker many[100];
    char text[1024];
    for (int i = 0; i < 100; i++) {
        many[i] = (tddp_launch_view_worker){.rank = i, .state = "done", .last_line = ""};
    }
    tddp_launch_view view = view_of_crew();
    view.workers = many;
    view.count = 100;
    tddp_launch_view_line(&view, text, sizeof text);
    CHECK_CONTAINS(text, "; rank 7 done; and 92 more");
    CHECK(strstr(text, "rank 8") == NULL);
}

/* A child that uses a core itself, and whose own child does too, and ends with it. */
static pid_t start_busy(void)
{
    int started[2];
    char byte;
    CHECK_INT(pipe(started), 0);
    pid_t pid = fork();
    if (pid == 0) {
        close(started[0]);
        if (fork() == 0) {
            (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        }
        (void)!write(started[1], "x", 1);
        close(started[1]);
        for (;;) {
        }
    }
    close(started[1]);
    CHECK_INT(read(started[0], &byte, 1), 1);
    CHECK_INT(read(started[0], &byte, 1), 1);
    close(started[0]);
    return pid;
}

TEST(workers_are_seen_with_their_descendants)
{
    tddp_launch_usage usage = {0};
    pid_t idle = fork();
    if (idle == 0) {
        pause();
        _exit(0);
    }
    tddp_launch_view_worker workers[] = {
        {.pid = start_busy(), .alive = true, .state = "", .last_line = ""},
        {.pid = idle, .alive = true, .state = "", .last_line = ""},
        {.pid = 0, .alive = false, .state = "", .last_line = ""},
    };
    CHECK_OK(tddp_launch_usage_look(&usage, workers, 3, 0));
    CHECK_INT(usage.seen.count, 3);
    CHECK(workers[0].cpu < 0 && workers[1].cpu < 0);
    CHECK(workers[0].memory > workers[1].memory && workers[1].memory > 0);
    double before = workers[0].cpu;
    CHECK_OK(tddp_launch_usage_look(&usage, workers, 3, INT64_MAX)); /* not so soon again */
    CHECK_DOUBLE(workers[0].cpu, before, 0);
    do { /* until the kernel has counted time for it */
        (void)nanosleep(&(struct timespec){0, 20000000}, NULL);
        CHECK_OK(tddp_launch_usage_look(&usage, workers, 3, 0));
        CHECK_DOUBLE(workers[1].cpu, 0, 0);
    } while (workers[0].cpu == 0);
    CHECK(workers[0].cpu > 0);
    CHECK_DOUBLE(workers[2].cpu, -1, 0);
    CHECK_INT(workers[2].memory, 0);
    /* Another worker in the same place is found at once. */
    (void)kill(idle, SIGKILL);
    (void)waitpid(idle, NULL, 0);
    workers[1].alive = false;
    CHECK_OK(tddp_launch_usage_look(&usage, workers, 3, 0));
    CHECK_INT(workers[1].memory, 0);
    workers[2].pid = workers[0].pid;
    workers[2].alive = true;
    workers[0].alive = false;
    CHECK_OK(tddp_launch_usage_look(&usage, workers, 3, 0));
    CHECK(workers[2].memory > 0);
    CHECK_INT(workers[0].memory, 0);
    (void)kill(workers[2].pid, SIGKILL);
    (void)waitpid(workers[2].pid, NULL, 0);
    tddp_launch_usage_free(&usage);
}
