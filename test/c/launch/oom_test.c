#include <fcntl.h>

#include "base/base.h"
#include "launch/report/report.h"
#include "launch/workers/oom.h"
#include "machine.h"

static const char events[] = "sys/fs/cgroup/user.slice/job/memory.events";
static const char log_file[] = "dev/kmsg";

static void put_events(const char *root, const char *path, int kills)
{
    char text[128];
    (void)snprintf(text, sizeof text,
                   "low 0\nhigh 7\nmax 31\noom 9\noom_kill %d\noom_group_kill 0\n", kills);
    machine_file(root, text, "%s", path);
}

static void append_log(const char *root, const char *text)
{
    char path[256];
    (void)snprintf(path, sizeof path, "%s/%s", root, log_file);
    FILE *file = fopen(path, "a");
    CHECK(file && fputs(text, file) >= 0);
    fclose(file);
}

/* A machine whose log can be read, in the first pid namespace or another. */
static char *machine_with_log(const char *namespace)
{
    char path[256];
    char *root = machine_make();
    machine_file(root, "6,1,100,-;Out of memory: Killed process 41 (old)\n", "%s", log_file);
    machine_file(root, "", "proc/self/ns/other");
    (void)snprintf(path, sizeof path, "%s/proc/self/ns/pid", root);
    CHECK_INT(symlink(namespace, path), 0);
    return root;
}

TEST(the_count_of_a_cgroup)
{
    tddp_launch_oom oom;
    char *root = machine_make();
    machine_file(root, "0::/user.slice/job\n", "proc/self/cgroup");
    put_events(root, events, 3);
    tddp_launch_oom_open(&oom, root);
    CHECK(!tddp_launch_oom_has_killed(&oom, 100));
    put_events(root, events, 5);
    CHECK(tddp_launch_oom_has_killed(&oom, 100)); /* two kills are two workers */
    CHECK(tddp_launch_oom_has_killed(&oom, 101));
    CHECK(!tddp_launch_oom_has_killed(&oom, 102));
    put_events(root, events, 6);
    tddp_launch_oom_forget(&oom);
    CHECK(!tddp_launch_oom_has_killed(&oom, 103));
    put_events(root, events, 7);
    CHECK(tddp_launch_oom_has_killed(&oom, 103));
    tddp_launch_oom_close(&oom);
    machine_remove(root);
}

/* In a container the path is the host's at times, and the files are at the mount's root. */
TEST(the_count_of_a_container)
{
    tddp_launch_oom oom;
    char *root = machine_make();
    machine_file(root, "0::/system.slice/docker-1.scope\n", "proc/self/cgroup");
    put_events(root, "sys/fs/cgroup/memory.events", 0);
    tddp_launch_oom_open(&oom, root);
    put_events(root, "sys/fs/cgroup/memory.events", 1);
    CHECK(tddp_launch_oom_has_killed(&oom, 7));
    tddp_launch_oom_close(&oom);
    machine_remove(root);
}

TEST(the_count_of_version_1)
{
    static const char control[] = "sys/fs/cgroup/memory/job/memory.oom_control";
    tddp_launch_oom oom;
    char *root = machine_make();
    machine_file(root, "11:cpu,cpuacct:/x\n9:memory:/job\n0::/none\n", "proc/self/cgroup");
    machine_file(root, "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n", "%s", control);
    tddp_launch_oom_open(&oom, root);
    CHECK(!tddp_launch_oom_has_killed(&oom, 7));
    machine_file(root, "oom_kill_disable 0\nunder_oom 1\noom_kill 1\n", "%s", control);
    CHECK(tddp_launch_oom_has_killed(&oom, 7));
    tddp_launch_oom_close(&oom);
    machine_remove(root);
}

TEST(the_kernels_log)
{
    tddp_launch_oom oom;
    char *root = machine_with_log("pid:[4026531836]");
    tddp_launch_oom_open(&oom, root);
    CHECK(!tddp_launch_oom_has_killed(&oom, 41)); /* it stood there before */
    append_log(root, "6,2,200,-;Killed in action: 7\n"
                     "6,3,201,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),"
                     "oom_memcg=/job,task_memcg=/job,task=ruby,pid=77,uid=0\n"
                     "3,4,202,-;Memory cgroup out of memory: Killed process 78 (ruby), UID 0, "
                     "total-vm:2097152kB, anon-rss:1048576kB\n");
    CHECK(!tddp_launch_oom_has_killed(&oom, 7));
    CHECK(tddp_launch_oom_has_killed(&oom, 78));
    CHECK(tddp_launch_oom_has_killed(&oom, 77));
    tddp_launch_oom_forget(&oom);
    CHECK(!tddp_launch_oom_has_killed(&oom, 77));
    tddp_launch_oom_close(&oom);
    machine_remove(root);
}

/* Its numbers mean other processes within a container. */
TEST(the_log_says_nothing_to_a_container)
{
    tddp_launch_oom oom;
    char *root = machine_with_log("pid:[4026532198]");
    tddp_launch_oom_open(&oom, root);
    append_log(root, "3,4,202,-;Out of memory: Killed process 78 (ruby)\n");
    CHECK(!tddp_launch_oom_has_killed(&oom, 78));
    tddp_launch_oom_close(&oom);
    machine_remove(root);
}

TEST(a_machine_that_shows_nothing)
{
    tddp_launch_oom oom;
    char *root = machine_make();
    tddp_launch_oom_open(&oom, root);
    CHECK(!tddp_launch_oom_has_killed(&oom, 1));
    tddp_launch_oom_forget(&oom);
    tddp_launch_oom_close(&oom);
    machine_remove(root);
}

TEST(the_report_says_so)
{
    char text[TDDP_LAUNCH_ENDING_BYTES];
    tddp_launch_worker worker = {.pid = 3, .wait_status = 9, .out_of_memory = true};
    CHECK_TEXT(tddp_launch_ending(&worker, text),
               "killed by SIGKILL (the kernel's out-of-memory killer)");
}
