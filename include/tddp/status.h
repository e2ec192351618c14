/**
 * @file status.h
 * @brief What every function of libtddp returns, and the text of a failure.
 *
 * One table makes the codes, their names and texts. Failures are grouped by what is broken
 * afterwards:
 *
 *   1x  nothing: an argument was refused before anything was sent; correct it and call again
 *   2x  one operation: the object it was called on can be used again
 *   3x  a process group: destroy it
 *   4x  a store or a connection
 *   5x  this process: memory, the system, the installation
 */
#ifndef TDDP_STATUS_H
#define TDDP_STATUS_H

#include <tddp/export.h>

#ifdef __cplusplus
extern "C" {
#endif

/** X(name, code, text) */
#define TDDP_STATUS_MAP(X)                                        \
    X(OK, 0, "success")                                           \
    X(INVALID_ARGUMENT, 10, "invalid argument")                   \
    X(UNSUPPORTED, 11, "not supported")                           \
    X(TIMEOUT, 20, "timed out")                                   \
    X(CANCELED, 21, "interrupted")                                \
    X(NOT_FOUND, 22, "not found")                                 \
    X(MISMATCH, 23, "ranks disagree")                             \
    X(PEER_LOST, 30, "a peer was lost")                           \
    X(GROUP_FAILED, 31, "the process group has failed")           \
    X(GROUP_CLOSED, 32, "the process group is destroyed")         \
    X(FORKED, 33, "made before a fork, used in the child")        \
    X(NETWORK, 40, "network failure")                             \
    X(ADDRESS_IN_USE, 41, "address already in use")               \
    X(STORE, 42, "store failure")                                 \
    X(PROTOCOL, 43, "the peer does not use the store's protocol") \
    X(SYSTEM, 50, "system call failed")                           \
    X(OUT_OF_MEMORY, 51, "out of memory")                         \
    X(UNAVAILABLE, 52, "not available in this installation")      \
    X(INTERNAL, 53, "internal error")

/** The outcome of a call. */
typedef enum tddp_status {
#define TDDP_STATUS_ENUM(name, code, text) TDDP_##name = code,
    TDDP_STATUS_MAP(TDDP_STATUS_ENUM)
#undef TDDP_STATUS_ENUM
} tddp_status;

/** The name of a status, "TDDP_TIMEOUT" for TDDP_TIMEOUT. Static; never NULL. */
TDDP_API const char *tddp_status_name(tddp_status status);

/** A few words on a status. Static; never NULL. */
TDDP_API const char *tddp_status_text(tddp_status status);

/**
 * The text of the last failure on the calling thread: what was wrong, what was expected, what to
 * do. Valid until the next failing call on this thread; never NULL, empty before the first failure.
 */
TDDP_API const char *tddp_error_message(void);

/**
 * Sets the calling thread's text and returns `status`, for backends and bindings:
 * `return tddp_fail(TDDP_INVALID_ARGUMENT, "rank %d: expected 0 to %d", rank, last);`
 * The arguments may include the previous tddp_error_message(). Texts over 4 KiB are cut.
 */
TDDP_API tddp_status tddp_fail(tddp_status status, const char *format, ...) TDDP_PRINTF(2, 3);

#ifdef __cplusplus
}
#endif

#endif
