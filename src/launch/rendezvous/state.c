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

typedef enum field_kind { INT, INT64, BOOL, TEXT, STAGE, HOW } field_kind;

typedef struct field {
    const char *key;
    field_kind kind;
    size_t offset;
    size_t size; /* TEXT */
    int64_t min; /* INT */
    int64_t max;
} field;

#define TEXT_FIELD(type, name)                                      \
    {                                                               \
        .key = #name, .kind = TEXT, .offset = offsetof(type, name), \
        .size = sizeof(((type *)0)->name)                           \
    }
#define INT_FIELD(type, name, least, most)                                                       \
    {                                                                                            \
        .key = #name, .kind = INT, .offset = offsetof(type, name), .min = (least), .max = (most) \
    }
#define FIELD(type, name, what)                                      \
    {                                                                \
        .key = #name, .kind = (what), .offset = offsetof(type, name) \
    }
#define ROUND_FIELD(type, name) INT_FIELD(type, name, -1, TDDP_LAUNCH_HIGHEST_ROUND)
#define COUNT(array) (sizeof(array) / sizeof(array)[0])

static const field entry_fields[] = {
    TEXT_FIELD(tddp_launch_entry, id),
    TEXT_FIELD(tddp_launch_entry, host),
    TEXT_FIELD(tddp_launch_entry, role),
    TEXT_FIELD(tddp_launch_entry, job),
    TEXT_FIELD(tddp_launch_entry, addr),
    FIELD(tddp_launch_entry, pid, INT64),
    INT_FIELD(tddp_launch_entry, local_size, 1, TDDP_LAUNCH_MOST_MEMBERS),
    INT_FIELD(tddp_launch_entry, node_rank, -1, TDDP_LAUNCH_MOST_MEMBERS),
    FIELD(tddp_launch_entry, hosting, BOOL),
    ROUND_FIELD(tddp_launch_entry, round),
    INT_FIELD(tddp_launch_entry, rank, -1, TDDP_LAUNCH_MOST_MEMBERS),
    ROUND_FIELD(tddp_launch_entry, ready),
    ROUND_FIELD(tddp_launch_entry, done),
    ROUND_FIELD(tddp_launch_entry, failed),
    FIELD(tddp_launch_entry, probe, INT64),
    FIELD(tddp_launch_entry, leaves, BOOL),
    FIELD(tddp_launch_entry, ended, BOOL),
    ROUND_FIELD(tddp_launch_entry, master_round),
    INT_FIELD(tddp_launch_entry, master_port, 0, 65535),
    TEXT_FIELD(tddp_launch_entry, master_addr),
    TEXT_FIELD(tddp_launch_entry, text),
    TEXT_FIELD(tddp_launch_entry, leave_text),
};

static const field member_fields[] = {
    TEXT_FIELD(tddp_launch_member, id),
    TEXT_FIELD(tddp_launch_member, host),
    TEXT_FIELD(tddp_launch_member, role),
    TEXT_FIELD(tddp_launch_member, addr),
    FIELD(tddp_launch_member, pid, INT64),
    INT_FIELD(tddp_launch_member, local_size, 1, TDDP_LAUNCH_MOST_MEMBERS),
    INT_FIELD(tddp_launch_member, node_rank, -1, TDDP_LAUNCH_MOST_MEMBERS),
    FIELD(tddp_launch_member, hosting, BOOL),
};

static const field note_fields[] = {
    TEXT_FIELD(tddp_launch_note, id),
    FIELD(tddp_launch_note, refused, BOOL),
    TEXT_FIELD(tddp_launch_note, text),
};

static const field trace_fields[] = {
    TEXT_FIELD(tddp_launch_trace, host),
    INT_FIELD(tddp_launch_trace, rank, -1, TDDP_LAUNCH_MOST_MEMBERS),
};

static const field state_fields[] = {
    FIELD(tddp_launch_state, version, INT64),
    FIELD(tddp_launch_state, started, INT64),
    TEXT_FIELD(tddp_launch_state, job),
    FIELD(tddp_launch_state, stage, STAGE),
    ROUND_FIELD(tddp_launch_state, round),
    INT_FIELD(tddp_launch_state, restart, 0, INT32_MAX),
    FIELD(tddp_launch_state, generation, INT64),
    FIELD(tddp_launch_state, probe, INT64),
    INT_FIELD(tddp_launch_state, master_port, 0, 65535),
    TEXT_FIELD(tddp_launch_state, master_addr),
    ROUND_FIELD(tddp_launch_state, over),
    FIELD(tddp_launch_state, over_how, HOW),
    TEXT_FIELD(tddp_launch_state, over_text),
    FIELD(tddp_launch_state, ended_how, HOW),
    TEXT_FIELD(tddp_launch_state, ended_text),
    FIELD(tddp_launch_state, report, INT64),
    TEXT_FIELD(tddp_launch_state, status),
};

