/*
 * Words as text: what the council says, written by the host's thread and read by the members'.
 * Holds no state. A round that decodes has its members in the order of their ranks, each slot once.
 */
#include <stdlib.h>
#include <string.h>

#include "launch/rendezvous/text.h"

static const char *const hows[] = {"done", "failed", "stopped", "changed"};
enum { HOWS = sizeof hows / sizeof hows[0] };

const char *tddp_launch_how_text(tddp_launch_how how)
{
    return hows[how];
}

void tddp_launch_word_free(tddp_launch_word *word)
{
    free(word->members);
    *word = (tddp_launch_word){0};
}

/* --- writing --------------------------------------------------------------------------------- */

static tddp_status write_member(tddp_bytes *out, int rank, const tddp_launch_member *member)
{
    const char *const names[] = {member->role, member->host, member->addr};
    tddp_status status =
        tddp_launch_write(out, "\n%d %d %d", rank, member->slot, member->local_size);
    for (size_t i = 0; status == TDDP_OK && i < sizeof names / sizeof names[0]; i++) {
        status = tddp_bytes_append(out, " ", 1);
        status = status == TDDP_OK ? tddp_launch_write_name(out, names[i]) : status;
    }
    return status;
}

static tddp_status write_round(tddp_bytes *out, const tddp_launch_word *word)
{
    tddp_status status = tddp_launch_write(out, "round %d restart %d", word->round, word->restart);
    for (int rank = 0; status == TDDP_OK && rank < word->count; rank++) {
        status = write_member(out, rank, &word->members[rank]);
    }
    return status;
}

static tddp_status write_master(tddp_bytes *out, const tddp_launch_word *word)
{
    tddp_status status = tddp_launch_write(out, "master %d ", word->round);
    status = status == TDDP_OK ? tddp_launch_write_name(out, word->addr) : status;
    return status == TDDP_OK ? tddp_launch_write(out, " %d", word->port) : status;
}

tddp_status tddp_launch_word_encode(const tddp_launch_word *word, tddp_bytes *out)
{
    switch (word->kind) {
    case TDDP_LAUNCH_WORD_ROUND:
        return write_round(out, word);
    case TDDP_LAUNCH_WORD_MASTER:
        return write_master(out, word);
    case TDDP_LAUNCH_WORD_OVER:
        return tddp_launch_write(out, "over %d %s\n%s", word->round, hows[word->how], word->text);
    case TDDP_LAUNCH_WORD_END:
        return tddp_launch_write(out, "end %s\n%s", hows[word->how], word->text);
    case TDDP_LAUNCH_WORD_REFUSE:
        return tddp_launch_write(out, "refuse %d\n%s", word->slot, word->text);
    case TDDP_LAUNCH_WORD_SPARE:
        return tddp_launch_write(out, "spare %d\n%s", word->slot, word->text);
    case TDDP_LAUNCH_WORD_ANEW:
        return tddp_launch_write(out, "anew %d\n%s", word->slot, word->text);
    case TDDP_LAUNCH_WORD_TELL:
        return tddp_launch_write(out, "tell\n%s", word->text);
    }
    return tddp_fail(TDDP_INTERNAL, "no word is of kind %d", (int)word->kind);
}

/* --- reading --------------------------------------------------------------------------------- */

static bool read_how(tddp_launch_reader *reader, tddp_launch_how *out)
{
    for (size_t i = 0; i < HOWS; i++) {
        if (tddp_launch_read_literal(reader, hows[i])) {
            *out = (tddp_launch_how)i;
            return true;
        }
    }
    return false;
}

static bool read_text(tddp_launch_reader *reader, tddp_launch_word *word)
{
    return tddp_launch_read_line_end(reader) &&
           tddp_launch_read_rest(reader, word->text, sizeof word->text);
}

static bool read_member(tddp_launch_reader *reader, int rank, tddp_launch_member *out)
{
    int index;
    return tddp_launch_read_int(reader, rank, rank, &index) && tddp_launch_read_blank(reader) &&
           tddp_launch_read_int(reader, 1, INT32_MAX, &out->slot) &&
           tddp_launch_read_blank(reader) &&
           tddp_launch_read_int(reader, 1, TDDP_LAUNCH_MOST_MEMBERS, &out->local_size) &&
           tddp_launch_read_blank(reader) &&
           tddp_launch_read_name(reader, out->role, sizeof out->role) &&
           tddp_launch_read_blank(reader) &&
           tddp_launch_read_name(reader, out->host, sizeof out->host) &&
           tddp_launch_read_blank(reader) &&
           tddp_launch_read_name(reader, out->addr, sizeof out->addr) &&
           tddp_launch_read_line_end(reader);
}

static int by_number(const void *a, const void *b)
{
    int left = *(const int *)a;
    int right = *(const int *)b;
    return (left > right) - (left < right);
}

