/*
 * Entries and documents as JSON. Each structure has one table of fields, from which it is written
 * and read. Pure. Invariant of a document's text: what stands alone comes before the lists, so that
 * every item after the start of an object belongs to that object.
 */
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json_read.h"
#include "launch/rendezvous/state.h"
#include "launch/report/json.h"

typedef enum field_kind { NUMBER, BOOL, TEXT, WORD } field_kind;

typedef struct field {
    const char *key;
    field_kind kind;
    size_t offset;
    size_t size;
    int64_t min; /* NUMBER; of WORD the last index is `max` */
    int64_t max;
    const char *const *words; /* WORD: by the enumeration's value */
} field;

#define FIELD(type, name, what) \
    .key = #name, .kind = (what), .offset = offsetof(type, name), .size = sizeof(((type *)0)->name)
#define ENTRY(name, what) FIELD(tddp_launch_entry, name, what)
#define STATE(name, what) FIELD(tddp_launch_state, name, what)
#define MEMBER(name, what) FIELD(tddp_launch_member, name, what)
#define RANGE(least, most) .min = (least), .max = (most)
#define ANY_NUMBER RANGE(INT64_MIN, INT64_MAX)
#define ROUND RANGE(-1, TDDP_LAUNCH_HIGHEST_ROUND)
#define RANK RANGE(-1, TDDP_LAUNCH_MOST_MEMBERS)
#define HOW .max = TDDP_LAUNCH_HOW_CHANGED, .words = hows

static const char *const stages[] = {"gathering", "running", "ended"};
static const char *const hows[] = {"done", "failed", "stopped", "changed"};

static const field member_fields[] = {
    {MEMBER(id, TEXT)},
    {MEMBER(host, TEXT)},
    {MEMBER(role, TEXT)},
    {MEMBER(addr, TEXT)},
    {MEMBER(pid, NUMBER), ANY_NUMBER},
    {MEMBER(local_size, NUMBER), RANGE(1, TDDP_LAUNCH_MOST_MEMBERS)},
    {MEMBER(node_rank, NUMBER), RANK},
    {MEMBER(hosting, BOOL)},
    {.key = NULL},
};

static const field entry_fields[] = {
    {ENTRY(job, TEXT)},
    {ENTRY(round, NUMBER), ROUND},
    {ENTRY(rank, NUMBER), RANK},
    {ENTRY(ready, NUMBER), ROUND},
    {ENTRY(done, NUMBER), ROUND},
    {ENTRY(failed, NUMBER), ROUND},
    {ENTRY(probe, NUMBER), ANY_NUMBER},
    {ENTRY(leaves, BOOL)},
    {ENTRY(ended, BOOL)},
    {ENTRY(master_round, NUMBER), ROUND},
    {ENTRY(master_port, NUMBER), RANGE(0, 65535)},
    {ENTRY(master_addr, TEXT)},
    {ENTRY(text, TEXT)},
    {ENTRY(leave_text, TEXT)},
    {.key = NULL},
};

static const field state_fields[] = {
    {STATE(version, NUMBER), ANY_NUMBER},
    {STATE(started, NUMBER), ANY_NUMBER},
    {STATE(job, TEXT)},
    {STATE(stage, WORD), .max = TDDP_LAUNCH_STAGE_ENDED, .words = stages},
    {STATE(round, NUMBER), ROUND},
    {STATE(restart, NUMBER), RANGE(0, INT32_MAX)},
    {STATE(generation, NUMBER), ANY_NUMBER},
    {STATE(probe, NUMBER), ANY_NUMBER},
    {STATE(master_port, NUMBER), RANGE(0, 65535)},
    {STATE(master_addr, TEXT)},
    {STATE(over, NUMBER), ROUND},
    {STATE(over_how, WORD), HOW},
    {STATE(over_text, TEXT)},
    {STATE(ended_how, WORD), HOW},
    {STATE(ended_text, TEXT)},
    {STATE(report, NUMBER), ANY_NUMBER},
    {STATE(status, TEXT)},
    {.key = NULL},
};

static const field note_fields[] = {
    {FIELD(tddp_launch_note, id, TEXT)},
    {FIELD(tddp_launch_note, refused, BOOL)},
    {FIELD(tddp_launch_note, text, TEXT)},
    {.key = NULL},
};

/* The document's lists. */
static const struct list {
    const char *key;
    const field *fields;
    size_t each;
    size_t items; /* where the pointer to them is, and their count */
    size_t count;
} lists[] = {
    {"members", member_fields, sizeof(tddp_launch_member), offsetof(tddp_launch_state, members),
     offsetof(tddp_launch_state, count)},
    {"notes", note_fields, sizeof(tddp_launch_note), offsetof(tddp_launch_state, notes),
     offsetof(tddp_launch_state, note_count)},
};

enum { LISTS = sizeof lists / sizeof lists[0] };

/* --- values in their places ------------------------------------------------------------------ */

static int64_t load(const field *item, const void *data)
{
    const void *at = (const char *)data + item->offset;
    if (item->kind == BOOL) {
        return *(const bool *)at;
    }
    return item->size == sizeof(int64_t) ? *(const int64_t *)at : *(const int *)at;
}

static void store(const field *item, void *data, int64_t value)
{
    void *at = (char *)data + item->offset;
    if (item->kind == BOOL) {
        *(bool *)at = value != 0;
    } else if (item->size == sizeof(int64_t)) {
        *(int64_t *)at = value;
    } else {
        *(int *)at = (int)value;
    }
}

