/*
 * Makes a worker's environment block. Names and values are PyTorch's, but for the threads: PyTorch
 * gives each worker one, here it gets its share of the cores. OpenBLAS made with pthreads does not
 * read OMP_NUM_THREADS, so it has a variable of its own. Made before the fork: between fork and
 * exec nothing may allocate. Main thread.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "launch/command/program.h"
#include "launch/workers/worker.h"

extern char **environ;

/* Torchrun's own, for whoever started it. */
static const char own_variables[] = "TORCHELASTIC_ERROR_FILE=\0"
                                    "TORCHELASTIC_HEALTH_CHECK_PORT=\0"
                                    "TORCHELASTIC_TIMER_FILE=\0";

/* Variables: "NAME=VALUE", each with its NUL. */
typedef struct block {
    tddp_bytes text;
    bool failed;
} block;

/* Adds a variable, which is freed; NULL is short memory. */
static void put(block *made, char *variable)
{
    made->failed |= !variable || tddp_bytes_append(&made->text, variable, strlen(variable) + 1);
    free(variable);
}

static int at_least_one(int number)
{
    return number > 1 ? number : 1;
}

/* However it is bound, limits of CPU time leave it no more. */
static int threads_of(const tddp_launch_job *job, int local_size, int local_rank)
{
    if (!job->cpus) {
        return job->threads;
    }
    int share = tddp_launch_binding_share(job->cpus, local_size, local_rank);
    int limit = at_least_one(tddp_core_limit() / local_size);
    return share < limit ? share : limit;
}

/* What people have set stands; and who has set OMP_NUM_THREADS means the others too: MKL follows it
 * by itself. */
static void put_threads(block *made, int threads)
{
    const char *set = getenv("OMP_NUM_THREADS");
    if (!set) {
        put(made, tddp_format("OMP_NUM_THREADS=%d", threads));
    }
    if (!getenv("MKL_NUM_THREADS") && !set) {
        put(made, tddp_format("MKL_NUM_THREADS=%d", threads));
    }
    if (!getenv("OPENBLAS_NUM_THREADS")) {
        int first = set ? atoi(set) : 0; /* "4,2": of the levels the first */
        put(made, tddp_format("OPENBLAS_NUM_THREADS=%d", first > 0 ? first : threads));
    }
}

static void put_signals(block *made, const tddp_launch_options *options)
{
    char text[TDDP_LAUNCH_MAX_SIGNALS * 16] = "";
    char name[32];
    for (int i = 0; i < options->signal_count; i++) {
        tddp_add_text(text, sizeof text, "%s%s", i > 0 ? "," : "",
                      tddp_launch_signal_name(options->signals[i], name));
    }
    put(made, tddp_format("TORCHELASTIC_SIGNALS_TO_HANDLE=%s", text));
}

static void put_world(block *made, const tddp_launch_world *world, int local_rank, bool is_virtual)
{
    put(made, tddp_format("RANK=%d", world->base_rank + local_rank));
    put(made, tddp_format("LOCAL_RANK=%d", is_virtual ? 0 : local_rank));
    put(made, tddp_format("WORLD_SIZE=%d", world->size));
    put(made, tddp_format("LOCAL_WORLD_SIZE=%d", world->local_size));
    put(made, tddp_format("GROUP_RANK=%d", world->node_rank));
    put(made, tddp_format("GROUP_WORLD_SIZE=%d", world->nodes));
    put(made, tddp_format("ROLE_RANK=%d", world->role_base_rank + local_rank));
    put(made, tddp_format("ROLE_WORLD_SIZE=%d", world->role_size));
    put(made, tddp_format("MASTER_ADDR=%s", world->master_addr));
    put(made, tddp_format("MASTER_PORT=%d", world->master_port));
    put(made, tddp_format("TORCHELASTIC_RESTART_COUNT=%d", world->restart));
    put(made, tddp_format("TORCHELASTIC_MAX_RESTARTS=%d", world->max_restarts));
    put(made, tddp_format("TDDP_GENERATION=%lld", (long long)world->generation));
}

/* Whether one of the texts that follow each other sets the same variable. */
static bool is_set(const char *texts, size_t size, const char *variable)
{
    for (const char *at = texts; at < texts + size; at += strlen(at) + 1) {
        if (strncmp(at, variable, strcspn(variable, "=") + 1) == 0) {
            return true;
        }
    }
    return false;
}

char **tddp_launch_environment(const tddp_launch_world *world, const tddp_launch_job *job,
                               int local_rank, const char *error_file)
{
    const tddp_launch_options *options = job->options;
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    char device[TDDP_LAUNCH_DEVICE_BYTES];
    block made = {0};
    put_world(&made, world, local_rank, options->virtual_local_rank);
    /* Its own GPU is all that it sees. */
    if (options->virtual_local_rank &&
        tddp_launch_devices_name(job->devices, visible, local_rank, device)) {
        put(&made, tddp_format("CUDA_VISIBLE_DEVICES=%s", device));
    }
    put(&made, tddp_format("ROLE_NAME=%s", options->role));
    put(&made, tddp_format("TORCHELASTIC_RUN_ID=%s", job->run_id));
    put(&made, tddp_format("TORCHELASTIC_USE_AGENT_STORE=True"));
    put_signals(&made, options);
    if (!getenv("TORCH_NCCL_ASYNC_ERROR_HANDLING")) {
        put(&made, tddp_format("TORCH_NCCL_ASYNC_ERROR_HANDLING=1"));
    }
    put_threads(&made, threads_of(job, world->local_size, local_rank));
    if (job->timer_file) {
        put(&made, tddp_format("TORCHELASTIC_TIMER_FILE=%s", job->timer_file));
    }
    if (error_file) {
        put(&made, tddp_format("TORCHELASTIC_ERROR_FILE=%s", error_file));
    }
    const size_t size = made.text.size;
    for (char **at = environ; *at; at++) {
        if (!is_set(made.text.data, size, *at) &&
            !is_set(own_variables, sizeof own_variables - 1, *at)) {
            put(&made, tddp_copy_string(*at));
        }
    }
    return tddp_launch_list_texts(&made.text, made.failed);
}

tddp_status tddp_launch_job_prepare(const tddp_launch_options *options,
                                    const tddp_launch_devices *devices, int local_size,
                                    tddp_launch_job *out)
{
    *out = (tddp_launch_job){
        .options = options,
        .devices = devices,
        .threads = at_least_one(tddp_launch_cores() / local_size),
    };
    return options->numa_binding == TDDP_LAUNCH_BINDING_NONE
               ? TDDP_OK
               : tddp_launch_binding_plan(options->numa_binding, devices, local_size, &out->cpus);
}
