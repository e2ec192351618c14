/*
 * The failure detector's state, shared by detector.c, outbox.c and watcher.c.
 */
#ifndef TDDP_GROUP_DETECTOR_STATE_H
#define TDDP_GROUP_DETECTOR_STATE_H

#include "group/failure_detector/detector.h"

enum {
    TDDP_DETECTOR_REPORT_MS = 300, /* the longest that a group's thread waits for its report */
    TDDP_DETECTOR_REPLY_MS = 500,  /* how long a rank has to answer a notice with its report */
    TDDP_DETECTOR_KEY_BYTES = 256,
};

/* How long a store to which there is no connection is tried before its host is asked whether it
 * refuses them. Only tests change it. */
extern int64_t tddp_detector_connect_ms;

typedef enum tddp_detector_stage {
    TDDP_DETECTOR_IDLE,
    TDDP_DETECTOR_FAILED,   /* an operation has failed here; its root cause is not known yet */
    TDDP_DETECTOR_NOTIFIED, /* another rank has failed; likewise */
    TDDP_DETECTOR_RESOLVED, /* the root cause is known */
} tddp_detector_stage;

/* A group of the detector's. */
typedef struct tddp_detector_entry {
    tddp_group *group;
    tddp_detector_fail *fail;
    char key[TDDP_DETECTOR_KEY_BYTES]; /* the group's name among the job's, equal on all ranks */
    struct tddp_detector_entry *next;
    tddp_detector_stage stage;
    bool asked;       /* all ranks are to connect, and no notice has said so yet */
    bool unchecked;   /* a notice may have come before this rank watched the group */
    bool busy;        /* the watcher works on it, without the lock */
    bool failed_here; /* an operation of this rank failed: `op` to `text` describe it */
    tddp_op op;
    char *described; /* by the caller; NULL: not at all */
    tddp_status status;
    char *text;
    int64_t deadline; /* for the root cause */
    tddp_status cause;
    char *cause_text; /* NULL: no memory for it */
} tddp_detector_entry;

/* What the store has to be told: a line of a group's log, or a notice. */
typedef struct tddp_detector_message {
    struct tddp_detector_message *next;
    char key[TDDP_DETECTOR_KEY_BYTES]; /* of its group */
    tddp_notice_kind notice;
    tddp_bytes line; /* empty: it is the notice */
} tddp_detector_message;

/* A notice of a group that this rank does not observe: not yet, no longer, or never. */
typedef struct tddp_detector_stray {
    struct tddp_detector_stray *next;
    tddp_notice notice;
} tddp_detector_stray;

struct tddp_detector {
    atomic_int references;
    pid_t pid;
    pthread_t thread;
    tddp_cancel *wake; /* triggered to wake the watcher after an entry or the outbox has changed */
    tddp_store *base;  /* the first group's part of the store, on that group's connection */
    /* Only used by the watcher. */
    tddp_store *store;     /* the same on the watcher's own connection; NULL: there is none now */
    int64_t connect_until; /* without one: from then on it is lost where its host refuses */
    int64_t notices_received;
    tddp_detector_stray *strays;
    pthread_mutex_t mutex; /* guards what follows */
    pthread_cond_t changed;
    tddp_detector_entry *entries;
    tddp_detector_message *outbox; /* in order; the watcher alone removes any */
    uint64_t queued;               /* messages, ever */
    uint64_t told;                 /* of which the store knows, or never will */
    bool store_silent; /* the store has not answered, and is asked again; set by the watcher */
    bool store_lost;   /* it cannot be reached any more; set by the watcher, never cleared */
    bool ended;
};

/* watcher.c: the thread's body. */
void *tddp_detector_run_watcher(void *detector);

/* --- outbox.c: with the lock held ------------------------------------------------------------- */

/* Puts this rank's report in the outbox; `text`: of its failure, or why it leaves; may be NULL.
 * Without memory for it there is none. */
void tddp_detector_put_report(tddp_detector *detector, const tddp_detector_entry *self,
                              tddp_status_report_kind kind, const char *text);

/* Puts a line of the group's log in the outbox, whose bytes it takes over; or, without one, a
 * notice about the group. */
void tddp_detector_put(tddp_detector *detector, const char *key, tddp_notice_kind notice,
                       tddp_bytes *line);

/* Takes the outbox's first message out, and frees it. */
void tddp_detector_drop_message(tddp_detector *detector);

#endif
