/*
 * What each event does to the agent; the table of phases is in agent_state.h. Every phase after
 * RUNNING has a deadline, so that whatever workers do, torchrun ends. Main thread.
 */
#include <sys/wait.h>

#include "launch/agent/agent_state.h"
#include "launch/report/report.h"

enum {
    CULPRIT_MS = 1000,    /* for the rank that others say they have lost */
    KILL_MS = 5000,       /* a killed process that stays is stuck in the kernel */
    SWEEP_TERM_MS = 300,  /* for what workers have left behind, between SIGTERM and SIGKILL */
    ORPHANED_MS = 5000,   /* for the workers, once torchrun's front was killed */
    SWEEP_KILL_MS = 100,  /* between two rounds of SIGKILL: new ones may have been started */
    MOST_SWEEPS = 30,     /* then what is left cannot be killed */
    LAST_WORDS_MS = 1000, /* for output nobody takes, after a signal */
    GOODBYE_MS = 4000     /* for the other nodes to let go of the store hosted here */
};

static void enter(tddp_launch_agent *agent, tddp_launch_phase phase, int64_t limit_ms)
{
    agent->phase = phase;
    agent->deadline = limit_ms < 0 ? INT64_MAX : tddp_deadline_after_ms(limit_ms);
}

static void signal_workers(tddp_launch_agent *agent, int number)
{
    for (int i = 0; i < agent->count; i++) {
        if (agent->workers[i].alive) {
            agent->workers[i].ended_by_us = true;
            tddp_launch_worker_signal(&agent->workers[i], number);
        }
    }
}

/* --- ending the workers ---------------------------------------------------------------------- */

static void kill_workers(tddp_launch_agent *agent)
{
    signal_workers(agent, SIGKILL);
    enter(agent, TDDP_LAUNCH_KILLING, KILL_MS);
}

void tddp_launch_agent_sweep(tddp_launch_agent *agent)
{
    agent->sweeps = 0;
    enter(agent, TDDP_LAUNCH_SWEEPING, SWEEP_TERM_MS);
    if (tddp_launch_has_children()) {
        (void)tddp_launch_signal_descendants(NULL, 0, SIGTERM);
        (void)tddp_launch_signal_descendants(NULL, 0, SIGCONT);
    }
}

void tddp_launch_agent_stop(tddp_launch_agent *agent, tddp_launch_cause cause, int number)
{
    if (agent->cause != TDDP_LAUNCH_CAUSE_NONE || agent->phase >= TDDP_LAUNCH_STOPPING) {
        return;
    }
    agent->cause = cause;
    if (agent->alive == 0) {
        tddp_launch_agent_sweep(agent);
        return;
    }
    signal_workers(agent, number);
    enter(agent, TDDP_LAUNCH_STOPPING, (int64_t)(agent->options->shutdown_timeout * 1000));
}

void tddp_launch_agent_fail(tddp_launch_agent *agent)
{
    if (agent->cause == TDDP_LAUNCH_CAUSE_NONE) {
        (void)snprintf(agent->text, sizeof agent->text, "%s", tddp_error_message());
    }
    if (agent->phase >= TDDP_LAUNCH_SWEEPING) {
        enter(agent, TDDP_LAUNCH_OVER, -1); /* the workers are gone, and nothing else works */
        return;
    }
    tddp_launch_agent_stop(agent, TDDP_LAUNCH_CAUSE_FATAL, SIGTERM);
}

/* --- signals --------------------------------------------------------------------------------- */

static void note_end(tddp_launch_agent *agent, pid_t pid, int status)
{
    for (int i = 0; i < agent->count; i++) {
        tddp_launch_worker *worker = &agent->workers[i];
        if (worker->alive && worker->pid == pid) {
            tddp_launch_worker_note_end(worker, status);
            agent->alive--;
            return;
        }
    }
}

/* Of a rank that only lost its peer other nodes may know more: that a node is gone, say. */
static void tell_failure(tddp_launch_agent *agent, const tddp_launch_worker *root)
{
    char text[TDDP_LAUNCH_NEWS_BYTES];
    if (agent->rendezvous) {
        tddp_launch_rendezvous_tell(
            agent->rendezvous,
            root->error.consequence ? TDDP_LAUNCH_TALE_HURT : TDDP_LAUNCH_TALE_FAILED,
            tddp_launch_report_summary(agent->workers, agent->count, agent->world.node_rank, text,
                                       sizeof text));
    }
}

/* A rank that lost its peer may be out before the peer itself, which closes its connections first.
 * So when only such a rank has failed, the one to blame gets a moment. */
static void look_for_failures(tddp_launch_agent *agent, bool moment_is_over)
{
    const tddp_launch_worker *root = tddp_launch_root_cause(agent->workers, agent->count);
    if (!root || agent->phase != TDDP_LAUNCH_RUNNING) {
        return;
    }
    if (root->error.consequence && agent->alive > 0 && !moment_is_over) {
        if (agent->deadline == INT64_MAX) {
            agent->deadline = tddp_deadline_after_ms(CULPRIT_MS);
        }
        return;
    }
    tell_failure(agent, root);
    tddp_launch_agent_stop(agent, TDDP_LAUNCH_CAUSE_WORKER, SIGTERM);
}

/* Reaps whoever has ended, orphans of workers among them. */
static void reap(tddp_launch_agent *agent)
{
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        note_end(agent, pid, status);
    }
    look_for_failures(agent, false);
}

