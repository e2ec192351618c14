/* What a store is: a list of keys with their values, and of what queues hold. */
#ifndef TDDP_STORE_MODEL_H
#define TDDP_STORE_MODEL_H

#include "kinds.h"

typedef struct item {
    char key[64];
    tddp_bytes value;
    bool queued; /* one of a queue's, which are in order; else the value of the key */
    int owner;   /* the client with which the key goes, or -1 */
} item;

/* What a client watches. */
typedef struct view {
    bool on;
    char prefix[64];
    bool changed;
} view;

enum { MODEL_CLIENTS = 4 };

typedef struct model {
    item *items;
    size_t count;
    size_t room;
    view views[MODEL_CLIENTS];
} model;

static inline void note_change(model *m, const char *key)
{
    for (int i = 0; i < MODEL_CLIENTS; i++) {
        view *v = &m->views[i];
        v->changed = v->changed || strncmp(key, v->prefix, strlen(v->prefix)) == 0;
    }
}

static inline item *find(const model *m, const char *key, bool queued)
{
    for (size_t i = 0; i < m->count; i++) {
        if (m->items[i].queued == queued && strcmp(m->items[i].key, key) == 0) {
            return &m->items[i];
        }
    }
    return NULL;
}

static inline void take_out(model *m, const item *it)
{
    size_t at = (size_t)(it - m->items);
    if (!it->queued) {
        note_change(m, it->key);
    }
    tddp_bytes_free(&m->items[at].value);
    memmove(&m->items[at], &m->items[at + 1], (m->count - at - 1) * sizeof *it);
    m->count--;
}

static inline item *put_in(model *m, const char *key, bool queued)
{
    if (m->count == m->room) {
        m->room = m->room ? 2 * m->room : 64;
        m->items = realloc(m->items, m->room * sizeof *m->items);
        CHECK(m->items);
    }
    item *it = &m->items[m->count++];
    *it = (item){.queued = queued, .owner = -1};
    snprintf(it->key, sizeof it->key, "%s", key);
    return it;
}

static inline tddp_slice value_in(const item *it)
{
    return it ? (tddp_slice){it->value.data, it->value.size} : (tddp_slice){"", 0};
}

static inline void put_value(model *m, const char *key, tddp_slice value, bool append)
{
    item *it = find(m, key, false);
    bool same =
        it &&
        (append ? value.size == 0
                : it->value.size == value.size &&
                      (value.size == 0 || memcmp(it->value.data, value.data, value.size) == 0));
    it = it ? it : put_in(m, key, false);
    it->owner = -1;
    if (!same) {
        it->value.size = append ? it->value.size : 0;
        CHECK_OK(tddp_bytes_append(&it->value, value.data, value.size));
        note_change(m, key);
    }
}

/* The client's connection has ended. */
static inline void end_connection(model *m, int client)
{
    for (size_t i = m->count; i-- > 0;) {
        if (!m->items[i].queued && m->items[i].owner == client) {
            take_out(m, &m->items[i]);
        }
    }
    m->views[client] = (view){.on = false};
}

static inline bool exists(const model *m, const char *key)
{
    return find(m, key, false) || find(m, key, true);
}

static inline int64_t count_of(const model *m, const char *key, bool queued)
{
    int64_t count = 0;
    for (size_t i = 0; i < m->count; i++) {
        bool fits = !key || strcmp(m->items[i].key, key) == 0;
        count += m->items[i].queued == queued && fits;
    }
    return count;
}

/* As strtoll reads it; false if it is none. */
static inline bool number_of(const item *it, int64_t *out)
{
    char text[32];
    size_t size = it->value.size < sizeof text ? it->value.size : sizeof text - 1;
    char *end;
    if (size) {
        memcpy(text, it->value.data, size);
    }
    text[size] = '\0';
    *out = strtoll(text, &end, 10);
    return end != text;
}

static inline void clear(model *m)
{
    for (size_t i = 0; i < m->count; i++) {
        tddp_bytes_free(&m->items[i].value);
    }
    free(m->items);
    *m = (model){0};
}

#endif
