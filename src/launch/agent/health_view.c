/*
 * Collects what the health check answers about the agent, without changing it. Main thread.
 */
#include "launch/agent/agent_state.h"
#include "launch/report/json.h"
#include "launch/report/report.h"

/* The job fails, or this node's part of it: a restart makes it healthy again. */
static bool is_failing(const tddp_launch_agent *agent)
{
    switch (agent->cause) {
    case TDDP_LAUNCH_CAUSE_WORKER:
    case TDDP_LAUNCH_CAUSE_PEER:
    case TDDP_LAUNCH_CAUSE_OUTPUT:
    case TDDP_LAUNCH_CAUSE_FATAL:
    case TDDP_LAUNCH_CAUSE_SAID:
        return true;
    case TDDP_LAUNCH_CAUSE_NONE:
    case TDDP_LAUNCH_CAUSE_CHANGED:
    case TDDP_LAUNCH_CAUSE_SIGNAL:
        break;
    }
    return false;
}

static const char *worker_state(const tddp_launch_agent *agent, const tddp_launch_worker *worker,
                                char text[TDDP_LAUNCH_ENDING_BYTES])
{
    if (worker->pid == 0) {
        return "-";
    }
    if (!worker->alive) {
        return tddp_launch_worker_failed(worker) ? tddp_launch_ending(worker, text) : "done";
    }
    return agent->phase == TDDP_LAUNCH_STOPPING ? "told to end" : "running";
}

static const char *state_text(const tddp_launch_agent *agent)
{
    switch (agent->phase) {
    case TDDP_LAUNCH_JOINING:
        return "waiting for nodes";
    case TDDP_LAUNCH_RUNNING:
        return "running";
    case TDDP_LAUNCH_LINGERING:
        return "done here";
    case TDDP_LAUNCH_STOPPING:
        return agent->alive > 0 ? "ending workers" : "ending what is left";
    case TDDP_LAUNCH_KILLING:
        return "killing workers";
    case TDDP_LAUNCH_FLUSHING:
    case TDDP_LAUNCH_OVER:
        break;
    }
    return "over";
}

/* Changes whenever one of the above does. */
static int64_t state_key(const tddp_launch_agent *agent)
{
    return ((int64_t)agent->world.round * TDDP_LAUNCH_MAX_LOCAL + agent->alive) * 16 +
           (int64_t)agent->phase;
}

static void put_workers(const tddp_launch_agent *agent, tddp_launch_json *json)
{
    char ending[TDDP_LAUNCH_ENDING_BYTES];
    int count = agent->phase == TDDP_LAUNCH_JOINING ? 0 : agent->count;
    tddp_launch_json_open(json, "workers", '[');
    for (int i = 0; i < count; i++) {
        const tddp_launch_worker *worker = &agent->workers[i];
        tddp_launch_json_open(json, NULL, '{');
        tddp_launch_json_number(json, "rank", worker->rank);
        tddp_launch_json_number(json, "local_rank", worker->local_rank);
        tddp_launch_json_number(json, "pid", worker->pid);
        tddp_launch_json_text(json, "state", worker_state(agent, worker, ending));
        tddp_launch_json_close(json, '{');
    }
    tddp_launch_json_close(json, '[');
}

static void put_job(const tddp_launch_agent *agent, tddp_launch_json *json)
{
    const tddp_launch_world *world = &agent->world;
    tddp_launch_json_text(json, "state", state_text(agent));
    tddp_launch_json_text(json, "run_id", agent->job.run_id);
    tddp_launch_json_number(json, "node_rank", world->node_rank);
    tddp_launch_json_number(json, "nodes", world->nodes);
    tddp_launch_json_number(json, "world_size", world->size);
    tddp_launch_json_number(json, "round", world->round);
    tddp_launch_json_number(json, "restart", world->restart);
    tddp_launch_json_number(json, "max_restarts", world->max_restarts);
}

void tddp_launch_agent_update_health(tddp_launch_agent *agent)
{
    tddp_launch_health_turn(agent->health);
    int64_t state = state_key(agent);
    if (!agent->health || agent->published_state == state) {
        return;
    }
    tddp_launch_json json = {.follows = true};
    put_job(agent, &json);
    put_workers(agent, &json);
    if (json.failed) { /* short memory: at the next turn */
        tddp_bytes_free(&json.text);
        return;
    }
    tddp_launch_health_publish(agent->health, !is_failing(agent), &json.text);
    agent->published_state = state;
}
