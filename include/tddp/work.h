/**
 * @file work.h
 * @brief A handle on one operation of a process group.
 *
 * Returned by the call that submits the operation, and owned by its caller: tddp_work_release(). It
 * may outlive its group. Any thread may query it and wait, several at a time. Where a call has
 * executed its operation itself (tddp_op_args.inline_us), there is none: it returns NULL, which
 * stands for an operation that was done, successfully.
 */
#ifndef TDDP_WORK_H
#define TDDP_WORK_H

#include <tddp/buffer.h>
#include <tddp/op.h>
#include <tddp/wait.h>

#ifdef __cplusplus
extern "C" {
#endif

/** An operation that was submitted. Any thread. */
typedef struct tddp_work tddp_work;

/**
 * Waits until the operation is done. Any thread, any number of times.
 * Returns its outcome: TDDP_OK or its failure, with its text on this thread. TDDP_TIMEOUT and
 * TDDP_CANCELED may also concern this wait alone: if tddp_work_completed() is 0, the operation
 * continues and its buffers are still in use. Without `wait` it waits until the operation's own
 * deadline.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_work_wait(tddp_work *work, const tddp_wait *wait);

/**
 * Makes later work on `stream`, a cudaStream_t of the device that the operation's memory is on,
 * wait for the operation, and returns as soon as that is queued: the operation has started then,
 * its memory is still in use, and tddp_work_wait() returns its outcome. For an operation that the
 * CPU executes this is tddp_work_wait(). Any thread. Errors: as tddp_work_wait(), of an operation
 * that has failed already or could not start.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_work_order(tddp_work *work, void *stream,
                                                    const tddp_wait *wait);

/** Where its memory is: TDDP_CPU, or TDDP_CUDA for an operation that a device executes, with the
 * device's number in `*index` (0 for the CPU). */
TDDP_API tddp_device_type tddp_work_device(const tddp_work *work, int32_t *index);

/** Whether it is done, successfully or not; never blocks. */
TDDP_API int tddp_work_completed(const tddp_work *work);

/** Its outcome with its text on this thread; TDDP_OK while it runs. */
TDDP_API tddp_status tddp_work_status(const tddp_work *work);

/** Its kind. Not of NULL, like its number. */
TDDP_API tddp_op_kind tddp_work_kind(const tddp_work *work);
/** Its number in its group. */
TDDP_API uint64_t tddp_work_sequence(const tddp_work *work);

/** The sender's rank, of a recv that succeeded; else TDDP_ANY_SOURCE. */
TDDP_API int tddp_work_source(const tddp_work *work);

/**
 * Registers `callback(data)`, which is called once when the work is done, on a thread of the
 * group's or on one that waits for a work of that group, or immediately if it is done already. It
 * must not block, wait for a lock of a host language, or shut the group down. One callback a work.
 * Errors: TDDP_INVALID_ARGUMENT if there is one already, or no callback.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_work_on_done(tddp_work *work, void (*callback)(void *data),
                                                      void *data);

/**
 * A descriptor for poll(2), epoll and event loops: readable (POLLIN) once the work is done, well
 * or not, and from then on. tddp_work_status() then has the outcome; ask it before reading the
 * results, since poll() alone does not order them between threads. The group's threads execute
 * the operation meanwhile: an event loop needs no other call. The first call makes the
 * descriptor, later ones return the same. It belongs to the work and is valid until
 * tddp_work_release(): do not read, write or close it. Each work that is polled takes one. Any
 * thread. Errors: TDDP_INVALID_ARGUMENT (NULL), TDDP_SYSTEM (too many descriptors), TDDP_FORKED.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_work_fd(tddp_work *work, int *fd);

/** A pointer of the caller's, NULL at first. The library neither reads nor frees what it points to.
 * Any thread. */
TDDP_API void tddp_work_set_user(tddp_work *work, void *user);
/** What tddp_work_set_user() has set. */
TDDP_API void *tddp_work_user(const tddp_work *work);

/** Drops the caller's reference. A running operation continues; its buffers must outlive it all the
 * same. NULL is fine. */
TDDP_API void tddp_work_release(tddp_work *work);

#ifdef __cplusplus
}
#endif

#endif
