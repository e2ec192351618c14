/*
 * The agent's event loop, one poll(2): signals, notifications from other nodes, workers' output,
 * and our own output when it can be written. Only --health-check-port uses a timer;
 * else the poll's timeout is the phase's deadline. Main thread.
 */
#include <errno.h>

#include "launch/agent/agent_state.h"

/* Signals, notifications, timers and our own output come before the workers' streams. */
enum { FIXED = 3 };

static size_t collect(const tddp_launch_agent *agent)
{
    struct pollfd *entries = agent->entries;
    size_t count = 0;
    entries[count++] = (struct pollfd){.fd = agent->signals->fd, .events = POLLIN};
    /* A negative descriptor is passed over by poll. */
    int notification = agent->rendezvous ? tddp_launch_rendezvous_fd(agent->rendezvous) : -1;
    entries[count++] = (struct pollfd){.fd = notification, .events = POLLIN};
    entries[count++] =
        (struct pollfd){.fd = tddp_launch_timers_fd(agent->timers), .events = POLLIN};
    count += tddp_launch_console_poll(&agent->console, entries + count);
    for (int i = 0; i < agent->count; i++) {
        for (int stream = 0; stream < TDDP_LAUNCH_STREAMS; stream++) {
            int fd = agent->workers[i].fds[stream];
            if (fd >= 0 && !tddp_launch_output_full(agent->output, i, stream)) {
                entries[count++] = (struct pollfd){.fd = fd, .events = POLLIN};
            }
        }
    }
    return count;
}

/* The streams were added in this order, so one pass over both finds who is ready. */
static tddp_status pump_ready(tddp_launch_agent *agent, size_t at, size_t count)
{
    tddp_status status = TDDP_OK;
    for (int i = 0; i < agent->count && status == TDDP_OK; i++) {
        for (int stream = 0; stream < TDDP_LAUNCH_STREAMS && status == TDDP_OK; stream++) {
            tddp_launch_worker *worker = &agent->workers[i];
            if (at >= count || agent->entries[at].fd != worker->fds[stream]) {
                continue;
            }
            if (agent->entries[at++].revents) {
                status = tddp_launch_worker_pump(worker, stream, agent->output);
            }
        }
    }
    return status;
}

static void take_signals(tddp_launch_agent *agent)
{
    tddp_launch_signal signal;
    while ((signal = tddp_launch_signals_next(agent->signals)).number != 0) {
        tddp_launch_agent_on_signal(agent, &signal);
    }
}

static void check_output(tddp_launch_agent *agent)
{
    tddp_launch_console_flush(&agent->console);
    if (tddp_launch_console_abandoned(&agent->console)) {
        tddp_launch_agent_stop(agent, TDDP_LAUNCH_CAUSE_OUTPUT, SIGTERM);
    }
}

static int time_limit(const tddp_launch_agent *agent)
{
    int64_t deadline = agent->deadline;
    int64_t turn = tddp_launch_health_deadline(agent->health);
    int64_t timer = tddp_launch_timers_deadline(agent->timers);
    deadline = turn < deadline ? turn : deadline;
    deadline = timer < deadline ? timer : deadline;
    return deadline == INT64_MAX ? -1 : tddp_deadline_poll_ms(deadline);
}

void tddp_launch_agent_loop(tddp_launch_agent *agent)
{
    for (;;) {
        tddp_launch_agent_advance(agent);
        if (agent->phase == TDDP_LAUNCH_OVER) {
            return;
        }
        tddp_launch_agent_update_health(agent);
        size_t count = collect(agent);
        size_t streams = FIXED + tddp_launch_console_poll(&agent->console, agent->entries + FIXED);
        if (poll(agent->entries, (nfds_t)count, time_limit(agent)) < 0 && errno != EINTR) {
            (void)tddp_fail_errno("poll");
            tddp_launch_agent_fail(agent);
        }
        if (pump_ready(agent, streams, count) != TDDP_OK) {
            tddp_launch_agent_fail(agent);
        }
        take_signals(agent);
        tddp_launch_agent_on_timers(agent);
        tddp_launch_agent_on_notification(agent);
        if (agent->deadline != INT64_MAX && tddp_now_ns() >= agent->deadline) {
            tddp_launch_agent_on_deadline(agent);
        }
        check_output(agent);
    }
}
