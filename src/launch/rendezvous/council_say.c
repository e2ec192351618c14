/*
 * What the council says: words appended to the caller's list, and the sentences about who is here
 * and who is missing. Called by council.c and council_round.c. Changes nothing but the list.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "launch/rendezvous/council_state.h"

void tddp_launch_words_free(tddp_launch_words *words)
{
    for (size_t i = 0; i < words->count; i++) {
        tddp_launch_word_free(&words->words[i]);
    }
    free(words->words);
    *words = (tddp_launch_words){0};
}

tddp_launch_word *tddp_launch_council_say(tddp_launch_council *council, tddp_launch_word_kind kind,
                                          const char *format, ...)
{
    tddp_launch_words *words = council->words;
    if (words->count == words->capacity) {
        size_t capacity = words->capacity ? words->capacity * 2 : 4;
        tddp_launch_word *more = tddp_resize(words->words, capacity * sizeof *more);
        if (!more) {
            council->status = TDDP_OUT_OF_MEMORY;
            return NULL;
        }
        words->words = more;
        words->capacity = capacity;
    }
    tddp_launch_word *word = &words->words[words->count++];
    *word = (tddp_launch_word){.kind = kind, .round = council->round};
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(word->text, sizeof word->text, format, arguments);
    va_end(arguments);
    return word;
}

/* --- lists of nodes -------------------------------------------------------------------------- */

/* Appends to a text of LIST_BYTES; what does not fit is cut, with dots. */
static void add(char *text, const char *format, ...) TDDP_PRINTF(2, 3);

static void add(char *text, const char *format, ...)
{
    size_t used = strlen(text);
    if (used + 4 >= TDDP_LAUNCH_LIST_BYTES) {
        return; /* it has its dots already */
    }
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(text + used, TDDP_LAUNCH_LIST_BYTES - used, format, arguments);
    va_end(arguments);
    if (length < 0 || used + (size_t)length + 4 >= TDDP_LAUNCH_LIST_BYTES) {
        (void)snprintf(text + TDDP_LAUNCH_LIST_BYTES - 5, 5, " ...");
    }
}

const char *tddp_launch_council_name(const tddp_launch_seat *node,
                                     char text[TDDP_LAUNCH_LIST_BYTES])
{
    text[0] = '\0';
    int rank = node->rank >= 0 ? node->rank : node->comer.node_rank;
    if (rank >= 0) {
        add(text, "node %d", rank);
    } else {
        add(text, "a node");
    }
    add(text, " (%s pid %lld)", node->comer.host, (long long)node->comer.pid);
    return text;
}

/* Who is here (`unready`: of them, whose workers still run); returns how many. */
static int list_nodes(const tddp_launch_council *council, bool unready, char *text)
{
    int listed = 0;
    text[0] = '\0';
    for (int i = 0; i < council->count; i++) {
        const tddp_launch_seat *node = &council->nodes[i];
        char name[TDDP_LAUNCH_LIST_BYTES];
        if (node->standing != TDDP_LAUNCH_MEMBER || (unready && node->ready)) {
            continue;
        }
        add(text, "%s%s", listed++ ? ", " : "", tddp_launch_council_name(node, name));
    }
    return listed;
}

/* Whether a rank is asked for, or else was held, by a node that is here. */
static bool has_rank(const tddp_launch_council *council, int rank)
{
    for (int i = 0; i < council->count; i++) {
        const tddp_launch_seat *node = &council->nodes[i];
        int its = node->comer.node_rank >= 0 ? node->comer.node_rank : node->rank;
        if (node->standing == TDDP_LAUNCH_MEMBER && its == rank) {
            return true;
        }
    }
    return false;
}

