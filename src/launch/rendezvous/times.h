/*
 * The durations of the rendezvous, in one place: made of --rdzv-conf, so that tests can have
 * shorter ones. Milliseconds.
 */
#ifndef TDDP_LAUNCH_TIMES_H
#define TDDP_LAUNCH_TIMES_H

#include "launch/command/options.h"

typedef struct tddp_launch_times {
    int64_t beat_ms;      /* between two signs of life of a node */
    int64_t silence_ms;   /* without one, until a node counts as lost; 0: never */
    int64_t read_ms;      /* for one answer; then the connection is made anew */
    int64_t join_ms;      /* for the nodes to come together */
    int64_t last_call_ms; /* for more than the least number of nodes */
    int64_t close_ms;     /* at the end, for all nodes to read it */
    int64_t reconnect_ms; /* for a node whose connection has ended, before it counts as lost */
    int64_t takeover_ms;  /* for the nodes of a document, after a change of leaders */
    int64_t report_ms;    /* between two lines about what is waited for */
} tddp_launch_times;

/* Larger than any that was made before, as long as nobody sets back the clock: microseconds since
 * 1970. */
int64_t tddp_launch_new_generation(void);

tddp_launch_times tddp_launch_times_of(const tddp_launch_options *options);

#endif
