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

/* The first row that matches is used. The last row of each kind must match anything. Of operations
 * that only move data, exchange.c selects the algorithm for each part. */
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
};
enum { ROWS = sizeof table / sizeof *table };

static const char *const names[] = {
#define TDDP_SHM_ALGORITHM_TEXT(name, text) text,
    TDDP_SHM_ALGORITHM_MAP(TDDP_SHM_ALGORITHM_TEXT)
#undef TDDP_SHM_ALGORITHM_TEXT
};

/* Whether an operation has this algorithm. */
static bool exists(tddp_op_kind kind, tddp_shm_algorithm algorithm)
{
    switch (kind) {
    case TDDP_OP_ALL_REDUCE:
    case TDDP_OP_REDUCE:
    case TDDP_OP_BROADCAST:
        return true;
    case TDDP_OP_REDUCE_SCATTER:
    case TDDP_OP_ALL_GATHER:
    case TDDP_OP_GATHER:
    case TDDP_OP_SCATTER:
    case TDDP_OP_ALL_TO_ALL:
        return algorithm != TDDP_SHM_SLICED;
    default:
        return false;
    }
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

void tddp_shm_log_choice(const tddp_shm *shm, tddp_op_kind kind, size_t bytes,
                         tddp_shm_algorithm algorithm)
{
    if (!tddp_log_enabled(TDDP_LOG_DEBUG)) {
        return;
    }
    const int exponent = 63 - __builtin_clzll(bytes | 1);
    uint64_t *logged = &tddp_shm_choices_of(shm)->logged[kind][algorithm];
    if (*logged >> exponent & 1) {
        return;
    }
    *logged |= UINT64_C(1) << exponent;
    tddp_log(TDDP_LOG_DEBUG, "shm", "%s of %zu bytes by %d ranks: %s%s", tddp_op_name(kind), bytes,
             tddp_shm_size(shm), names[algorithm],
             tddp_shm_choices_of(shm)->forced[kind] == algorithm + 1 ? " (TDDP_SHM_ALGORITHM)"
                                                                     : "");
}

/* --- TDDP_SHM_ALGORITHM ---------------------------------------------------------------------- */

static void add_text(char *text, const char *between, const char *more)
{
    const size_t used = strlen(text);
    (void)snprintf(text + used, TDDP_SHM_CHOICES_TEXT - used, "%s%s", used ? between : "", more);
}

/* "operation=algorithm" */
enum { CHOICE_TEXT = 64 };

static void choice_text(char text[CHOICE_TEXT], tddp_op_kind kind, const char *algorithm)
{
    (void)snprintf(text, CHOICE_TEXT, "%s=%s", tddp_op_name(kind), algorithm);
}

static bool begins_with(const char *text, size_t length, const char *start)
{
    return strlen(start) <= length && strncmp(text, start, strlen(start)) == 0;
}

/* Names the algorithms of the operation, or the operations if there is none of that name. */
static tddp_status fail_choice(const char *text, size_t length)
{
    char operations[TDDP_SHM_CHOICES_TEXT] = "";
    for (int kind = 0; kind < TDDP_OP_COUNT; kind++) {
        char algorithms[TDDP_SHM_CHOICES_TEXT] = "";
        for (int i = 0; i < TDDP_SHM_ALGORITHM_COUNT; i++) {
            if (exists((tddp_op_kind)kind, (tddp_shm_algorithm)i)) {
                add_text(algorithms, ", ", names[i]);
            }
        }
        char start[CHOICE_TEXT];
        choice_text(start, (tddp_op_kind)kind, "");
        if (*algorithms && begins_with(text, length, start)) {
            return tddp_fail(TDDP_INVALID_ARGUMENT,
                             "TDDP_SHM_ALGORITHM: %.*s: expected %s to be one of %s", (int)length,
                             text, tddp_op_name((tddp_op_kind)kind), algorithms);
        }
        if (*algorithms) {
            add_text(operations, ", ", tddp_op_name((tddp_op_kind)kind));
        }
    }
    return tddp_fail(TDDP_INVALID_ARGUMENT,
                     "TDDP_SHM_ALGORITHM: %.*s: expected OPERATION=ALGORITHM, with one of %s",
                     (int)length, text, operations);
}

static tddp_status parse_choice(const char *text, size_t length, tddp_shm_choices *out)
{
    for (int kind = 0; kind < TDDP_OP_COUNT; kind++) {
        for (int i = 0; i < TDDP_SHM_ALGORITHM_COUNT; i++) {
            char choice[CHOICE_TEXT];
            choice_text(choice, (tddp_op_kind)kind, names[i]);
            if (strlen(choice) == length && begins_with(text, length, choice) &&
                exists((tddp_op_kind)kind, (tddp_shm_algorithm)i)) {
                out->forced[kind] = (uint8_t)(i + 1);
                return TDDP_OK;
            }
        }
    }
    return fail_choice(text, length);
}

tddp_status tddp_shm_choices_parse(tddp_shm_choices *out)
{
    tddp_shm_choices choices = {0};
    const char *text = getenv("TDDP_SHM_ALGORITHM");
    while (text && *text) {
        size_t length = strcspn(text, ",");
        tddp_status status = parse_choice(text, length, &choices);
        if (status) {
            return status;
        }
        text += length + (text[length] == ',');
    }
    *out = choices;
    return TDDP_OK;
}

void tddp_shm_choices_text(const tddp_shm_choices *choices, char text[TDDP_SHM_CHOICES_TEXT])
{
    text[0] = '\0';
    for (int kind = 0; kind < TDDP_OP_COUNT; kind++) {
        if (choices->forced[kind]) {
            char choice[CHOICE_TEXT];
            choice_text(choice, (tddp_op_kind)kind, names[choices->forced[kind] - 1]);
            add_text(text, ",", choice);
        }
    }
}
