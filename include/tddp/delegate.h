/**
 * @file delegate.h
 * @brief Backends whose operations the host language executes, on threads of its own.
 *
 * libtddp's threads can't run code of a host language. So each operation of such a backend becomes
 * a request, for which the host has one thread that waits for tddp_delegate_fd() to become
 * readable, and takes requests by tddp_delegate_next(). It passes each to a thread that may block;
 * requests of one context come one at a time, except for an abort. Each is completed once.
 *
 * An operation may end before its request is completed, by a timeout or an abort: its memory is
 * copied, by tddp_delegate_read() and tddp_delegate_complete(), and not used after that.
 */
#ifndef TDDP_DELEGATE_H
#define TDDP_DELEGATE_H

#include <tddp/backend.h>

#ifdef __cplusplus
extern "C" {
#endif

/** What the other side is asked for. */
typedef enum tddp_delegate_kind {
    TDDP_DELEGATE_CREATE,  /**< connect this rank to the others */
    TDDP_DELEGATE_RUN,     /**< an operation */
    TDDP_DELEGATE_ABORT,   /**< end what runs: nobody waits for it any more */
    TDDP_DELEGATE_DESTROY, /**< the last one of a context */
} tddp_delegate_kind;

/** Valid until it is completed. Fields that a kind doesn't have are zero. */
typedef struct tddp_delegate_request {
    tddp_delegate_kind kind;
    uint64_t context;    /**< a number for each group of this process */
    const char *backend; /**< its name */
    int rank;
    int world_size;
    int64_t timeout_ms;

    /* --- create --- */
    tddp_store *store; /**< a connection of this context's own; NULL: none could be made */

    /* --- run --- */
    tddp_op_kind op;
    tddp_reduce_op reduce;
    double premul;
    int root;
    /** What this rank sends and receives, as tddp_op describes it, without the memory. all_reduce
     * and broadcast have an output for each input, the same memory; reduce has one at the root. */
    const tddp_buffer *inputs;
    size_t input_count;
    const tddp_buffer *outputs;
    size_t output_count;
} tddp_delegate_request;

/** Registers a backend under this name, as tddp_backend_register() does. It supports all operations
 * but send and recv, on the CPU's memory. */
TDDP_API TDDP_NODISCARD tddp_status tddp_delegate_register(const char *name);

/** Begins to take requests in this process; once more after a fork. `*fd` becomes readable when
 * there are some; borrowed. */
TDDP_API TDDP_NODISCARD tddp_status tddp_delegate_start(int *fd);

/** The next request, or NULL; never blocks. Caller: tddp_delegate_complete(). */
TDDP_API tddp_delegate_request *tddp_delegate_next(void);

/** Copies input `index`. TDDP_CANCELED: the operation has ended. */
TDDP_API TDDP_NODISCARD tddp_status tddp_delegate_read(const tddp_delegate_request *request,
                                                       size_t index, void *to);

/**
 * Ends a request, and frees it. With TDDP_OK an operation's outputs are copied from `outputs`,
 * output_count addresses; otherwise `text` says what has failed. TDDP_INVALID_ARGUMENT and
 * TDDP_UNSUPPORTED fail this operation only, all else the group.
 */
TDDP_API void tddp_delegate_complete(tddp_delegate_request *request, tddp_status status,
                                     const char *text, const void *const *outputs);

#ifdef __cplusplus
}
#endif

#endif
