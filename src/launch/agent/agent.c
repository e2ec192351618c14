/*
 * A run of torchrun: creates what lasts for the run, starts each round's store and workers, and
 * cleans up at the end. The agent owns everything it makes and releases it on its single exit path.
 * Main thread.
 */
#include <fcntl.h>
#include <stdlib.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <unistd.h>

#include "launch/agent/agent_state.h"
#include "launch/output/log_queue.h"
#include "net/net.h"

/* --- the workers ----------------------------------------------------------------------------- */

static tddp_status start_worker(tddp_launch_agent *agent, int local_rank)
{
    tddp_launch_worker *worker = &agent->workers[local_rank];
    worker->local_rank = local_rank;
    worker->rank = agent->world.base_rank + local_rank;
    worker->error_file = tddp_launch_output_error_file(agent->output, local_rank);
    int out_fd = tddp_launch_output_fd(agent->output, local_rank, TDDP_LAUNCH_OUT);
    tddp_launch_start start = {
        .path = agent->program->path,
        .argv = tddp_launch_program_argv(agent->program, local_rank),
        .envp = tddp_launch_environment(&agent->world, &agent->job, local_rank, worker->error_file),
        .signals = agent->signals,
        .files = &agent->files,
        /* One reader at most: two would tear the input between them. */
        .stdin_fd = local_rank == 0 ? STDIN_FILENO : agent->null_fd,
        .binding = &agent->job.binding,
        .terminal_group =
            agent->terminal.present && out_fd == STDOUT_FILENO ? agent->terminal.group : 0,
        .output_fds = {out_fd, tddp_launch_output_fd(agent->output, local_rank, TDDP_LAUNCH_ERR)},
    };
    tddp_status status =
        start.argv && start.envp ? tddp_launch_worker_start(worker, &start) : TDDP_OUT_OF_MEMORY;
    tddp_launch_list_free(start.argv);
    tddp_launch_list_free(start.envp);
    if (status != TDDP_OK) {
        return status;
    }
    agent->alive++;
    return tddp_launch_agent_watch_worker(agent, local_rank);
}

void tddp_launch_agent_start_workers(tddp_launch_agent *agent)
{
    agent->phase = TDDP_LAUNCH_RUNNING;
    agent->deadline = INT64_MAX;
    tddp_launch_timers_forget(agent->timers);
    tddp_status status = tddp_launch_output_begin(agent->output, &agent->world);
    tddp_launch_oom_forget(&agent->oom);
    for (int i = 0; i < agent->count; i++) {
        if (status != TDDP_OK || start_worker(agent, i) != TDDP_OK) {
            if (agent->rendezvous) {
                tddp_launch_rendezvous_request(agent->rendezvous, TDDP_LAUNCH_REQUEST_FAILED,
                                               tddp_error_message());
            }
            tddp_launch_agent_fail(agent);
            return;
        }
    }
}

static void forget_workers(tddp_launch_agent *agent)
{
    for (int i = 0; i < agent->count; i++) {
        tddp_launch_worker_free(&agent->workers[i]);
    }
    agent->alive = 0;
}

/* --- a round --------------------------------------------------------------------------------- */

/* Where the only node's store listens, and as what the workers are told to find it. */
static void choose_master(const tddp_launch_agent *agent, char address[TDDP_LAUNCH_HOST_BYTES],
                          int *port)
{
    const tddp_launch_options *options = agent->options;
    bool is_static = options->backend == TDDP_LAUNCH_STATIC && !options->standalone;
    bool endpoint = is_static && options->endpoint_count > 0;
    const char *host = endpoint                            ? options->endpoints[0].host
                       : is_static && options->master_addr ? options->master_addr
                                                           : tddp_net_loopback();
    (void)snprintf(address, TDDP_LAUNCH_HOST_BYTES, "%s", host);
    int asked = endpoint ? options->endpoints[0].port : options->master_port;
    *port = is_static && asked > 0 ? asked : 0;
}

static tddp_status open_server(tddp_launch_agent *agent)
{
    tddp_launch_world *world = &agent->world;
    tddp_store_server_opts opts = TDDP_STORE_SERVER_OPTS_INIT;
    choose_master(agent, world->master_addr, &opts.port);
    opts.host = world->master_addr;
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
    if (open_server(agent) != TDDP_OK) {
        tddp_launch_agent_fail(agent);
        return;
    }
    tddp_launch_agent_start_workers(agent);
}

static void start_first_round(tddp_launch_agent *agent)
{
    const tddp_launch_times times = tddp_launch_times_of(agent->options);
    agent->phase = TDDP_LAUNCH_JOINING;
    agent->deadline = INT64_MAX;
    if (agent->options->max_nodes == 1) {
        start_alone(agent, 0);
    } else if (tddp_launch_rendezvous_start(agent->options, &times, agent->job.run_id, agent->count,
                                            &agent->rendezvous) != TDDP_OK ||
               tddp_launch_agent_watch_nodes(agent) != TDDP_OK) {
        tddp_launch_agent_fail(agent);
    }
}