static void begin_to_end(tddp_launch_agent *agent, int number)
{
    char name[32];
    bool orphaned = tddp_launch_signals_front_gone(agent->signals);
    if (orphaned) {
        tddp_launch_console_say(&agent->console, "killed: ending the workers");
    } else {
        tddp_launch_console_say(&agent->console, "%s: %s; once more: at once",
                                tddp_launch_signal_name(number, name),
                                agent->alive > 0 ? "ending the workers" : "leaving the job");
    }
    tddp_launch_agent_stop(agent, TDDP_LAUNCH_CAUSE_SIGNAL, number);
    int64_t latest = tddp_deadline_after_ms(ORPHANED_MS);
    if (orphaned && agent->phase == TDDP_LAUNCH_STOPPING && agent->deadline > latest) {
        agent->deadline = latest;
    }
}

static void tell_signal(const tddp_launch_agent *agent, int number)
{
    char name[32];
    char why[64];
    (void)snprintf(why, sizeof why, "was told to end by %s", tddp_launch_signal_name(number, name));
    tddp_launch_agent_tell_leave(agent, why);
}

static void on_ending_signal(tddp_launch_agent *agent, int number)
{
    bool second = agent->signal != 0;
    agent->signal = second ? agent->signal : number;
    if (agent->rendezvous && !second) {
        tell_signal(agent, number);
    }
    switch (agent->phase) {
    case TDDP_LAUNCH_JOINING:
    case TDDP_LAUNCH_RUNNING:
    case TDDP_LAUNCH_LINGERING:
        begin_to_end(agent, number);
        break;
    case TDDP_LAUNCH_STOPPING:
    case TDDP_LAUNCH_KILLING:
        kill_workers(agent);
        break;
    case TDDP_LAUNCH_SWEEPING:
        agent->deadline = tddp_now_ns();
        break;
    case TDDP_LAUNCH_FLUSHING:
        enter(agent, TDDP_LAUNCH_OVER, -1);
        break;
    case TDDP_LAUNCH_OVER:
        break;
    }
}

void tddp_launch_agent_on_signal(tddp_launch_agent *agent, int number)
{
    if (number == SIGCHLD) {
        reap(agent);
    } else {
        on_ending_signal(agent, number);
    }
}

/* --- time ------------------------------------------------------------------------------------ */

static void say_killed(tddp_launch_agent *agent)
{
    for (int i = 0; i < agent->count; i++) {
        const tddp_launch_worker *worker = &agent->workers[i];
        if (worker->alive) {
            tddp_launch_console_say(
                &agent->console,
                "rank %d (pid %d) did not end within %g s (--shutdown-timeout): "
                "killed",
                worker->rank, (int)worker->pid, agent->options->shutdown_timeout);
        }
    }
}

void tddp_launch_agent_on_deadline(tddp_launch_agent *agent)
{
    switch (agent->phase) {
    case TDDP_LAUNCH_STOPPING:
        say_killed(agent);
        kill_workers(agent);
        break;
    case TDDP_LAUNCH_KILLING:
        tddp_launch_agent_sweep(agent);
        break;
    case TDDP_LAUNCH_SWEEPING:
        if (++agent->sweeps <= MOST_SWEEPS) {
            (void)tddp_launch_signal_descendants(NULL, 0, SIGKILL);
            agent->deadline = tddp_deadline_after_ms(SWEEP_KILL_MS);
        }
        break;
    case TDDP_LAUNCH_FLUSHING:
        /* The other nodes have had their time; who reads our output has as long as it takes. */
        tddp_launch_rendezvous_end(agent->rendezvous);
        agent->rendezvous = NULL;
        agent->deadline = INT64_MAX;
        if (agent->signal != 0) {
            agent->phase = TDDP_LAUNCH_OVER;
        }
        break;
    case TDDP_LAUNCH_RUNNING:
        look_for_failures(agent, true);
        break;
    case TDDP_LAUNCH_JOINING:
    case TDDP_LAUNCH_LINGERING:
    case TDDP_LAUNCH_OVER:
        agent->deadline = INT64_MAX;
        break;
    }
}

static void all_succeeded(tddp_launch_agent *agent)
{
    if (agent->rendezvous) {
        enter(agent, TDDP_LAUNCH_LINGERING, -1);
        tddp_launch_rendezvous_tell(agent->rendezvous, TDDP_LAUNCH_TALE_DONE, "");
    } else {
        tddp_launch_agent_sweep(agent);
    }
}

static void advance_sweep(tddp_launch_agent *agent)
{
    bool left = tddp_launch_has_children();
    if (left && agent->sweeps <= MOST_SWEEPS) {
        return;
    }
    if (left) {
        tddp_launch_console_say(&agent->console, "some processes of the workers cannot be killed");
    }
    tddp_launch_agent_finish_round(agent);
    if (agent->phase == TDDP_LAUNCH_FLUSHING) {
        enter(agent, TDDP_LAUNCH_FLUSHING,
              agent->signal       ? LAST_WORDS_MS
              : agent->rendezvous ? GOODBYE_MS
                                  : -1);
    }
}

void tddp_launch_agent_advance(tddp_launch_agent *agent)
{
    if (agent->phase == TDDP_LAUNCH_RUNNING && agent->alive == 0) {
        all_succeeded(agent);
    }
    if ((agent->phase == TDDP_LAUNCH_STOPPING || agent->phase == TDDP_LAUNCH_KILLING) &&
        agent->alive == 0) {
        tddp_launch_agent_sweep(agent);
    }
    if (agent->phase == TDDP_LAUNCH_SWEEPING) {
        advance_sweep(agent);
    }
    if (agent->phase == TDDP_LAUNCH_FLUSHING && !tddp_launch_console_pending(&agent->console) &&
        (!agent->rendezvous || tddp_launch_rendezvous_over(agent->rendezvous))) {
        enter(agent, TDDP_LAUNCH_OVER, -1);
    }
}
