/*
 * Handles events; the table of phases is in agent_state.h. Every phase after
 * RUNNING has a deadline, so that whatever workers do, torchrun ends. Main thread.
 */
#include <sys/wait.h>

#include "launch/agent/agent_state.h"
#include "launch/report/report.h"

enum {
    CULPRIT_MS = 1000,    /* for the rank that others say they have lost */
    ORPHANED_MS = 5000,   /* for the workers, once torchrun's front was killed */
    KILL_AGAIN_MS = 100,  /* between two rounds of SIGKILL: new ones may have been started */
    MOST_KILLS = 80,      /* then what is left is stuck in the kernel */
    LAST_WORDS_MS = 1000, /* for output nobody takes, after a signal */
    GOODBYE_MS = 1000     /* for the rendezvous, beyond the time that others have for its end */
};

static void enter(tddp_launch_agent *agent, tddp_launch_phase phase, int64_t limit_ms)
{
    agent->phase = phase;
    agent->deadline = limit_ms < 0 ? INT64_MAX : tddp_deadline_after_ms(limit_ms);
}

/* --- ending the workers ---------------------------------------------------------------------- */

static void mark_ended_by_us(tddp_launch_agent *agent)
{
    for (int i = 0; i < agent->count; i++) {
        agent->workers[i].ended_by_us |= agent->workers[i].alive;
    }
}

/* The worker that has the terminal to itself, as long as it lives; NULL: there is none. */
static const tddp_launch_worker *terminals_owner(const tddp_launch_agent *agent)
{
    const tddp_launch_worker *worker = &agent->workers[0];
    return worker->alive && worker->has_terminal ? worker : NULL;
}

/*
 * Sends a signal once to each process of the job: to workers by their process groups, which no fork
 * escapes, and to all that have left these. What comes from the terminal its owner's group has
 * already. Stopped ones continue: they take no other signal.
 */
static void signal_job(const tddp_launch_agent *agent, int number, bool from_terminal)
{
    pid_t groups[TDDP_LAUNCH_MAX_LOCAL + 1];
    tddp_launch_exempt reached = {.groups = groups};
    for (int i = 0; i < agent->count; i++) {
        const tddp_launch_worker *worker = &agent->workers[i];
        if (worker->alive && !worker->has_terminal) {
            groups[reached.group_count++] = worker->pid;
            tddp_launch_worker_signal(worker, number);
        }
    }
    if (from_terminal) {
        groups[reached.group_count++] = agent->terminal.group;
    }
    (void)tddp_launch_signal_descendants(&reached, number);
    (void)tddp_launch_signal_descendants(NULL, SIGCONT);
}

/* Has all processes of the job end: they get the signal once, and have until the deadline. */
static void end_job(tddp_launch_agent *agent, int number, bool from_terminal)
{
    mark_ended_by_us(agent);
    agent->ended_by = number;
    agent->kills = 0;
    if (tddp_launch_has_children()) {
        signal_job(agent, number, from_terminal);
    }
    enter(agent, TDDP_LAUNCH_STOPPING, (int64_t)(agent->options->shutdown_timeout * 1000));
}

/* Once the workers are gone: what they have left and never heard of the end, since it ignores that
 * signal, gets SIGTERM. All others have been told, and may still be busy with it. */
static void end_deaf_rest(tddp_launch_agent *agent)
{
    if (agent->ended_by != SIGTERM) {
        const tddp_launch_exempt told = {.unless_ignoring = agent->ended_by};
        agent->ended_by = SIGTERM;
        (void)tddp_launch_signal_descendants(&told, SIGTERM);
    }
}

static void kill_job(tddp_launch_agent *agent)
{
    mark_ended_by_us(agent);
    agent->kills++;
    (void)tddp_launch_signal_descendants(NULL, SIGKILL);
    enter(agent, TDDP_LAUNCH_KILLING, KILL_AGAIN_MS);
}

void tddp_launch_agent_sweep(tddp_launch_agent *agent)
{
    end_job(agent, SIGTERM, false);
}

void tddp_launch_agent_stop(tddp_launch_agent *agent, tddp_launch_cause cause, int number)
{
    if (agent->cause == TDDP_LAUNCH_CAUSE_NONE && agent->phase < TDDP_LAUNCH_STOPPING) {
        agent->cause = cause;
        end_job(agent, number, false);
    }
}

