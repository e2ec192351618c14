/*
 * The agent's state, shared by agent.c (a run from its start to its end), phases.c (what each event
 * does), notifications.c (what those of other nodes do), sources.c (what the event loop waits for)
 * and outcome.c (the report and the exit status).
 *
 *              all nodes there       first failure, signal, other node
 *     JOINING ----------------> RUNNING ------------------------> STOPPING
 *        |                         | all succeeded                   ^  | time is up,
 *        |                         v                                 |  v same signal again
 *        |                     LINGERING ----------------------------+ KILLING
 *        |                            so have all nodes'             |  |
 *        | signal, error                                             |  |
 *        +-----------------------------------------------------------+  |
 *                                    no process of the job is left <----+
 *                                  +--> JOINING or RUNNING again, unless the job is over; with
 *                                  |    several nodes JOINING may still bring that outcome
 *                                  v
 *                              FLUSHING --> OVER
 */
#ifndef TDDP_LAUNCH_AGENT_STATE_H
#define TDDP_LAUNCH_AGENT_STATE_H

#include <tddp/store.h>

#include "launch/agent/agent.h"
#include "launch/health/health.h"
#include "launch/loop/loop.h"
#include "launch/output/output.h"
#include "launch/workers/processes.h"
#include "launch/rendezvous/rendezvous.h"
#include "launch/report/report.h"
#include "launch/timers/timers.h"

typedef enum tddp_launch_phase {
    TDDP_LAUNCH_JOINING,
    TDDP_LAUNCH_RUNNING,
    TDDP_LAUNCH_LINGERING,
    TDDP_LAUNCH_STOPPING,
    TDDP_LAUNCH_KILLING,
    TDDP_LAUNCH_FLUSHING,
    TDDP_LAUNCH_OVER,
} tddp_launch_phase;

/* Why the workers are being ended; the first reason stands. */
typedef enum tddp_launch_cause {
    TDDP_LAUNCH_CAUSE_NONE,
    TDDP_LAUNCH_CAUSE_WORKER,  /* one of ours failed */
    TDDP_LAUNCH_CAUSE_PEER,    /* one of another node's failed, or the node is lost */
    TDDP_LAUNCH_CAUSE_CHANGED, /* nodes came or went: all start again */
    TDDP_LAUNCH_CAUSE_SIGNAL,  /* we were told to end */
    TDDP_LAUNCH_CAUSE_OUTPUT,  /* nobody reads our output any more */
    TDDP_LAUNCH_CAUSE_FATAL,   /* the job cannot go on: `text` says why */
    TDDP_LAUNCH_CAUSE_SAID,    /* nor then, but all has been said */
} tddp_launch_cause;

/* What the nodes have made of the round's end. */
typedef enum tddp_launch_sequel {
    TDDP_LAUNCH_SEQUEL_OPEN,    /* nothing yet */
    TDDP_LAUNCH_SEQUEL_RESTART, /* another round, which costs a restart */
    TDDP_LAUNCH_SEQUEL_REGROUP, /* another round, of other nodes */
    TDDP_LAUNCH_SEQUEL_END,     /* no other round */
} tddp_launch_sequel;

typedef struct tddp_launch_agent tddp_launch_agent;

/* One stream of a worker, as long as it is read. */
typedef struct tddp_launch_stream {
    tddp_launch_agent *agent;
    int local_rank;
    int stream;
    tddp_launch_source source;
} tddp_launch_stream;

struct tddp_launch_agent {
    const tddp_launch_options *options;
    const tddp_launch_program *program;
    tddp_launch_signals *signals;
    tddp_launch_loop loop;
    struct {
        tddp_launch_source signals;
        tddp_launch_source nodes;  /* notifications of the rendezvous */
        tddp_launch_source timers; /* workers' */
        tddp_launch_source phase;  /* its deadline */
    } sources;
    tddp_launch_console console;
    tddp_launch_job job;
    char run_id[64]; /* made up if none was given */
    tddp_launch_world world;
    tddp_store_server *server;          /* one node: the workers' store */
    tddp_launch_rendezvous *rendezvous; /* several nodes */
    tddp_launch_output *output;
    tddp_launch_terminal terminal;
    long long oom_kills; /* of the kernel, that have been accounted for */
    int null_fd;
    struct rlimit files; /* how many torchrun was started with */
    tddp_launch_worker *workers;
    tddp_launch_stream *streams; /* TDDP_LAUNCH_STREAMS for each worker */
    int count;                   /* of workers, on this node */
    int alive;
    tddp_launch_phase phase;
    int64_t deadline; /* of the phase; INT64_MAX: none */
    int ended_by;     /* what the job's processes are being ended by, before SIGKILL */
    int kills;        /* rounds of SIGKILL */
    tddp_launch_cause cause;
    tddp_launch_sequel sequel;
    bool reported; /* what ended the last round was a failure of ours, and its report is out */
    tddp_launch_record record; /* of what failed so far */
    int signal;                /* the first ending signal, or 0 */
    bool front_gone;           /* torchrun's front was killed, and that has been acted on */
    char text[TDDP_LAUNCH_NOTIFICATION_BYTES];
    tddp_launch_timers *timers; /* NULL: there can be none */
    tddp_launch_health *health; /* --health-check-port; else NULL */
};

