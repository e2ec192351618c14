/*
 * Which clients wait for a key, and which watch one. Both are lists by key, so that a SET visits
 * only the clients that want this key. Server thread only. Invariant: a key has an entry in the map
 * of waits (or of watches) exactly while a client waits for it (or watches it), and client->missing
 * is the number of the client's waits with an entry.
 */
#include <stdint.h>
#include <stdlib.h>

#include "store/server/server.h"

/* The most events that may wait to be sent to a client, in times the largest request. */
enum { EVENT_REQUESTS = 2 };

/* Hangs a new wait into its key's list and at the head of its client's. */
static tddp_status attach(tddp_store_map *map, tddp_server_client *client, tddp_slice key,
                          tddp_server_wait **of_client, size_t *attached)
{
    tddp_server_wait *wait = tddp_alloc(sizeof *wait);
    if (!wait) {
        return TDDP_OUT_OF_MEMORY;
    }
    tddp_status status = tddp_store_map_obtain(map, key, &wait->entry);
    if (status) {
        free(wait);
        return status;
    }
    wait->map = map;
    wait->client = client;
    wait->next = wait->entry->data;
    if (wait->next) {
        wait->next->previous = wait;
    }
    wait->entry->data = wait;
    wait->next_of_client = *of_client;
    *of_client = wait;
    ++*attached;
    return TDDP_OK;
}

/* Takes a wait out of its key's list; it stays in its client's. */
static void detach(tddp_server_wait *wait)
{
    if (wait->previous) {
        wait->previous->next = wait->next;
    } else {
        wait->entry->data = wait->next;
    }
    if (wait->next) {
        wait->next->previous = wait->previous;
    }
    if (!wait->entry->data) {
        tddp_store_map_remove(wait->map, wait->entry);
    }
    wait->entry = NULL;
}

static void free_all(tddp_server_wait **of_client, size_t *attached)
{
    while (*of_client) {
        tddp_server_wait *wait = *of_client;
        *of_client = wait->next_of_client;
        if (wait->entry) {
            detach(wait);
            --*attached;
        }
        free(wait);
    }
}

tddp_status tddp_server_wait_for(tddp_store_map *map, tddp_server_client *client, tddp_slice key)
{
    client->waiting_bytes += key.size;
    return attach(map, client, key, &client->waits, &client->missing);
}

void tddp_server_wait_cancel(tddp_server_client *client)
{
    free_all(&client->waits, &client->missing);
    client->waiting_bytes = 0;
}

static void answer(tddp_store_server *server, tddp_server_client *client)
{
    tddp_server_wait_cancel(client);
    if (tddp_wire_put_byte(&client->out, TDDP_WIRE_STOP_WAITING) == TDDP_OK) {
        tddp_server_client_unsent(server, client);
    } else {
        tddp_server_client_drop(server, client, tddp_error_message());
    }
}

void tddp_server_wake(tddp_store_server *server, tddp_store_map *map, tddp_slice key, size_t limit)
{
    tddp_store_entry *entry = tddp_store_map_find(map, key);
    tddp_server_wait *wait = entry ? entry->data : NULL;
    while (wait && limit-- > 0) {
        tddp_server_wait *next = wait->next;
        tddp_server_client *client = wait->client;
        detach(wait);
        if (--client->missing == 0) {
            /* Frees the client's waits: all are fulfilled, so `next` is none of them. */
            answer(server, client);
        }
        wait = next;
    }
}

tddp_status tddp_server_watch(tddp_store_server *server, tddp_server_client *client, tddp_slice key)
{
    const tddp_store_entry *entry = tddp_store_map_find(&server->watches, key);
    for (const tddp_server_wait *w = entry ? entry->data : NULL; w; w = w->next) {
        if (w->client == client) {
            return TDDP_OK;
        }
    }
    if (client->watching == server->limits.keys ||
        client->watching_bytes + key.size > server->limits.request_bytes) {
        return tddp_fail(TDDP_STORE, "it watches more than %zu keys (TDDP_STORE_MAX_KEYS)",
                         client->watching);
    }
    client->watching_bytes += key.size; /* there is no way to stop watching but to leave */
    return attach(&server->watches, client, key, &client->watches, &client->watching);
}

void tddp_server_watch_cancel(tddp_server_client *client)
{
    free_all(&client->watches, &client->watching);
}