void tddp_launch_agent_fail(tddp_launch_agent *agent)
{
    if (agent->cause == TDDP_LAUNCH_CAUSE_NONE) {
        (void)snprintf(agent->text, sizeof agent->text, "%s", tddp_error_message());
    }
    if (agent->phase >= TDDP_LAUNCH_FLUSHING) {
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
            worker->out_of_memory = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL &&
                                    !worker->ended_by_us && tddp_launch_oom_has_killed(&agent->oom);
            agent->alive--;
            return;
        }
    }
}

/* Of a rank that only lost its peer other nodes may know more: that a node is gone, say. */
static void tell_failure(tddp_launch_agent *agent, const tddp_launch_worker *root)
{
    char text[TDDP_LAUNCH_NOTIFICATION_BYTES];
    if (agent->rendezvous) {
        tddp_launch_rendezvous_request(
            agent->rendezvous,
            root->error.consequence ? TDDP_LAUNCH_REQUEST_FAILED_AFTER_PEER
                                    : TDDP_LAUNCH_REQUEST_FAILED,
            tddp_launch_report_summary(agent->workers, agent->count, agent->world.node_rank, text,
                                       sizeof text));
    }
}

static void tell_signal(const tddp_launch_agent *agent, int number)
{
    char name[32];
    char why[64];
    (void)snprintf(why, sizeof why, "was told to end by %s", tddp_launch_signal_name(number, name));
    tddp_launch_agent_send_leave(agent, why);
}

/* The first signal that ends the job decides the exit status. */
static void note_signal(tddp_launch_agent *agent, int number)
{
    if (agent->signal == 0) {
        agent->signal = number;
        if (agent->rendezvous) {
            tell_signal(agent, number);
        }
    }
}

/* Whether a key of the terminal has ended the worker that has it: that ends the job as if torchrun
 * had been sent the signal. */
