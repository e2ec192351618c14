/*
 * Handles events: the list of rules, at the end, has what each of them does in which phases. Every
 * phase after RUNNING has a deadline, so that whatever workers do, torchrun ends. Main thread.
 */
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "launch/agent/agent_state.h"

enum {
    ROOT_CAUSE_MS = 1000, /* for the rank that others report as lost */
    ORPHANED_MS = 5000,   /* for the workers, once torchrun's front was killed */
    KILL_AGAIN_MS = 100,  /* between two rounds of SIGKILL: new ones may have been started */
    MOST_KILLS = 80,      /* then what is left is stuck in the kernel */
    HURRY_MS = 1000,      /* for output nobody takes, after a signal */
};

void tddp_launch_agent_enter(tddp_launch_agent *agent, tddp_launch_phase phase, int64_t limit_ms)
{
    agent->phase = phase;
    agent->sources.phase.time = limit_ms < 0 ? 0 : tddp_deadline_after_ms(limit_ms);
}

static void shorten(tddp_launch_agent *agent, int limit_ms)
{
    int64_t latest = tddp_deadline_after_ms(limit_ms);
    int64_t *time = &agent->sources.phase.time;
    *time = *time == 0 || *time > latest ? latest : *time;
}

/* --- ending the workers ---------------------------------------------------------------------- */

/*
 * Has all processes of the job end, for a cause (NONE: these are what workers that are done have
 * left): they get the signal once, and have until the deadline. What comes from the terminal its
 * owner's group has already. Stopped ones continue: they take no other signal.
 */
static void stop(tddp_launch_agent *agent, int cause)
{
    bool by_signal = cause == TDDP_LAUNCH_CAUSE_SIGNAL;
    bool from_terminal = by_signal && agent->received.from_terminal;
    const tddp_launch_exempt reached = {.group = from_terminal ? agent->terminal.group : 0};
    agent->cause = (tddp_launch_cause)cause;
    agent->ended_by = by_signal ? agent->received.number : SIGTERM;
    agent->kills = 0;
    for (int i = 0; i < agent->count; i++) {
        agent->workers[i].ended_by_us |= agent->workers[i].alive;
    }
    if (tddp_launch_has_children()) {
        (void)tddp_launch_signal_descendants(&reached, agent->ended_by);
        (void)tddp_launch_signal_descendants(NULL, SIGCONT);
    }
    tddp_launch_agent_enter(agent, TDDP_LAUNCH_STOPPING,
                            (int64_t)(agent->options->shutdown_timeout * 1000));
    if (agent->front_killed) {
        /* No process sees the exit status any more, and a prompt end is expected. */
        shorten(agent, ORPHANED_MS);
    }
}

/* `late`: the deadline has passed. */
static void kill_job(tddp_launch_agent *agent, int late)
{
    static const char text[] = "%s did not end within %g s (--shutdown-timeout): killed";
    double limit = agent->options->shutdown_timeout;
    char who[64];
    bool first = late && agent->kills == 0;
    agent->kills++;
    for (int i = 0; i < agent->count && first; i++) {
        const tddp_launch_worker *worker = &agent->workers[i];
        if (worker->alive) {
            (void)snprintf(who, sizeof who, "rank %d (pid %d)", worker->rank, (int)worker->pid);
            tddp_launch_console_log(&agent->console, text, who, limit);
        }
    }
    if (first && agent->alive == 0) {
        tddp_launch_console_log(&agent->console, text, "what workers had started", limit);
    }
    (void)tddp_launch_signal_descendants(NULL, SIGKILL);
    tddp_launch_agent_enter(agent, TDDP_LAUNCH_STOPPING, KILL_AGAIN_MS);
}

