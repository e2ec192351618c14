/*
 * Each collective that only moves data, once, on a group: bytes that tell who sent them to whom and
 * where they stood, in memory that is registered or not, between bytes that must stay as they are.
 */
#ifndef TDDP_TEST_MOVING_H
#define TDDP_TEST_MOVING_H

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include <tddp.h>

#include "check.h"

enum { MOVING_MAX_RANKS = 16, MOVING_GUARD = 64, MOVING_UNTOUCHED = 0x5a };

/* Which memory is registered, for the buffer number n of a rank's. */
typedef enum moving_memory {
    MOVING_PLAIN,
    MOVING_REGISTERED,
    MOVING_MIXED, /* by turns, differently on each rank */
    MOVING_MEMORIES
} moving_memory;

typedef struct moving_buffer {
    tddp_buffer buffer;
    char *guard;
    tddp_group_memory *registered;
} moving_buffer;

/* A rank with what its calls have in common. */
typedef struct mover {
    tddp_group *group;
    int rank;
    int size;
    tddp_dtype dtype;
    size_t count; /* of a piece, at most about */
    moving_memory memory;
    unsigned made; /* buffers so far */
} mover;

/* How many elements one rank has for another. */
typedef size_t (*moving_rule)(const mover *it, int from, int to);

static inline size_t moving_even(const mover *it, int from, int to)
{
    (void)from;
    (void)to;
    return it->count;
}

/* Some nothing, some less, some all. */
static inline size_t moving_by_sender(const mover *it, int from, int to)
{
    (void)to;
    return from % 3 == 1 ? 0 : from % 3 == 2 ? it->count / 2 + 1 : it->count;
}

static inline size_t moving_by_receiver(const mover *it, int from, int to)
{
    return moving_by_sender(it, to, from);
}

static inline size_t moving_by_both(const mover *it, int from, int to)
{
    int which = (from + 2 * to) % 4;
    return which == 3   ? 0
           : which == 2 ? it->count + (size_t)from
           : which == 1 ? it->count / 3
                        : it->count;
}

static inline tddp_buffer moving_part(void *data, size_t count, tddp_dtype dtype)
{
    return (tddp_buffer){data, count, dtype, TDDP_CPU, 0, NULL};
}

static inline size_t moving_bytes(const moving_buffer *it)
{
    return it->buffer.count * tddp_dtype_size(it->buffer.dtype);
}

static inline moving_buffer moving_make(mover *it, size_t count)
{
    moving_buffer made = {.buffer = moving_part(NULL, count, it->dtype)};
    size_t bytes = moving_bytes(&made) + (size_t)2 * MOVING_GUARD;
    unsigned number = it->made++;
    bool registered = it->memory == MOVING_REGISTERED ||
                      (it->memory == MOVING_MIXED && (number + (unsigned)it->rank) % 3 == 1);
    if (registered) {
        CHECK_OK(tddp_group_memory_create(it->group, bytes, &made.registered));
        made.guard = tddp_group_memory_data(made.registered);
    } else {
        made.guard = malloc(bytes);
    }
    CHECK(made.guard != NULL);
    memset(made.guard, MOVING_UNTOUCHED, bytes);
    made.buffer.data = made.guard + MOVING_GUARD;
    return made;
}

static inline void moving_drop(moving_buffer *it)
{
    for (size_t i = 0; i < MOVING_GUARD; i++) {
        CHECK_INT(it->guard[i], MOVING_UNTOUCHED);
        CHECK_INT(it->guard[MOVING_GUARD + moving_bytes(it) + i], MOVING_UNTOUCHED);
    }
    if (it->registered) {
        tddp_group_memory_release(it->registered);
    } else {
        free(it->guard);
    }
}

enum { MOVING_ROW = 256 };

/* What one rank has for another: the row of it that begins at byte `first`, each different. The
 * thread sanitizer need not watch every byte of it, it sees the copies. */
__attribute__((no_sanitize("thread"))) static inline void moving_row(unsigned char *row, int from,
                                                                     int to, size_t first)
{
    size_t of = first / MOVING_ROW * 31 + (size_t)from * 101 + (size_t)to * 57 + 13;
    for (unsigned k = 0; k < MOVING_ROW; k++) {
        row[k] = (unsigned char)(k * 7 + of);
    }
}

static inline size_t moving_row_size(size_t first, size_t bytes)
{
    return bytes - first < MOVING_ROW ? bytes - first : MOVING_ROW;
}