static tddp_status put_event(tddp_server_change *change, tddp_server_client *client,
                             tddp_wire_event kind, tddp_slice now)
{
    uint64_t most = EVENT_REQUESTS * change->server->limits.request_bytes;
    tddp_slice old = {change->old.data, change->old.size};
    uint64_t size = 1 + 3 * 8 + change->key.size + old.size + now.size;
    /* Nothing else holds events back: a change must not wait for those who watch it. */
    if (client->out.size - client->out_sent + size > most || tddp_server_is_full(change->server)) {
        return tddp_fail(TDDP_STORE, "more than %llu bytes of events wait for it",
                         (unsigned long long)most);
    }
    tddp_status status = tddp_bytes_reserve(&client->out, (size_t)size);
    if (status) {
        return status;
    }
    status = tddp_wire_put_byte(&client->out, (unsigned char)kind); /* all have their room */
    status = status ? status : tddp_wire_put_string(&client->out, change->key);
    status = status ? status : tddp_wire_put_string(&client->out, old);
    status = status ? status : tddp_wire_put_string(&client->out, now);
    tddp_server_count_buffers(change->server, client);
    return status;
}

static void notify(tddp_server_change *change, const tddp_store_entry *present)
{
    tddp_wire_event kind = !present          ? TDDP_WIRE_KEY_DELETED
                           : change->existed ? TDDP_WIRE_KEY_UPDATED
                                             : TDDP_WIRE_KEY_CREATED;
    tddp_slice now = present ? tddp_store_entry_value(present) : (tddp_slice){"", 0};
    tddp_store_server *server = change->server;
    tddp_store_entry *entry = tddp_store_map_find(&server->watches, change->key);
    tddp_server_wait *watch = entry ? entry->data : NULL;
    while (watch) {
        /* Dropping a client frees its watches, and it has only one of this key. */
        tddp_server_wait *next = watch->next;
        tddp_server_client *client = watch->client;
        if (put_event(change, client, kind, now) == TDDP_OK) {
            tddp_server_client_unsent(server, client);
        } else {
            tddp_server_client_drop(server, client, tddp_error_message());
        }
        watch = next;
    }
}

tddp_status tddp_server_check_total(const tddp_store_server *server, const tddp_store_map *values,
                                    tddp_slice key, size_t bytes)
{
    uint64_t total = server->values.bytes + server->queues.bytes;
    if (total + TDDP_STORE_ENTRY_BYTES + key.size + bytes <= server->most_bytes) {
        return TDDP_OK;
    }
    const tddp_store_entry *entry = values ? tddp_store_map_find(values, key) : NULL;
    size_t present = entry ? entry->value.size : 0;
    if (entry && (bytes <= present || total + bytes - present <= server->most_bytes)) {
        return TDDP_OK;
    }
    return tddp_fail(TDDP_STORE,
                     "a value of %zu bytes, where %llu of at most %llu are stored already "
                     "(TDDP_STORE_MAX_TOTAL_BYTES)",
                     bytes, (unsigned long long)total, (unsigned long long)server->most_bytes);
}

tddp_status tddp_server_change_begin(tddp_store_server *server, tddp_slice key, size_t bytes,
                                     tddp_server_change *out)
{
    *out = (tddp_server_change){.server = server, .key = key};
    tddp_status status = tddp_server_check_total(server, &server->values, key, bytes);
    if (status) {
        return status;
    }
    if (server->watches.count == 0 || !tddp_store_map_find(&server->watches, key)) {
        return TDDP_OK;
    }
    out->watched = true;
    const tddp_store_entry *entry = tddp_store_map_find(&server->values, key);
    if (!entry) {
        return TDDP_OK;
    }
    out->existed = true;
    return tddp_bytes_append(&out->old, entry->value.data, entry->value.size);
}

tddp_status tddp_server_change_end(tddp_server_change *change, tddp_status status)
{
    tddp_store_server *server = change->server;
    if (status == TDDP_OK) {
        const tddp_store_entry *present = tddp_store_map_find(&server->values, change->key);
        if (present) {
            tddp_server_wake(server, &server->waits, change->key, SIZE_MAX);
        }
        if (change->watched && (present || change->existed)) {
            notify(change, present);
        }
    }
    tddp_bytes_free(&change->old);
    return status;
}
