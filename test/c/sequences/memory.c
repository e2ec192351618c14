/*
 * Where operands lie. A room is a piece of memory with room before, between and after the operands
 * in it; a second one beside it holds what must stand there in the end, so that one comparison
 * finds wrong results, inputs that were changed and writes beside an operand alike.
 */
#include <semaphore.h>
#include <stdlib.h>
#include <string.h>

#include "sequences/sequence.h"
#include "standin/standin.h"

enum { GUARD = 64 };

typedef enum arrangement { END_TO_END, WITH_GAPS, FALLING, IN_ROOMS } arrangement;

static unsigned char *make_room(seq_call *call, size_t bytes)
{
    CHECK(call->room_count < SEQ_ROOMS);
    seq_room *room = &call->rooms[call->room_count++];
    *room = (seq_room){.bytes = bytes + (size_t)2 * GUARD};
    if (call->op->device == TDDP_CPU && seq_once_in(&call->own, 3)) {
        CHECK_OK(tddp_group_memory_create(call->group, room->bytes, &room->memory));
        room->data = tddp_group_memory_data(room->memory);
    } else {
        room->data = malloc(room->bytes);
    }
    room->expected = malloc(room->bytes);
    CHECK(room->data && room->expected);
    memset(room->expected, 0x5a + call->op->number % 7, room->bytes);
    return room->data + GUARD;
}

static tddp_buffer buffer_at(const seq_call *call, void *place, size_t count, bool null)
{
    return (tddp_buffer){.data = count > 0 || !null ? place : NULL,
                         .count = count,
                         .dtype = call->op->dtype,
                         .device_type = call->op->device,
                         .stream = call->stream};
}

void seq_lay(seq_call *call, tddp_buffer *buffers, const size_t *counts, int count, bool whole)
{
    const size_t element = tddp_dtype_size(call->op->dtype);
    const arrangement way = whole ? END_TO_END : (arrangement)seq_below(&call->own, 4);
    /* Elements before the first, so that memory begins at no round address. */
    const size_t shift = seq_below(&call->own, 9);
    size_t total = shift;
    for (int i = 0; i < count; i++) {
        total += counts[i] + (way == WITH_GAPS || way == FALLING ? 3 + (size_t)i : 0);
    }
    unsigned char *room = way == IN_ROOMS ? NULL : make_room(call, total * element);
    size_t at = shift;
    for (int n = 0; n < count; n++) {
        const int i = way == FALLING ? count - 1 - n : n;
        unsigned char *place = room;
        if (way == IN_ROOMS) {
            place = make_room(call, (shift + counts[i]) * element);
            at = shift;
        }
        buffers[i] = buffer_at(call, place + at * element, counts[i], seq_once_in(&call->own, 2));
        at += counts[i] + (way == WITH_GAPS || way == FALLING ? 3 + (size_t)i : 0);
    }
}

void *seq_expected(const seq_call *call, const void *place)
{
    const uintptr_t wanted = (uintptr_t)place;
    for (int i = 0; i < call->room_count; i++) {
        const seq_room *room = &call->rooms[i];
        const uintptr_t begin = (uintptr_t)room->data;
        if (wanted >= begin && wanted < begin + room->bytes) {
            return room->expected + (wanted - begin);
        }
    }
    check_failed(__FILE__, __LINE__, "a place that is in no room");
}

/* --- contents -------------------------------------------------------------------------------- */

typedef struct writing {
    unsigned char *to;
    unsigned char *what; /* freed with it */
    size_t bytes;
} writing;

static void write_now(void *data)
{
    writing *it = data;
    memcpy(it->to, it->what, it->bytes);
    free(it->what);
    free(it);
}

void seq_set_rooms(seq_call *call)
{
    for (int i = 0; i < call->room_count; i++) {
        seq_room *room = &call->rooms[i];
        if (call->op->device == TDDP_CPU) {
            memcpy(room->data, room->expected, room->bytes);
            continue;
        }
        writing *it = malloc(sizeof *it);
        unsigned char *what = malloc(room->bytes);
        CHECK(it && what);
        memset(room->data, 0xee, room->bytes); /* for who reads before the stream has written */
        memcpy(what, room->expected, room->bytes);
        *it = (writing){room->data, what, room->bytes};
        standin_put(call->stream, write_now, it);
    }
}

static void signal_settled(void *data)
{
    (void)sem_post(data);
}

void seq_settle(const seq_call *call)
{
    sem_t settled;
    if (call->op->device == TDDP_CPU) {
        return;
    }
    CHECK_INT(sem_init(&settled, 0, 0), 0);
    standin_put(call->stream, signal_settled, &settled);
    while (sem_wait(&settled)) {
    }
    CHECK_INT(sem_destroy(&settled), 0);
}

static const char *name_of(const seq_call *call, const unsigned char *place)
{
    for (int i = 0; i < call->outs + call->ins; i++) {
        const bool is_out = i < call->outs;
        const tddp_buffer *buffer = is_out ? &call->out[i] : &call->in[i - call->outs];
        const unsigned char *begin = buffer->data;
        size_t bytes = buffer->count * tddp_dtype_size(buffer->dtype);
        if (begin && place >= begin && place < begin + bytes) {
            return is_out ? "in a result" : "in what was given";
        }
    }
    return "beside all operands";
}

void seq_check_rooms(const seq_call *call)
{
    char text[SEQ_TEXT];
    for (int i = 0; i < call->room_count; i++) {
        const seq_room *room = &call->rooms[i];
        if (memcmp(room->data, room->expected, room->bytes) == 0) {
            continue;
        }
        size_t at = 0;
        while (room->data[at] == room->expected[at]) {
            at++;
        }
        seq_describe_op(call->program, call->op, text, sizeof text);
        check_failed(__FILE__, __LINE__,
                     "%s: rank %d has 0x%02x, expected 0x%02x, %s, at byte %zu of %zu of room %d",
                     text, call->rank, room->data[at], room->expected[at],
                     name_of(call, room->data + at), at, room->bytes, i);
    }
}

void seq_free_rooms(seq_call *call)
{
    for (int i = 0; i < call->room_count; i++) {
        seq_room *room = &call->rooms[i];
        if (room->memory) {
            tddp_group_memory_release(room->memory);
        } else {
            free(room->data);
        }
        free(room->expected);
    }
    call->room_count = 0;
}
