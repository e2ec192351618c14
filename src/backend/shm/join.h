/*
 * What join.c (how ranks come to share memory) and join_rounds.c (how they meet for that) share.
 */
#ifndef TDDP_SHM_JOIN_H
#define TDDP_SHM_JOIN_H

#include <string.h>

#include <tddp/meeting.h>

#include "backend/shm/control.h"

enum { TDDP_SHM_REPORT_BYTES = 1024 };

/* One of the two rounds. */
typedef struct tddp_shm_join_round {
    tddp_meeting *ranks; /* of this host; its ranks are places in local_ranks */
    tddp_meeting *hosts; /* NULL: there is one */
} tddp_shm_join_round;

typedef struct tddp_shm_joining {
    const tddp_backend_opts *opts;
    int64_t deadline;
    tddp_cancel *cancel;
    const char *refusal;
    int *local_ranks; /* the ranks of this host, sorted */
    int size;
    int rank;        /* index in local_ranks */
    int *firsts;     /* the first rank of each host, which are numbered in that order */
    int *names;      /* what texts call the ranks of this host, */
    int *host_names; /* and the first of each host */
    int host_count;
    int host; /* this rank's */
    int listen_fd;
    size_t arena;
    char address[TDDP_SHM_ADDRESS_BYTES];
    char (*addresses)[TDDP_SHM_ADDRESS_BYTES]; /* by rank of this host */
    char overrides[TDDP_SHM_CHOICES_TEXT];     /* the first rank's, once they were compared */
    tddp_shm_place *places;                    /* by rank of this host */
    bool has_views;                            /* this host's ranks have segments already */
    bool all_have_views;                       /* and so have those of every other host */
    int declined;                              /* the lowest rank that said "no"; -1: none */
    char reason[TDDP_SHM_REPORT_BYTES];        /* and what it said */
    tddp_shm_join_round rounds[2];
    tddp_shm *shm;
} tddp_shm_joining;

static inline int tddp_shm_join_name(const tddp_shm_joining *self, int rank)
{
    return self->opts->names ? self->opts->names[rank] : rank;
}

static inline bool tddp_shm_join_begins(const char *text, const char *prefix)
{
    return strncmp(text, prefix, strlen(prefix)) == 0;
}

/* Opens the meetings of both rounds: none has been asked for anything. Caller: close(). */
TDDP_NODISCARD tddp_status tddp_shm_join_open(tddp_shm_joining *self);
void tddp_shm_join_close(tddp_shm_joining *self);

/* This rank's record of a meeting, and those of all; a failure of another rank is its text. */
TDDP_NODISCARD tddp_status tddp_shm_join_give(const tddp_shm_joining *self, tddp_meeting *meeting,
                                              const char *text);
TDDP_NODISCARD tddp_status tddp_shm_join_await(const tddp_shm_joining *self, tddp_meeting *meeting);
TDDP_NODISCARD tddp_status tddp_shm_join_check_failures(const tddp_meeting *meeting);

/* What ranks of this host say: a record that is none; "no"s of a round, as TDDP_UNAVAILABLE;
 * overrides that are not those of the rank `first`, which are taken over. */
TDDP_NODISCARD tddp_status tddp_shm_join_malformed(const tddp_shm_joining *self, int rank,
                                                   const char *text);
TDDP_NODISCARD tddp_status tddp_shm_join_check_records(tddp_shm_joining *self, int round);
TDDP_NODISCARD tddp_status tddp_shm_join_compare_overrides(tddp_shm_joining *self, int first,
                                                           int rank, const char *overrides);

/* What all hosts make of a round, of which this one has made `local`. */
TDDP_NODISCARD tddp_status tddp_shm_join_agree(tddp_shm_joining *self, int round,
                                               tddp_status local);

/* Tells all others that this rank has failed, and why: the thread's error text, which stays. */
void tddp_shm_join_fail(tddp_shm_joining *self, tddp_status status);

#endif