/* Whether no process of the job is left, or none that can be killed. */
static bool job_has_ended(tddp_launch_agent *agent)
{
    if (!tddp_launch_has_children()) {
        return true;
    }
    if (agent->kills == 0 && agent->alive == 0 && agent->ended_by != SIGTERM) {
        /* What workers have left and ignores that signal gets SIGTERM. All others have been
         * signaled, and may still be busy with it. */
        const tddp_launch_exempt signaled = {.unless_ignoring = agent->ended_by};
        agent->ended_by = SIGTERM;
        (void)tddp_launch_signal_descendants(&signaled, SIGTERM);
    }
    if (agent->kills > MOST_KILLS) {
        tddp_launch_console_log(&agent->console, "some processes of the workers cannot be killed");
    }
    return agent->kills > MOST_KILLS;
}

static void stop_by_fault(tddp_launch_agent *agent, int cause)
{
    (void)snprintf(agent->text, sizeof agent->text, "%s", tddp_error_message());
    tddp_launch_console_log(&agent->console, "%s", agent->text);
    stop(agent, cause);
}

/* --- signals --------------------------------------------------------------------------------- */

/* The first signal that ends the job decides the exit status. */
static void note_signal(tddp_launch_agent *agent, int number)
{
    char name[32];
    char what[64];
    if (agent->signal == 0) {
        agent->signal = number;
        (void)snprintf(what, sizeof what, "was stopped by %s",
                       tddp_launch_signal_name(number, name));
        tddp_launch_agent_send_leave(agent, what);
    }
}

/* While the job's processes are being ended, another signal changes nothing. */
static void take_signal(tddp_launch_agent *agent, int cause)
{
    char name[32];
    bool stopping = agent->phase == TDDP_LAUNCH_STOPPING;
    const char *what = stopping ? "workers are being stopped already; send it again to kill them"
                       : agent->alive > 0 ? "stopping workers; send it again to kill them"
                                          : "leaving the job";
    if (!stopping || agent->received.number != agent->signal) {
        tddp_launch_console_log(&agent->console, "%s received: %s",
                                tddp_launch_signal_name(agent->received.number, name), what);
    }
    if (!stopping) {
        stop(agent, cause);
    }
}

static void on_signal(tddp_launch_agent *agent)
{
    const tddp_launch_signal *signal = &agent->received;
    bool orphaned = !agent->front_killed && getppid() != agent->signals->parent;
    if (!orphaned && signal->from_terminal && signal->number != SIGHUP &&
        agent->phase == TDDP_LAUNCH_RUNNING && agent->workers[0].alive &&
        agent->workers[0].has_terminal) {
        return; /* a key, which the worker has too: a debugger lives on Ctrl-C */
    }
    agent->front_killed |= orphaned;
    note_signal(agent, signal->number);
    tddp_launch_agent_handle(agent, orphaned        ? TDDP_LAUNCH_EVENT_ORPHANED
                                    : signal->again ? TDDP_LAUNCH_EVENT_REPEATED
                                                    : TDDP_LAUNCH_EVENT_SIGNAL);
}

/* --- workers that end ------------------------------------------------------------------------ */

/* The worker that lives with this process id; a child of a worker has none. */
static tddp_launch_worker *find_worker(const tddp_launch_agent *agent, pid_t pid)
{
    for (int i = 0; i < agent->count; i++) {
        if (agent->workers[i].alive && agent->workers[i].pid == pid) {
            return &agent->workers[i];
        }
    }
    return NULL;
}

/* Reaps all that have ended, orphans of workers among them. */
static void reap(tddp_launch_agent *agent)
{
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        tddp_launch_worker *worker = find_worker(agent, pid);
        if (worker) {
            tddp_launch_worker_note_end(worker, status);
            worker->out_of_memory = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL &&
                                    !worker->ended_by_us &&
                                    tddp_launch_oom_kills("") > agent->oom_kills;
            agent->oom_kills += worker->out_of_memory; /* by one kill one worker */
            agent->alive--;
        }
    }
    tddp_launch_agent_handle(agent, TDDP_LAUNCH_EVENT_FAILURE);
}