static const char *const stages[] = {
    [TDDP_LAUNCH_STAGE_GATHERING] = "gathering",
    [TDDP_LAUNCH_STAGE_RUNNING] = "running",
    [TDDP_LAUNCH_STAGE_ENDED] = "ended",
};

static const char *const hows[] = {
    [TDDP_LAUNCH_HOW_DONE] = "done",
    [TDDP_LAUNCH_HOW_FAILED] = "failed",
    [TDDP_LAUNCH_HOW_STOPPED] = "stopped",
    [TDDP_LAUNCH_HOW_CHANGED] = "changed",
};

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

static void write_fields(tddp_launch_json *json, const field *fields, size_t count,
                         const void *data)
{
    for (size_t i = 0; i < count; i++) {
        const char *at = (const char *)data + fields[i].offset;
        switch (fields[i].kind) {
        case INT:
            tddp_launch_json_number(json, fields[i].key, *(const int *)(const void *)at);
            break;
        case INT64:
            tddp_launch_json_number(json, fields[i].key, *(const int64_t *)(const void *)at);
            break;
        case BOOL:
            tddp_launch_json_bool(json, fields[i].key, *(const bool *)(const void *)at);
            break;
        case TEXT:
            tddp_launch_json_text(json, fields[i].key, at);
            break;
        case STAGE:
            tddp_launch_json_text(json, fields[i].key,
                                  stages[*(const tddp_launch_stage *)(const void *)at]);
            break;
        case HOW:
            tddp_launch_json_text(json, fields[i].key,
                                  hows[*(const tddp_launch_how *)(const void *)at]);
            break;
        }
    }
}

static void write_list(tddp_launch_json *json, const char *key, const field *fields, size_t count,
                       const void *items, int item_count, size_t each)
{
    tddp_launch_json_open(json, key, '[');
    for (int i = 0; i < item_count; i++) {
        tddp_launch_json_open(json, NULL, '{');
        write_fields(json, fields, count, (const char *)items + (size_t)i * each);
        tddp_launch_json_close(json, '{');
    }
    tddp_launch_json_close(json, '[');
}

static tddp_status finish(tddp_launch_json *json, tddp_bytes *out)
{
    tddp_status status = json->failed ? TDDP_OUT_OF_MEMORY
                                      : tddp_bytes_append(out, json->text.data, json->text.size);
    tddp_bytes_free(&json->text);
    return status;
}

tddp_status tddp_launch_entry_write(const tddp_launch_entry *entry, tddp_bytes *out)
{
    tddp_launch_json json = {0};
    tddp_launch_json_open(&json, NULL, '{');
    write_fields(&json, entry_fields, COUNT(entry_fields), entry);
    if (entry->last) {
        tddp_launch_json_text(&json, "last", entry->last);
    }
    tddp_launch_json_close(&json, '{');
    return finish(&json, out);
}

tddp_status tddp_launch_state_write(const tddp_launch_state *state, tddp_bytes *out)
{
    tddp_launch_json json = {0};
    tddp_launch_json_open(&json, NULL, '{');
    write_fields(&json, state_fields, COUNT(state_fields), state);
    write_list(&json, "members", member_fields, COUNT(member_fields), state->members, state->count,
               sizeof *state->members);
    write_list(&json, "notes", note_fields, COUNT(note_fields), state->notes, state->note_count,
               sizeof *state->notes);
    write_list(&json, "traces", trace_fields, COUNT(trace_fields), state->traces,
               state->trace_count, sizeof *state->traces);
    tddp_launch_json_close(&json, '{');
    return finish(&json, out);
}

/* --- reading --------------------------------------------------------------------------------- */

/* What the items that follow belong to. */
typedef struct reading {
    const field *fields;
    size_t count;
    void *data;
    tddp_launch_entry *entry; /* one of the two */
    tddp_launch_state *state;
    bool bad;
    tddp_status status;
} reading;

static bool read_word(const char *const *words, size_t count, const char *text, unsigned *out)
{
    for (size_t i = 0; i < count; i++) {
        if (strcmp(words[i], text) == 0) {
            *out = (unsigned)i;
            return true;
        }
    }
    return false;
}

