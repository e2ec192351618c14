/*
 * How the ranks of a group come to share memory, in two rounds: before segments are exchanged
 * within each host (round 0), and when each rank has all of them (round 1).
 *
 *     join.c         what a rank does in them
 *     join_agree.c   what the ranks make of each other's reports: the same on all ranks
 *     join_store.c   the reports in the store
 *
 * In each round every rank publishes a report ("shm/RANK", "shm/RANK/mapped"), which the ranks of
 * its host read; with several hosts the first rank of each then publishes one for its host
 * ("shm/host/HOST", "shm/host/HOST/mapped"), which all ranks read. Where all ranks of a host have
 * the segments of an earlier group (fabric.c), they need only round 0.
 *
 *     yes ...        it can share. Of a rank in round 0: its socket's name, its arena size, its
 *                    overrides and the place of its view; of a host: its overrides, and whether it
 *                    needs only round 0
 *     no TEXT        it cannot or must not share: all ranks go without. Of a host: no RANK TEXT
 *     after          it stopped because of another rank's "no"
 *     a failure      it failed for another reason, and so do the others: published by
 *                    tddp_backend_publish_failure(), of a host by any of its ranks
 *
 * Invariants: unless it is killed, a rank publishes both reports whatever happens, so that no rank
 * waits for one that gave up. All ranks fail with the same text if one says "no", that of the
 * lowest such rank.
 */
#ifndef TDDP_SHM_JOIN_H
#define TDDP_SHM_JOIN_H

#include "backend/shm/control.h"

enum { TDDP_SHM_REPORT_BYTES = 1024, TDDP_SHM_SLICE_MS = 200 };

typedef struct tddp_shm_join_report {
    char text[TDDP_SHM_REPORT_BYTES];
} tddp_shm_join_report;

/* Whose reports: of ranks of the group, or of hosts, by number. */
typedef enum tddp_shm_join_scope { TDDP_SHM_RANKS, TDDP_SHM_HOSTS } tddp_shm_join_scope;

typedef struct tddp_shm_joining {
    const tddp_backend_opts *opts;
    int64_t deadline;
    tddp_cancel *cancel;
    const char *refusal;
    int *local_ranks; /* the ranks of this host, sorted */
    int size;
    int rank;    /* index in local_ranks */
    int *hosts;  /* of each rank of the group, numbered by first appearance */
    int *firsts; /* the first rank of each host */
    int host_count;
    int listen_fd;
    size_t arena;
    char address[TDDP_SHM_ADDRESS_BYTES];
    char (*addresses)[TDDP_SHM_ADDRESS_BYTES]; /* by rank of this host */
    char overrides[TDDP_SHM_CHOICES_TEXT];     /* of all ranks that have agreed so far */
    tddp_shm_place *places;                    /* by rank of this host */
    bool *has_views;   /* by host: its ranks have the segments of an earlier group */
    bool published[2]; /* this rank's reports that are in the store */
    int declined;      /* the lowest rank known to have said "no"; -1: none */
    char reason[TDDP_SHM_REPORT_BYTES]; /* and what it said */
    tddp_shm *shm;
} tddp_shm_joining;

/* This rank's host. */
static inline int tddp_shm_join_host(const tddp_shm_joining *self)
{
    return self->hosts[self->opts->rank];
}

/* --- join_store.c ---------------------------------------------------------------------------- */

/* The number of a rank of the group in messages. */
int tddp_shm_join_rank_name(const tddp_shm_joining *self, int group_rank);
/* Publishes this rank's report, or its host's. */
TDDP_NODISCARD tddp_status tddp_shm_join_publish(tddp_shm_joining *self, tddp_shm_join_scope scope,
                                                 int round, const char *text);
/* Publishes a failure in place of the reports that are missing, and of its host's. */
void tddp_shm_join_publish_failure(const tddp_shm_joining *self, const char *reason);
/* Waits for a report, at most `max_ms`. */
TDDP_NODISCARD tddp_status tddp_shm_join_read(const tddp_shm_joining *self,
                                              tddp_shm_join_scope scope, int round, int number,
                                              int64_t max_ms, tddp_shm_join_report *out);
/* Waits for several reports with one request, at most `max_ms`. TDDP_TIMEOUT: some are missing, and
 * nothing was read. */
TDDP_NODISCARD tddp_status tddp_shm_join_read_all(const tddp_shm_joining *self,
                                                  tddp_shm_join_scope scope, int round,
                                                  const int *numbers, size_t count, int64_t max_ms,
                                                  tddp_shm_join_report *out);

/* --- join_agree.c ---------------------------------------------------------------------------- */

bool tddp_shm_report_begins(const tddp_shm_join_report *report, const char *prefix);
/* What a report means here: TDDP_OK for "yes" and "after"; TDDP_UNAVAILABLE for "no", which it
 * keeps. */
TDDP_NODISCARD tddp_status tddp_shm_join_check(tddp_shm_joining *self, tddp_shm_join_scope scope,
                                               int number, const tddp_shm_join_report *report);
/* A rank's report that is none of this version. */
tddp_status tddp_shm_join_fail_malformed(const tddp_shm_joining *self, int rank,
                                         const tddp_shm_join_report *report);
/* Takes over the TDDP_SHM_ALGORITHM of the rank `first`, and compares others' with it. */
TDDP_NODISCARD tddp_status tddp_shm_join_compare_overrides(tddp_shm_joining *self, int first,
                                                           int rank, const char *overrides);
/* Waits for reports, checks them and stops at the first failure. */
TDDP_NODISCARD tddp_status tddp_shm_join_collect(tddp_shm_joining *self, tddp_shm_join_scope scope,
                                                 int round, const int *numbers, int count,
                                                 tddp_shm_join_report *out);
/* What all ranks of the group make of a round, of which the ranks of this host made `local`; its
 * error text is the thread's. */
TDDP_NODISCARD tddp_status tddp_shm_join_agree(tddp_shm_joining *self, int round,
                                               tddp_status local);

#endif
