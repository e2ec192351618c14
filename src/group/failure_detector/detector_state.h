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

typedef enum tddp_detector_store_state {
    TDDP_DETECTOR_STORE_SILENT, /* it has not answered, and is asked again */
    TDDP_DETECTOR_STORE_ANSWERS,
    TDDP_DETECTOR_STORE_LOST, /* it cannot be reached any more; for good */
} tddp_detector_store_state;

/* A group of the detector's. */
typedef struct tddp_detector_entry {
    tddp_group *group;
    char key[TDDP_DETECTOR_KEY_BYTES]; /* the group's name among the job's, equal on all ranks */
    struct tddp_detector_entry *next;
    tddp_detector_stage stage;
    size_t heard; /* those of the notices that were looked at for this group */
    bool asked;   /* all ranks are to connect, and no notice has said so yet */
    bool busy;    /* the watcher works on it, without the lock */
    /* Of an operation of this rank, whose thread waits for the root cause; else NULL. */
    const tddp_failure *failure;
    int64_t deadline; /* for the root cause */
    tddp_status cause;
    char *cause_text; /* NULL: no memory for it */
} tddp_detector_entry;

/* What the store has to be told: a notice, or, with a line, that line of its group's log. */
typedef struct tddp_detector_message {
    struct tddp_detector_message *next;
    tddp_bytes line;
    char notice[1 + TDDP_DETECTOR_KEY_BYTES];
} tddp_detector_message;

struct tddp_detector {
    atomic_int references;
    pid_t pid;
    pthread_t thread;
    tddp_cancel *wake; /* triggered to wake the watcher after an entry or the outbox has changed */
    /* Only used by the watcher. */
    tddp_store *base;      /* the first group's part of the store, on that group's connection */
    tddp_store *store;     /* the same on the watcher's own connection; NULL: there is none now */
    bool connected;        /* there has been one */
    int64_t connect_until; /* without one: from then on it is lost where its host refuses */
    char **notices;        /* all of them, in the order of their numbers */
    size_t notice_count;
    pthread_mutex_t mutex; /* guards what follows */
    pthread_cond_t changed;
    tddp_detector_entry *entries;
    tddp_detector_message *outbox;         /* in order; the watcher alone removes any */
    uint64_t queued;                       /* messages, ever */
    uint64_t told;                         /* of which the store knows, or never will */
    tddp_detector_store_state store_state; /* set by the watcher */
    bool ended;
};

/* watcher.c: the thread's body. */
void *tddp_detector_run_watcher(void *detector);

/* --- outbox.c: with the lock held ------------------------------------------------------------- */

/* Puts this rank's report in the outbox; `text`: of its failure, or why it leaves; may be NULL.
 * Without memory for it there is none. */
void tddp_detector_put_report(tddp_detector *detector, const tddp_detector_entry *self,
                              tddp_status_report_kind kind, const char *text);

/* Puts a notice about the group in the outbox, or, if `line` is not empty, that line of its log,
 * whose bytes it takes over. */
void tddp_detector_put(tddp_detector *detector, const char *key, char notice, tddp_bytes line);

/* Takes the outbox's first message out, and frees it; or all of them. */
void tddp_detector_pop_message(tddp_detector *detector);
void tddp_detector_clear_outbox(tddp_detector *detector);

#endif