static inline void moving_fill(tddp_buffer buffer, int from, int to)
{
    unsigned char *data = buffer.data;
    size_t bytes = buffer.count * tddp_dtype_size(buffer.dtype);
    unsigned char row[MOVING_ROW];
    for (size_t first = 0; first < bytes; first += MOVING_ROW) {
        moving_row(row, from, to, first);
        memcpy(data + first, row, moving_row_size(first, bytes));
    }
}

static inline void moving_check(tddp_buffer buffer, int from, int to)
{
    const unsigned char *data = buffer.data;
    size_t bytes = buffer.count * tddp_dtype_size(buffer.dtype);
    unsigned char row[MOVING_ROW];
    for (size_t first = 0; first < bytes; first += MOVING_ROW) {
        moving_row(row, from, to, first);
        size_t size = moving_row_size(first, bytes);
        if (memcmp(data + first, row, size) == 0) {
            continue;
        }
        size_t k = 0;
        while (k < size && data[first + k] == row[k]) {
            k++;
        }
        check_failed(__FILE__, __LINE__, "byte %zu of %zu that came from %d to %d is wrong",
                     first + k, bytes, from, to);
    }
}

static inline void moving_broadcast(mover *it, int root)
{
    moving_buffer buffer = moving_make(it, it->count);
    moving_fill(buffer.buffer, it->rank, 0);
    CHECK_OK(tddp_broadcast(it->group, buffer.buffer, root, NULL));
    moving_check(buffer.buffer, root, 0);
    moving_drop(&buffer);
}

/* Flat memory; `in_place`: the input is this rank's part of the output. */
static inline void moving_all_gather(mover *it, bool in_place)
{
    size_t element = tddp_dtype_size(it->dtype);
    moving_buffer all = moving_make(it, it->count * (size_t)it->size);
    moving_buffer mine = moving_make(it, it->count);
    tddp_buffer input = mine.buffer;
    tddp_buffer part = mine.buffer;
    if (in_place) {
        input.data = (char *)all.buffer.data + (size_t)it->rank * it->count * element;
    }
    moving_fill(input, it->rank, 0);
    CHECK_OK(tddp_all_gather(it->group, input, all.buffer, NULL));
    for (int r = 0; r < it->size; r++) {
        part.data = (char *)all.buffer.data + (size_t)r * it->count * element;
        moving_check(part, r, 0);
    }
    moving_drop(&all);
    moving_drop(&mine);
}

static inline void moving_all_gather_list(mover *it, moving_rule rule)
{
    moving_buffer outputs[MOVING_MAX_RANKS];
    tddp_buffer parts[MOVING_MAX_RANKS];
    moving_buffer input = moving_make(it, rule(it, it->rank, 0));
    moving_fill(input.buffer, it->rank, 0);
    for (int r = 0; r < it->size; r++) {
        outputs[r] = moving_make(it, rule(it, r, 0));
        parts[r] = outputs[r].buffer;
    }
    CHECK_OK(tddp_all_gather_list(it->group, input.buffer, parts, (size_t)it->size, NULL));
    for (int r = 0; r < it->size; r++) {
        moving_check(parts[r], r, 0);
        moving_drop(&outputs[r]);
    }
    moving_check(input.buffer, it->rank, 0);
    moving_drop(&input);
}

static inline void moving_gather(mover *it, moving_rule rule, int root)
{
    moving_buffer outputs[MOVING_MAX_RANKS];
    tddp_buffer parts[MOVING_MAX_RANKS];
    moving_buffer input = moving_make(it, rule(it, it->rank, root));
    bool receives = it->rank == root;
    moving_fill(input.buffer, it->rank, root);
    for (int r = 0; r < it->size && receives; r++) {
        outputs[r] = moving_make(it, rule(it, r, root));
        /* The own part may be the input itself. */
        parts[r] = r == root && it->count % 2 ? input.buffer : outputs[r].buffer;
    }
    CHECK_OK(tddp_gather(it->group, input.buffer, receives ? parts : NULL,
                         receives ? (size_t)it->size : 0, root, NULL));
    for (int r = 0; r < it->size && receives; r++) {
        moving_check(parts[r], r, root);
        moving_drop(&outputs[r]);
    }
    moving_check(input.buffer, it->rank, root);
    moving_drop(&input);
}

