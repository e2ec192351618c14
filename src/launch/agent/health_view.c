/*
 * What the health check answers about the job. Main thread.
 */
#include "launch/agent/agent_state.h"

static const char *state_of(const tddp_launch_agent *agent)
{
    static const char *const states[] = {
        [TDDP_LAUNCH_JOINING] = "joining",   [TDDP_LAUNCH_RUNNING] = "running",
        [TDDP_LAUNCH_LINGERING] = "running", [TDDP_LAUNCH_STOPPING] = "stopping",
        [TDDP_LAUNCH_FLUSHING] = "done",     [TDDP_LAUNCH_OVER] = "done",
    };
    bool again = agent->phase == TDDP_LAUNCH_JOINING
                     ? agent->world.size > 0
                     : agent->phase < TDDP_LAUNCH_FLUSHING && tddp_launch_agent_goes_on(agent);
    return again ? "restarting" : states[agent->phase];
}

static void put_workers(const tddp_launch_agent *agent, tddp_launch_json *json)
{
    char ending[TDDP_LAUNCH_ENDING_BYTES];
    tddp_launch_json_open(json, "workers", '[');
    for (int i = 0; i < agent->count; i++) {
        const tddp_launch_worker *worker = &agent->workers[i];
        if (worker->pid == 0) {
            continue; /* not started yet, or not again */
        }
        tddp_launch_json_open(json, NULL, '{');
        tddp_launch_json_number(json, "rank", worker->rank);
        tddp_launch_json_number(json, "local_rank", worker->local_rank);
        tddp_launch_json_number(json, "pid", worker->pid);
        tddp_launch_json_text(json, "state",
                              tddp_launch_worker_failed(worker) ? tddp_launch_ending(worker, ending)
                              : !worker->alive                  ? "done"
                              : agent->phase == TDDP_LAUNCH_RUNNING ? "running"
                                                                    : "stopping");
        tddp_launch_json_close(json, '{');
    }
    tddp_launch_json_close(json, '[');
}

char *tddp_launch_agent_health(void *data, bool *healthy)
{
    const tddp_launch_agent *agent = data;
    const tddp_launch_world *world = &agent->world;
    tddp_launch_json json = {0};
    /* As far as this node can tell: one that restarts has not failed. */
    *healthy = agent->cause < TDDP_LAUNCH_CAUSE_WORKER || tddp_launch_agent_goes_on(agent);
    tddp_launch_json_open(&json, NULL, '{');
    tddp_launch_json_bool(&json, "healthy", *healthy);
    tddp_launch_json_text(&json, "state", state_of(agent));
    tddp_launch_json_text(&json, "run_id", agent->job.run_id);
    tddp_launch_json_number(&json, "node_rank", world->node_rank);
    tddp_launch_json_number(&json, "nodes", world->nodes);
    tddp_launch_json_number(&json, "world_size", world->size);
    tddp_launch_json_number(&json, "round", world->round);
    tddp_launch_json_number(&json, "restart", world->restart);
    tddp_launch_json_number(&json, "max_restarts", world->max_restarts);
    put_workers(agent, &json);
    tddp_launch_json_close(&json, '{');
    json.failed |= tddp_bytes_append(&json.text, "\n", 2) != TDDP_OK; /* with its NUL */
    if (json.failed) {
        tddp_bytes_free(&json.text);
    }
    return json.text.data;
}
