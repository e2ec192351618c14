/*
 * Makes a worker's environment block. Names and values are PyTorch's; OPENBLAS_NUM_THREADS is
 * beside OMP_NUM_THREADS because Debian's OpenBLAS with pthreads does not read the latter. Made
 * before the fork: between fork and exec nothing may allocate. Main thread.
 */
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "launch/workers/environment.h"
#include "launch/command/program.h"

extern char **environ;

/* Variables set here; more than there are below. */
enum { MOST_ADDED = 32 };

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

static void put_threads(block *made, const char *name, int threads)
{
    if (!getenv(name)) {
        put_number(made, name, threads);
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
        char *copy = tddp_copy_string(environ[i]);
        if (copy) {
            made.list[made.count++] = copy;
        } else {
            made.failed = true;
        }
    }
    put_world(&made, world, local_rank);
    put_text(&made, "ROLE_NAME", job->role);
    put_text(&made, "TORCHELASTIC_RUN_ID", job->run_id);
    put_text(&made, "TORCHELASTIC_USE_AGENT_STORE", "True");
    put_text(&made, "TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT");
    put_text(&made, "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1");
    put_threads(&made, "OMP_NUM_THREADS", job->threads);
    put_threads(&made, "OPENBLAS_NUM_THREADS", job->threads);
    if (error_file) {
        put_text(&made, "TORCHELASTIC_ERROR_FILE", error_file);
    }
    if (made.failed) {
        tddp_launch_list_free(made.list);
        return NULL;
    }
    return made.list;
}