tddp_status tddp_launch_agent_on_signals(void *data)
{
    tddp_launch_agent *agent = data;
    while ((agent->received = tddp_launch_signals_next(agent->signals)).number != 0) {
        if (agent->received.number == SIGCHLD) {
            reap(agent);
        } else {
            on_signal(agent);
        }
    }
    return TDDP_OK;
}

/* The key of the terminal that has ended the worker that has it, or 0: that ends the job as if
 * torchrun had been sent the signal. */
static int key_of(const tddp_launch_agent *agent)
{
    const tddp_launch_worker *worker = &agent->workers[0];
    int number = !worker->alive && worker->has_terminal && WIFSIGNALED(worker->wait_status)
                     ? WTERMSIG(worker->wait_status)
                     : 0;
    bool key = number == SIGINT || number == SIGQUIT;
    return key && sigismember(&agent->signals->ending, number) == 1 ? number : 0;
}

/*
 * `limit_ms`: a rank that lost its peer may be out before the peer itself, which closes its
 * connections first. So when only such a rank has failed, the root cause gets a moment to show.
 */
static void take_failure(tddp_launch_agent *agent, int limit_ms)
{
    char text[TDDP_LAUNCH_NOTIFICATION_BYTES];
    const tddp_launch_worker *root = tddp_launch_failure(agent->workers, agent->count, NULL);
    int key = root ? key_of(agent) : 0;
    if (root && root->error.consequence && agent->alive > 0 && limit_ms > 0) {
        shorten(agent, limit_ms);
    } else if (key != 0) {
        note_signal(agent, key);
        agent->received = (tddp_launch_signal){.number = SIGTERM};
        stop(agent, TDDP_LAUNCH_CAUSE_SIGNAL);
    } else if (root) {
        /* Of a rank that only lost its peer other nodes may know more, such as a lost node. */
        tddp_launch_rendezvous_request(
            agent->rendezvous,
            root->error.consequence ? TDDP_LAUNCH_REQUEST_FAILED_AFTER_PEER
                                    : TDDP_LAUNCH_REQUEST_FAILED,
            tddp_launch_report_summary(agent->workers, agent->count, agent->world.node_rank, text,
                                       sizeof text));
        stop(agent, TDDP_LAUNCH_CAUSE_WORKER);
    }
}

/* All workers have succeeded. */
static void linger(tddp_launch_agent *agent, int cause)
{
    if (agent->rendezvous) {
        tddp_launch_agent_enter(agent, TDDP_LAUNCH_LINGERING, -1);
        tddp_launch_rendezvous_request(agent->rendezvous, TDDP_LAUNCH_REQUEST_DONE, "");
    } else {
        stop(agent, cause);
    }
}

/* Ends workers whose timers have expired: from there on they are workers that fail. */
tddp_status tddp_launch_agent_on_timers(void *data)
{
    tddp_launch_agent *agent = data;
    tddp_launch_timer timer;
    tddp_launch_timers_read(agent->timers);
    while (tddp_launch_timers_expired(agent->timers, &timer)) {
        tddp_launch_worker *worker = find_worker(agent, timer.pid);
        if (worker && agent->phase == TDDP_LAUNCH_RUNNING) {
            tddp_launch_console_log(&agent->console,
                                    "rank %d (pid %d): its timer \"%s\" has expired: ending it",
                                    worker->rank, (int)worker->pid, timer.scope);
            free(worker->expired_timer);
            worker->expired_timer = tddp_copy_string(timer.scope); /* short memory costs the name */
            (void)kill(worker->pid, timer.signal);
            (void)kill(worker->pid, SIGCONT); /* a stopped process takes no other signal */
        }
    }
    agent->sources.timers.time = tddp_launch_timers_deadline(agent->timers);
    return TDDP_OK;
}

/* --- other nodes ----------------------------------------------------------------------------- */

/*
 * A round that is over here may have ended for a reason of this node's own, which it has sent
 * before: then this is the common outcome, and its text isn't logged again. While workers run, a
 * failure is reported once they have ended.
 */
