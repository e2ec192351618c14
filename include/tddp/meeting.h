/**
 * @file meeting.h
 * @brief Meetings: each rank of a group gives a record, and gets those of all, through a store.
 *
 * Also one rank for all others. Ranks that are missing are named; a rank that fails says why, which
 * ends the meeting for all at once. What records say is the caller's. Groups are made this way, and
 * backends connect this way (UCC calls it the out-of-band allgather).
 *
 * Who has arrived is what the list of records says, by rank; counters and keys beside it only wake
 * those that wait, so that no order of arriving, withdrawing, failing and dying completes a meeting
 * early or hides a record.
 *
 * One thread at a time uses a meeting. Calls that wait do so in slices, since a TCP store serves
 * one call at a time.
 */
#ifndef TDDP_MEETING_H
#define TDDP_MEETING_H

#include <tddp/store.h>

#ifdef __cplusplus
extern "C" {
#endif

/** Numbers with a meaning of their own. */
enum {
    TDDP_MEETING_ALL = -1,         /**< a sender: each rank gives a record */
    TDDP_MEETING_TEXT_BYTES = 128, /**< of a list of ranks */
};

/** A meeting, as one rank has opened it. */
typedef struct tddp_meeting tddp_meeting;

/** What a meeting is; all pointers are borrowed until the close. */
typedef struct tddp_meeting_opts {
    tddp_store *store;
    /** Of its keys in the store, at most 60 bytes. Serves for one meeting, and for another one once
     * all ranks have left. */
    const char *name;
    int rank;
    int world_size;
    int sender;       /**< the one rank that gives a record, or TDDP_MEETING_ALL */
    const int *names; /**< what texts call the ranks; NULL: by their numbers */
    /** Called about every `check_ms` milliseconds while tddp_meeting_await() waits; an error other
     * than TDDP_TIMEOUT ends the wait. NULL: nothing is. */
    tddp_status (*check)(void *data);
    void *data;
    int check_ms;
} tddp_meeting_opts;

/** Makes no request yet. Errors: TDDP_OUT_OF_MEMORY. Caller: tddp_meeting_close(). */
TDDP_API TDDP_NODISCARD tddp_status tddp_meeting_open(const tddp_meeting_opts *opts,
                                                      tddp_meeting **out);

/** Frees it with its records; its keys stay. NULL is fine. */
TDDP_API void tddp_meeting_close(tddp_meeting *meeting);

/** Gives this rank's record, of any bytes, all ranks' together at most some MiB (a store's longest
 * value): once, or again after tddp_meeting_withdraw(). */
TDDP_API TDDP_NODISCARD tddp_status tddp_meeting_give(tddp_meeting *meeting, tddp_slice record,
                                                      const tddp_wait *wait);

/** Returns once all records are there; `wait` NULL: however long that takes. Errors: TDDP_TIMEOUT,
 * with the ranks that are missing in the text; TDDP_PEER_LOST: a rank has failed before all had
 * arrived, see tddp_meeting_failure(); what tddp_meeting_read() and the check return; the store's.
 * Of records and failures the one that is in the store first counts, for all ranks. */
TDDP_API TDDP_NODISCARD tddp_status tddp_meeting_await(tddp_meeting *meeting,
                                                       const tddp_wait *wait);

/** Reads who has arrived, and waits for nobody. Errors: TDDP_MISMATCH (another rank's world size is
 * another one), TDDP_PROTOCOL (there are other keys of that name), the store's. */
TDDP_API TDDP_NODISCARD tddp_status tddp_meeting_read(tddp_meeting *meeting, const tddp_wait *wait);

/** What was read last, by rank. A record points into the meeting, has a NUL behind it, and is NULL
 * where the rank has not arrived. */
TDDP_API const tddp_slice *tddp_meeting_records(const tddp_meeting *meeting);

/** How many are missing, and which: "2", "1, 2, 4", "1, 2, ... (30 in all)". */
TDDP_API int tddp_meeting_missing(const tddp_meeting *meeting, char text[TDDP_MEETING_TEXT_BYTES]);

/** Why a rank has failed, as was read last; NULL: it has not. `*rank` < 0: the first that has,
 * which is set. */
TDDP_API const char *tddp_meeting_failure(const tddp_meeting *meeting, int *rank);

/** Why a rank has failed, as it says soon after others have noticed its end: read again and again
 * for so many milliseconds; NULL: it doesn't. */
TDDP_API const char *tddp_meeting_await_failure(tddp_meeting *meeting, int rank, int64_t ms);

/** A rank has failed, before or after it gave its record: all that wait in this meeting, or read
 * it, learn why, up to 1,023 bytes of it. Needs no memory, takes two seconds at most; if the store
 * can't be told, that is only logged. Changes the thread's error text. */
TDDP_API void tddp_meeting_fail(const tddp_meeting_opts *opts, const char *reason);

/** This rank waits no longer, and its record, if it gave one, does not count: another process may
 * arrive with its rank. */
TDDP_API TDDP_NODISCARD tddp_status tddp_meeting_withdraw(tddp_meeting *meeting,
                                                          const tddp_wait *wait);

/** This rank needs the keys no more; the last rank that says so removes them. */
TDDP_API TDDP_NODISCARD tddp_status tddp_meeting_leave(tddp_meeting *meeting,
                                                       const tddp_wait *wait);

/** Removes the keys of a meeting that, as this rank knows, no rank needs any more. */
TDDP_API TDDP_NODISCARD tddp_status tddp_meeting_remove(const tddp_meeting_opts *opts,
                                                        const tddp_wait *wait);

#ifdef __cplusplus
}
#endif

#endif