tddp_status tddp_launch_grow(void **array, int count, size_t each)
{
    bool full = (count & (count - 1)) == 0; /* its room is the next power of two */
    size_t room = count == 0 ? 1 : (size_t)count * 2;
    void *grown = full ? tddp_resize(*array, room * each) : *array;
    if (!grown) {
        return TDDP_OUT_OF_MEMORY;
    }
    *array = grown;
    memset((char *)grown + (size_t)count * each, 0, each);
    return TDDP_OK;
}

/* --- writing --------------------------------------------------------------------------------- */

static void write_fields(tddp_launch_json *json, const field *item, const void *data)
{
    for (; item->key; item++) {
        switch (item->kind) {
        case NUMBER:
            tddp_launch_json_number(json, item->key, load(item, data));
            break;
        case BOOL:
            tddp_launch_json_bool(json, item->key, load(item, data) != 0);
            break;
        case TEXT:
            tddp_launch_json_text(json, item->key, (const char *)data + item->offset);
            break;
        case WORD:
            tddp_launch_json_text(json, item->key, item->words[load(item, data)]);
            break;
        }
    }
}

static void write_list(tddp_launch_json *json, const struct list *list,
                       const tddp_launch_state *state)
{
    const char *items;
    int count;
    memcpy(&items, (const char *)state + list->items, sizeof items);
    memcpy(&count, (const char *)state + list->count, sizeof count);
    tddp_launch_json_open(json, list->key, '[');
    for (int i = 0; i < count; i++) {
        tddp_launch_json_open(json, NULL, '{');
        write_fields(json, list->fields, items + (size_t)i * list->each);
        tddp_launch_json_close(json, '{');
    }
    tddp_launch_json_close(json, '[');
}

static tddp_status finish(tddp_launch_json *json, tddp_bytes *out)
{
    tddp_launch_json_close(json, '{');
    tddp_status status = json->failed ? TDDP_OUT_OF_MEMORY
                                      : tddp_bytes_append(out, json->text.data, json->text.size);
    tddp_bytes_free(&json->text);
    return status;
}

tddp_status tddp_launch_entry_write(const tddp_launch_entry *entry, tddp_bytes *out)
{
    tddp_launch_json json = {0};
    tddp_launch_json_open(&json, NULL, '{');
    write_fields(&json, member_fields, &entry->self);
    write_fields(&json, entry_fields, entry);
    return finish(&json, out);
}

tddp_status tddp_launch_state_write(const tddp_launch_state *state, tddp_bytes *out)
{
    tddp_launch_json json = {0};
    tddp_launch_json_open(&json, NULL, '{');
    write_fields(&json, state_fields, state);
    for (int i = 0; i < LISTS; i++) {
        write_list(&json, &lists[i], state);
    }
    return finish(&json, out);
}

/* --- reading --------------------------------------------------------------------------------- */

typedef struct reading {
    const field *fields[2]; /* of what the items that follow belong to */
    void *data;
    tddp_launch_state *state; /* NULL: an entry is read */
    bool bad;
    tddp_status status;
} reading;

/* Whether this is a value of the field, which it then becomes. */
static bool read_value(const field *item, void *data, const char *text)
{
    int64_t value = 0;
    if (item->kind == TEXT) {
        (void)snprintf((char *)data + item->offset, item->size, "%s", text);
        return true;
    }
    if (item->kind == NUMBER && !tddp_parse_int(text, item->min, item->max, &value)) {
        return false;
    }
    if (item->kind == BOOL) {
        value = strcmp(text, "true") == 0;
        if (!value && strcmp(text, "false") != 0) {
            return false;
        }
    }
    if (item->kind == WORD) {
        while (strcmp(item->words[value], text) != 0) {
            if (++value > item->max) {
                return false;
            }
        }
    }
    store(item, data, value);
    return true;
}

static void on_scalar(void *context, const char *key, const char *text)
{
    reading *r = context;
    for (int table = 0; table < 2; table++) {
        for (const field *item = r->fields[table]; item && item->key; item++) {
            if (strcmp(item->key, key) == 0) {
                r->bad |= !read_value(item, r->data, text);
            }
        }
    }
}

/* One more item of a list, to which what follows belongs. */
static void begin_item(reading *r, const struct list *list)
{
    char *array = (char *)r->state + list->items;
    void *items;
    int count;
    memcpy(&items, array, sizeof items);
    memcpy(&count, (char *)r->state + list->count, sizeof count);
    r->bad |= count == TDDP_LAUNCH_MOST_MEMBERS;
    if (r->bad || r->status != TDDP_OK) {
        return;
    }
    r->status = tddp_launch_grow(&items, count, list->each);
    if (r->status == TDDP_OK) {
        r->data = (char *)items + (size_t)count++ * list->each;
        r->fields[0] = list->fields;
        for (const field *item = list->fields; item->key; item++) {
            if (item->min > 0) { /* what the text leaves out is in its range, too */
                store(item, r->data, item->min);
            }
        }
        memcpy(array, &items, sizeof items);
        memcpy((char *)r->state + list->count, &count, sizeof count);
    }
}

static void on_object(void *context, const char *key)
{
    reading *r = context;
    for (int i = 0; i < LISTS && r->state; i++) {
        if (strcmp(key, lists[i].key) == 0) {
            begin_item(r, &lists[i]);
            return;
        }
    }
    r->bad |= key[0] != '\0'; /* the outermost one */
}

static tddp_status read_all(reading *r, const char *data, size_t size, const char *what)
{
    const tddp_json_visitor visitor = {r, on_object, on_scalar};
    if (!tddp_json_read(data, size, &visitor) || r->bad) {
        return tddp_fail(TDDP_PROTOCOL, "not %s of a rendezvous: %.*s", what,
                         (int)(size < 200 ? size : 200), data);
    }
    return r->status;
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
    for (int i = 0; i < state->count; i++) {
        if (strcmp(state->members[i].id, id) == 0) {
            return i;
        }
    }
    return -1;
}
