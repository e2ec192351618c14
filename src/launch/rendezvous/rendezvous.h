/*
 * How the torchruns of several nodes find each other, agree on ranks, and hear of each other's end.
 * All of it happens on a thread of its own; the agent sees a descriptor and notifications.
 */
#ifndef TDDP_LAUNCH_RENDEZVOUS_H
#define TDDP_LAUNCH_RENDEZVOUS_H

#include "launch/world.h"
#include "launch/command/options.h"

/* The durations, in milliseconds: made of --rdzv-conf, so that tests can have shorter ones. */
typedef struct tddp_launch_times {
    int64_t beat_ms;      /* between two signs of life of a node */
    int64_t silence_ms;   /* without one, until a node counts as lost; 0: never */
    int64_t read_ms;      /* for one answer; then the connection is made again */
    int64_t join_ms;      /* for the nodes to come together */
    int64_t last_call_ms; /* for more than the least number of nodes */
    int64_t close_ms;     /* at the end, for all nodes to read it */
    int64_t reconnect_ms; /* for a node whose connection has ended, before it counts as lost */
    int64_t takeover_ms;  /* for the nodes of a document, after a change of leaders */
    int64_t report_ms;    /* between two lines about what is waited for */
} tddp_launch_times;

tddp_launch_times tddp_launch_times_of(const tddp_launch_options *options);

/* Larger than any that was made before, as long as nobody sets back the clock: microseconds since
 * 1970. */
int64_t tddp_launch_new_generation(void);

typedef struct tddp_launch_rendezvous tddp_launch_rendezvous;

typedef enum tddp_launch_notification {
    TDDP_LAUNCH_NOTIFICATION_NONE,
    TDDP_LAUNCH_NOTIFICATION_JOINED,  /* the round has its nodes: start the workers of this world */
    TDDP_LAUNCH_NOTIFICATION_FAILED,  /* the round is over by a failure, which costs a restart */
    TDDP_LAUNCH_NOTIFICATION_CHANGED, /* the round is over because nodes came or went, which costs
                                         none */
    TDDP_LAUNCH_NOTIFICATION_DONE,    /* the workers of all nodes have succeeded */
    TDDP_LAUNCH_NOTIFICATION_ENDED,   /* the job has failed: no round follows */
    TDDP_LAUNCH_NOTIFICATION_STOPPED, /* the job is over because a node's torchrun was told to end
                                       */
    TDDP_LAUNCH_NOTIFICATION_ERROR,   /* this node cannot take part, or not any more */
    TDDP_LAUNCH_NOTIFICATION_STATUS,  /* nothing has happened: what is waited for, to be shown */
} tddp_launch_notification;

/* Starts joining; errors come as notification. Caller: tddp_launch_rendezvous_end(). `options` and
 * `run_id` must live as long. `times`: tddp_launch_times_of() the options, but in tests. */
TDDP_NODISCARD tddp_status tddp_launch_rendezvous_start(const tddp_launch_options *options,
                                                        const tddp_launch_times *times,
                                                        const char *run_id, int local_size,
                                                        tddp_launch_rendezvous **out);

/* Readable when there is a notification, or the thread has ended. Borrowed. */
int tddp_launch_rendezvous_fd(const tddp_launch_rendezvous *rendezvous);

/* The next notification in order of arrival, with the world of this node and a text (of any number
 * of lines; none for JOINED): call it until NONE. Never blocks. */
enum { TDDP_LAUNCH_NOTIFICATION_BYTES = 8192 };
tddp_launch_notification tddp_launch_rendezvous_next(tddp_launch_rendezvous *rendezvous,
                                                     tddp_launch_world *world,
                                                     char text[TDDP_LAUNCH_NOTIFICATION_BYTES]);

/* What the agent tells. */
typedef enum tddp_launch_request {
    TDDP_LAUNCH_REQUEST_DONE,              /* this node's workers have succeeded */
    TDDP_LAUNCH_REQUEST_FAILED,            /* one has failed: `text` is for all nodes */
    TDDP_LAUNCH_REQUEST_FAILED_AFTER_PEER, /* one has failed since it lost a peer, so that others
                                              know more */
    TDDP_LAUNCH_REQUEST_AGAIN,             /* the workers are gone: the node joins the next round */
    TDDP_LAUNCH_REQUEST_LEAVE,             /* it takes no part any more, for the reason in `text` */
    TDDP_LAUNCH_REQUEST_QUIT,              /* of tddp_launch_rendezvous_end() */
    TDDP_LAUNCH_REQUESTS,
} tddp_launch_request;

/* Tells the other nodes; NULL: there are none. Never blocks. */
void tddp_launch_rendezvous_request(tddp_launch_rendezvous *rendezvous, tddp_launch_request request,
                                    const char *text);

/* Whether the thread has ended, so that the end below does not wait. */
bool tddp_launch_rendezvous_over(const tddp_launch_rendezvous *rendezvous);

/* Ends the thread and frees all; a store hosted here stops. Waits a second at most: a thread that
 * still waits for a host then is left to the end of the process, which must be near. NULL is fine.
 */
void tddp_launch_rendezvous_end(tddp_launch_rendezvous *rendezvous);

#endif
