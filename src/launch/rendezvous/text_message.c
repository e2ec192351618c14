/*
 * Messages as text: what the coordinator says, written by the host's thread and read by the
 * members'. Holds no state. A round that decodes has its members in the order of their ranks, each
 * slot once.
 */
#include <stdlib.h>
#include <string.h>

#include "launch/rendezvous/text.h"

static const char *const hows[] = {"done", "failed", "stopped", "changed"};
enum { HOWS = sizeof hows / sizeof hows[0] };

void tddp_launch_message_free(tddp_launch_message *message)
{
    free(message->members);
    *message = (tddp_launch_message){0};
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

static tddp_status write_round(tddp_bytes *out, const tddp_launch_message *message)
{
    tddp_status status =
        tddp_launch_write(out, "round %d restart %d", message->round, message->restart);
    for (int rank = 0; status == TDDP_OK && rank < message->count; rank++) {
        status = write_member(out, rank, &message->members[rank]);
    }
    return status;
}

static tddp_status write_master(tddp_bytes *out, const tddp_launch_message *message)
{
    tddp_status status = tddp_launch_write(out, "master %d ", message->round);
    status = status == TDDP_OK ? tddp_launch_write_name(out, message->addr) : status;
    return status == TDDP_OK ? tddp_launch_write(out, " %d", message->port) : status;
}

tddp_status tddp_launch_message_encode(const tddp_launch_message *message, tddp_bytes *out)
{
    switch (message->kind) {
    case TDDP_LAUNCH_MESSAGE_ROUND:
        return write_round(out, message);
    case TDDP_LAUNCH_MESSAGE_MASTER:
        return write_master(out, message);
    case TDDP_LAUNCH_MESSAGE_OVER:
        return tddp_launch_write(out, "over %d %s\n%s", message->round, hows[message->how],
                                 message->text);
    case TDDP_LAUNCH_MESSAGE_END:
        return tddp_launch_write(out, "end %s\n%s", hows[message->how], message->text);
    case TDDP_LAUNCH_MESSAGE_REFUSE:
        return tddp_launch_write(out, "refuse %d\n%s", message->slot, message->text);
    case TDDP_LAUNCH_MESSAGE_SPARE:
        return tddp_launch_write(out, "spare %d\n%s", message->slot, message->text);
    case TDDP_LAUNCH_MESSAGE_REJOIN:
        return tddp_launch_write(out, "rejoin %d\n%s", message->slot, message->text);
    case TDDP_LAUNCH_MESSAGE_STATUS:
        return tddp_launch_write(out, "status\n%s", message->text);
    }
    return tddp_fail(TDDP_INTERNAL, "no message is of kind %d", (int)message->kind);
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

static bool read_text(tddp_launch_reader *reader, tddp_launch_message *message)
{
    return tddp_launch_read_line_end(reader) &&
           tddp_launch_read_rest(reader, message->text, sizeof message->text);
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
static bool slots_differ(const tddp_launch_message *message, int *slots)
{
    for (int i = 0; i < message->count; i++) {
        slots[i] = message->members[i].slot;
    }
    qsort(slots, (size_t)message->count, sizeof *slots, by_number);
    for (int i = 1; i < message->count; i++) {
        if (slots[i] == slots[i - 1]) {
            return false;
        }
    }
    return true;
}

/* As many as there are lines, so that memory follows what was sent. */
static tddp_status read_members(tddp_launch_reader *reader, tddp_launch_message *message)
{
    size_t lines = 1;
    for (const char *at = reader->at; at < reader->end; at++) {
        lines += *at == '\n';
    }
    if (lines > TDDP_LAUNCH_MOST_MEMBERS) {
        return tddp_launch_read_failed(reader, "round");
    }
    message->members = tddp_alloc_array(lines, sizeof *message->members);
    int *slots = tddp_alloc_array(lines, sizeof *slots);
    tddp_status status = message->members && slots ? TDDP_OK : TDDP_OUT_OF_MEMORY;
    while (status == TDDP_OK && reader->at < reader->end) {
        if (read_member(reader, message->count, &message->members[message->count])) {
            message->count++;
        } else {
            status = tddp_launch_read_failed(reader, "member");
        }
    }
    if (status == TDDP_OK && (message->count == 0 || !slots_differ(message, slots))) {
        status = tddp_launch_read_failed(reader, "round");
    }
    free(slots);
    return status;
}

static tddp_status read_round(tddp_launch_reader *reader, tddp_launch_message *message)
{
    const int last = TDDP_LAUNCH_HIGHEST_ROUND;
    message->kind = TDDP_LAUNCH_MESSAGE_ROUND;
    if (!tddp_launch_read_int(reader, 0, last, &message->round) ||
        !tddp_launch_read_literal(reader, " restart ") ||
        !tddp_launch_read_int(reader, 0, last, &message->restart) ||
        !tddp_launch_read_line_end(reader)) {
        return tddp_launch_read_failed(reader, "message");
    }
    return read_members(reader, message);
}

static bool read_other(tddp_launch_reader *reader, tddp_launch_message *message)
{
    const int last = TDDP_LAUNCH_HIGHEST_ROUND;
    const struct {
        const char *name;
        tddp_launch_message_kind kind;
    } slotted[] = {{"refuse ", TDDP_LAUNCH_MESSAGE_REFUSE},
                   {"spare ", TDDP_LAUNCH_MESSAGE_SPARE},
                   {"rejoin ", TDDP_LAUNCH_MESSAGE_REJOIN}};
    if (tddp_launch_read_literal(reader, "master ")) {
        message->kind = TDDP_LAUNCH_MESSAGE_MASTER;
        return tddp_launch_read_int(reader, 0, last, &message->round) &&
               tddp_launch_read_blank(reader) &&
               tddp_launch_read_name(reader, message->addr, sizeof message->addr) &&
               tddp_launch_read_blank(reader) &&
               tddp_launch_read_int(reader, 1, 65535, &message->port);
    }
    if (tddp_launch_read_literal(reader, "over ")) {
        message->kind = TDDP_LAUNCH_MESSAGE_OVER;
        return tddp_launch_read_int(reader, 0, last, &message->round) &&
               tddp_launch_read_blank(reader) && read_how(reader, &message->how) &&
               (message->how == TDDP_LAUNCH_HOW_FAILED ||
                message->how == TDDP_LAUNCH_HOW_CHANGED) &&
               read_text(reader, message);
    }
    if (tddp_launch_read_literal(reader, "end ")) {
        message->kind = TDDP_LAUNCH_MESSAGE_END;
        return read_how(reader, &message->how) && message->how != TDDP_LAUNCH_HOW_CHANGED &&
               read_text(reader, message);
    }
    for (size_t i = 0; i < sizeof slotted / sizeof slotted[0]; i++) {
        if (tddp_launch_read_literal(reader, slotted[i].name)) {
            message->kind = slotted[i].kind;
            return tddp_launch_read_int(reader, 1, INT32_MAX, &message->slot) &&
                   read_text(reader, message);
        }
    }
    message->kind = TDDP_LAUNCH_MESSAGE_STATUS;
    return tddp_launch_read_literal(reader, "status") && read_text(reader, message);
}

tddp_status tddp_launch_message_decode(const char *data, size_t size, tddp_launch_message *out)
{
    tddp_launch_reader reader = {data, data + size, data};
    tddp_launch_message *message = tddp_alloc(sizeof *message);
    if (!message) {
        return TDDP_OUT_OF_MEMORY;
    }
    tddp_status status = TDDP_OK;
    if (tddp_launch_read_literal(&reader, "round ")) {
        status = read_round(&reader, message);
    } else if (!read_other(&reader, message) || reader.at != reader.end) {
        status = tddp_launch_read_failed(&reader, "message");
    }
    if (status == TDDP_OK) {
        *out = *message;
    } else {
        tddp_launch_message_free(message);
    }
    free(message);
    return status;
}
