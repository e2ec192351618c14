/*
 * The watch of a job: one thread a process, with a connection of its own to the store, by which a
 * rank whose operation has failed tells the others why, learns from them where they are, and by
 * which it hears of failures that its own operations do not meet.
 *
 *   watch.c        what the groups ask of it
 *   vigil.c        its thread
 *   alarm.c        the words in the store
 *   account.c      what a rank says of itself, as a line of text
 *   post_mortem.c  what follows from all of it
 */
#ifndef TDDP_GROUP_DETECTOR_H
#define TDDP_GROUP_DETECTOR_H

#include "group/failure_detector/status_report.h"

typedef struct tddp_detector tddp_detector;

/* Puts a group whose ranks have met under its parent's watch, or one of its own. A group of one
 * rank needs none. */
TDDP_NODISCARD tddp_status tddp_detector_add_group(tddp_group *group, tddp_group *parent);

/* The watch lets go of the group: it is told no more, and the others know that it has left. The
 * last group's leave ends the thread. Once, by the thread that shuts the group down. */
void tddp_detector_remove_group(tddp_group *group);

/* The ranks have met, but the group cannot be made here: the others need not wait for this rank. */
void tddp_detector_report_create_failure(tddp_group *group, tddp_group *parent, tddp_status status,
                                         const char *text);

/* One reference less. NULL is fine; also in a forked child. */
void tddp_detector_release(tddp_detector *watch);

/* The group's first failure: returns when the others can learn of it, or soon if they cannot. */
void tddp_detector_report_failure(tddp_group *group, const tddp_op *op, const char *described,
                                  tddp_status status, const char *text);

/* Then: waits for what the others say, a second at most. Returns what the operation ends with, and
 * sets this thread's error text: the cause, without the operation's name. */
tddp_status tddp_detector_find_cause(tddp_group *group, const tddp_op *op, const char *described,
                                     tddp_status status, const char *text);

/* --- alarm.c: the watch's words in the store. `store` is the watch's own, `key` the group's name
 * among those of the job. All of them wait for moments only. -------------------------------------
 */

/* Adds a line to the group's log. */
TDDP_NODISCARD tddp_status tddp_notice_append_report(tddp_store *store, const char *key,
                                                     const tddp_bytes *line);

/* Wakes the other ranks' watches, the first time that any rank asks for it. */
TDDP_NODISCARD tddp_status tddp_notice_publish(tddp_store *store, const char *key);

/* What has been said, to be freed; an empty text if nothing was. */
TDDP_NODISCARD tddp_status tddp_notice_read_reports(tddp_store *store, const char *key, char **log);

/* The key of alarm `number`, from 1, to be freed: waits for it as long as `wait` says. */
TDDP_NODISCARD tddp_status tddp_notice_wait(tddp_store *store, int64_t number,
                                            const tddp_wait *wait, char **key);

#endif
