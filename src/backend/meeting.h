/*
 * A meeting of ranks in a store: each rank gives a record, and gets those of all, or one rank gives
 * one for all the others. Whoever is missing is named; a rank that will not come says why, which
 * ends the meeting for all at once. What the records say is the caller's.
 *
 * Invariant: who has come is what the list of records says, by rank; counters and keys beside it
 * only wake those that wait, so that no order of coming, giving up, failing and dying completes a
 * meeting early or hides a record.
 *
 * One thread at a time uses a meeting; calls wait as their `wait` allows, in slices, since a TCP
 * store serves one call at a time.
 */
#ifndef TDDP_MEETING_H
#define TDDP_MEETING_H

#include <stdbool.h>

#include <tddp/store.h>

enum { TDDP_MEETING_ALL = -1, TDDP_MEETING_TEXT_BYTES = 128 };

/* All borrowed, but for the time of tddp_meeting_open() alone. */
typedef struct tddp_meeting_opts {
    tddp_store *store; /* for the meeting's life */
    const char *name;  /* of its keys; a name is used for one meeting of a store */
    int rank;
    int world_size;
    int giver; /* the one rank that gives a record; TDDP_MEETING_ALL: each does */
    /* What is called between slices while records are missing, once a second or each `check_ms`: an
     * error ends the wait; NULL. */
    tddp_status (*check)(void *data);
    void *data;
    int check_ms; /* 0: a second */
} tddp_meeting_opts;

typedef struct tddp_meeting tddp_meeting;

/* Makes no request. Errors: TDDP_OUT_OF_MEMORY. Caller: tddp_meeting_close(). */
TDDP_NODISCARD tddp_status tddp_meeting_open(const tddp_meeting_opts *opts, tddp_meeting **out);

/* Frees it with its records; its keys stay. NULL is fine. */
void tddp_meeting_close(tddp_meeting *meeting);

/* Gives this rank's record, of any bytes. Once, or again after tddp_meeting_withdraw(). */
TDDP_NODISCARD tddp_status tddp_meeting_give(tddp_meeting *meeting, tddp_slice record,
                                             const tddp_wait *wait);

/* Returns once all records are there. Errors: TDDP_TIMEOUT, with the ranks that are missing in the
 * text; TDDP_PEER_LOST: a rank has failed, as tddp_meeting_failure() says; what `check` returns;
 * the store's. */
TDDP_NODISCARD tddp_status tddp_meeting_await(tddp_meeting *meeting, const tddp_wait *wait);

/* Reads who has come, without waiting for anybody. Errors: TDDP_MISMATCH (another rank's world size
 * is another one), TDDP_PROTOCOL (other keys of that name). */
TDDP_NODISCARD tddp_status tddp_meeting_look(tddp_meeting *meeting, const tddp_wait *wait);

/* What was read last, by rank. A record points into the meeting, has a NUL behind it, and is NULL
 * where the rank has not come. */
const tddp_slice *tddp_meeting_records(const tddp_meeting *meeting);

/* How many are missing, and which: "2", "1, 2, 4", "1, 2, ... (30 in all)". */
int tddp_meeting_missing(const tddp_meeting *meeting, char text[TDDP_MEETING_TEXT_BYTES]);

/* Why a rank has failed; NULL: it has not. `rank` < 0: the first that has, which is set. */
const char *tddp_meeting_failure(const tddp_meeting *meeting, int *rank);

/* This rank has failed, before or after it gave its record: all that wait or look learn why. Takes
 * a second at most; if it can't be told, that is only logged. Changes the thread's error text. */
void tddp_meeting_fail(tddp_meeting *meeting, const char *reason);

/* This rank waits no longer, and its record, if it gave one, does not count: another process may
 * come with its rank. Also with a meeting opened again. */
TDDP_NODISCARD tddp_status tddp_meeting_withdraw(tddp_meeting *meeting, bool gave,
                                                 const tddp_wait *wait);

/* This rank needs the keys no more; the last rank that says so removes them. */
TDDP_NODISCARD tddp_status tddp_meeting_leave(tddp_meeting *meeting, const tddp_wait *wait);

#endif
