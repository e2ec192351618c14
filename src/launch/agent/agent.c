/*
 * A run of torchrun: creates what lasts for the run, has the loop wait for events, and cleans up at
 * the end. The agent owns everything it makes and releases it on its single exit path. Main thread.
 */
#include <stdlib.h>

#include "launch/agent/agent_state.h"
#include "net/net.h"

/* --- preparing ------------------------------------------------------------------------------- */

tddp_status tddp_launch_agent_watch(tddp_launch_agent *agent, tddp_launch_source *source, int fd,
                                    tddp_launch_priority priority, tddp_launch_callback *callback)
{
    *source = (tddp_launch_source){
        .fd = fd,
        .events = POLLIN,
        .priority = priority,
        .callback = callback,
        .data = agent,
    };
    return tddp_launch_loop_add(&agent->loop, source);
}

/* Without these no event is handled. */
static bool open_loop(tddp_launch_agent *agent)
{
    return tddp_launch_console_open(&agent->console, &agent->loop) == TDDP_OK &&
           tddp_launch_agent_watch(agent, &agent->sources.signals, agent->signals->fd,
                                   TDDP_LAUNCH_PRIORITY_SIGNAL,
                                   tddp_launch_agent_on_signals) == TDDP_OK &&
           tddp_launch_agent_watch(agent, &agent->sources.phase, -1, TDDP_LAUNCH_PRIORITY_DEADLINE,
                                   tddp_launch_agent_on_deadline) == TDDP_OK;
}

static void choose_run_id(tddp_launch_agent *agent)
{
    const tddp_launch_options *options = agent->options;
    const char *given = options->standalone ? NULL : options->run_id;
    (void)snprintf(agent->run_id, sizeof agent->run_id, "%016llx",
                   (unsigned long long)tddp_hash("", 0)); /* random in each process */
    agent->job.run_id = given ? given : options->max_nodes > 1 ? "none" : agent->run_id;
}

/* A pipe and a log file for each stream of many workers, and the ranks of all nodes at the store,
 * are more than the usual limit: as many as are allowed. Workers get the old limit back. */
static void allow_files(tddp_launch_agent *agent)
{
    (void)getrlimit(RLIMIT_NOFILE, &agent->files); /* cannot fail */
    struct rlimit raised = {agent->files.rlim_max, agent->files.rlim_max};
    (void)setrlimit(RLIMIT_NOFILE, &raised);
}

/* The job runs without one if its port cannot be had. */
static void open_health(tddp_launch_agent *agent)
{
    const tddp_launch_endpoint *at = &agent->options->health;
    const char *host = at->host[0] != '\0' ? at->host : tddp_net_loopback();
    int port = at->port;
    if (port < 0) {
        return;
    }
    if (tddp_launch_health_open(&agent->loop, host, &port, tddp_launch_agent_health, agent,
                                &agent->health) != TDDP_OK) {
        tddp_launch_console_log(&agent->console,
                                "--health-check-port: %s; the job runs without a health check",
                                tddp_error_message());
    } else if (at->port == 0) {
        tddp_launch_console_log(&agent->console, "health check on port %d", port);
    }
}

/* Without a place for the pipe the job runs without timers. */
static bool open_timers(tddp_launch_agent *agent)
{
    const char *folder = agent->options->private_folder;
    if (folder && tddp_launch_timers_open(folder, &agent->timers) != TDDP_OK) {
        tddp_launch_console_log(&agent->console, "no timers for workers: %s", tddp_error_message());
    }
    agent->job.timer_file = agent->timers ? agent->timers->path : NULL;
    return !agent->timers || tddp_launch_agent_watch(agent, &agent->sources.timers,
                                                     agent->timers->fd, TDDP_LAUNCH_PRIORITY_EVENT,
                                                     tddp_launch_agent_on_timers) == TDDP_OK;
}

/* False with a text. */
static bool prepare(tddp_launch_agent *agent, const tddp_launch_devices *devices, int count)
{
    allow_files(agent);
    agent->workers = tddp_alloc_array((size_t)count, sizeof *agent->workers);
    if (!agent->workers ||
        tddp_launch_job_prepare(agent->options, devices, count, &agent->job) != TDDP_OK) {
        return false;
    }
    agent->count = count;
    tddp_launch_terminal_look(&agent->terminal);
    choose_run_id(agent);
    if (tddp_launch_adopt_orphans() != TDDP_OK ||
        tddp_launch_output_create(agent->options, agent->job.run_id, &agent->console,
                                  &agent->output) != TDDP_OK ||
        !open_timers(agent)) {
        return false;
    }
    agent->attempt.workers = agent->workers;
    agent->attempt.count = count;
    agent->attempt.output = agent->output;
    open_health(agent);
    return true;
}

static void release(tddp_launch_agent *agent)
{
    /* First the store: what is left of its thread must not outlive what it uses. */
    tddp_launch_agent_leave_nodes(agent);
    tddp_store_server_stop(agent->server);
    tddp_launch_health_close(agent->health);
    tddp_launch_agent_forget_workers(agent);
    free(agent->workers);
    tddp_bytes_free(&agent->record.json.text);
    tddp_launch_timers_close(agent->timers);
    tddp_launch_output_free(agent->output);
    free(agent->job.cpus);
    tddp_launch_console_close(&agent->console);
    tddp_launch_loop_free(&agent->loop);
}

/* --- running --------------------------------------------------------------------------------- */

static void loop(tddp_launch_agent *agent)
{
    tddp_launch_agent_advance(agent);
    while (agent->phase != TDDP_LAUNCH_OVER) {
        tddp_launch_output_hold_back(agent->output);
        if (tddp_launch_loop_turn(&agent->loop) != TDDP_OK) {
            tddp_launch_agent_handle(agent, TDDP_LAUNCH_EVENT_FAULT);
        }
        tddp_launch_console_flush(&agent->console);
        if (tddp_launch_console_abandoned(&agent->console)) {
            tddp_launch_agent_handle(agent, TDDP_LAUNCH_EVENT_UNREAD);
        }
        tddp_launch_agent_advance(agent);
    }
}

int tddp_launch_run(const tddp_launch_options *options, const tddp_launch_program *program,
                    tddp_launch_signals *signals, const tddp_launch_devices *devices,
                    int local_size)
{
    tddp_launch_agent agent = {
        .options = options,
        .program = program,
        .signals = signals,
        .world = {.node_rank = -1},
        .attempt = {.program = program->name, .job = &agent.job, .world = &agent.world},
    };
    bool opened = open_loop(&agent);
    if (opened && prepare(&agent, devices, local_size)) {
        tddp_launch_agent_start_first_round(&agent);
    } else {
        tddp_launch_agent_handle(&agent, TDDP_LAUNCH_EVENT_FAULT);
    }
    if (opened) {
        loop(&agent);
    }
    int status = tddp_launch_agent_conclude(&agent);
    release(&agent);
    return status;
}