static void take_end(tddp_launch_agent *agent, int value)
{
    bool failure = agent->outcome == TDDP_LAUNCH_NOTIFICATION_FAILED ||
                   agent->outcome == TDDP_LAUNCH_NOTIFICATION_ENDED;
    bool joining = agent->phase == TDDP_LAUNCH_JOINING;
    (void)value;
    if (agent->signal == 0 && (!failure || (joining && !agent->reported))) {
        tddp_launch_console_log(&agent->console, "%s", agent->news);
    }
    if (joining && agent->outcome < TDDP_LAUNCH_NOTIFICATION_DONE) {
        tddp_launch_agent_log_next_round(agent);
    } else if (agent->phase <= TDDP_LAUNCH_LINGERING) {
        (void)snprintf(agent->text, sizeof agent->text, "%s", agent->news);
        stop(agent, failure && !joining                                  ? TDDP_LAUNCH_CAUSE_PEER
                    : agent->outcome == TDDP_LAUNCH_NOTIFICATION_CHANGED ? TDDP_LAUNCH_CAUSE_CHANGED
                                                                         : TDDP_LAUNCH_CAUSE_FATAL);
    }
}

tddp_status tddp_launch_agent_on_notifications(void *data)
{
    tddp_launch_agent *agent = data;
    tddp_launch_world world;
    tddp_launch_notification got;
    bool over = tddp_launch_rendezvous_over(agent->rendezvous);
    while ((got = tddp_launch_rendezvous_next(agent->rendezvous, &world, agent->news)) !=
           TDDP_LAUNCH_NOTIFICATION_NONE) {
        if (got == TDDP_LAUNCH_NOTIFICATION_STATUS) {
            tddp_launch_console_log(&agent->console, "%s", agent->news);
        } else if (got != TDDP_LAUNCH_NOTIFICATION_JOINED) {
            agent->outcome = got;
            tddp_launch_agent_handle(agent, got == TDDP_LAUNCH_NOTIFICATION_DONE
                                                ? TDDP_LAUNCH_EVENT_DONE
                                                : TDDP_LAUNCH_EVENT_ENDED);
        } else if (agent->phase == TDDP_LAUNCH_JOINING) {
            agent->world = world;
            agent->outcome = got;
            tddp_launch_agent_handle(agent, TDDP_LAUNCH_EVENT_JOINED);
        }
    }
    if (over && agent->phase <= TDDP_LAUNCH_LINGERING) {
        /* Its last notification could not be queued: no other would follow. */
        return tddp_fail(TDDP_OUT_OF_MEMORY, "the state of the other nodes is not known: out of "
                                             "memory");
    }
    return TDDP_OK;
}

/* --- the end --------------------------------------------------------------------------------- */

static void end_run(tddp_launch_agent *agent, int value)
{
    (void)value;
    tddp_launch_agent_enter(agent, TDDP_LAUNCH_OVER, -1);
}

/* The other nodes have had their time; who reads our output has as long as it takes. */
static void flush_alone(tddp_launch_agent *agent, int value)
{
    tddp_launch_agent_leave_nodes(agent);
    if (agent->signal != 0) {
        end_run(agent, value);
    }
}

/* Whether what the phase waits for has happened. */
static bool is_complete(tddp_launch_agent *agent)
{
    return agent->phase == TDDP_LAUNCH_RUNNING    ? agent->alive == 0
           : agent->phase == TDDP_LAUNCH_STOPPING ? job_has_ended(agent)
           : agent->phase == TDDP_LAUNCH_FLUSHING
               ? !tddp_launch_console_pending(&agent->console) &&
                     (!agent->rendezvous || tddp_launch_rendezvous_over(agent->rendezvous))
               : false;
}

