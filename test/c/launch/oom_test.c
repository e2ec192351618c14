#include "base/base.h"
#include "launch/report/report.h"
#include "machine.h"

static const char events[] = "sys/fs/cgroup/user.slice/job/memory.events";

static void put_events(const char *root, const char *path, int kills)
{
    char text[128];
    (void)snprintf(text, sizeof text,
                   "low 0\nhigh 7\nmax 31\noom 9\noom_kill %d\noom_group_kill 0\n", kills);
    machine_file(root, text, "%s", path);
}

TEST(the_count_of_a_cgroup)
{
    char *root = machine_make();
    machine_file(root, "0::/user.slice/job\n", "proc/self/cgroup");
    put_events(root, events, 3);
    CHECK_INT(tddp_launch_oom_kills(root), 3);
    put_events(root, events, 5);
    CHECK_INT(tddp_launch_oom_kills(root), 5);
    machine_remove(root);
}

/* In a container the path is the host's at times, and the files are at the mount's root. */
TEST(the_count_of_a_container)
{
    char *root = machine_make();
    machine_file(root, "0::/system.slice/docker-1.scope\n", "proc/self/cgroup");
    put_events(root, "sys/fs/cgroup/memory.events", 0);
    CHECK_INT(tddp_launch_oom_kills(root), 0);
    put_events(root, "sys/fs/cgroup/memory.events", 1);
    CHECK_INT(tddp_launch_oom_kills(root), 1);
    machine_remove(root);
}

TEST(the_count_of_version_1)
{
    static const char control[] = "sys/fs/cgroup/memory/job/memory.oom_control";
    char *root = machine_make();
    machine_file(root, "11:cpu,cpuacct:/x\n9:memory:/job\n0::/none\n", "proc/self/cgroup");
    machine_file(root, "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n", "%s", control);
    CHECK_INT(tddp_launch_oom_kills(root), 0);
    machine_file(root, "oom_kill_disable 0\nunder_oom 1\noom_kill 1\n", "%s", control);
    CHECK_INT(tddp_launch_oom_kills(root), 1);
    machine_remove(root);
}

TEST(a_machine_that_shows_nothing)
{
    char *root = machine_make();
    CHECK_INT(tddp_launch_oom_kills(root), -1);
    machine_remove(root);
}

TEST(the_report_says_so)
{
    char text[TDDP_LAUNCH_ENDING_BYTES];
    tddp_launch_worker worker = {.pid = 3, .wait_status = 9, .out_of_memory = true};
    CHECK_TEXT(tddp_launch_ending(&worker, text),
               "killed by SIGKILL (the kernel's out-of-memory killer)");
}
