/*
 * The selection table of algorithms, the TDDP_SHM_ALGORITHM override, and the log of choices.
 *
 * Invariant: a choice depends only on what is equal on all ranks; otherwise ranks would run
 * different algorithms and wait for each other. How an algorithm works is in the operation's own
 * file.
 *
 * Threads: tddp_shm_choices_parse() runs at the join, the rest on the thread of the operation.
 */
#include "backend/shm/algorithms.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"

enum { ANY_RANKS = INT32_MAX, KIB = 1024 };

/* The first row that matches is used. The last row of each kind must match anything. */
typedef struct row {
    tddp_op_kind kind;
    tddp_shm_algorithm algorithm;
    size_t max_bytes;
    int max_ranks;
    size_t max_total; /* bytes of all ranks, which one combines alone; 0: any number */
} row;

static const row table[] = {
    /* Measured with two ranks on two cores, and with 4 to 32. Inline and staged wait once, direct
     * and sliced twice, but share the work. Inline reads the rank's own memory twice, staged
     * once. */
    {TDDP_OP_ALL_REDUCE, TDDP_SHM_INLINE, 256, ANY_RANKS, 0},
    {TDDP_OP_ALL_REDUCE, TDDP_SHM_STAGED, 4 * KIB, ANY_RANKS, 256 * KIB},
    {TDDP_OP_ALL_REDUCE, TDDP_SHM_DIRECT, SIZE_MAX, ANY_RANKS, 0},
    {TDDP_OP_ALL_REDUCE, TDDP_SHM_STAGED, 8 * KIB, 2, 0},
    {TDDP_OP_ALL_REDUCE, TDDP_SHM_STAGED, 32 * KIB, 4, 0},
    {TDDP_OP_ALL_REDUCE, TDDP_SHM_STAGED, 32 * KIB, ANY_RANKS, 256 * KIB},
    {TDDP_OP_ALL_REDUCE, TDDP_SHM_SLICED, SIZE_MAX, ANY_RANKS, 0},
    {TDDP_OP_REDUCE, TDDP_SHM_INLINE, 256, ANY_RANKS, 0},
    {TDDP_OP_REDUCE, TDDP_SHM_STAGED, 4 * KIB, ANY_RANKS, 0},
    {TDDP_OP_REDUCE, TDDP_SHM_DIRECT, SIZE_MAX, ANY_RANKS, 0},
    {TDDP_OP_REDUCE, TDDP_SHM_STAGED, SIZE_MAX, 2, 0},
    {TDDP_OP_REDUCE, TDDP_SHM_STAGED, 64 * KIB, ANY_RANKS, 1024 * KIB},
    {TDDP_OP_REDUCE, TDDP_SHM_SLICED, SIZE_MAX, ANY_RANKS, 0},
    {TDDP_OP_REDUCE_SCATTER, TDDP_SHM_INLINE, 512, ANY_RANKS, 0},
    {TDDP_OP_REDUCE_SCATTER, TDDP_SHM_STAGED, 4 * KIB, ANY_RANKS, 0},
    {TDDP_OP_REDUCE_SCATTER, TDDP_SHM_DIRECT, SIZE_MAX, ANY_RANKS, 0},
    {TDDP_OP_REDUCE_SCATTER, TDDP_SHM_STAGED, SIZE_MAX, ANY_RANKS, 0},
    /* For these, exchange.c selects one of the algorithms for each part. */
    {TDDP_OP_BROADCAST, TDDP_SHM_INLINE, 0, ANY_RANKS, 0},
    {TDDP_OP_BROADCAST, TDDP_SHM_DIRECT, SIZE_MAX, ANY_RANKS, 0},
    {TDDP_OP_BROADCAST, TDDP_SHM_SLICED, SIZE_MAX, ANY_RANKS, 0},
    {TDDP_OP_BROADCAST, TDDP_SHM_STAGED, SIZE_MAX, ANY_RANKS, 0},
    {TDDP_OP_ALL_GATHER, TDDP_SHM_INLINE, 0, ANY_RANKS, 0},
    {TDDP_OP_ALL_GATHER, TDDP_SHM_DIRECT, SIZE_MAX, ANY_RANKS, 0},
    {TDDP_OP_ALL_GATHER, TDDP_SHM_STAGED, SIZE_MAX, ANY_RANKS, 0},
    {TDDP_OP_GATHER, TDDP_SHM_INLINE, 0, ANY_RANKS, 0},
    {TDDP_OP_GATHER, TDDP_SHM_DIRECT, SIZE_MAX, ANY_RANKS, 0},
    {TDDP_OP_GATHER, TDDP_SHM_STAGED, SIZE_MAX, ANY_RANKS, 0},
    {TDDP_OP_SCATTER, TDDP_SHM_INLINE, 0, ANY_RANKS, 0},
    {TDDP_OP_SCATTER, TDDP_SHM_DIRECT, SIZE_MAX, ANY_RANKS, 0},
    {TDDP_OP_SCATTER, TDDP_SHM_STAGED, SIZE_MAX, ANY_RANKS, 0},
    {TDDP_OP_ALL_TO_ALL, TDDP_SHM_INLINE, 0, ANY_RANKS, 0},
    {TDDP_OP_ALL_TO_ALL, TDDP_SHM_DIRECT, SIZE_MAX, ANY_RANKS, 0},
    {TDDP_OP_ALL_TO_ALL, TDDP_SHM_STAGED, SIZE_MAX, ANY_RANKS, 0},
};
enum { ROWS = sizeof table / sizeof *table };

