/*
 * What groups ask of their watch: to be under it, to tell the others of a failure, to explain it.
 * Any thread of a group's; the work is done by the watch's own thread (vigil.c), which is asked by
 * setting the group's entry and triggering the token that ends its wait.
 *
 * The group's lock is never taken with the watch's. All waits here are short, and what the watch
 * does not answer is judged without it. In a forked child the thread is not there and nothing here
 * is touched but the memory.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "group/failure_detector/root_cause.h"
#include "group/failure_detector/detector_state.h"

/* For the other ranks to report, which each does as soon as it runs: whoever is stopped or cut off
 * must not hold up the error for long. Of a described call an error without both sides is of little
 * use, so it waits longer. */
enum { MISMATCH_MS = 400, DESCRIBED_MS = 5000, TIMEOUT_MS = 1000 };

static tddp_detector_entry *find(tddp_detector *watch, const tddp_group *group)
{
    tddp_detector_entry *each = watch->entries;
    while (each && each->group != group) {
        each = each->next;
    }
    return each;
}

static tddp_status create(tddp_group *group, tddp_detector **out)
{
    tddp_detector *watch = tddp_alloc(sizeof *watch);
    tddp_status status = watch ? tddp_cancel_create(&watch->wake) : TDDP_OUT_OF_MEMORY;
    if (status == TDDP_OK) {
        status = tddp_cond_init(&watch->changed);
        if (status) {
            tddp_cancel_free(watch->wake);
        }
    }
    if (status) {
        free(watch);
        return status;
    }
    pthread_mutex_init(&watch->mutex, NULL);
    atomic_init(&watch->references, 1);
    watch->pid = getpid();
    watch->base = tddp_store_retain(group->store);
    *out = watch;
    return TDDP_OK;
}

/* A child shares its parent's watch while that is there. */
static bool share(tddp_detector *watch, tddp_detector_entry *added)
{
    pthread_mutex_lock(&watch->mutex);
    bool shared = !watch->ended;
    if (shared) {
        atomic_fetch_add(&watch->references, 1);
        added->next = watch->entries;
        watch->entries = added;
    }
    pthread_mutex_unlock(&watch->mutex);
    return shared;
}

static void name_group(const tddp_group *group, char key[TDDP_DETECTOR_KEY_BYTES])
{
    (void)snprintf(key, TDDP_DETECTOR_KEY_BYTES, "%.160s/%08" PRIx32 "/%" PRId64 "/%d", group->name,
                   tddp_group_fingerprint(group->name), group->incarnation,
                   group->peers->entries[0].root_rank);
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
    name_group(group, added->key);
    if (parent && parent->watch && share(parent->watch, added)) {
        group->watch = parent->watch;
        return TDDP_OK;
    }
    tddp_detector *watch;
    tddp_status status = create(group, &watch);
    if (status) {
        free(added);
        return status;
    }
    watch->entries = added;
    status = tddp_thread_start(&watch->thread, "tddp-detector", tddp_detector_run_watcher, watch);
    if (status) {
        watch->ended = true;
        tddp_detector_release(watch);
        return status;
    }
    group->watch = watch;
    return TDDP_OK;
}

static void free_entry(tddp_detector_entry *self)
{
    free(self->described);
    free(self->text);
    free(self->verdict_text);
    free(self);
}

void tddp_detector_release(tddp_detector *watch)
{
    if (!watch || atomic_fetch_sub(&watch->references, 1) != 1) {
        return;
    }
    while (watch->entries) {
        tddp_detector_entry *next = watch->entries->next;
        free_entry(watch->entries);
        watch->entries = next;
    }
    tddp_store_release(watch->store);
    tddp_store_release(watch->base);
    tddp_cancel_free(watch->wake);
    if (watch->pid == getpid()) {
        pthread_cond_destroy(&watch->changed);
        pthread_mutex_destroy(&watch->mutex);
    }
    free(watch);
}

void tddp_detector_remove_group(tddp_group *group)
{
    tddp_detector *watch = group->watch;
    if (!watch) {
        return;
    }
    int64_t deadline = tddp_deadline_after_ms(TDDP_DETECTOR_REPORT_MS);
    pthread_mutex_lock(&watch->mutex);
    tddp_detector_entry *self = find(watch, group);
    if (!self) {
        pthread_mutex_unlock(&watch->mutex);
        return;
    }
    self->leaving = self->stage == TDDP_DETECTOR_IDLE && !watch->deaf;
    tddp_cancel_trigger(watch->wake);
    while (self->leaving && !watch->deaf && tddp_now_ns() < deadline) {
        (void)tddp_cond_wait_until(&watch->changed, &watch->mutex, deadline);
    }
    while (self->busy) {
        pthread_cond_wait(&watch->changed, &watch->mutex);
    }
    tddp_detector_entry **link = &watch->entries;
    while (*link != self) {
        link = &(*link)->next;
    }
    *link = self->next;
    bool last = !watch->entries;
    watch->ended = last;
    tddp_cancel_trigger(watch->wake);
    pthread_mutex_unlock(&watch->mutex);
    free_entry(self);
    if (last) {
        pthread_join(watch->thread, NULL);
        pthread_mutex_lock(&watch->mutex);
        tddp_store *store = watch->store;
        tddp_store *base = watch->base;
        watch->store = NULL;
        watch->base = NULL;
        pthread_mutex_unlock(&watch->mutex);
        tddp_store_release(store);
        tddp_store_release(base);
    }
}

