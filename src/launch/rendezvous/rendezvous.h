/*
 * How the torchruns of several nodes find each other, agree on ranks, and hear of each other's end.
 * All of it happens on a thread of its own; the agent sees a descriptor and news.
 */
#ifndef TDDP_LAUNCH_RENDEZVOUS_H
#define TDDP_LAUNCH_RENDEZVOUS_H

#include "launch/workers/environment.h"
#include "launch/command/options.h"

typedef struct tddp_launch_rendezvous tddp_launch_rendezvous;

typedef enum tddp_launch_news {
    TDDP_LAUNCH_NEWS_NONE,
    TDDP_LAUNCH_NEWS_JOINED,  /* all nodes are there: start the workers of this world */
    TDDP_LAUNCH_NEWS_DONE,    /* the workers of all nodes have succeeded */
    TDDP_LAUNCH_NEWS_FAILED,  /* a worker of some node has failed, or a node is lost */
    TDDP_LAUNCH_NEWS_STOPPED, /* some node's torchrun was told to end */
    TDDP_LAUNCH_NEWS_ERROR,   /* the nodes cannot work together */
} tddp_launch_news;

/* Starts joining; errors come as news. Caller: tddp_launch_rendezvous_end(). `options` and `run_id`
 * must live as long. */
TDDP_NODISCARD tddp_status tddp_launch_rendezvous_start(const tddp_launch_options *options,
                                                        const char *run_id, int local_size,
                                                        tddp_launch_rendezvous **out);

/* Readable when there is news, or the thread has ended. Borrowed. */
int tddp_launch_rendezvous_fd(const tddp_launch_rendezvous *rendezvous);

/* The next news, with `*world` for JOINED and `text` (TDDP_LAUNCH_NEWS_BYTES) for the others.
 * Never blocks. */
enum { TDDP_LAUNCH_NEWS_BYTES = 1024 };
tddp_launch_news tddp_launch_rendezvous_next(tddp_launch_rendezvous *rendezvous,
                                             tddp_launch_world *world, char *text);

/* Tells the other nodes how this one fares: DONE, FAILED or STOPPED. Never blocks. */
void tddp_launch_rendezvous_tell(tddp_launch_rendezvous *rendezvous, tddp_launch_news how,
                                 const char *text);

/* After FAILED, once this node's workers are gone: joins the next round. Never blocks. */
void tddp_launch_rendezvous_again(tddp_launch_rendezvous *rendezvous);

/* Whether the thread has ended, so that the end below does not wait. */
bool tddp_launch_rendezvous_over(tddp_launch_rendezvous *rendezvous);

/* Ends the thread and frees all; a store hosted here stops. Waits a second at most: a thread that
 * still waits for a host then is left to the end of the process, which must be near. NULL is fine.
 */
void tddp_launch_rendezvous_end(tddp_launch_rendezvous *rendezvous);

#endif