static bool is_ended_by_key(const tddp_launch_agent *agent)
{
    const tddp_launch_worker *worker = &agent->workers[0];
    int number = !worker->alive && worker->has_terminal && WIFSIGNALED(worker->wait_status)
                     ? WTERMSIG(worker->wait_status)
                     : 0;
    return (number == SIGINT || number == SIGQUIT) &&
           sigismember(&agent->signals->ending, number) == 1;
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
    if (is_ended_by_key(agent)) {
        note_signal(agent, WTERMSIG(root->wait_status));
        tddp_launch_agent_stop(agent, TDDP_LAUNCH_CAUSE_SIGNAL, SIGTERM);
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

/* Nobody sees the exit status any more, and whoever killed the front expects a prompt end. */
static void on_front_gone(tddp_launch_agent *agent, int number)
{
    agent->front_gone = true;
    note_signal(agent, number);
    if (agent->phase <= TDDP_LAUNCH_LINGERING) {
        tddp_launch_console_say(&agent->console, "killed: ending the workers");
        tddp_launch_agent_stop(agent, TDDP_LAUNCH_CAUSE_SIGNAL, number);
    }
    int64_t latest = tddp_deadline_after_ms(ORPHANED_MS);
    if (agent->phase == TDDP_LAUNCH_STOPPING && agent->deadline > latest) {
        agent->deadline = latest;
    } else if (agent->phase == TDDP_LAUNCH_FLUSHING) {
        enter(agent, TDDP_LAUNCH_OVER, -1);
    }
}

static void begin_to_end(tddp_launch_agent *agent, const tddp_launch_signal *signal)
{
    char name[32];
    tddp_launch_console_say(&agent->console, "%s: %s; once more: at once",
                            tddp_launch_signal_name(signal->number, name),
                            agent->alive > 0 ? "ending the workers" : "leaving the job");
    agent->cause = TDDP_LAUNCH_CAUSE_SIGNAL;
    end_job(agent, signal->number, signal->from_terminal);
}

/* A signal that ends the job while its processes are being ended: the same one again means at
 * once; another one says no more than what is under way. */
static void on_signal_while_stopping(tddp_launch_agent *agent, const tddp_launch_signal *signal)
{
    char name[32];
    if (signal->again) {
        kill_job(agent);
    } else if (signal->number != agent->signal) {
        tddp_launch_console_say(&agent->console,
                                "%s: the workers are being ended already; once more: at once",
                                tddp_launch_signal_name(signal->number, name));
    }
}

static void on_ending_signal(tddp_launch_agent *agent, const tddp_launch_signal *signal)
{
    bool first = agent->signal == 0;
    if (!agent->front_gone && tddp_launch_signals_front_gone(agent->signals)) {
        on_front_gone(agent, signal->number);
        return;
    }
    if (signal->from_terminal && signal->number != SIGHUP && agent->phase == TDDP_LAUNCH_RUNNING &&
        terminals_owner(agent)) {
        return; /* a key, which the worker has too: a debugger lives on Ctrl-C */
    }
    note_signal(agent, signal->number);
    switch (agent->phase) {
    case TDDP_LAUNCH_JOINING:
    case TDDP_LAUNCH_RUNNING:
    case TDDP_LAUNCH_LINGERING:
        begin_to_end(agent, signal);
        break;
    case TDDP_LAUNCH_STOPPING:
        on_signal_while_stopping(agent, signal);
        break;
    case TDDP_LAUNCH_FLUSHING:
        if (signal->again) {
            enter(agent, TDDP_LAUNCH_OVER, -1);
        } else if (first) {
            enter(agent, TDDP_LAUNCH_FLUSHING, LAST_WORDS_MS);
        }
        break;
    case TDDP_LAUNCH_KILLING:
    case TDDP_LAUNCH_OVER:
        break;
    }
}

void tddp_launch_agent_on_signal(tddp_launch_agent *agent, const tddp_launch_signal *signal)
{
    if (signal->number == SIGCHLD) {
        reap(agent);
    } else {
        on_ending_signal(agent, signal);
    }
}

/* --- time ------------------------------------------------------------------------------------ */

static void say_killed(tddp_launch_agent *agent)
{
    static const char late[] = "did not end within";
    for (int i = 0; i < agent->count; i++) {
        const tddp_launch_worker *worker = &agent->workers[i];
        if (worker->alive) {
            tddp_launch_console_say(
                &agent->console, "rank %d (pid %d) %s %g s (--shutdown-timeout): killed",
                worker->rank, (int)worker->pid, late, agent->options->shutdown_timeout);
        }
    }
    if (agent->alive == 0) {
        tddp_launch_console_say(&agent->console,
                                "what workers had started %s %g s (--shutdown-timeout): killed",
                                late, agent->options->shutdown_timeout);
    }
}

void tddp_launch_agent_on_deadline(tddp_launch_agent *agent)
{
    switch (agent->phase) {
    case TDDP_LAUNCH_STOPPING:
        say_killed(agent);
        kill_job(agent);
        break;
    case TDDP_LAUNCH_KILLING:
        kill_job(agent);
        break;
    case TDDP_LAUNCH_FLUSHING:
        /* The other nodes have had their time; who reads our output has as long as it takes. */
        tddp_launch_agent_leave_nodes(agent);
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
        tddp_launch_rendezvous_request(agent->rendezvous, TDDP_LAUNCH_REQUEST_DONE, "");
    } else {
        tddp_launch_agent_sweep(agent);
    }
}

/* Whether nobody of the job is left, or nobody who can be killed. */
static bool job_has_ended(tddp_launch_agent *agent)
{
    if (!tddp_launch_has_children()) {
        return true;
    }
    if (agent->phase == TDDP_LAUNCH_STOPPING && agent->alive == 0) {
        end_deaf_rest(agent);
    }
    if (agent->kills <= MOST_KILLS) {
        return false;
    }
    tddp_launch_console_say(&agent->console, "some processes of the workers cannot be killed");
    return true;
}

void tddp_launch_agent_advance(tddp_launch_agent *agent)
{
    if (agent->phase == TDDP_LAUNCH_RUNNING && agent->alive == 0) {
        all_succeeded(agent);
    }
    /* The next round may be over at once, without a worker whose end would be an event. */
    while ((agent->phase == TDDP_LAUNCH_STOPPING || agent->phase == TDDP_LAUNCH_KILLING) &&
           job_has_ended(agent)) {
        tddp_launch_agent_finish_round(agent);
        if (agent->phase == TDDP_LAUNCH_FLUSHING) {
            enter(agent, TDDP_LAUNCH_FLUSHING,
                  agent->signal ? LAST_WORDS_MS
                  : agent->rendezvous
                      ? (int64_t)agent->options->conf.close_timeout * 1000 + GOODBYE_MS
                      : -1);
        }
    }
    if (agent->phase == TDDP_LAUNCH_FLUSHING && !tddp_launch_console_pending(&agent->console) &&
        (!agent->rendezvous || tddp_launch_rendezvous_over(agent->rendezvous))) {
        enter(agent, TDDP_LAUNCH_OVER, -1);
    }
}
