/*
 * Makes a worker's environment block. Names and values are PyTorch's, but for the threads: PyTorch
 * gives each worker one, here it gets its share of the cores. OpenBLAS made with pthreads does not
 * read OMP_NUM_THREADS, so it has a variable of its own. Made before the fork: between fork and
 * exec nothing may allocate. Main thread.
 */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "launch/workers/environment.h"
#include "launch/command/program.h"
#include "launch/workers/resources.h"
#include "launch/workers/signals.h"

extern char **environ;

/* Variables set here; more than there are below. */
enum { MOST_ADDED = 32 };

/* Torchrun's own, for whoever started it. */
static const char *const own_variables[] = {
    "TORCHELASTIC_ERROR_FILE=", "TORCHELASTIC_HEALTH_CHECK_PORT=", "TORCHELASTIC_TIMER_FILE="};

typedef struct block {
    char **list;
    size_t count;
    bool failed;
} block;

/* Adds a variable in place of one with the same name; a text of NULL is short memory. */
static void put(block *made, char *text)
{
    if (!text) {
        made->failed = true;
        return;
    }
    size_t length = strcspn(text, "=") + 1;
    for (size_t i = 0; i < made->count; i++) {
        if (strncmp(made->list[i], text, length) == 0) {
            free(made->list[i]);
            made->list[i] = text;
            return;
        }
    }
    made->list[made->count++] = text;
}

static void put_number(block *made, const char *name, int value)
{
    put(made, tddp_format("%s=%d", name, value));
}

static void put_text(block *made, const char *name, const char *value)
{
    put(made, tddp_format("%s=%s", name, value));
}

static int threads_of(const tddp_launch_job *job, int local_rank)
{
    int share = tddp_launch_binding_share(&job->binding, local_rank, job->threads);
    return share < job->most_threads ? share : job->most_threads;
}

/* What people have set stands; and who has set OMP_NUM_THREADS means the others too: MKL follows it
 * by itself. */
static void put_threads(block *made, const tddp_launch_job *job, int local_rank)
{
    int threads = threads_of(job, local_rank);
    const char *set = getenv("OMP_NUM_THREADS");
    if (!set) {
        put_number(made, "OMP_NUM_THREADS", threads);
    }
    if (!getenv("MKL_NUM_THREADS") && !set) {
        put_number(made, "MKL_NUM_THREADS", threads);
    }
    if (!getenv("OPENBLAS_NUM_THREADS")) {
        int first = set ? atoi(set) : 0; /* "4,2": of the levels the first */
        put_number(made, "OPENBLAS_NUM_THREADS", first > 0 ? first : threads);
    }
}

static void put_signals(block *made, const tddp_launch_options *options)
{
    char text[TDDP_LAUNCH_MAX_SIGNALS * 16] = "";
    size_t size = 0;
    for (int i = 0; i < options->signal_count; i++) {
        char name[32];
        int added = snprintf(text + size, sizeof text - size, "%s%s", i > 0 ? "," : "",
                             tddp_launch_signal_name(options->signals[i], name));
        size += (size_t)added < sizeof text - size ? (size_t)added : 0;
    }
    put_text(made, "TORCHELASTIC_SIGNALS_TO_HANDLE", text);
}

/* The worker's own GPU is all that it sees. */
static void put_device(block *made, const tddp_launch_job *job, int local_rank)
{
    char name[TDDP_LAUNCH_DEVICE_BYTES];
    if (tddp_launch_devices_name(job->devices, getenv("CUDA_VISIBLE_DEVICES"), local_rank, name)) {
        put_text(made, "CUDA_VISIBLE_DEVICES", name);
    }
}

static void put_world(block *made, const tddp_launch_world *world, int local_rank)
{
    put_number(made, "RANK", world->base_rank + local_rank);
    put_number(made, "LOCAL_RANK", local_rank);
    put_number(made, "WORLD_SIZE", world->size);
    put_number(made, "LOCAL_WORLD_SIZE", world->local_size);
    put_number(made, "GROUP_RANK", world->node_rank);
    put_number(made, "GROUP_WORLD_SIZE", world->nodes);
    put_number(made, "ROLE_RANK", world->role_base_rank + local_rank);
    put_number(made, "ROLE_WORLD_SIZE", world->role_size);
    put_text(made, "MASTER_ADDR", world->master_addr);
    put_number(made, "MASTER_PORT", world->master_port);
    put_number(made, "TORCHELASTIC_RESTART_COUNT", world->restart);
    put_number(made, "TORCHELASTIC_MAX_RESTARTS", world->max_restarts);
    put(made, tddp_format("TDDP_GENERATION=%lld", (long long)world->generation));
}

static bool is_own(const char *variable)
{
    for (size_t i = 0; i < sizeof own_variables / sizeof own_variables[0]; i++) {
        if (strncmp(variable, own_variables[i], strlen(own_variables[i])) == 0) {
            return true;
        }
    }
    return false;
}

char **tddp_launch_environment(const tddp_launch_world *world, const tddp_launch_job *job,
                               int local_rank, const char *error_file)
{
    size_t inherited = 0;
    while (environ[inherited]) {
        inherited++;
    }
    block made = {tddp_alloc_array(inherited + MOST_ADDED, sizeof *made.list), 0, false};
    if (!made.list) {
        return NULL;
    }
    for (size_t i = 0; i < inherited && !made.failed; i++) {
        if (is_own(environ[i])) {
            continue;
        }
        char *copy = tddp_copy_string(environ[i]);
        if (copy) {
            made.list[made.count++] = copy;
        } else {
            made.failed = true;
        }
    }
    put_world(&made, world, local_rank);
    if (job->options->virtual_local_rank) {
        put_number(&made, "LOCAL_RANK", 0);
        put_device(&made, job, local_rank);
    }
    put_text(&made, "ROLE_NAME", job->options->role);
    put_text(&made, "TORCHELASTIC_RUN_ID", job->run_id);
    put_text(&made, "TORCHELASTIC_USE_AGENT_STORE", "True");
    put_signals(&made, job->options);
    if (!getenv("TORCH_NCCL_ASYNC_ERROR_HANDLING")) {
        put_text(&made, "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1");
    }
    put_threads(&made, job, local_rank);
    if (job->timer_file) {
        put_text(&made, "TORCHELASTIC_TIMER_FILE", job->timer_file);
    }
    if (error_file) {
        put_text(&made, "TORCHELASTIC_ERROR_FILE", error_file);
    }
    if (made.failed) {
        tddp_launch_list_free(made.list);
        return NULL;
    }
    return made.list;
}

/* --- the job --------------------------------------------------------------------------------- */

static int at_least_one(int number)
{
    return number > 1 ? number : 1;
}

tddp_status tddp_launch_job_prepare(const tddp_launch_options *options,
                                    const tddp_launch_devices *devices, int local_size,
                                    tddp_launch_job *out)
{
    *out = (tddp_launch_job){
        .options = options,
        .devices = devices,
        .threads = at_least_one(tddp_launch_cores() / local_size),
        .most_threads = INT_MAX,
    };
    if (options->numa_binding == TDDP_LAUNCH_BINDING_NONE) {
        return TDDP_OK;
    }
    out->most_threads = at_least_one(tddp_core_limit() / local_size);
    return tddp_launch_binding_plan(options->numa_binding, devices, local_size, &out->binding);
}

void tddp_launch_job_free(tddp_launch_job *job)
{
    tddp_launch_binding_free(&job->binding);
}