/* --- agent.c --------------------------------------------------------------------------------- */

/* Starts the workers of agent->world. A failure ends the run. */
void tddp_launch_agent_start_workers(tddp_launch_agent *agent);

/* Says what kind of round follows, and forgets it. */
void tddp_launch_agent_say_sequel(tddp_launch_agent *agent);

/* Whether another round follows once the workers of this one have ended, as far as this node can
 * tell: one node alone decides, several have all decide, and what they decide may come later. */
bool tddp_launch_agent_goes_on(const tddp_launch_agent *agent);

/* Once nobody is left: starts the next round if one is due, or reports and goes to FLUSHING. */
void tddp_launch_agent_finish_round(tddp_launch_agent *agent);

/* --- outcome.c: the report ------------------------------------------------------------------- */

/* At the end of a round: reports why it ended, to people at once and to files later. */
void tddp_launch_agent_say_cause(tddp_launch_agent *agent);

/* At the end of the run: writes the files that tell of it; returns torchrun's exit status. */
int tddp_launch_agent_conclude(tddp_launch_agent *agent);

/* --- phases.c: what events do ---------------------------------------------------------------- */

/* Begins to end the workers with a signal, for a reason. */
void tddp_launch_agent_stop(tddp_launch_agent *agent, tddp_launch_cause cause, int number);

/* Ends what workers that are done have left behind; then the round is over. */
void tddp_launch_agent_sweep(tddp_launch_agent *agent);

/* Stops at once, for a fault of our own: takes its text from tddp_error_message(). */
void tddp_launch_agent_fail(tddp_launch_agent *agent);

/* A worker, or who descends from one, has ended (SIGCHLD), or the job is to end. */
void tddp_launch_agent_on_signal(tddp_launch_agent *agent, const tddp_launch_signal *signal);

/* The phase's time is up. */
void tddp_launch_agent_on_deadline(tddp_launch_agent *agent);

/* After other events: whether the phase is over. */
void tddp_launch_agent_advance(tddp_launch_agent *agent);

/* --- health_view.c --------------------------------------------------------------------------- */

/* The job's state: a tddp_launch_health_view, whose data is the agent. */
char *tddp_launch_agent_health(void *data, bool *healthy);

/* --- notifications.c ------------------------------------------------------------------------- */

/* Handles all notifications that the rendezvous has queued. */
void tddp_launch_agent_on_notification(tddp_launch_agent *agent);

/* Tells the other nodes that this one leaves: "node 1" with what it did behind it. */
void tddp_launch_agent_send_leave(const tddp_launch_agent *agent, const char *what);

/* --- expired_timers.c ------------------------------------------------------------------------ */

/* Executes the workers' requests, and ends workers whose timers have expired. */
void tddp_launch_agent_on_timers(tddp_launch_agent *agent);

/* --- sources.c ------------------------------------------------------------------------------- */

/* Has the loop wait for signals, deadlines, and room on the console, so that it can be run. */
tddp_status tddp_launch_agent_watch(tddp_launch_agent *agent);

/* The same for the workers' timers, for the rendezvous, and for what a worker writes, once these
 * are there. */
tddp_status tddp_launch_agent_watch_timers(tddp_launch_agent *agent);
tddp_status tddp_launch_agent_watch_nodes(tddp_launch_agent *agent);
tddp_status tddp_launch_agent_watch_worker(tddp_launch_agent *agent, int local_rank);

/* Reads what is left of the worker's streams, and closes them. */
void tddp_launch_agent_drain_worker(tddp_launch_agent *agent, int local_rank);

/* Ends the rendezvous, if there is one. */
void tddp_launch_agent_leave_nodes(tddp_launch_agent *agent);

/* Waits for events and has them handled until OVER. */
void tddp_launch_agent_loop(tddp_launch_agent *agent);

#endif