void tddp_launch_agent_advance(tddp_launch_agent *agent)
{
    /* The next round may be over at once, without a worker whose end would be an event. */
    while (is_complete(agent)) {
        tddp_launch_agent_handle(agent, TDDP_LAUNCH_EVENT_COMPLETE);
    }
}

/* --- the rules ------------------------------------------------------------------------------- */

typedef struct rule {
    tddp_launch_event event;
    tddp_launch_phase first; /* from this phase on */
    tddp_launch_phase last;  /* up to this one */
    tddp_launch_action *action;
    int value;
    const char *text; /* for people; or NULL */
} rule;

/* Short for what stands in the list. */
#define EVENT(name) TDDP_LAUNCH_EVENT_##name
#define IN(first, last) TDDP_LAUNCH_##first, TDDP_LAUNCH_##last
#define BY(name) TDDP_LAUNCH_CAUSE_##name

static const rule rules[] = {
    {EVENT(SIGNAL), IN(JOINING, STOPPING), take_signal, BY(SIGNAL), NULL},
    {EVENT(SIGNAL), IN(FLUSHING, FLUSHING), shorten, HURRY_MS, NULL},
    {EVENT(REPEATED), IN(JOINING, LINGERING), take_signal, BY(SIGNAL), NULL},
    {EVENT(REPEATED), IN(STOPPING, STOPPING), kill_job, false, NULL},
    {EVENT(REPEATED), IN(FLUSHING, FLUSHING), end_run, 0, NULL},
    {EVENT(ORPHANED), IN(JOINING, LINGERING), stop, BY(SIGNAL), "killed: stopping workers"},
    {EVENT(ORPHANED), IN(STOPPING, STOPPING), shorten, ORPHANED_MS, NULL},
    {EVENT(ORPHANED), IN(FLUSHING, FLUSHING), end_run, 0, NULL},
    {EVENT(FAULT), IN(JOINING, LINGERING), stop_by_fault, BY(FATAL), NULL},
    {EVENT(FAULT), IN(FLUSHING, FLUSHING), end_run, 0, NULL},
    {EVENT(UNREAD), IN(JOINING, LINGERING), stop, BY(UNREAD), NULL},
    {EVENT(FAILURE), IN(RUNNING, RUNNING), take_failure, ROOT_CAUSE_MS, NULL},
    {EVENT(DEADLINE), IN(RUNNING, RUNNING), take_failure, 0, NULL},
    {EVENT(DEADLINE), IN(STOPPING, STOPPING), kill_job, true, NULL},
    {EVENT(DEADLINE), IN(FLUSHING, FLUSHING), flush_alone, 0, NULL},
    {EVENT(COMPLETE), IN(RUNNING, RUNNING), linger, BY(NONE), NULL},
    {EVENT(COMPLETE), IN(STOPPING, STOPPING), tddp_launch_agent_finish_round, 0, NULL},
    {EVENT(COMPLETE), IN(FLUSHING, FLUSHING), end_run, 0, NULL},
    {EVENT(JOINED), IN(JOINING, JOINING), tddp_launch_agent_start_workers, 0, NULL},
    {EVENT(ENDED), IN(JOINING, FLUSHING), take_end, 0, NULL},
    {EVENT(DONE), IN(JOINING, JOINING), stop, BY(NONE),
     "the job is done; this node was not needed for it any more"},
    {EVENT(DONE), IN(RUNNING, LINGERING), stop, BY(NONE), NULL},
};

void tddp_launch_agent_handle(tddp_launch_agent *agent, tddp_launch_event event)
{
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        const rule *found = &rules[i];
        if (found->event == event && found->first <= agent->phase && agent->phase <= found->last) {
            if (found->text) {
                tddp_launch_console_log(&agent->console, "%s", found->text);
            }
            found->action(agent, found->value);
            return;
        }
    }
}

tddp_status tddp_launch_agent_on_deadline(void *data)
{
    tddp_launch_agent_handle(data, TDDP_LAUNCH_EVENT_DEADLINE);
    return TDDP_OK;
}