/* The ranks nobody has, where all who are here have one; else none. Returns how many. */
static int list_missing(const tddp_launch_council *council, char *text)
{
    int missing = 0;
    text[0] = '\0';
    for (int i = 0; i < council->count; i++) {
        const tddp_launch_seat *node = &council->nodes[i];
        if (node->standing == TDDP_LAUNCH_MEMBER && node->comer.node_rank < 0 && node->rank < 0 &&
            !node->comer.hosting) {
            return 0;
        }
    }
    for (int rank = 0; rank < tddp_launch_council_needed(council); rank++) {
        bool hosts = rank == 0 && council->round < 0 && council->count > 0 &&
                     council->nodes[0].comer.hosting && council->nodes[0].comer.node_rank < 0;
        if (!hosts && !has_rank(council, rank)) {
            add(text, "%s%d", missing++ ? ", " : "", rank);
        }
    }
    return missing;
}

/* --- sentences ------------------------------------------------------------------------------- */

static void tell_unready(tddp_launch_council *council, const char *unready)
{
    (void)tddp_launch_council_say(council, TDDP_LAUNCH_WORD_TELL,
                                  "waiting at %s for the workers of %s to end", council->opts.where,
                                  unready);
}

static void tell_absent(tddp_launch_council *council, int absent, const char *here)
{
    char missing[TDDP_LAUNCH_LIST_BYTES];
    int ranks = list_missing(council, missing);
    bool more = council->opts.max_nodes > tddp_launch_council_needed(council);
    (void)tddp_launch_council_say(
        council, TDDP_LAUNCH_WORD_TELL, "waiting at %s for %d of %s%d nodes%s%s%s%s; here: %s",
        council->opts.where, absent, more ? "at least " : "", tddp_launch_council_needed(council),
        ranks == 1  ? ": node rank "
        : ranks > 1 ? ": node ranks "
                    : "",
        missing,
        ranks == 1  ? " has not come"
        : ranks > 1 ? " have not come"
                    : "",
        "", here[0] ? here : "nobody");
}

void tddp_launch_council_tell(tddp_launch_council *council)
{
    char here[TDDP_LAUNCH_LIST_BYTES];
    char unready[TDDP_LAUNCH_LIST_BYTES];
    int count = list_nodes(council, false, here);
    int absent = tddp_launch_council_needed(council) - count;
    if (absent > 0) {
        tell_absent(council, absent, here);
    } else if (list_nodes(council, true, unready) > 0) {
        tell_unready(council, unready);
    } else if (council->enough_ns != 0) {
        int64_t left = council->enough_ns + council->opts.last_call_ns - council->now_ns;
        (void)tddp_launch_council_say(
            council, TDDP_LAUNCH_WORD_TELL,
            "%d of up to %d nodes have come to %s (%s); the workers start in %lld s, or once all "
            "have come",
            count, council->opts.max_nodes, council->opts.where, here,
            (long long)((left + TDDP_NS_PER_S - 1) / TDDP_NS_PER_S));
    }
}

void tddp_launch_council_lament(const tddp_launch_council *council,
                                char text[TDDP_LAUNCH_TEXT_BYTES])
{
    char here[TDDP_LAUNCH_LIST_BYTES];
    char other[TDDP_LAUNCH_LIST_BYTES];
    const char *where = council->opts.where;
    long long seconds = council->opts.join_timeout_ns / TDDP_NS_PER_S;
    int needed = tddp_launch_council_needed(council);
    int count = list_nodes(council, false, here);
    if (count >= needed && list_nodes(council, true, other) > 0) {
        (void)snprintf(text, TDDP_LAUNCH_TEXT_BYTES,
                       "the workers of %s did not end within %lld s, so no other round can start",
                       other, seconds);
        return;
    }
    int ranks = list_missing(council, other);
    if (ranks == 0) {
        (void)snprintf(other, sizeof other, "%d", needed - count);
    }
    (void)snprintf(text, TDDP_LAUNCH_TEXT_BYTES,
                   "not all of the %d nodes came to %s within %lld s (%s%s %s missing; here: %s); "
                   "check that torchrun runs on each with the same endpoint and --rdzv-id, or "
                   "raise --rdzv-conf join_timeout",
                   needed, where, seconds,
                   ranks == 1  ? "node rank "
                   : ranks > 1 ? "node ranks "
                               : "",
                   other, ranks == 1 || (ranks == 0 && needed - count == 1) ? "is" : "are",
                   here[0] ? here : "nobody");
}
