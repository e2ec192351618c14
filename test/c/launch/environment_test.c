#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "base/base.h"
#include "check.h"
#include "launch/workers/worker.h"
#include "machine.h"

static tddp_launch_options options = {
    .role = "trainer", .signals = {SIGTERM, SIGUSR1}, .signal_count = 2};

static const tddp_launch_world world = {.node_rank = 1,
                                        .nodes = 2,
                                        .base_rank = 4,
                                        .size = 8,
                                        .local_size = 4,
                                        .role_size = 8,
                                        .role_base_rank = 4,
                                        .master_port = 99,
                                        .generation = 5000000000,
                                        .master_addr = "host0"};

static void forget_threads(void)
{
    unsetenv("OMP_NUM_THREADS");
    unsetenv("MKL_NUM_THREADS");
    unsetenv("OPENBLAS_NUM_THREADS");
    unsetenv("CUDA_VISIBLE_DEVICES");
}

static tddp_launch_job job_with(int threads)
{
    return (tddp_launch_job){.options = &options, .run_id = "id", .threads = threads};
}

/* The value of a variable that must be there once; NULL if it is not there. */
static const char *value_of(char **list, const char *name)
{
    const char *found = NULL;
    for (; *list; list++) {
        size_t length = strlen(name);
        if (strncmp(*list, name, length) == 0 && (*list)[length] == '=') {
            CHECK(found == NULL);
            found = *list + length + 1;
        }
    }
    return found;
}

TEST(the_environment_replaces_what_is_there)
{
    forget_threads();
    setenv("RANK", "77", 1);
    setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3", 1);
    tddp_launch_job job = job_with(3);
    char **list = tddp_launch_environment(&world, &job, 2, "/x/error.json");
    CHECK(list != NULL);
    CHECK_TEXT(value_of(list, "RANK"), "6");
    CHECK_TEXT(value_of(list, "LOCAL_RANK"), "2");
    CHECK_TEXT(value_of(list, "GROUP_RANK"), "1");
    CHECK_TEXT(value_of(list, "ROLE_RANK"), "6");
    CHECK_TEXT(value_of(list, "ROLE_NAME"), "trainer");
    CHECK_TEXT(value_of(list, "TDDP_GENERATION"), "5000000000");
    CHECK_TEXT(value_of(list, "TORCHELASTIC_SIGNALS_TO_HANDLE"), "SIGTERM,SIGUSR1");
    CHECK_TEXT(value_of(list, "TORCHELASTIC_ERROR_FILE"), "/x/error.json");
    CHECK_TEXT(value_of(list, "TORCH_NCCL_ASYNC_ERROR_HANDLING"), "3");
    CHECK(value_of(list, "CUDA_VISIBLE_DEVICES") == NULL);
    free(list);
}

static void check_threads(const tddp_launch_job *job, const char *omp, const char *mkl,
                          const char *openblas)
{
    char **list = tddp_launch_environment(&world, job, 1, NULL);
    CHECK(list != NULL);
    const char *got[] = {value_of(list, "OMP_NUM_THREADS"), value_of(list, "MKL_NUM_THREADS"),
                         value_of(list, "OPENBLAS_NUM_THREADS")};
    CHECK_TEXT(got[0] ? got[0] : "none", omp);
    CHECK_TEXT(got[1] ? got[1] : "none", mkl);
    CHECK_TEXT(got[2] ? got[2] : "none", openblas);
    free(list);
}

TEST(threads_are_a_workers_share)
{
    forget_threads();
    tddp_launch_job job = job_with(3);
    check_threads(&job, "3", "3", "3");
    setenv("MKL_NUM_THREADS", "2", 1);
    check_threads(&job, "3", "2", "3");
    char *root = machine_make();
    machine_file(root, "0::/\n", "proc/self/cgroup");
    tddp_launch_cpus sets[] = {{{0xff}}, {{0x1f00}}, {{1}}, {{2}}};
    job.cpus = sets;
    tddp_cgroup_root(root);
    check_threads(&job, "5", "2", "5");
    machine_file(root, "800000 100000\n", "sys/fs/cgroup/cpu.max"); /* two cores for each of 4 */
    check_threads(&job, "2", "2", "2");
    tddp_cgroup_root("");
    machine_remove(root);
}

TEST(threads_that_people_have_set_stand)
{
    forget_threads();
    tddp_launch_job job = job_with(3);
    setenv("OMP_NUM_THREADS", "7", 1);
    check_threads(&job, "7", "none", "7");
    setenv("OMP_NUM_THREADS", "4,2", 1);
    check_threads(&job, "4,2", "none", "4");
    setenv("OPENBLAS_NUM_THREADS", "5", 1);
    check_threads(&job, "4,2", "none", "5");
}

static void check_device(tddp_launch_job *job, const char *visible, int local_rank,
                         const char *expected)
{
    if (visible) {
        setenv("CUDA_VISIBLE_DEVICES", visible, 1);
    } else {
        unsetenv("CUDA_VISIBLE_DEVICES");
    }
    char **list = tddp_launch_environment(&world, job, local_rank, NULL);
    CHECK(list != NULL);
    CHECK_TEXT(value_of(list, "CUDA_VISIBLE_DEVICES"), expected);
    CHECK_TEXT(value_of(list, "LOCAL_RANK"), "0");
    free(list);
}

TEST(a_gpu_each)
{
    char *root = machine_make();
    tddp_launch_devices devices = {0};
    options.virtual_local_rank = true;
    tddp_launch_job job = job_with(1);
    job.devices = &devices;
    check_device(&job, NULL, 2, "2"); /* no GPU at all: as PyTorch does it */
    check_device(&job, "", 1, "");
    CHECK_OK(tddp_launch_devices_find(root, "4, 6,7", &devices));
    check_device(&job, "4, 6,7", 1, "6");
    char name[TDDP_LAUNCH_DEVICE_BYTES];
    CHECK(!tddp_launch_devices_name(&devices, "4, 6,7", 3, name));
    tddp_launch_devices_free(&devices);
    for (int i = 0; i < 4; i++) {
        machine_gpu(root, i);
    }
    CHECK_OK(tddp_launch_devices_find(root, NULL, &devices));
    check_device(&job, NULL, 3, "3");
    tddp_launch_devices_free(&devices);
    CHECK_OK(tddp_launch_devices_find(root, "3,1", &devices));
    check_device(&job, "3,1", 1, "1");
    CHECK(!tddp_launch_devices_name(&devices, "3,1", 2, name));
    tddp_launch_devices_free(&devices);
    machine_remove(root);
}

TEST(a_job_is_prepared)
{
    const tddp_launch_devices none = {0};
    tddp_launch_job job;
    CHECK_OK(tddp_launch_job_prepare(&options, &none, 1, &job));
    CHECK_INT(job.threads, tddp_launch_cores());
    CHECK(job.cpus == NULL);
    CHECK_OK(tddp_launch_job_prepare(&options, &none, 4000, &job));
    CHECK_INT(job.threads, 1);
}

/* With every allocation failing in turn, the makers of lists return NULL and leak nothing. */
TEST(short_memory_is_survived)
{
    tddp_launch_job job = job_with(3);
    for (long nth = 1;; nth++) {
        tddp_fail_allocation(nth);
        char **list = tddp_launch_environment(&world, &job, 0, NULL);
        tddp_fail_allocation(0);
        if (list) {
            free(list);
            CHECK(nth > 10);
            return;
        }
    }
}