/* Whether each slot is there once. */
static bool slots_differ(const tddp_launch_word *word, int *slots)
{
    for (int i = 0; i < word->count; i++) {
        slots[i] = word->members[i].slot;
    }
    qsort(slots, (size_t)word->count, sizeof *slots, by_number);
    for (int i = 1; i < word->count; i++) {
        if (slots[i] == slots[i - 1]) {
            return false;
        }
    }
    return true;
}

/* As many as there are lines, so that memory follows what was sent. */
static tddp_status read_members(tddp_launch_reader *reader, tddp_launch_word *word)
{
    size_t lines = 1;
    for (const char *at = reader->at; at < reader->end; at++) {
        lines += *at == '\n';
    }
    if (lines > TDDP_LAUNCH_MOST_MEMBERS) {
        return tddp_launch_read_failed(reader, "round");
    }
    word->members = tddp_alloc_array(lines, sizeof *word->members);
    int *slots = tddp_alloc_array(lines, sizeof *slots);
    tddp_status status = word->members && slots ? TDDP_OK : TDDP_OUT_OF_MEMORY;
    while (status == TDDP_OK && reader->at < reader->end) {
        if (read_member(reader, word->count, &word->members[word->count])) {
            word->count++;
        } else {
            status = tddp_launch_read_failed(reader, "member");
        }
    }
    if (status == TDDP_OK && (word->count == 0 || !slots_differ(word, slots))) {
        status = tddp_launch_read_failed(reader, "round");
    }
    free(slots);
    return status;
}

static tddp_status read_round(tddp_launch_reader *reader, tddp_launch_word *word)
{
    const int last = TDDP_LAUNCH_HIGHEST_ROUND;
    word->kind = TDDP_LAUNCH_WORD_ROUND;
    if (!tddp_launch_read_int(reader, 0, last, &word->round) ||
        !tddp_launch_read_literal(reader, " restart ") ||
        !tddp_launch_read_int(reader, 0, last, &word->restart) ||
        !tddp_launch_read_line_end(reader)) {
        return tddp_launch_read_failed(reader, "word");
    }
    return read_members(reader, word);
}

static bool read_other(tddp_launch_reader *reader, tddp_launch_word *word)
{
    const int last = TDDP_LAUNCH_HIGHEST_ROUND;
    const struct {
        const char *name;
        tddp_launch_word_kind kind;
    } slotted[] = {{"refuse ", TDDP_LAUNCH_WORD_REFUSE},
                   {"spare ", TDDP_LAUNCH_WORD_SPARE},
                   {"anew ", TDDP_LAUNCH_WORD_ANEW}};
    if (tddp_launch_read_literal(reader, "master ")) {
        word->kind = TDDP_LAUNCH_WORD_MASTER;
        return tddp_launch_read_int(reader, 0, last, &word->round) &&
               tddp_launch_read_blank(reader) &&
               tddp_launch_read_name(reader, word->addr, sizeof word->addr) &&
               tddp_launch_read_blank(reader) &&
               tddp_launch_read_int(reader, 1, 65535, &word->port);
    }
    if (tddp_launch_read_literal(reader, "over ")) {
        word->kind = TDDP_LAUNCH_WORD_OVER;
        return tddp_launch_read_int(reader, 0, last, &word->round) &&
               tddp_launch_read_blank(reader) && read_how(reader, &word->how) &&
               (word->how == TDDP_LAUNCH_HOW_FAILED || word->how == TDDP_LAUNCH_HOW_CHANGED) &&
               read_text(reader, word);
    }
    if (tddp_launch_read_literal(reader, "end ")) {
        word->kind = TDDP_LAUNCH_WORD_END;
        return read_how(reader, &word->how) && word->how != TDDP_LAUNCH_HOW_CHANGED &&
               read_text(reader, word);
    }
    for (size_t i = 0; i < sizeof slotted / sizeof slotted[0]; i++) {
        if (tddp_launch_read_literal(reader, slotted[i].name)) {
            word->kind = slotted[i].kind;
            return tddp_launch_read_int(reader, 1, INT32_MAX, &word->slot) &&
                   read_text(reader, word);
        }
    }
    word->kind = TDDP_LAUNCH_WORD_TELL;
    return tddp_launch_read_literal(reader, "tell") && read_text(reader, word);
}

tddp_status tddp_launch_word_decode(const char *data, size_t size, tddp_launch_word *out)
{
    tddp_launch_reader reader = {data, data + size, data};
    tddp_launch_word *word = tddp_alloc(sizeof *word);
    if (!word) {
        return TDDP_OUT_OF_MEMORY;
    }
    tddp_status status = TDDP_OK;
    if (tddp_launch_read_literal(&reader, "round ")) {
        status = read_round(&reader, word);
    } else if (!read_other(&reader, word) || reader.at != reader.end) {
        status = tddp_launch_read_failed(&reader, "word");
    }
    if (status == TDDP_OK) {
        *out = *word;
    } else {
        tddp_launch_word_free(word);
    }
    free(word);
    return status;
}