static void start_next_round(tddp_launch_agent *agent)
{
    forget_workers(agent);
    agent->cause = TDDP_LAUNCH_CAUSE_NONE;
    agent->phase = TDDP_LAUNCH_JOINING;
    agent->deadline = INT64_MAX;
    if (agent->rendezvous) {
        tddp_launch_rendezvous_request(agent->rendezvous, TDDP_LAUNCH_REQUEST_AGAIN, "");
    } else {
        start_alone(agent, agent->world.restart + 1);
    }
}

void tddp_launch_agent_say_sequel(tddp_launch_agent *agent)
{
    if (agent->sequel == TDDP_LAUNCH_SEQUEL_RESTART) {
        tddp_launch_console_say(&agent->console, "starting all workers again (restart %d of %d)",
                                agent->world.restart + 1, agent->options->max_restarts);
    } else if (agent->sequel == TDDP_LAUNCH_SEQUEL_REGROUP) {
        tddp_launch_console_say(&agent->console,
                                "starting the workers again with the nodes that are there then");
    }
    agent->sequel = TDDP_LAUNCH_SEQUEL_OPEN;
}

bool tddp_launch_agent_goes_on(const tddp_launch_agent *agent)
{
    bool reason = agent->cause == TDDP_LAUNCH_CAUSE_WORKER ||
                  agent->cause == TDDP_LAUNCH_CAUSE_PEER ||
                  agent->cause == TDDP_LAUNCH_CAUSE_CHANGED;
    if (!reason || agent->signal != 0) {
        return false;
    }
    if (agent->rendezvous) {
        return agent->sequel != TDDP_LAUNCH_SEQUEL_END;
    }
    return agent->world.restart < agent->options->max_restarts;
}

void tddp_launch_agent_finish_round(tddp_launch_agent *agent)
{
    for (int i = 0; i < agent->count; i++) {
        const tddp_launch_worker *worker = &agent->workers[i];
        tddp_launch_agent_drain_worker(agent, i);
        if (worker->has_terminal && WIFSIGNALED(worker->wait_status)) {
            tddp_launch_terminal_restore(&agent->terminal);
        }
    }
    tddp_launch_agent_say_cause(agent);
    if (tddp_launch_agent_goes_on(agent)) {
        agent->reported = agent->cause == TDDP_LAUNCH_CAUSE_WORKER;
        agent->sequel = agent->rendezvous ? agent->sequel : TDDP_LAUNCH_SEQUEL_RESTART;
        tddp_launch_agent_say_sequel(agent);
        start_next_round(agent);
        return;
    }
    agent->phase = TDDP_LAUNCH_FLUSHING;
    if (agent->rendezvous && agent->sequel != TDDP_LAUNCH_SEQUEL_END && agent->signal == 0) {
        /* Whatever it was, the others need not find out by silence. */
        tddp_launch_agent_send_leave(agent, "has ended");
    }
}

/* --- the run --------------------------------------------------------------------------------- */

static tddp_status make_run_id(tddp_launch_agent *agent)
{
    const tddp_launch_options *options = agent->options;
    agent->job.run_id = agent->run_id;
    if (options->run_id && !options->standalone) {
        agent->job.run_id = options->run_id;
        return TDDP_OK;
    }
    if (options->max_nodes > 1) {
        (void)snprintf(agent->run_id, sizeof agent->run_id, "none");
        return TDDP_OK;
    }
    uint64_t random;
    if (getrandom(&random, sizeof random, 0) != sizeof random) {
        return tddp_fail_errno("getrandom");
    }
    (void)snprintf(agent->run_id, sizeof agent->run_id, "%016llx", (unsigned long long)random);
    return TDDP_OK;
}

/* A pipe and a log file for each stream of many workers, and the ranks of all nodes at the store,
 * are more than the usual limit: as many as are allowed. Workers get the old limit back. */
static tddp_status allow_files(tddp_launch_agent *agent)
{
    if (getrlimit(RLIMIT_NOFILE, &agent->files) != 0) {
        return tddp_fail_errno("getrlimit");
    }
    struct rlimit raised = {agent->files.rlim_max, agent->files.rlim_max};
    (void)setrlimit(RLIMIT_NOFILE, &raised);
    return TDDP_OK;
}

