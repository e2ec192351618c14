/*
 * A round: its store and workers at the start; at its end the report for people, the record for
 * programs, and what follows. Main thread.
 */
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "launch/agent/agent_state.h"
#include "net/net.h"

enum {
    EXIT_JOB_FAILED = 1,
    LAST_OUTPUT_MS = 1000, /* for output nobody takes, after a signal */
    LEAVE_MS = 1000        /* for the rendezvous, beyond the time that others have for its end */
};

/* --- workers --------------------------------------------------------------------------------- */

static tddp_status start_worker(tddp_launch_agent *agent, int local_rank)
{
    tddp_launch_worker *worker = &agent->workers[local_rank];
    worker->local_rank = local_rank;
    worker->rank = agent->world.base_rank + local_rank;
    worker->error_file = tddp_launch_output_error_file(agent->output, local_rank);
    int pipes[TDDP_LAUNCH_STREAMS];
    int out_fd = tddp_launch_output_fd(agent->output, local_rank, TDDP_LAUNCH_OUT);
    tddp_launch_start start = {
        .path = agent->program->path,
        .argv = tddp_launch_program_argv(agent->program, local_rank),
        .envp = tddp_launch_environment(&agent->world, &agent->job, local_rank, worker->error_file),
        .signals = agent->signals,
        .files = &agent->files,
        /* One reader at most: two would tear the input between them. */
        .has_input = local_rank == 0,
        .cpus = agent->job.cpus ? &agent->job.cpus[local_rank] : NULL,
        .terminal_group =
            agent->terminal.present && out_fd == STDOUT_FILENO ? agent->terminal.group : 0,
        .output_fds = {out_fd, tddp_launch_output_fd(agent->output, local_rank, TDDP_LAUNCH_ERR)},
    };
    tddp_status status = start.argv && start.envp ? tddp_launch_worker_start(worker, &start, pipes)
                                                  : TDDP_OUT_OF_MEMORY;
    free(start.argv);
    free(start.envp);
    if (status != TDDP_OK) {
        return status;
    }
    agent->alive++;
    return tddp_launch_output_watch(agent->output, &agent->loop, local_rank, pipes);
}

void tddp_launch_agent_start_workers(tddp_launch_agent *agent, int value)
{
    (void)value;
    tddp_launch_agent_enter(agent, TDDP_LAUNCH_RUNNING, -1);
    agent->reported = false;
    if (agent->timers) {
        agent->timers->count = 0;
    }
    tddp_status status = tddp_launch_output_begin(agent->output, &agent->world);
    agent->oom_kills = tddp_launch_oom_kills("");
    for (int i = 0; i < agent->count && status == TDDP_OK; i++) {
        status = start_worker(agent, i);
    }
    if (status != TDDP_OK) {
        tddp_launch_rendezvous_request(agent->rendezvous, TDDP_LAUNCH_REQUEST_FAILED,
                                       tddp_error_message());
        tddp_launch_agent_handle(agent, TDDP_LAUNCH_EVENT_FAULT);
    }
}

void tddp_launch_agent_forget_workers(tddp_launch_agent *agent)
{
    for (int i = 0; i < agent->count; i++) {
        tddp_launch_worker_free(&agent->workers[i]);
    }
    agent->alive = 0;
}

/* --- the start ------------------------------------------------------------------------------- */

/* The only node's store, at the address that workers get. */
static tddp_status open_server(tddp_launch_agent *agent)
{
    const tddp_launch_options *options = agent->options;
    tddp_launch_world *world = &agent->world;
    bool named = options->backend == TDDP_LAUNCH_STATIC && !options->standalone;
    const tddp_launch_endpoint *at =
        named && options->endpoint_count > 0 ? &options->endpoints[0] : NULL;
    const char *host = at ? at->host : tddp_net_loopback();
    int port = at ? at->port : named ? options->master_port : 0;
    (void)snprintf(world->master_addr, sizeof world->master_addr, "%s", host);
    tddp_store_server_opts opts = TDDP_STORE_SERVER_OPTS_INIT;
    opts.host = world->master_addr;
    opts.port = port > 0 ? port : 0;
    tddp_status status = tddp_store_server_start(&opts, &agent->server);
    if (status == TDDP_ADDRESS_IN_USE) {
        return tddp_fail(status, "%s; choose another --master-port, or none for a free one",
                         tddp_error_message());
    }
    if (status == TDDP_OK) {
        world->master_port = tddp_store_server_port(agent->server);
    }
    return status;
}

static void start_alone(tddp_launch_agent *agent, int restart)
{
    agent->world = (tddp_launch_world){
        .nodes = 1,
        .size = agent->count,
        .local_size = agent->count,
        .role_size = agent->count,
        .round = restart,
        .restart = restart,
        .max_restarts = agent->options->max_restarts,
        .generation = tddp_launch_new_generation(),
    };
    tddp_store_server_stop(agent->server);
    agent->server = NULL;
    tddp_launch_agent_handle(agent, open_server(agent) == TDDP_OK ? TDDP_LAUNCH_EVENT_JOINED
                                                                  : TDDP_LAUNCH_EVENT_FAULT);
}

