/*
 * Entries and documents as JSON. Each structure has one table of fields, from which it is written
 * and read. Pure. Invariant of a document's text: what stands alone comes before the lists, so that
 * every item after the start of an object belongs to that object.
 */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json_read.h"
#include "launch/rendezvous/state.h"
#include "launch/report/json.h"

/* A text, which is longer than any number; or a number from `min` to `max`. */
typedef struct field {
    const char *key;
    size_t offset;
    size_t size;
    int64_t min;
    int64_t max;
} field;

#define FIELD(type, name) \
    .key = #name, .offset = offsetof(type, name), .size = sizeof(((type *)0)->name)
#define ENTRY(name) FIELD(tddp_launch_entry, name)
#define STATE(name) FIELD(tddp_launch_state, name)
#define MEMBER(name) FIELD(tddp_launch_member, name)
#define RANGE(least, most) .min = (least), .max = (most)
#define ANY_NUMBER RANGE(INT64_MIN / 2, INT64_MAX / 2) /* from which there is some way to count */
#define ROUND RANGE(-1, TDDP_LAUNCH_HIGHEST_ROUND)
#define RANK RANGE(-1, TDDP_LAUNCH_MOST_MEMBERS)
#define FLAG RANGE(0, 1)

static const field member_fields[] = {
    {MEMBER(id)},
    {MEMBER(host)},
    {MEMBER(role)},
    {MEMBER(addr)},
    {MEMBER(pid), ANY_NUMBER},
    {MEMBER(local_size), RANGE(1, TDDP_LAUNCH_MOST_MEMBERS)},
    {MEMBER(node_rank), RANK},
    {MEMBER(hosting), FLAG},
    {.key = NULL},
};

static const field entry_fields[] = {
    {ENTRY(job)},
    {ENTRY(round), ROUND},
    {ENTRY(rank), RANK},
    {ENTRY(ready), ROUND},
    {ENTRY(done), ROUND},
    {ENTRY(failed), ROUND},
    {ENTRY(probe), ANY_NUMBER},
    {ENTRY(leaves), FLAG},
    {ENTRY(ended), FLAG},
    {ENTRY(master_round), ROUND},
    {ENTRY(master_port), RANGE(0, 65535)},
    {ENTRY(master_addr)},
    {ENTRY(text)},
    {ENTRY(leave_text)},
    {.key = NULL},
};

static const field state_fields[] = {
    {STATE(started), ANY_NUMBER},
    {STATE(job)},
    {STATE(stage), RANGE(0, TDDP_LAUNCH_STAGE_ENDED)},
    {STATE(round), ROUND},
    {STATE(restart), RANGE(0, INT32_MAX)},
    {STATE(generation), ANY_NUMBER},
    {STATE(probe), ANY_NUMBER},
    {STATE(master_port), RANGE(0, 65535)},
    {STATE(master_addr)},
    {STATE(over), ROUND},
    {STATE(how), RANGE(0, TDDP_LAUNCH_HOW_CHANGED)},
    {STATE(text)},
    {STATE(report), ANY_NUMBER},
    {STATE(status)},
    {.key = NULL},
};

static const field note_fields[] = {
    {FIELD(tddp_launch_note, id)},
    {FIELD(tddp_launch_note, refused), FLAG},
    {FIELD(tddp_launch_note, text)},
    {.key = NULL},
};

/* --- values in their places ------------------------------------------------------------------ */

static int64_t load(const field *item, const void *at)
{
    return item->size == sizeof(bool)  ? *(const bool *)at
           : item->size == sizeof(int) ? *(const int *)at
                                       : *(const int64_t *)at;
}

static void store(const field *item, void *at, int64_t value)
{
    if (item->size == sizeof(bool)) {
        *(bool *)at = value != 0;
    } else if (item->size == sizeof(int)) {
        *(int *)at = (int)value;
    } else {
        *(int64_t *)at = value;
    }
}

/* --- writing --------------------------------------------------------------------------------- */

static void write_fields(tddp_launch_json *json, const field *item, const void *data)
{
    for (; item->key; item++) {
        const char *at = (const char *)data + item->offset;
        if (item->size > sizeof(int64_t)) {
            tddp_launch_json_text(json, item->key, at);
        } else {
            tddp_launch_json_number(json, item->key, load(item, at));
        }
    }
}

static void write_list(tddp_launch_json *json, const char *key, const field *fields,
                       const void *items, int count, size_t each)
{
    tddp_launch_json_open(json, key, '[');
    for (int i = 0; i < count; i++) {
        tddp_launch_json_open(json, NULL, '{');
        write_fields(json, fields, (const char *)items + (size_t)i * each);
        tddp_launch_json_close(json, '{');
    }
    tddp_launch_json_close(json, '[');
}

static tddp_status finish(tddp_launch_json *json, tddp_bytes *out)
{
    tddp_launch_json_close(json, '{');
    *out = json->text;
    return json->failed ? TDDP_OUT_OF_MEMORY : TDDP_OK;
}