static inline void moving_scatter(mover *it, moving_rule rule, int root)
{
    moving_buffer inputs[MOVING_MAX_RANKS];
    tddp_buffer parts[MOVING_MAX_RANKS];
    moving_buffer output = moving_make(it, rule(it, root, it->rank));
    bool sends = it->rank == root;
    for (int r = 0; r < it->size && sends; r++) {
        inputs[r] = moving_make(it, rule(it, root, r));
        parts[r] = r == root && it->count % 2 ? output.buffer : inputs[r].buffer;
        moving_fill(parts[r], root, r);
    }
    CHECK_OK(tddp_scatter(it->group, output.buffer, sends ? parts : NULL,
                          sends ? (size_t)it->size : 0, root, NULL));
    for (int r = 0; r < it->size && sends; r++) {
        moving_check(parts[r], root, r);
        moving_drop(&inputs[r]);
    }
    moving_check(output.buffer, root, it->rank);
    moving_drop(&output);
}

static inline void moving_all_to_all(mover *it, moving_rule rule)
{
    moving_buffer inputs[MOVING_MAX_RANKS];
    moving_buffer outputs[MOVING_MAX_RANKS];
    tddp_buffer given[MOVING_MAX_RANKS];
    tddp_buffer wanted[MOVING_MAX_RANKS];
    for (int r = 0; r < it->size; r++) {
        inputs[r] = moving_make(it, rule(it, it->rank, r));
        outputs[r] = moving_make(it, rule(it, r, it->rank));
        given[r] = inputs[r].buffer;
        wanted[r] = outputs[r].buffer;
        moving_fill(given[r], it->rank, r);
    }
    CHECK_OK(tddp_all_to_all(it->group, given, wanted, (size_t)it->size, NULL));
    for (int r = 0; r < it->size; r++) {
        moving_check(given[r], it->rank, r);
        moving_check(wanted[r], r, it->rank);
        moving_drop(&inputs[r]);
        moving_drop(&outputs[r]);
    }
}

/* The parts lie end to end, of different sizes: one tensor with splits. */
static inline void moving_all_to_all_together(mover *it)
{
    size_t element = tddp_dtype_size(it->dtype);
    size_t most = (it->count + MOVING_MAX_RANKS) * (size_t)it->size;
    moving_buffer input = moving_make(it, most);
    moving_buffer output = moving_make(it, most);
    tddp_buffer given[MOVING_MAX_RANKS];
    tddp_buffer wanted[MOVING_MAX_RANKS];
    char *in = input.buffer.data;
    char *out = output.buffer.data;
    for (int r = 0; r < it->size; r++) {
        given[r] = moving_part(in, moving_by_both(it, it->rank, r), it->dtype);
        wanted[r] = moving_part(out, moving_by_both(it, r, it->rank), it->dtype);
        in += given[r].count * element;
        out += wanted[r].count * element;
        moving_fill(given[r], it->rank, r);
    }
    CHECK_OK(tddp_all_to_all(it->group, given, wanted, (size_t)it->size, NULL));
    for (int r = 0; r < it->size; r++) {
        moving_check(wanted[r], r, it->rank);
    }
    moving_drop(&input);
    moving_drop(&output);
}

/* One call; there are MOVING_KINDS. */
enum { MOVING_KINDS = 12 };

static inline void moving_call(mover *it, int kind, int root)
{
    switch (kind) {
    case 0:
        moving_broadcast(it, root);
        break;
    case 1:
        moving_all_gather(it, false);
        break;
    case 2:
        moving_all_gather(it, true);
        break;
    case 3:
        moving_all_gather_list(it, moving_even);
        break;
    case 4:
        moving_all_gather_list(it, moving_by_sender);
        break;
    case 5:
        moving_all_to_all(it, moving_even);
        break;
    case 6:
        moving_all_to_all(it, moving_by_both);
        break;
    case 7:
        moving_all_to_all_together(it);
        break;
    case 8:
        moving_gather(it, moving_even, root);
        break;
    case 9:
        moving_gather(it, moving_by_sender, root);
        break;
    case 10:
        moving_scatter(it, moving_even, root);
        break;
    default:
        moving_scatter(it, moving_by_receiver, root);
        break;
    }
}

static inline bool moving_has_root(int kind)
{
    return kind == 0 || kind >= 8;
}

/* Every kind, with every root. */
static inline void moving_all(mover *it, size_t count, tddp_dtype dtype)
{
    it->count = count;
    it->dtype = dtype;
    for (int kind = 0; kind < MOVING_KINDS; kind++) {
        for (int root = 0; root < (moving_has_root(kind) ? it->size : 1); root++) {
            moving_call(it, kind, root);
        }
    }
}

#endif