static const char *name_of(tddp_shm_algorithm algorithm)
{
    switch (algorithm) {
#define TEXT(name, text)  \
    case TDDP_SHM_##name: \
        return text;
        TDDP_SHM_ALGORITHM_MAP(TEXT)
#undef TEXT
    case TDDP_SHM_ALGORITHM_COUNT:
        break;
    }
    return "unknown";
}

static bool is_applicable(tddp_shm_algorithm algorithm, size_t bytes, bool registered)
{
    return algorithm == TDDP_SHM_INLINE   ? bytes <= TDDP_SHM_PAYLOAD_BYTES
           : algorithm == TDDP_SHM_DIRECT ? registered
                                          : true;
}

tddp_shm_algorithm tddp_shm_choose(const tddp_shm *shm, tddp_op_kind kind, size_t bytes,
                                   bool registered)
{
    int forced = tddp_shm_choices_of(shm)->forced[kind] - 1;
    if (forced >= 0 && is_applicable((tddp_shm_algorithm)forced, bytes, registered)) {
        return (tddp_shm_algorithm)forced;
    }
    int ranks = tddp_shm_size(shm);
    for (int i = 0; i < ROWS; i++) {
        const row *candidate = &table[i];
        if (candidate->kind == kind && bytes <= candidate->max_bytes &&
            ranks <= candidate->max_ranks &&
            (candidate->max_total == 0 || bytes * (size_t)ranks <= candidate->max_total) &&
            is_applicable(candidate->algorithm, bytes, registered)) {
            return candidate->algorithm;
        }
    }
    return TDDP_SHM_STAGED;
}

static int log2_of(size_t bytes)
{
    int exponent = 0;
    for (; bytes > 1; bytes /= 2) {
        exponent++;
    }
    return exponent;
}

void tddp_shm_log_choice(const tddp_shm *shm, tddp_op_kind kind, size_t bytes,
                         tddp_shm_algorithm algorithm)
{
    if (!tddp_log_enabled(TDDP_LOG_DEBUG)) {
        return;
    }
    int exponent = log2_of(bytes);
    uint64_t *logged = &tddp_shm_choices_of(shm)->logged[kind][algorithm];
    if (*logged >> exponent & 1) {
        return;
    }
    *logged |= UINT64_C(1) << exponent;
    tddp_log(TDDP_LOG_DEBUG, "shm", "%s of %zu bytes by %d ranks: %s%s", tddp_op_name(kind), bytes,
             tddp_shm_size(shm), name_of(algorithm),
             tddp_shm_choices_of(shm)->forced[kind] == algorithm + 1 ? " (TDDP_SHM_ALGORITHM)"
                                                                     : "");
}

const char *tddp_shm_override(const tddp_shm *shm, tddp_op_kind kind)
{
    int forced = tddp_shm_choices_of(shm)->forced[kind] - 1;
    return forced >= 0 ? name_of((tddp_shm_algorithm)forced) : NULL;
}