/* The job runs without one if its port cannot be had. */
static void open_health(tddp_launch_agent *agent)
{
    const tddp_launch_endpoint *at = &agent->options->health;
    if (at->port < 0) {
        return;
    }
    const char *host = at->host[0] != '\0' ? at->host : tddp_net_loopback();
    if (tddp_launch_health_open(&agent->loop, host, at->port, tddp_launch_agent_health, agent,
                                &agent->health) != TDDP_OK) {
        tddp_launch_console_say(&agent->console,
                                "--health-check-port: %s; the job runs without a health check",
                                tddp_error_message());
    } else if (at->port == 0) {
        tddp_launch_console_say(&agent->console, "health check on port %d",
                                tddp_launch_health_port(agent->health));
    }
}

/* Without a place for the pipe the job runs without timers. */
static tddp_status open_timers(tddp_launch_agent *agent)
{
    const char *folder = agent->options->private_folder;
    if (folder && tddp_launch_timers_open(folder, &agent->timers) != TDDP_OK) {
        tddp_launch_console_say(&agent->console, "no timers for workers: %s", tddp_error_message());
    }
    agent->job.timer_file = tddp_launch_timers_path(agent->timers);
    return agent->timers ? tddp_launch_agent_watch_timers(agent) : TDDP_OK;
}

static tddp_status prepare(tddp_launch_agent *agent, const tddp_launch_devices *devices)
{
    size_t count = (size_t)agent->count;
    agent->streams = tddp_alloc_array(count * TDDP_LAUNCH_STREAMS, sizeof *agent->streams);
    agent->workers = agent->streams ? tddp_alloc_array(count, sizeof *agent->workers) : NULL;
    if (!agent->workers) {
        return TDDP_OUT_OF_MEMORY;
    }
    for (int i = 0; i < agent->count; i++) {
        agent->workers[i] = (tddp_launch_worker){.fds = {-1, -1}};
    }
    agent->null_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (agent->null_fd < 0) {
        return tddp_fail_errno("/dev/null");
    }
    tddp_status status = allow_files(agent);
    if (status == TDDP_OK) {
        status = tddp_launch_job_prepare(agent->options, devices, agent->count, &agent->job);
    }
    if (status != TDDP_OK) {
        return status;
    }
    if (agent->job.binding.note[0] != '\0') {
        tddp_launch_console_say(&agent->console, "--numa-binding: %s", agent->job.binding.note);
    }
    tddp_launch_oom_open(&agent->oom, "");
    tddp_launch_terminal_look(&agent->terminal, agent->signals->front);
    status = make_run_id(agent);
    if (status == TDDP_OK) {
        status = tddp_launch_adopt_orphans();
    }
    if (status == TDDP_OK) {
        status = tddp_launch_output_create(agent->options, agent->job.run_id, &agent->console,
                                           &agent->output);
    }
    if (status == TDDP_OK) {
        status = open_timers(agent);
    }
    if (status == TDDP_OK) {
        open_health(agent);
    }
    return status;
}

static void release(tddp_launch_agent *agent)
{
    /* First the store: what is left of its thread must not outlive what it uses. */
    tddp_launch_agent_leave_nodes(agent);
    tddp_store_server_stop(agent->server);
    tddp_launch_health_close(agent->health);
    if (agent->workers) {
        forget_workers(agent);
    }
    free(agent->workers);
    free(agent->streams);
    tddp_launch_record_free(&agent->record);
    tddp_launch_timers_close(agent->timers);
    tddp_launch_output_free(agent->output);
    tddp_launch_job_free(&agent->job);
    tddp_launch_oom_close(&agent->oom);
    tddp_close(agent->null_fd);
    tddp_launch_log_queue_close();
    tddp_launch_console_flush(&agent->console);
    tddp_launch_console_close(&agent->console);
    tddp_launch_loop_free(&agent->loop);
}

int tddp_launch_run(const tddp_launch_options *options, const tddp_launch_program *program,
                    tddp_launch_signals *signals, const tddp_launch_devices *devices,
                    int local_size)
{
    tddp_launch_agent agent = {
        .options = options,
        .program = program,
        .signals = signals,
        .null_fd = -1,
        .count = local_size,
        .world = {.node_rank = -1},
    };
    tddp_launch_console_open(&agent.console);
    bool watched = tddp_launch_agent_watch(&agent) == TDDP_OK;
    if (watched && prepare(&agent, devices) == TDDP_OK) {
        start_first_round(&agent);
    } else {
        (void)snprintf(agent.text, sizeof agent.text, "%s", tddp_error_message());
        tddp_launch_console_say(&agent.console, "%s", agent.text);
        agent.cause = TDDP_LAUNCH_CAUSE_FATAL;
        agent.phase = TDDP_LAUNCH_FLUSHING;
        agent.deadline = INT64_MAX;
    }
    if (watched) {
        tddp_launch_agent_loop(&agent);
    }
    int status = tddp_launch_agent_conclude(&agent);
    release(&agent);
    return status;
}