void tddp_launch_agent_start_first_round(tddp_launch_agent *agent)
{
    const tddp_launch_times times = tddp_launch_times_of(agent->options);
    if (agent->options->max_nodes == 1) {
        start_alone(agent, 0);
    } else if (tddp_launch_rendezvous_start(agent->options, &times, agent->job.run_id, agent->count,
                                            &agent->rendezvous) != TDDP_OK ||
               tddp_launch_agent_watch(
                   agent, &agent->sources.nodes, tddp_launch_rendezvous_fd(agent->rendezvous),
                   TDDP_LAUNCH_PRIORITY_EVENT, tddp_launch_agent_on_notifications) != TDDP_OK) {
        tddp_launch_agent_handle(agent, TDDP_LAUNCH_EVENT_FAULT);
    }
}

static void start_next_round(tddp_launch_agent *agent)
{
    tddp_launch_agent_forget_workers(agent);
    agent->reported = agent->cause == TDDP_LAUNCH_CAUSE_WORKER;
    agent->cause = TDDP_LAUNCH_CAUSE_NONE;
    tddp_launch_agent_enter(agent, TDDP_LAUNCH_JOINING, -1);
    if (agent->rendezvous) {
        tddp_launch_rendezvous_request(agent->rendezvous, TDDP_LAUNCH_REQUEST_AGAIN, "");
    } else {
        start_alone(agent, agent->world.restart + 1);
    }
}

/* --- the end --------------------------------------------------------------------------------- */

void tddp_launch_agent_log_next_round(tddp_launch_agent *agent)
{
    if (!agent->rendezvous || agent->outcome == TDDP_LAUNCH_NOTIFICATION_FAILED) {
        tddp_launch_console_log(&agent->console, "restarting workers (restart %d of %d)",
                                agent->world.restart + 1, agent->options->max_restarts);
    } else if (agent->outcome == TDDP_LAUNCH_NOTIFICATION_CHANGED) {
        tddp_launch_console_log(&agent->console, "restarting workers after a membership change");
    }
}

bool tddp_launch_agent_goes_on(const tddp_launch_agent *agent)
{
    bool reason =
        agent->cause >= TDDP_LAUNCH_CAUSE_CHANGED && agent->cause <= TDDP_LAUNCH_CAUSE_PEER;
    if (!reason || agent->signal != 0) {
        return false;
    }
    return agent->rendezvous ? agent->outcome < TDDP_LAUNCH_NOTIFICATION_DONE
                             : agent->world.restart < agent->options->max_restarts;
}

void tddp_launch_agent_finish_round(tddp_launch_agent *agent, int value)
{
    (void)value;
    tddp_launch_output_drain(agent->output);
    if (agent->count > 0 && agent->workers[0].has_terminal &&
        WIFSIGNALED(agent->workers[0].wait_status)) {
        tddp_launch_terminal_restore(&agent->terminal);
    }
    bool elsewhere = agent->cause == TDDP_LAUNCH_CAUSE_PEER;
    if (elsewhere || agent->cause == TDDP_LAUNCH_CAUSE_WORKER) {
        tddp_launch_report(&agent->record, &agent->attempt, elsewhere ? agent->text : NULL,
                           &agent->console);
    }
    if (tddp_launch_agent_goes_on(agent)) {
        tddp_launch_agent_log_next_round(agent);
        start_next_round(agent);
        return;
    }
    if (agent->outcome < TDDP_LAUNCH_NOTIFICATION_DONE && agent->signal == 0) {
        /* Whatever it was, the others need not find out by silence. */
        tddp_launch_agent_send_leave(agent, "has ended");
    }
    int64_t nodes_ms = (int64_t)agent->options->conf.close_timeout * 1000 + LEAVE_MS;
    tddp_launch_agent_enter(agent, TDDP_LAUNCH_FLUSHING,
                            agent->signal != 0  ? LAST_OUTPUT_MS
                            : agent->rendezvous ? nodes_ms
                                                : -1);
}

void tddp_launch_agent_send_leave(const tddp_launch_agent *agent, const char *what)
{
    char text[128];
    char node[24] = "a node"; /* before a first round it has no rank */
    if (agent->world.node_rank >= 0) {
        (void)snprintf(node, sizeof node, "node %d", agent->world.node_rank);
    }
    (void)snprintf(text, sizeof text, "%s %s", node, what);
    tddp_launch_rendezvous_request(agent->rendezvous, TDDP_LAUNCH_REQUEST_LEAVE, text);
}

void tddp_launch_agent_leave_nodes(tddp_launch_agent *agent)
{
    tddp_launch_loop_remove(&agent->loop, &agent->sources.nodes);
    tddp_launch_rendezvous_end(agent->rendezvous);
    agent->rendezvous = NULL;
}

int tddp_launch_agent_conclude(tddp_launch_agent *agent)
{
    bool unread = agent->cause == TDDP_LAUNCH_CAUSE_UNREAD;
    int signal = agent->signal ? agent->signal : unread ? SIGPIPE : 0;
    tddp_launch_outcome outcome = {
        .exit_status = signal != 0 ? TDDP_LAUNCH_EXIT_BY_SIGNAL + signal
                       : agent->cause == TDDP_LAUNCH_CAUSE_NONE ? EXIT_SUCCESS
                                                                : EXIT_JOB_FAILED,
        .signal = agent->signal,
        .cause = unread                                   ? "nobody reads the output any more"
                 : agent->cause >= TDDP_LAUNCH_CAUSE_PEER ? agent->text
                                                          : NULL,
        .report_file = agent->options->report_file,
        .error_file = getenv("TORCHELASTIC_ERROR_FILE"),
    };
    tddp_launch_record_write(&agent->record, &agent->attempt, &outcome, &agent->console);
    tddp_launch_console_flush(&agent->console);
    return outcome.exit_status;
}