/* --- TDDP_SHM_ALGORITHM ---------------------------------------------------------------------- */

static bool has_row(tddp_op_kind kind, tddp_shm_algorithm algorithm)
{
    for (int i = 0; i < ROWS; i++) {
        if (table[i].kind == kind && table[i].algorithm == algorithm) {
            return true;
        }
    }
    return false;
}

static void add_text(char *text, size_t size, const char *between, const char *more)
{
    size_t used = strlen(text);
    snprintf(text + used, size - used, "%s%s", used ? between : "", more);
}

static tddp_status fail_kind(const char *text, int length)
{
    char kinds[TDDP_SHM_CHOICES_TEXT] = "";
    for (int kind = 0; kind < TDDP_OP_COUNT; kind++) {
        for (int i = 0; i < ROWS; i++) {
            if (table[i].kind == (tddp_op_kind)kind) {
                add_text(kinds, sizeof kinds, ", ", tddp_op_name((tddp_op_kind)kind));
                break;
            }
        }
    }
    return tddp_fail(TDDP_INVALID_ARGUMENT,
                     "TDDP_SHM_ALGORITHM: %.*s: expected OPERATION=ALGORITHM, with one of %s",
                     length, text, kinds);
}

static tddp_status fail_algorithm(tddp_op_kind kind, const char *text, int length)
{
    char names[TDDP_SHM_CHOICES_TEXT] = "";
    for (int i = 0; i < TDDP_SHM_ALGORITHM_COUNT; i++) {
        if (has_row(kind, (tddp_shm_algorithm)i)) {
            add_text(names, sizeof names, ", ", name_of((tddp_shm_algorithm)i));
        }
    }
    return tddp_fail(TDDP_INVALID_ARGUMENT, "TDDP_SHM_ALGORITHM: %.*s: expected %s to be one of %s",
                     length, text, tddp_op_name(kind), names);
}

static bool text_equals(const char *text, size_t length, const char *name)
{
    return strlen(name) == length && strncmp(text, name, length) == 0;
}

/* Parses one "operation=algorithm". */
static tddp_status read_one(const char *text, size_t length, tddp_shm_choices *out)
{
    const char *sign = memchr(text, '=', length);
    int kind = 0;
    while (sign && kind < TDDP_OP_COUNT &&
           !text_equals(text, (size_t)(sign - text), tddp_op_name((tddp_op_kind)kind))) {
        kind++;
    }
    bool known = false;
    for (int i = 0; i < ROWS; i++) {
        known |= table[i].kind == (tddp_op_kind)kind;
    }
    if (!sign || !known) {
        return fail_kind(text, (int)length);
    }
    size_t rest = length - (size_t)(sign + 1 - text);
    for (int i = 0; i < TDDP_SHM_ALGORITHM_COUNT; i++) {
        tddp_shm_algorithm algorithm = (tddp_shm_algorithm)i;
        if (text_equals(sign + 1, rest, name_of(algorithm)) &&
            has_row((tddp_op_kind)kind, algorithm)) {
            out->forced[kind] = (uint8_t)(i + 1);
            return TDDP_OK;
        }
    }
    return fail_algorithm((tddp_op_kind)kind, text, (int)length);
}

tddp_status tddp_shm_choices_parse(tddp_shm_choices *out)
{
    tddp_shm_choices choices = {0};
    const char *text = getenv("TDDP_SHM_ALGORITHM");
    while (text && *text) {
        size_t length = strcspn(text, ",");
        tddp_status status = read_one(text, length, &choices);
        if (status) {
            return status;
        }
        text += length + (text[length] == ',');
    }
    *out = choices;
    return TDDP_OK;
}

void tddp_shm_choices_text(const tddp_shm_choices *choices, char *text, size_t size)
{
    text[0] = '\0';
    for (int kind = 0; kind < TDDP_OP_COUNT; kind++) {
        if (choices->forced[kind]) {
            tddp_shm_algorithm algorithm = (tddp_shm_algorithm)(choices->forced[kind] - 1);
            add_text(text, size, ",", tddp_op_name((tddp_op_kind)kind));
            /* Without a separator. */
            size_t used = strlen(text);
            snprintf(text + used, size - used, "=%s", name_of(algorithm));
        }
    }
}
