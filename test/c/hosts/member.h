/* A rank of a group on made-up hosts, with backend tables and no group. */
#ifndef TDDP_TEST_MEMBER_H
#define TDDP_TEST_MEMBER_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "backend/open.h"
#include "base/base.h"
#include "gloo/numbers.h"
#include "hosted_store.h"

enum { TIMEOUT_MS = 15000, MAX_RANKS = 8 };

typedef struct member {
    int rank;
    int size;
    tddp_store *store;
    const tddp_backend_v1 *table;
    void *context;
    uint64_t sequence;
    int64_t timeout_ms;
    bool interrupts; /* every operation, wherever it waits */
} member;

/* Like a backend with TDDP_BACKEND_SHARES_HOSTS, whatever its traits. */
static inline const tddp_backend_v1 *sharing(const char *name)
{
    static tddp_backend_v1 copy;
    const tddp_backend_v1 *found;
    CHECK_OK(tddp_backend_find(name, &found));
    copy = *found;
    copy.traits |= TDDP_BACKEND_SHARES_HOSTS;
    return &copy;
}

static inline tddp_status try_join(member *self, const char *backend, const int *hosts, int rank,
                                   int world_size, int port)
{
    *self = (member){.rank = rank, .size = world_size, .timeout_ms = TIMEOUT_MS};
    self->store = open_store(rank, world_size, port);
    tddp_backend_opts opts = {.size = sizeof opts,
                              .rank = rank,
                              .world_size = world_size,
                              .store = self->store,
                              .timeout_ms = TIMEOUT_MS,
                              .device_index = -1,
                              .group = "made-up",
                              .address = "127.0.0.1",
                              .hosts = hosts};
    tddp_inner inner = {0};
    tddp_status status = tddp_backend_open(sharing(backend), &opts, NULL, &inner);
    self->table = inner.backend;
    self->context = inner.context;
    return status;
}

/* With shared memory. */
static inline member join(const char *backend, const int *hosts, int rank, int world_size, int port)
{
    member self;
    CHECK(setenv("TDDP_SHM", "1", 1) == 0);
    CHECK_OK(try_join(&self, backend, hosts, rank, world_size, port));
    CHECK_TEXT(self.table->name, "hosts");
    return self;
}

static inline tddp_buffer *copy_of(const tddp_buffer *parts, int size)
{
    const size_t bytes = (size_t)size * sizeof *parts;
    tddp_buffer *copy = parts ? malloc(bytes) : NULL;
    return copy ? memcpy(copy, parts, bytes) : NULL;
}

static inline void wipe(void *memory, size_t bytes)
{
    if (memory) {
        memset(memory, 0xa5, bytes);
        free(memory);
    }
}

/* Calls the slot until it does not return TDDP_CANCELED, each time with the operation and its lists
 * at another address, and again only after an event. */
static inline tddp_status run_interrupted(member *self, const tddp_op *op)
{
    tddp_eventcount *events = self->table->events(self->context);
    const size_t list = (size_t)self->size * sizeof *op->input_parts;
    for (;;) {
        const uint32_t seen = tddp_eventcount_read(events);
        tddp_cancel at_once = TDDP_CANCEL_AT_ONCE;
        tddp_op *copy = malloc(sizeof *copy);
        tddp_buffer *input_parts = copy_of(op->input_parts, self->size);
        tddp_buffer *output_parts = copy_of(op->output_parts, self->size);
        CHECK(copy != NULL);
        memcpy(copy, op, sizeof *copy);
        copy->input_parts = input_parts;
        copy->output_parts = output_parts;
        copy->cancel = &at_once;
        const tddp_status status = self->table->run[op->kind](self->context, copy);
        wipe(copy, sizeof *copy);
        wipe(input_parts, list);
        wipe(output_parts, list);
        if (status != TDDP_CANCELED) {
            return status;
        }
        tddp_eventcount_wait(events, seen, 0, TIMEOUT_MS * TDDP_NS_PER_MS);
    }
}

static inline tddp_status run(member *self, tddp_op *op)
{
    op->sequence = ++self->sequence;
    op->timeout_ms = self->timeout_ms;
    tddp_status status = self->interrupts ? run_interrupted(self, op)
                                          : self->table->run[op->kind](self->context, op);
    if (status) {
        char text[4096];
        snprintf(text, sizeof text, "%s", tddp_error_message());
        self->table->abort(self->context);
        (void)tddp_fail(status, "%s", text);
    }
    return status;
}

static inline void part(member *self)
{
    if (self->context) {
        self->table->destroy(self->context);
    }
    tddp_store_release(self->store);
}

static inline void die(void)
{
    syscall(SYS_exit_group, 0);
}

static inline tddp_buffer buffer_of(void *data, size_t count, tddp_dtype dtype)
{
    return (tddp_buffer){count > 0 ? data : NULL, count, dtype, TDDP_CPU, 0, NULL};
}

/* Shared memory of the group, for zero copy; freed by the caller. */
static inline void *shared(member *self, size_t bytes, void **handle)
{
    void *data;
    CHECK_OK(self->table->allocate(self->context, bytes, handle, &data));
    return data;
}

#endif
