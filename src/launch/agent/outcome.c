/*
 * The outcome of a round and of the whole run: the report for people, the JSON record for programs,
 * the exit status. Main thread.
 */
#include <stdlib.h>

#include "launch/agent/agent_state.h"

enum { EXIT_JOB_FAILED = 1 };

static tddp_launch_attempt attempt_of(const tddp_launch_agent *agent)
{
    return (tddp_launch_attempt){
        .program = agent->program->name,
        .job = &agent->job,
        .world = &agent->world,
        .workers = agent->workers,
        .count = agent->workers ? agent->count : 0,
        .output = agent->output,
    };
}

void tddp_launch_agent_say_cause(tddp_launch_agent *agent)
{
    const tddp_launch_attempt attempt = attempt_of(agent);
    switch (agent->cause) {
    case TDDP_LAUNCH_CAUSE_WORKER:
        tddp_launch_report(&agent->record, &attempt, NULL, &agent->console);
        break;
    case TDDP_LAUNCH_CAUSE_PEER:
        tddp_launch_report(&agent->record, &attempt, agent->text, &agent->console);
        break;
    case TDDP_LAUNCH_CAUSE_CHANGED:
    case TDDP_LAUNCH_CAUSE_FATAL:
        tddp_launch_console_say(&agent->console, "%s", agent->text);
        break;
    case TDDP_LAUNCH_CAUSE_NONE:
    case TDDP_LAUNCH_CAUSE_SIGNAL:
    case TDDP_LAUNCH_CAUSE_OUTPUT:
    case TDDP_LAUNCH_CAUSE_SAID:
        break;
    }
}

int tddp_launch_agent_conclude(tddp_launch_agent *agent)
{
    const tddp_launch_attempt attempt = attempt_of(agent);
    bool elsewhere = agent->cause == TDDP_LAUNCH_CAUSE_PEER ||
                     agent->cause == TDDP_LAUNCH_CAUSE_FATAL ||
                     agent->cause == TDDP_LAUNCH_CAUSE_SAID;
    tddp_launch_outcome outcome = {
        .exit_status = agent->signal ? TDDP_LAUNCH_EXIT_BY_SIGNAL + agent->signal
                       : agent->cause == TDDP_LAUNCH_CAUSE_NONE ? EXIT_SUCCESS
                       : agent->cause == TDDP_LAUNCH_CAUSE_OUTPUT
                           ? TDDP_LAUNCH_EXIT_BY_SIGNAL + SIGPIPE
                           : EXIT_JOB_FAILED,
        .signal = agent->signal,
        .cause = elsewhere                                  ? agent->text
                 : agent->cause == TDDP_LAUNCH_CAUSE_OUTPUT ? "nobody reads the output any more"
                                                            : NULL,
        .report_file = agent->options->report_file,
        .error_file = getenv("TORCHELASTIC_ERROR_FILE"),
    };
    tddp_launch_record_write(&agent->record, &attempt, &outcome, &agent->console);
    tddp_launch_console_flush(&agent->console);
    return outcome.exit_status;
}
