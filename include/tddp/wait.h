/**
 * @file wait.h
 * @brief How long a blocking call may take, and how another thread ends it early.
 *
 * Every call of libtddp that may block takes a `const tddp_wait *`. NULL means the default time of
 * the object it is called on and no way to end it early.
 */
#ifndef TDDP_WAIT_H
#define TDDP_WAIT_H

#include <stdint.h>

#include <tddp/status.h>

#ifdef __cplusplus
extern "C" {
#endif

/** A token by which another thread, or a signal handler, ends calls that wait. */
typedef struct tddp_cancel tddp_cancel;

/** How long a call may wait. */
typedef struct tddp_wait {
    /** Milliseconds from the start of the call; 0 polls once; negative: the object's default. */
    int64_t timeout_ms;
    /** Borrowed for the call; NULL: it cannot be canceled. */
    tddp_cancel *cancel;
} tddp_wait;

/** Use the default time of the object, cannot be cancelled. */
#define TDDP_WAIT_INIT \
    {                  \
        -1, NULL       \
    }

/**
 * Makes a token that ends blocking calls early. Caller frees it with tddp_cancel_free().
 * It holds one descriptor (CLOEXEC). Errors: TDDP_SYSTEM, TDDP_OUT_OF_MEMORY.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_cancel_create(tddp_cancel **out);

/**
 * Makes the calls waiting with this token, and later ones, return TDDP_CANCELED. May be called from
 * any thread and from a signal handler; calling it twice is harmless.
 */
TDDP_API void tddp_cancel_trigger(tddp_cancel *cancel);

/** Makes a triggered token fresh again. No call may be waiting with it. */
TDDP_API void tddp_cancel_reset(tddp_cancel *cancel);

/** Whether the token was triggered. Any thread. */
TDDP_API int tddp_cancel_triggered(const tddp_cancel *cancel);

/** Frees the token; no call may be waiting with it. NULL is fine. */
TDDP_API void tddp_cancel_free(tddp_cancel *cancel);

#ifdef __cplusplus
}
#endif

#endif
