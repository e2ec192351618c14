/*
 * What the agent's loop waits for: each source, and the function that handles its events. Sources
 * are added when what they wait for comes into being, and removed before that is closed. Main
 * thread.
 */
#include "launch/agent/agent_state.h"
#include "launch/output/log_queue.h"

/* --- callbacks ------------------------------------------------------------------------------- */

static tddp_status on_stream(void *data, int events)
{
    tddp_launch_stream *self = data;
    tddp_launch_agent *agent = self->agent;
    tddp_launch_worker *worker = &agent->workers[self->local_rank];
    (void)events;
    tddp_status status = tddp_launch_worker_pump(worker, self->stream, agent->output);
    if (status != TDDP_OK || worker->fds[self->stream] < 0) {
        tddp_launch_loop_remove(&agent->loop, &self->source);
    }
    return status;
}

static tddp_status on_signals(void *data, int events)
{
    tddp_launch_agent *agent = data;
    tddp_launch_signal signal;
    (void)events;
    while ((signal = tddp_launch_signals_next(agent->signals)).number != 0) {
        tddp_launch_agent_on_signal(agent, &signal);
    }
    return TDDP_OK;
}

static tddp_status on_notification(void *data, int events)
{
    (void)events;
    tddp_launch_agent_on_notification(data);
    return TDDP_OK;
}

static tddp_status on_timers(void *data, int events)
{
    tddp_launch_agent *agent = data;
    (void)events;
    tddp_launch_agent_on_timers(agent);
    agent->sources.timers.time = tddp_launch_timers_deadline(agent->timers);
    return TDDP_OK;
}

static tddp_status on_deadline(void *data, int events)
{
    (void)events;
    tddp_launch_agent_on_deadline(data);
    return TDDP_OK;
}

/* --- sources --------------------------------------------------------------------------------- */

static tddp_status watch(tddp_launch_agent *agent, tddp_launch_source *source, int fd,
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

tddp_status tddp_launch_agent_watch(tddp_launch_agent *agent)
{
    tddp_status status = watch(agent, &agent->sources.signals, agent->signals->fd,
                               TDDP_LAUNCH_PRIORITY_SIGNAL, on_signals);
    if (status == TDDP_OK) {
        status =
            watch(agent, &agent->sources.phase, -1, TDDP_LAUNCH_PRIORITY_DEADLINE, on_deadline);
    }
    if (status == TDDP_OK) {
        status = tddp_launch_console_watch(&agent->console, &agent->loop);
    }
    return status == TDDP_OK ? tddp_launch_log_queue_open(&agent->loop, &agent->console) : status;
}

tddp_status tddp_launch_agent_watch_timers(tddp_launch_agent *agent)
{
    return watch(agent, &agent->sources.timers, agent->timers->fd, TDDP_LAUNCH_PRIORITY_EVENT,
                 on_timers);
}

tddp_status tddp_launch_agent_watch_nodes(tddp_launch_agent *agent)
{
    return watch(agent, &agent->sources.nodes, tddp_launch_rendezvous_fd(agent->rendezvous),
                 TDDP_LAUNCH_PRIORITY_EVENT, on_notification);
}

void tddp_launch_agent_leave_nodes(tddp_launch_agent *agent)
{
    tddp_launch_loop_remove(&agent->loop, &agent->sources.nodes);
    tddp_launch_rendezvous_end(agent->rendezvous);
    agent->rendezvous = NULL;
}

/* --- workers' streams ------------------------------------------------------------------------ */

static tddp_launch_stream *stream_of(const tddp_launch_agent *agent, int local_rank, int stream)
{
    return &agent->streams[local_rank * TDDP_LAUNCH_STREAMS + stream];
}

tddp_status tddp_launch_agent_watch_worker(tddp_launch_agent *agent, int local_rank)
{
    tddp_status status = TDDP_OK;
    for (int i = 0; i < TDDP_LAUNCH_STREAMS && status == TDDP_OK; i++) {
        tddp_launch_stream *self = stream_of(agent, local_rank, i);
        *self = (tddp_launch_stream){.agent = agent, .local_rank = local_rank, .stream = i};
        if (agent->workers[local_rank].fds[i] >= 0) {
            status = watch(agent, &self->source, agent->workers[local_rank].fds[i],
                           TDDP_LAUNCH_PRIORITY_STREAM, on_stream);
            self->source.data = self;
        }
    }
    return status;
}

void tddp_launch_agent_drain_worker(tddp_launch_agent *agent, int local_rank)
{
    for (int i = 0; i < TDDP_LAUNCH_STREAMS; i++) {
        tddp_launch_loop_remove(&agent->loop, &stream_of(agent, local_rank, i)->source);
    }
    /* Short memory costs output here, nothing else. */
    (void)!tddp_launch_worker_drain(&agent->workers[local_rank], agent->output);
}

/* Workers wait while too much of what they wrote is not written yet. */
static void hold_back_streams(tddp_launch_agent *agent)
{
    for (int i = 0; i < agent->count && agent->workers; i++) {
        for (int stream = 0; stream < TDDP_LAUNCH_STREAMS; stream++) {
            if (agent->workers[i].fds[stream] >= 0) {
                bool full = tddp_launch_output_full(agent->output, i, stream);
                stream_of(agent, i, stream)->source.events = full ? 0 : POLLIN;
            }
        }
    }
}

/* --- the loop -------------------------------------------------------------------------------- */

static void check_output(tddp_launch_agent *agent)
{
    tddp_launch_console_flush(&agent->console);
    if (tddp_launch_console_abandoned(&agent->console)) {
        tddp_launch_agent_stop(agent, TDDP_LAUNCH_CAUSE_OUTPUT, SIGTERM);
    }
}

void tddp_launch_agent_loop(tddp_launch_agent *agent)
{
    tddp_launch_agent_advance(agent);
    while (agent->phase != TDDP_LAUNCH_OVER) {
        hold_back_streams(agent);
        agent->sources.phase.time = agent->deadline;
        if (tddp_launch_loop_turn(&agent->loop) != TDDP_OK) {
            tddp_launch_agent_fail(agent);
        }
        check_output(agent);
        tddp_launch_agent_advance(agent);
    }
}
