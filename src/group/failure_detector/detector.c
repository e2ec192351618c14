/*
 * What groups call on their failure detector: join and leave it, report a failure, find its root
 * cause. Any thread of a group's. The watcher thread (watcher.c) does the work: a caller changes
 * its group's entry and triggers the token that wakes the watcher.
 *
 * The group's lock and the detector's are never held together. All waits here are short; without an
 * answer of the watcher the caller finds the root cause from what this rank knows. A forked child
 * has no watcher thread and only frees memory.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "group/failure_detector/detector_state.h"

/* How long the error waits for the other ranks' reports, which each sends as soon as it runs: a
 * stopped or disconnected rank must not delay it for long. A mismatch of described calls waits
 * longer, since its error is of little use without both descriptions. */
enum { MISMATCH_MS = 400, DESCRIBED_MS = 5000, TIMEOUT_MS = 1000 };

static tddp_detector_entry *find(tddp_detector *detector, const tddp_group *group)
{
    tddp_detector_entry *each = detector->entries;
    while (each && each->group != group) {
        each = each->next;
    }
    return each;
}

/* Makes a detector with its first entry, which is the caller's still after a failure. */
static tddp_status create(tddp_group *group, tddp_detector_entry *first, tddp_detector **out)
{
    tddp_detector *made = tddp_alloc(sizeof *made);
    tddp_status status = made ? tddp_cond_init(&made->changed) : TDDP_OUT_OF_MEMORY;
    if (status) {
        free(made);
        return status;
    }
    pthread_mutex_init(&made->mutex, NULL);
    atomic_init(&made->references, 1);
    made->pid = getpid();
    made->base = tddp_store_retain(group->store);
    made->connect_until = tddp_deadline_after_ms(tddp_detector_connect_ms);
    made->entries = first;
    status = tddp_cancel_create(&made->wake);
    status =
        status ? status
               : tddp_thread_start(&made->thread, "tddp-detector", tddp_detector_run_watcher, made);
    if (status) {
        made->entries = NULL;
        tddp_detector_release(made);
        return status;
    }
    *out = made;
    return TDDP_OK;
}

/* Adds a group to its parent's detector, unless that has ended. */
static bool add(tddp_detector *detector, tddp_detector_entry *added)
{
    pthread_mutex_lock(&detector->mutex);
    bool running = !detector->ended;
    if (running) {
        atomic_fetch_add(&detector->references, 1);
        added->next = detector->entries;
        detector->entries = added;
        tddp_cancel_trigger(detector->wake);
    }
    pthread_mutex_unlock(&detector->mutex);
    return running;
}

tddp_status tddp_detector_add_group(tddp_group *group, tddp_group *parent)
{
    if (group->world_size == 1) {
        return TDDP_OK;
    }
    tddp_detector_entry *added = tddp_alloc(sizeof *added);
    if (!added) {
        return TDDP_OUT_OF_MEMORY;
    }
    added->group = group;
    (void)snprintf(added->key, sizeof added->key, "%.160s/%08" PRIx32 "/%" PRId64 "/%d",
                   group->name, tddp_group_fingerprint(group->name), group->incarnation,
                   group->peers->entries[0].root_rank);
    tddp_detector *detector = parent ? parent->detector : NULL;
    tddp_status status =
        detector && add(detector, added) ? TDDP_OK : create(group, added, &detector);
    if (status) {
        free(added);
    } else {
        group->detector = detector;
    }
    return status;
}

static void free_entry(tddp_detector_entry *self)
{
    free(self->cause_text);
    free(self);
}

void tddp_detector_release(tddp_detector *detector)
{
    if (!detector || atomic_fetch_sub(&detector->references, 1) != 1) {
        return;
    }
    while (detector->entries) {
        tddp_detector_entry *next = detector->entries->next;
        free_entry(detector->entries);
        detector->entries = next;
    }
    tddp_detector_clear_outbox(detector);
    while (detector->notice_count > 0) {
        free(detector->notices[--detector->notice_count]);
    }
    free(detector->notices);
    tddp_store_release(detector->store);
    tddp_store_release(detector->base);
    tddp_cancel_free(detector->wake);
    if (detector->pid == getpid()) {
        pthread_cond_destroy(&detector->changed);
        pthread_mutex_destroy(&detector->mutex);
    }
    free(detector);
}

/* Wakes the watcher, and waits until the store has what is in the outbox now. With the lock held.
 */
static void await_told(tddp_detector *detector, int64_t deadline)
{
    uint64_t queued = detector->queued;
    tddp_cancel_trigger(detector->wake);
    while (detector->told < queued && tddp_now_ns() < deadline) {
        (void)tddp_cond_wait_until(&detector->changed, &detector->mutex, deadline);
    }
}