/* The job's part of the store, or if its watch is over the group's; the caller releases it. */
static tddp_store *hold_store(tddp_group *group, tddp_detector *watch)
{
    tddp_store *store = NULL;
    if (watch) {
        pthread_mutex_lock(&watch->mutex);
        store = watch->base ? tddp_store_retain(watch->base) : NULL;
        pthread_mutex_unlock(&watch->mutex);
    }
    return store ? store : tddp_store_retain(group->store);
}

void tddp_detector_report_create_failure(tddp_group *group, tddp_group *parent, tddp_status status,
                                         const char *text)
{
    if (group->world_size == 1 || !group->peers || group->watch) {
        return;
    }
    enum { TEXT_BYTES = 500 };
    char key[TDDP_DETECTOR_KEY_BYTES];
    tddp_bytes line = {0};
    tddp_recorder_position nowhere = {.messages = 0};
    tddp_store *store = hold_store(group, parent ? parent->watch : NULL);
    name_group(group, key);
    tddp_status told = tddp_status_report_write(&line, TDDP_REPORT_FAILURE, group->rank, status,
                                                &nowhere, "", text, TEXT_BYTES);
    told = told ? told : tddp_notice_append_report(store, key, &line);
    told = told ? told : tddp_notice_publish(store, key);
    tddp_bytes_free(&line);
    tddp_store_release(store);
    if (told) {
        tddp_log(TDDP_LOG_DEBUG, "group", "the others do not learn that \"%s\" cannot be made: %s",
                 group->name, tddp_error_message());
    }
}

static int64_t report_timeout_ms(tddp_status status, bool described)
{
    switch (status) {
    case TDDP_TIMEOUT:
        return TIMEOUT_MS;
    case TDDP_MISMATCH:
        return described ? DESCRIBED_MS : MISMATCH_MS;
    default:
        return TDDP_DETECTOR_REPLY_MS;
    }
}

void tddp_detector_report_failure(tddp_group *group, const tddp_op *op, const char *described,
                                  tddp_status status, const char *text)
{
    tddp_detector *watch = group->watch;
    if (!watch) {
        return;
    }
    /* Without memory for them it is told all the same. */
    char *own_text = tddp_copy_string(text);
    char *own_described = described ? tddp_copy_string(described) : NULL;
    int64_t deadline = tddp_deadline_after_ms(TDDP_DETECTOR_REPORT_MS);
    pthread_mutex_lock(&watch->mutex);
    tddp_detector_entry *self = find(watch, group);
    while (self && self->busy && tddp_now_ns() < deadline) {
        (void)tddp_cond_wait_until(&watch->changed, &watch->mutex, deadline);
    }
    if (self && !self->busy && !self->own) {
        self->own = true;
        self->op = *op;
        self->text = own_text;
        self->described = own_described;
        own_text = own_described = NULL;
        self->status = status;
        self->deadline = tddp_deadline_after_ms(report_timeout_ms(status, described != NULL));
        self->stage = TDDP_DETECTOR_UNREPORTED;
        tddp_cancel_trigger(watch->wake);
        while (self->stage == TDDP_DETECTOR_UNREPORTED && !watch->deaf &&
               tddp_now_ns() < deadline) {
            (void)tddp_cond_wait_until(&watch->changed, &watch->mutex, deadline);
        }
    }
    pthread_mutex_unlock(&watch->mutex);
    free(own_text);
    free(own_described);
}

/* The watch does not answer: what can be said without it. */
static tddp_status explain_alone(tddp_group *group, const tddp_op *op, const char *described,
                                 tddp_status status, const char *text)
{
    tddp_status_report *accounts =
        tddp_alloc_array((size_t)group->world_size, sizeof(tddp_status_report));
    if (!accounts) {
        return tddp_fail(status, "%s", text);
    }
    tddp_status_report_read(NULL, accounts, group->world_size);
    tddp_failure_evidence evidence = {
        .peers = group->peers,
        .rank = group->rank,
        .op = op,
        .described = described,
        .status = status,
        .text = text,
        .accounts = accounts,
        .deaf = true,
        .last = true,
    };
    (void)tddp_root_cause_find(&evidence, &status);
    free(accounts);
    return status;
}

tddp_status tddp_detector_find_cause(tddp_group *group, const tddp_op *op, const char *described,
                                     tddp_status status, const char *text)
{
    tddp_detector *watch = group->watch;
    if (group->world_size == 1) {
        return tddp_fail(status, "%s", text);
    }
    bool explained = false;
    if (watch) {
        pthread_mutex_lock(&watch->mutex);
        tddp_detector_entry *self = find(watch, group);
        int64_t deadline = self ? self->deadline + TDDP_DETECTOR_REPORT_MS * TDDP_NS_PER_MS : 0;
        while (self && self->own && self->stage != TDDP_DETECTOR_RESOLVED &&
               tddp_now_ns() < deadline) {
            (void)tddp_cond_wait_until(&watch->changed, &watch->mutex, deadline);
        }
        explained =
            self && self->own && self->stage == TDDP_DETECTOR_RESOLVED && self->verdict_text;
        if (explained) {
            status = tddp_fail(self->verdict, "%s", self->verdict_text);
        }
        pthread_mutex_unlock(&watch->mutex);
    }
    return explained ? status : explain_alone(group, op, described, status, text);
}