tddp_status tddp_launch_entry_write(const tddp_launch_entry *entry, tddp_bytes *out)
{
    tddp_launch_json json = {.text = *out};
    tddp_launch_json_open(&json, NULL, '{');
    write_fields(&json, member_fields, &entry->self);
    write_fields(&json, entry_fields, entry);
    return finish(&json, out);
}

tddp_status tddp_launch_state_write(const tddp_launch_state *state, tddp_bytes *out)
{
    tddp_launch_json json = {.text = *out};
    tddp_launch_json_open(&json, NULL, '{');
    write_fields(&json, state_fields, state);
    write_list(&json, "members", member_fields, state->members, state->count,
               sizeof *state->members);
    write_list(&json, "notes", note_fields, state->notes, state->note_count, sizeof *state->notes);
    return finish(&json, out);
}

/* --- reading --------------------------------------------------------------------------------- */

typedef struct reading {
    const field *fields[2]; /* of what the items that follow belong to */
    void *data;
    tddp_launch_state *state; /* NULL: an entry is read */
    tddp_status status;
} reading;

/* Whether this is a value of the field, which it then becomes. */
static bool read_value(const field *item, void *at, const char *text)
{
    int64_t value;
    bool sound = true;
    if (item->size > sizeof(int64_t)) {
        (void)snprintf(at, item->size, "%s", text);
    } else if ((sound = tddp_parse_int(text, item->min, item->max, &value))) {
        store(item, at, value);
    }
    return sound;
}

static void on_scalar(void *context, const char *key, const char *text)
{
    reading *r = context;
    for (int table = 0; table < 2; table++) {
        for (const field *item = r->fields[table]; item && item->key; item++) {
            if (strcmp(item->key, key) == 0 &&
                !read_value(item, (char *)r->data + item->offset, text)) {
                r->status = TDDP_PROTOCOL;
            }
        }
    }
}

/* One more item of a list, to which what follows belongs. Returns where the list is now. */
static void *begin_item(reading *r, const field *fields, void *items, int *count, size_t each)
{
    char *grown = *count < TDDP_LAUNCH_MOST_MEMBERS ? tddp_grow(items, (size_t)*count, each) : NULL;
    if (!grown) {
        r->status = *count < TDDP_LAUNCH_MOST_MEMBERS ? TDDP_OUT_OF_MEMORY : TDDP_PROTOCOL;
        return items;
    }
    r->fields[0] = fields;
    r->data = grown + (size_t)(*count)++ * each;
    return grown;
}

static void on_object(void *context, const char *key)
{
    reading *r = context;
    tddp_launch_state *doc = r->state;
    if (doc && strcmp(key, "members") == 0) {
        doc->members =
            begin_item(r, member_fields, doc->members, &doc->count, sizeof *doc->members);
        if (r->status == TDDP_OK) {
            doc->members[doc->count - 1].local_size = 1; /* unless the text has another */
        }
    } else if (doc && strcmp(key, "notes") == 0) {
        doc->notes = begin_item(r, note_fields, doc->notes, &doc->note_count, sizeof *doc->notes);
    } else if (key[0] != '\0') { /* not the outermost one */
        r->status = TDDP_PROTOCOL;
    }
}

static tddp_status read_all(reading *r, const char *data, size_t size, const char *what)
{
    const tddp_json_visitor visitor = {r, on_object, on_scalar};
    if (!tddp_json_read(data, size, &visitor)) {
        r->status = TDDP_PROTOCOL;
    }
    return r->status != TDDP_PROTOCOL ? r->status
                                      : tddp_fail(TDDP_PROTOCOL, "not %s of a rendezvous: %.*s",
                                                  what, (int)(size < 200 ? size : 200), data);
}

tddp_status tddp_launch_entry_read(const char *data, size_t size, tddp_launch_entry *out)
{
    *out = (tddp_launch_entry)TDDP_LAUNCH_ENTRY_INIT;
    _Static_assert(offsetof(tddp_launch_entry, self) == 0, "both tables are of the same place");
    reading r = {.fields = {entry_fields, member_fields}, .data = out};
    tddp_status status = read_all(&r, data, size, "a node's entry");
    if (status == TDDP_OK && out->self.id[0] == '\0') {
        status = tddp_fail(TDDP_PROTOCOL, "a node's entry without an id");
    }
    return status;
}

tddp_status tddp_launch_state_read(const char *data, size_t size, tddp_launch_state *out)
{
    *out = (tddp_launch_state){.round = -1, .over = -1};
    reading r = {.fields = {state_fields}, .data = out, .state = out};
    tddp_status status = read_all(&r, data, size, "the document");
    if (status != TDDP_OK) {
        tddp_launch_state_free(out);
    }
    return status;
}

void tddp_launch_state_free(tddp_launch_state *state)
{
    free(state->members);
    free(state->notes);
    *state = (tddp_launch_state){0};
}

int tddp_launch_state_rank(const tddp_launch_state *state, const char *id)
{
    int rank = state->count - 1;
    while (rank >= 0 && strcmp(state->members[rank].id, id) != 0) {
        rank--;
    }
    return rank;
}
