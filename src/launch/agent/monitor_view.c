/*
 * Collects what --monitor shows of the agent, without changing it. Main thread.
 */
#include <stdlib.h>

#include "launch/agent/agent_state.h"
#include "launch/output/tail.h"
#include "launch/report/report.h"

const char *tddp_launch_agent_worker_state(const tddp_launch_agent *agent,
                                           const tddp_launch_worker *worker,
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

const char *tddp_launch_agent_state_text(const tddp_launch_agent *agent)
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

/* What is waited for, as last reported, or as much as is known here. */
static void put_waits(const tddp_launch_agent *agent, char *text, size_t size)
{
    const tddp_launch_options *options = agent->options;
    text[0] = '\0';
    if (agent->phase == TDDP_LAUNCH_LINGERING) {
        (void)snprintf(text, size, "the other nodes' workers");
    } else if (agent->phase == TDDP_LAUNCH_JOINING && agent->waited_for[0] != '\0') {
        (void)snprintf(text, size, "%s", agent->waited_for);
    } else if (agent->phase == TDDP_LAUNCH_JOINING && options->endpoint_count > 0) {
        (void)snprintf(text, size, "the job's nodes, at %s port %d", options->endpoints[0].host,
                       options->endpoints[0].port);
    }
}

/* The texts of one worker. */
typedef struct worker_texts {
    char ending[TDDP_LAUNCH_ENDING_BYTES];
    char line[TDDP_LAUNCH_TAIL_BYTES];
} worker_texts;

static void look_at_worker(const tddp_launch_agent *agent, int local_rank, worker_texts *texts,
                           tddp_launch_view_worker *out)
{
    const tddp_launch_worker *worker = &agent->workers[local_rank];
    (void)snprintf(texts->line, sizeof texts->line, "%s",
                   tddp_launch_output_last_line(agent->output, local_rank));
    *out = (tddp_launch_view_worker){
        .rank = worker->rank,
        .pid = worker->pid,
        .alive = worker->alive,
        .state = tddp_launch_agent_worker_state(agent, worker, texts->ending),
        .last_line = texts->line,
    };
}

static void show(const tddp_launch_agent *agent, tddp_launch_view_worker *workers,
                 worker_texts *texts)
{
    const tddp_launch_world *world = &agent->world;
    bool joining = agent->phase == TDDP_LAUNCH_JOINING;
    int count = joining ? 0 : agent->count;
    char waits[sizeof agent->waited_for + 64];
    put_waits(agent, waits, sizeof waits);
    for (int i = 0; i < count; i++) {
        look_at_worker(agent, i, &texts[i], &workers[i]);
    }
    tddp_launch_view view = {
        .run_id = agent->job.run_id,
        .state = tddp_launch_agent_state_text(agent),
        .waits_for = waits,
        .nodes = joining ? 0 : world->nodes,
        .min_nodes = agent->options->min_nodes,
        .max_nodes = agent->options->max_nodes,
        .node_rank = world->node_rank,
        .world_size = world->size,
        .round = world->round,
        .restart = world->restart,
        .max_restarts = agent->options->max_restarts,
        .workers = workers,
        .count = count,
    };
    tddp_launch_monitor_show(agent->monitor, &view);
}

int64_t tddp_launch_agent_state_key(const tddp_launch_agent *agent)
{
    return ((int64_t)agent->world.round * TDDP_LAUNCH_MAX_LOCAL + agent->alive) * 16 +
           (int64_t)agent->phase;
}

void tddp_launch_agent_update_monitor(tddp_launch_agent *agent)
{
    if (!agent->monitor) {
        return;
    }
    if (agent->phase >= TDDP_LAUNCH_FLUSHING) {
        /* The report is the last that people see. */
        tddp_launch_monitor_free(agent->monitor);
        agent->monitor = NULL;
        return;
    }
    if (agent->phase != TDDP_LAUNCH_JOINING) {
        agent->waited_for[0] = '\0';
    }
    if (agent->shown_state != tddp_launch_agent_state_key(agent)) {
        agent->shown_state = tddp_launch_agent_state_key(agent);
        tddp_launch_monitor_wake(agent->monitor);
    }
    if (tddp_now_ns() < tddp_launch_monitor_deadline(agent->monitor)) {
        return;
    }
    tddp_launch_view_worker *workers = tddp_alloc_array((size_t)agent->count, sizeof *workers);
    worker_texts *texts = tddp_alloc_array((size_t)agent->count, sizeof *texts);
    if (workers && texts) {
        show(agent, workers, texts);
    }
    free(workers);
    free(texts);
}