void tddp_detector_remove_group(tddp_group *group, const char *reason)
{
    tddp_detector *detector = group->detector;
    if (!detector) {
        return;
    }
    pthread_mutex_lock(&detector->mutex);
    tddp_detector_entry *self = find(detector, group);
    if (self->stage == TDDP_DETECTOR_IDLE) {
        tddp_detector_put_report(detector, self, TDDP_REPORT_LEFT, reason);
    }
    await_told(detector, tddp_deadline_after_ms(TDDP_DETECTOR_REPORT_MS));
    while (self->busy) {
        pthread_cond_wait(&detector->changed, &detector->mutex);
    }
    tddp_detector_entry **link = &detector->entries;
    while (*link != self) {
        link = &(*link)->next;
    }
    *link = self->next;
    const bool last = !detector->entries;
    detector->ended = last;
    tddp_cancel_trigger(detector->wake);
    pthread_mutex_unlock(&detector->mutex);
    free_entry(self);
    if (last) {
        pthread_join(detector->thread, NULL);
    }
}

/* --- failures -------------------------------------------------------------------------------- */

void tddp_detector_report_create_failure(tddp_group *group, tddp_group *parent, tddp_status status,
                                         const char *text)
{
    const tddp_failure failure = {.status = status, .text = text};
    if (group->world_size == 1 || !group->peers || group->detector) {
        return;
    }
    tddp_status added = group->recorder ? TDDP_OK : tddp_recorder_create(group);
    added = added ? added : tddp_detector_add_group(group, parent);
    if (added) {
        tddp_log(TDDP_LOG_DEBUG, "group",
                 "cannot report to the other ranks that \"%s\" was not created: %s", group->name,
                 tddp_error_message());
        return;
    }
    tddp_detector_report_failure(group, &failure);
    tddp_detector_remove_group(group, NULL);
}

void tddp_detector_ask_to_connect(void *data)
{
    tddp_group *group = data;
    tddp_detector *detector = group->detector;
    if (!detector) {
        return;
    }
    pthread_mutex_lock(&detector->mutex);
    tddp_detector_entry *self = find(detector, group);
    if (self) {
        self->asked = true;
        tddp_detector_put(detector, self->key, TDDP_NOTICE_CONNECT, (tddp_bytes){0});
        tddp_cancel_trigger(detector->wake);
    }
    pthread_mutex_unlock(&detector->mutex);
}

static int64_t report_timeout_ms(const tddp_failure *failure)
{
    switch (failure->status) {
    case TDDP_TIMEOUT:
        return TIMEOUT_MS;
    case TDDP_MISMATCH:
        return failure->described ? DESCRIBED_MS : MISMATCH_MS;
    default:
        return TDDP_DETECTOR_REPLY_MS;
    }
}

void tddp_detector_report_failure(tddp_group *group, const tddp_failure *failure)
{
    tddp_detector *detector = group->detector;
    if (!detector) {
        return;
    }
    int64_t deadline = tddp_deadline_after_ms(TDDP_DETECTOR_REPORT_MS);
    pthread_mutex_lock(&detector->mutex);
    tddp_detector_entry *self = find(detector, group);
    while (self && self->busy && tddp_now_ns() < deadline) {
        (void)tddp_cond_wait_until(&detector->changed, &detector->mutex, deadline);
    }
    if (self && !self->busy) {
        self->failure = failure;
        self->deadline = tddp_deadline_after_ms(report_timeout_ms(failure));
        self->stage = TDDP_DETECTOR_FAILED;
        tddp_detector_put_report(detector, self, TDDP_REPORT_FAILURE, failure->text);
        tddp_detector_put(detector, self->key, TDDP_NOTICE_FAILURE, (tddp_bytes){0});
        await_told(detector, deadline);
    }
    pthread_mutex_unlock(&detector->mutex);
}

/* Waits for the watcher to find the root cause; false: it has not, in time. With the lock held. */
static bool await_cause(tddp_detector *detector, tddp_detector_entry *self, tddp_status *status)
{
    const int64_t deadline = self->deadline + TDDP_DETECTOR_REPORT_MS * TDDP_NS_PER_MS;
    while (self->stage != TDDP_DETECTOR_RESOLVED && tddp_now_ns() < deadline) {
        (void)tddp_cond_wait_until(&detector->changed, &detector->mutex, deadline);
    }
    while (self->busy) {
        pthread_cond_wait(&detector->changed, &detector->mutex);
    }
    const bool found = self->stage == TDDP_DETECTOR_RESOLVED && self->cause_text;
    if (found) {
        *status = tddp_fail(self->cause, "%s", self->cause_text);
    }
    self->stage = TDDP_DETECTOR_RESOLVED;
    self->failure = NULL;
    return found;
}

tddp_status tddp_detector_find_cause(tddp_group *group, const tddp_failure *failure)
{
    tddp_detector *detector = group->detector;
    tddp_status status = TDDP_OK;
    if (group->world_size == 1) {
        return tddp_fail(failure->status, "%s", failure->text);
    }
    bool found = false;
    if (detector) {
        pthread_mutex_lock(&detector->mutex);
        tddp_detector_entry *self = find(detector, group);
        found = self && self->failure && await_cause(detector, self, &status);
        pthread_mutex_unlock(&detector->mutex);
    }
    if (!found) {
        /* For want of the watcher's answer, from what this rank knows. */
        const tddp_failure_evidence evidence = {.peers = group->peers,
                                                .rank = group->rank,
                                                .failure = failure,
                                                .observed = &group->observed,
                                                .store_lost = true,
                                                .deadline_over = true};
        (void)tddp_root_cause_find(&evidence, NULL, &status);
    }
    return status;
}
