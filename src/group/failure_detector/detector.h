/*
 * The failure detector of a job: one watcher thread a process, with its own connection to the
 * store. A rank whose operation fails publishes a failure notice; the other ranks' watchers receive
 * it, append their own status reports, and fail the group on their rank too. So every rank names
 * the same root cause, also where no operation of that rank observes the failure. By the same way
 * one rank has the others make connections that it needs.
 *
 *   detector.c       what the groups call
 *   watcher.c        the watcher thread
 *   outbox.c         what it has yet to tell the store, which may be silent for a while
 *   notice.c         notices and reports in the store
 *   status_report.c  a rank's report of where it is, as a line of text
 *   observed.c       what this rank's backend has seen of other ranks
 *   root_cause.c     finds the root cause in both
 */
#ifndef TDDP_GROUP_DETECTOR_H
#define TDDP_GROUP_DETECTOR_H

#include "group/failure_detector/root_cause.h"

typedef struct tddp_detector tddp_detector;

/* Adds a group whose ranks have joined to its parent's detector, or to a new one, which fails it by
 * tddp_group_fail() once it has failed on another rank. A group of one rank needs none. */
TDDP_NODISCARD tddp_status tddp_detector_add_group(tddp_group *group, tddp_group *parent);

/* Removes the group: it receives no more failures, and a report says that this rank has left, and
 * with a `reason` why. The last group's removal ends the watcher thread. Once, by the thread that
 * shuts the group down. */
void tddp_detector_remove_group(tddp_group *group, const char *reason);

/* Reports that the ranks have joined, but this rank failed to create the group: the others need
 * not wait for it. */
void tddp_detector_report_create_failure(tddp_group *group, tddp_group *parent, tddp_status status,
                                         const char *text);

/* Drops one reference. NULL is fine; also in a forked child. */
void tddp_detector_release(tddp_detector *detector);

/* Reports the group's first failure: returns when the other ranks can receive it, or soon if they
 * cannot. The failure must live until tddp_detector_find_cause(). */
void tddp_detector_report_failure(tddp_group *group, const tddp_failure *failure);

/* Waits for the other ranks' reports after that, a few seconds at most. Returns the status with
 * which the operation fails, and sets this thread's error text: the root cause, without the
 * operation's name. */
tddp_status tddp_detector_find_cause(tddp_group *group, const tddp_failure *failure);

/* Has the ranks of the group make the connections that one of them needs. Any thread; does not
 * wait. `group`: a tddp_group. */
void tddp_detector_ask_to_connect(void *group);

/* --- notice.c. `store` is the watcher's connection, `key` the group's name among the job's
 * groups. All of them return within a fraction of a second where the store answers, and soon where
 * it is silent. Each may be called again after a failure.
 * ------------------------------------------------------------------------------------------------
 */

/* Appends a status report to the group's log. */
TDDP_NODISCARD tddp_status tddp_notice_append_report(tddp_store *store, const char *key,
                                                     const tddp_bytes *line);

/* Reads the group's log, to be freed; NULL if there are no reports. */
TDDP_NODISCARD tddp_status tddp_notice_read_reports(tddp_store *store, const char *key, char **log);

/* A notice is a text: what it says of a group, and the group's key. */
enum {
    TDDP_NOTICE_FAILURE = 'F', /* the group has failed */
    TDDP_NOTICE_CONNECT = 'C', /* its ranks have to connect: backend/on_demand.h */
};

/* Makes this notice `number`, unless another one is: `*out`, to be freed, has that number then. All
 * those before it must be there. */
TDDP_NODISCARD tddp_status tddp_notice_offer(tddp_store *store, int64_t number, const char *notice,
                                             char **out);

/* Waits for notice `number` as long as `wait` says; `*out` is to be freed. */
TDDP_NODISCARD tddp_status tddp_notice_wait(tddp_store *store, int64_t number,
                                            const tddp_wait *wait, char **out);

/* Returns once the store answers. */
TDDP_NODISCARD tddp_status tddp_notice_ask(tddp_store *store, const tddp_wait *wait);

#endif