static bool read_value(const field *item, void *data, const char *text)
{
    void *at = (char *)data + item->offset;
    bool is_true = strcmp(text, "true") == 0;
    int64_t number;
    unsigned word;
    bool good = true;
    switch (item->kind) {
    case INT:
        good = tddp_parse_int(text, item->min, item->max, &number);
        *(int *)at = good ? (int)number : 0;
        break;
    case INT64:
        good = tddp_parse_int(text, INT64_MIN, INT64_MAX, &number);
        *(int64_t *)at = good ? number : 0;
        break;
    case BOOL:
        good = is_true || strcmp(text, "false") == 0;
        *(bool *)at = is_true;
        break;
    case TEXT:
        (void)snprintf(at, item->size, "%s", text);
        break;
    case STAGE:
        good = read_word(stages, COUNT(stages), text, &word);
        *(tddp_launch_stage *)at = good ? (tddp_launch_stage)word : TDDP_LAUNCH_STAGE_GATHERING;
        break;
    case HOW:
        good = read_word(hows, COUNT(hows), text, &word);
        *(tddp_launch_how *)at = good ? (tddp_launch_how)word : TDDP_LAUNCH_HOW_DONE;
        break;
    }
    return good;
}

static void on_scalar(void *context, const char *key, const char *text)
{
    reading *r = context;
    if (r->entry && strcmp(key, "last") == 0) {
        free(r->entry->last);
        r->entry->last = tddp_copy_string(text);
        r->status = r->entry->last ? r->status : TDDP_OUT_OF_MEMORY;
        return;
    }
    for (size_t i = 0; i < r->count; i++) {
        if (strcmp(r->fields[i].key, key) == 0) {
            r->bad |= !read_value(&r->fields[i], r->data, text);
        }
    }
}

/* One more item of a list, to which what follows belongs. */
static void begin_item(reading *r, void **items, int *count, size_t each, const field *fields,
                       size_t field_count)
{
    r->bad |= *count == TDDP_LAUNCH_MOST_MEMBERS;
    if (r->bad || r->status != TDDP_OK) {
        return;
    }
    r->status = tddp_launch_grow(items, *count, each);
    if (r->status == TDDP_OK) {
        r->data = (char *)*items + (size_t)(*count)++ * each;
        r->fields = fields;
        r->count = field_count;
    }
}

static void on_object(void *context, const char *key)
{
    reading *r = context;
    tddp_launch_state *state = r->state;
    void *items;
    if (state && strcmp(key, "members") == 0) {
        items = state->members;
        begin_item(r, &items, &state->count, sizeof *state->members, member_fields,
                   COUNT(member_fields));
        state->members = items;
    } else if (state && strcmp(key, "notes") == 0) {
        items = state->notes;
        begin_item(r, &items, &state->note_count, sizeof *state->notes, note_fields,
                   COUNT(note_fields));
        state->notes = items;
    } else if (state && strcmp(key, "traces") == 0) {
        items = state->traces;
        begin_item(r, &items, &state->trace_count, sizeof *state->traces, trace_fields,
                   COUNT(trace_fields));
        state->traces = items;
    } else {
        r->bad |= key[0] != '\0'; /* the outermost one */
    }
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
    *out = (tddp_launch_entry){.local_size = 1,
                               .node_rank = -1,
                               .round = -1,
                               .rank = -1,
                               .ready = -1,
                               .done = -1,
                               .failed = -1,
                               .master_round = -1};
    reading r = {.fields = entry_fields, .count = COUNT(entry_fields), .data = out, .entry = out};
    tddp_status status = read_all(&r, data, size, "a node's entry");
    if (status == TDDP_OK && out->id[0] == '\0') {
        status = tddp_fail(TDDP_PROTOCOL, "a node's entry without an id");
    }
    if (status != TDDP_OK) {
        tddp_launch_entry_free(out);
    }
    return status;
}

tddp_status tddp_launch_state_read(const char *data, size_t size, tddp_launch_state *out)
{
    *out = (tddp_launch_state){.round = -1, .over = -1};
    reading r = {.fields = state_fields, .count = COUNT(state_fields), .data = out, .state = out};
    tddp_status status = read_all(&r, data, size, "the document");
    if (status != TDDP_OK) {
        tddp_launch_state_free(out);
    }
    return status;
}

void tddp_launch_entry_free(tddp_launch_entry *entry)
{
    free(entry->last);
    *entry = (tddp_launch_entry){0};
}

void tddp_launch_state_free(tddp_launch_state *state)
{
    free(state->members);
    free(state->notes);
    free(state->traces);
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
