/*
 * The failure detector's state, shared by detector.c and watcher.c.
 */
#ifndef TDDP_GROUP_DETECTOR_STATE_H
#define TDDP_GROUP_DETECTOR_STATE_H

#include "group/failure_detector/detector.h"

enum {
    TDDP_DETECTOR_REPORT_MS = 300, /* the longest that a group's thread waits for its report */
    TDDP_DETECTOR_REPLY_MS = 500,  /* how long a rank has to answer a notice with its report */
    TDDP_DETECTOR_KEY_BYTES = 256,
};

typedef enum tddp_detector_stage {
    TDDP_DETECTOR_IDLE,
    TDDP_DETECTOR_UNREPORTED, /* an operation has failed here; the watcher has to report it */
    TDDP_DETECTOR_REPORTED,   /* and its root cause is not known yet */
    TDDP_DETECTOR_NOTIFIED,   /* another rank has failed: this rank has to reply; cause unknown */
    TDDP_DETECTOR_RESOLVED,   /* the root cause is known */
} tddp_detector_stage;

/* A group of the detector's. */
typedef struct tddp_detector_entry {
    tddp_group *group;
    char key[TDDP_DETECTOR_KEY_BYTES]; /* the group's name among the job's, equal on all ranks */
    struct tddp_detector_entry *next;
    tddp_detector_stage stage;
    bool leaving;           /* the watcher has to report that this rank leaves the group */
    bool asks;              /* the watcher has to ask all ranks to connect */
    bool unchecked;         /* and to look whether another rank did before it watched this group */
    bool busy;              /* the watcher works on it, without the lock */
    bool position_reported; /* this rank has replied to the notice */
    bool failed_here;       /* an operation of this rank failed: `op` to `text` describe it */
    tddp_op op;
    char *described; /* by the caller; NULL: not at all */
    tddp_status status;
    char *text;
    int64_t deadline; /* for the root cause */
    tddp_status cause;
    char *cause_text; /* NULL: no memory for it */
} tddp_detector_entry;

struct tddp_detector {
    atomic_int references;
    pid_t pid;
    pthread_t thread;
    tddp_cancel *wake;        /* triggered to wake the watcher after an entry has changed */
    tddp_store *base;         /* the first group's part of the store, on that group's connection */
    tddp_store *store;        /* the same on the watcher's own connection, once it is open */
    int64_t notices_received; /* only used by the watcher */
    pthread_mutex_t mutex;    /* guards what follows */
    pthread_cond_t changed;
    tddp_detector_entry *entries;
    bool store_lost; /* the store is unreachable; set by the watcher alone, never cleared */
    bool ended;
};

/* watcher.c: the thread's body. */
void *tddp_detector_run_watcher(void *detector);

#endif
