#include <limits.h>

#include "check.h"
#include "launch/agent/agent_state.h"

enum { EVENTS = TDDP_LAUNCH_EVENT_DONE + 1 };

static const tddp_launch_options options = {.shutdown_timeout = 30};
static const tddp_launch_program program = {.name = "train.rb"};

/* One without workers, of which nothing is written, and which has been told of a failure. */
static void open_agent(tddp_launch_agent *agent, tddp_launch_phase phase)
{
    *agent = (tddp_launch_agent){
        .options = &options,
        .program = &program,
        .phase = phase,
        .verdict = TDDP_LAUNCH_NOTIFICATION_FAILED,
        .received = {.number = SIGINT},
    };
    for (int i = 0; i < TDDP_LAUNCH_STREAMS; i++) {
        agent->console.sinks[i] = (tddp_launch_sink){.fd = INT_MAX, .at_line = true};
        agent->console.streams[i] = &agent->console.sinks[i];
    }
    (void)tddp_fail(TDDP_SYSTEM, "a fault");
}

static void close_agent(tddp_launch_agent *agent)
{
    for (int i = 0; i < TDDP_LAUNCH_STREAMS; i++) {
        tddp_bytes_free(&agent->console.sinks[i].queue);
    }
}

/* Where each event leads from each phase: to Joining, Running, Lingering, Stopping, Flushing, Over;
 * '-': it does nothing there. A round that is joined starts workers, which tests of torchrun do. */
static const struct {
    tddp_launch_event event;
    const char *to; /* from JOINING, RUNNING and so on */
} table[] = {
    {TDDP_LAUNCH_EVENT_SIGNAL, "SSSSF-"},   {TDDP_LAUNCH_EVENT_REPEATED, "SSSSO-"},
    {TDDP_LAUNCH_EVENT_ORPHANED, "SSSSO-"}, {TDDP_LAUNCH_EVENT_FAULT, "SSS-O-"},
    {TDDP_LAUNCH_EVENT_UNREAD, "SSS---"},   {TDDP_LAUNCH_EVENT_FAILURE, "-R----"},
    {TDDP_LAUNCH_EVENT_DEADLINE, "-R-SF-"}, {TDDP_LAUNCH_EVENT_COMPLETE, "-S-FO-"},
    {TDDP_LAUNCH_EVENT_JOINED, "*-----"},   {TDDP_LAUNCH_EVENT_ENDED, "JSSSF-"},
    {TDDP_LAUNCH_EVENT_DONE, "SSS---"},
};

TEST(each_event_in_each_phase)
{
    static const char names[] = "JRLSFO";
    CHECK_INT(sizeof table / sizeof *table, EVENTS);
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        for (int phase = 0; phase <= TDDP_LAUNCH_OVER; phase++) {
            tddp_launch_agent agent;
            char to = table[i].to[phase];
            tddp_launch_phase before = (tddp_launch_phase)phase;
            if (to != '*') {
                open_agent(&agent, before);
                tddp_launch_agent_handle(&agent, table[i].event);
                CHECK_INT(names[agent.phase], to == '-' ? names[phase] : to);
                close_agent(&agent);
            }
        }
    }
}

/* Whatever ends a run, there is an end to it. */
TEST(each_phase_after_running_has_a_deadline)
{
    static const tddp_launch_event ends[] = {TDDP_LAUNCH_EVENT_SIGNAL, TDDP_LAUNCH_EVENT_ORPHANED,
                                             TDDP_LAUNCH_EVENT_FAULT, TDDP_LAUNCH_EVENT_UNREAD,
                                             TDDP_LAUNCH_EVENT_DONE};
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        tddp_launch_agent agent;
        open_agent(&agent, TDDP_LAUNCH_LINGERING);
        agent.signal = SIGTERM;
        tddp_launch_agent_handle(&agent, ends[i]);
        CHECK_INT(agent.phase, TDDP_LAUNCH_STOPPING);
        CHECK(agent.sources.phase.time > 0);
        tddp_launch_agent_handle(&agent, TDDP_LAUNCH_EVENT_DEADLINE); /* some are killed */
        CHECK(agent.sources.phase.time > 0);
        tddp_launch_agent_handle(&agent, TDDP_LAUNCH_EVENT_COMPLETE);
        CHECK_INT(agent.phase, TDDP_LAUNCH_FLUSHING);
        CHECK(agent.sources.phase.time > 0);
        tddp_launch_agent_handle(&agent, TDDP_LAUNCH_EVENT_DEADLINE);
        CHECK_INT(agent.phase, TDDP_LAUNCH_OVER);
        close_agent(&agent);
    }
}

/* The first signal that ends the job has time; the same one again has none. */
TEST(a_signal_once_and_again)
{
    tddp_launch_agent agent;
    open_agent(&agent, TDDP_LAUNCH_RUNNING);
    tddp_launch_agent_handle(&agent, TDDP_LAUNCH_EVENT_SIGNAL);
    int64_t granted = agent.sources.phase.time;
    CHECK_INT(agent.cause, TDDP_LAUNCH_CAUSE_SIGNAL);
    CHECK_INT(agent.ended_by, SIGINT);
    tddp_launch_agent_handle(&agent, TDDP_LAUNCH_EVENT_SIGNAL);
    CHECK_INT(agent.sources.phase.time, granted);
    CHECK_INT(agent.kills, 0);
    tddp_launch_agent_handle(&agent, TDDP_LAUNCH_EVENT_REPEATED);
    CHECK_INT(agent.kills, 1);
    CHECK(agent.sources.phase.time < granted);
    close_agent(&agent);
}
