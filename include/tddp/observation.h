/**
 * @file observation.h
 * @brief What a backend sees of other ranks while its own rank waits for them.
 *
 * A backend whose operation fails because of other ranks reports what it has seen of each, by
 * tddp_observe(), and fails with tddp_observation_fail() of the likeliest cause, or with a text
 * that names one rank. libtddp weighs what all ranks have seen, and writes the error that users
 * read: the root cause, the missing ranks and their positions. Any thread, also several at a time;
 * nothing here waits.
 */
#ifndef TDDP_OBSERVATION_H
#define TDDP_OBSERVATION_H

#include <stddef.h>
#include <stdint.h>

#include <tddp/status.h>

#ifdef __cplusplus
extern "C" {
#endif

/** What was seen of a rank. */
typedef enum tddp_observation_kind {
    TDDP_OBSERVED_NOTHING,     /**< not reported */
    TDDP_OBSERVED_ENTERED,     /**< it has entered the operation that fails here */
    TDDP_OBSERVED_NOT_ENTERED, /**< it has not; its last was `text`, number `sequence`; 0: none */
    TDDP_OBSERVED_LEFT,        /**< it has left the group after collective `sequence` */
    TDDP_OBSERVED_FAILED,      /**< it takes no further part, for the reason `status` and `text` */
    TDDP_OBSERVED_CLOSED,      /**< its connection is closed, without a reason; `text`: how */
    TDDP_OBSERVED_ENDED,       /**< its process has ended, without a reason */
} tddp_observation_kind;

/** One observation. */
typedef struct tddp_observation {
    tddp_observation_kind kind;
    int rank; /**< by its name in messages: tddp_backend_opts.names */
    uint64_t sequence;
    tddp_status status;
    const char *text; /**< NULL: none; the observer copies it */
    int64_t seen_ns;  /**< when that was first seen, by any clock of the backend's; 0: unknown */
} tddp_observation;

/** Who receives what a backend sees; all zero: nobody. */
typedef struct tddp_observer {
    void (*observe)(void *data, const tddp_observation *seen);
    void *data;
} tddp_observer;

/** Reports an observation. */
static inline void tddp_observe(const tddp_observer *observer, const tddp_observation *seen)
{
    if (observer->observe && seen->kind != TDDP_OBSERVED_NOTHING) {
        observer->observe(observer->data, seen);
    }
}

/** Whether `one` is likelier the root cause than `other`: a rank that ended without a reason comes
 * before one that reports a failure of its own, that before one that lost another rank or whose
 * group had failed, that before one that has left; among equals, what is known to have been seen
 * first. */
TDDP_API int tddp_observation_precedes(const tddp_observation *one, const tddp_observation *other);

/** Writes "lost rank 2 (its process has ended)", "rank 3 has left the group" and so on, cut at
 * `size`; returns `text`. */
TDDP_API const char *tddp_observation_text(const tddp_observation *seen, char *text, size_t size);

/** Sets that as the error's text. Returns TDDP_PEER_LOST, or TDDP_MISMATCH for a rank that failed
 * because calls differ, so that all ranks return the same. */
TDDP_API TDDP_NODISCARD tddp_status tddp_observation_fail(const tddp_observation *seen);

#ifdef __cplusplus
}
#endif

#endif
