/*
 * The agent's state, shared by agent.c (a run from its start to its end), round.c (a round from its
 * start to its end), events.c (what each event does in each phase) and health_view.c.
 *
 *              all nodes there       first failure, signal, other node
 *     JOINING ----------------> RUNNING --------------------------> STOPPING
 *        |                         | all succeeded                  ^   |  SIGKILL once time is up,
 *        |                         v                                |   |  or for the same signal
 *        |                     LINGERING ---------------------------+   |  again
 *        | signal, error                so have all nodes'          |   |
 *        +----------------------------------------------------------+   |
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
#include "launch/rendezvous/rendezvous.h"
#include "launch/report/report.h"
#include "launch/timers/timers.h"
#include "launch/workers/processes.h"

typedef enum tddp_launch_phase {
    TDDP_LAUNCH_JOINING,
    TDDP_LAUNCH_RUNNING,
    TDDP_LAUNCH_LINGERING,
    TDDP_LAUNCH_STOPPING,
    TDDP_LAUNCH_FLUSHING,
    TDDP_LAUNCH_OVER,
} tddp_launch_phase;

typedef enum tddp_launch_event {
    TDDP_LAUNCH_EVENT_SIGNAL,   /* agent->received ends the job */
    TDDP_LAUNCH_EVENT_REPEATED, /* the same signal once more */
    TDDP_LAUNCH_EVENT_ORPHANED, /* torchrun's front was killed */
    TDDP_LAUNCH_EVENT_FAULT,    /* a failure of our own: its text is tddp_error_message() */
    TDDP_LAUNCH_EVENT_UNREAD,   /* nobody reads our output any more */
    TDDP_LAUNCH_EVENT_FAILURE,  /* a worker may have failed */
    TDDP_LAUNCH_EVENT_DEADLINE, /* of the phase */
    TDDP_LAUNCH_EVENT_COMPLETE, /* what the phase waits for has happened */
    TDDP_LAUNCH_EVENT_JOINED,   /* the round of agent->world has its nodes */
    TDDP_LAUNCH_EVENT_ENDED,    /* the round is over, or the job, for agent->outcome */
    TDDP_LAUNCH_EVENT_DONE,     /* the workers of all nodes have succeeded */
} tddp_launch_event;

/* Why the workers are being ended. */
typedef enum tddp_launch_cause {
    TDDP_LAUNCH_CAUSE_NONE,
    TDDP_LAUNCH_CAUSE_SIGNAL,
    TDDP_LAUNCH_CAUSE_CHANGED, /* nodes came or left: all start again */
    TDDP_LAUNCH_CAUSE_WORKER,  /* one of ours failed; from here on the job may have */
    TDDP_LAUNCH_CAUSE_PEER,    /* one of another node's failed, or the node is lost: `text` */
    TDDP_LAUNCH_CAUSE_UNREAD,  /* nobody reads our output any more */
    TDDP_LAUNCH_CAUSE_FATAL,   /* the job cannot go on: `text` says why, which is reported */
} tddp_launch_cause;

typedef struct tddp_launch_agent tddp_launch_agent;

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
    char run_id[32]; /* made up if none was given */
    tddp_launch_world world;
    tddp_store_server *server;          /* one node: the workers' store */
    tddp_launch_rendezvous *rendezvous; /* several nodes */
    tddp_launch_output *output;
    tddp_launch_terminal terminal;
    long long oom_kills;        /* of the kernel, that have been accounted for */
    tddp_launch_timers *timers; /* NULL: there can be none */
    tddp_launch_health *health; /* --health-check-port; else NULL */
    struct rlimit files;        /* how many torchrun was started with */
    tddp_launch_worker *workers;
    int count; /* of workers, on this node */
    int alive;
    tddp_launch_phase phase;
    int ended_by; /* what the job's processes are being ended by, before SIGKILL */
    int kills;    /* rounds of SIGKILL */
    tddp_launch_cause cause;
    tddp_launch_signal received;      /* last */
    int signal;                       /* the first ending signal, or 0 */
    bool front_killed;                /* torchrun's front was killed, and that has been acted on */
    tddp_launch_notification outcome; /* what the nodes have made of the round, up to now */
    bool reported; /* what ended the last round was a failure of ours, and its report is out */
    tddp_launch_attempt attempt; /* all of the last one's, for reports */
    tddp_launch_record record;   /* of what failed so far */
    char text[TDDP_LAUNCH_NOTIFICATION_BYTES];
    char news[TDDP_LAUNCH_NOTIFICATION_BYTES]; /* the text of the last notification */
};

/* --- agent.c --------------------------------------------------------------------------------- */

/* Has the loop wait for a descriptor, or -1: for a time alone. */
TDDP_NODISCARD tddp_status tddp_launch_agent_watch(tddp_launch_agent *agent,
                                                   tddp_launch_source *source, int fd,
                                                   tddp_launch_priority priority,
                                                   tddp_launch_callback *callback);

/* --- events.c -------------------------------------------------------------------------------- */

/* What an event does in a phase; `value` is its rule's. */
typedef void tddp_launch_action(tddp_launch_agent *agent, int value);

void tddp_launch_agent_handle(tddp_launch_agent *agent, tddp_launch_event event);

/* Goes to a phase, which has so many milliseconds; -1: no limit. */
void tddp_launch_agent_enter(tddp_launch_agent *agent, tddp_launch_phase phase, int64_t limit_ms);

/* After events: handles EVENT_COMPLETE while there is one. */
void tddp_launch_agent_advance(tddp_launch_agent *agent);

/* Callbacks of the loop, with the agent as data. */
tddp_launch_callback tddp_launch_agent_on_signals;
tddp_launch_callback tddp_launch_agent_on_notifications;
tddp_launch_callback tddp_launch_agent_on_timers;
tddp_launch_callback tddp_launch_agent_on_deadline;

/* --- round.c --------------------------------------------------------------------------------- */

/* Starts the first round, or joins the others for it. */
void tddp_launch_agent_start_first_round(tddp_launch_agent *agent);

/* Starts the workers of agent->world. A failure ends the run. */
tddp_launch_action tddp_launch_agent_start_workers;

/* Logs what kind of round follows, as far as that is known. */
void tddp_launch_agent_log_next_round(tddp_launch_agent *agent);

/* Whether another round follows once the workers of this one have ended, as far as this node can
 * know: one node alone decides, several have all decide, and what they decide may come later. */
bool tddp_launch_agent_goes_on(const tddp_launch_agent *agent);

/* Once nobody is left: reports why the round ended; starts the next one, or goes to FLUSHING. */
tddp_launch_action tddp_launch_agent_finish_round;

/* Forgets the workers, which have ended. */
void tddp_launch_agent_forget_workers(tddp_launch_agent *agent);

/* Requests to leave it: "node 1" with what it did behind it. */
void tddp_launch_agent_send_leave(const tddp_launch_agent *agent, const char *what);

/* Ends the rendezvous. */
void tddp_launch_agent_leave_nodes(tddp_launch_agent *agent);

/* At the end of the run: writes the files that report it; returns torchrun's exit status. */
int tddp_launch_agent_conclude(tddp_launch_agent *agent);

/* --- health_view.c --------------------------------------------------------------------------- */

/* The job's state: a tddp_launch_health_view, whose data is the agent. */
char *tddp_launch_agent_health(void *data, bool *healthy);

#endif
