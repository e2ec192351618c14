/*
 * A watch as its thread and the groups' side see it: watch.c and vigil.c.
 */
#ifndef TDDP_GROUP_DETECTOR_STATE_H
#define TDDP_GROUP_DETECTOR_STATE_H

#include "group/failure_detector/detector.h"

enum {
    TDDP_DETECTOR_REPORT_MS = 300, /* others are told within it, or find out by themselves */
    TDDP_DETECTOR_REPLY_MS = 500,  /* what a rank has to give a sign of life */
    TDDP_DETECTOR_KEY_BYTES = 256,
};

typedef enum tddp_detector_stage {
    TDDP_DETECTOR_IDLE,
    TDDP_DETECTOR_UNREPORTED, /* an operation has failed here: to be told */
    TDDP_DETECTOR_REPORTED,   /* and to be explained */
    TDDP_DETECTOR_NOTIFIED,   /* another rank has failed: to be answered, and to be explained */
    TDDP_DETECTOR_RESOLVED,
} tddp_detector_stage;

/* A group under the watch. */
typedef struct tddp_detector_entry {
    tddp_group *group;
    char key[TDDP_DETECTOR_KEY_BYTES]; /* the group's name among those of the job, on all ranks */
    struct tddp_detector_entry *next;
    tddp_detector_stage stage;
    bool leaving;  /* the others are to be told that it goes */
    bool busy;     /* the thread works for it, without the lock */
    bool answered; /* where this rank is has been said */
    bool own;      /* what follows is of an operation that failed here */
    tddp_op op;
    char *described; /* NULL: it was not */
    tddp_status status;
    char *text;
    int64_t deadline; /* of the explanation */
    tddp_status verdict;
    char *verdict_text; /* NULL: no memory for it */
} tddp_detector_entry;

struct tddp_detector {
    atomic_int references;
    pid_t pid;
    pthread_t thread;
    tddp_cancel *wake; /* triggered after something was asked */
    tddp_store *base;  /* the first group's part of the store, on that group's connection */
    tddp_store *store; /* the first group's part, on the thread's own connection once it is made */
    int64_t heard;     /* alarms that have been heard; the thread's */
    pthread_mutex_t mutex; /* guards what follows */
    pthread_cond_t changed;
    tddp_detector_entry *entries;
    bool deaf; /* the store cannot be reached any more; set by the thread alone */
    bool ended;
};

/* vigil.c: the thread. */
void *tddp_detector_run_watcher(void *watch);

#endif
