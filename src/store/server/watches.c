/*
 * Which clients watch a prefix: one each, and whether something that begins with it has changed
 * since the client was notified. Server thread only. A change only leaves a mark; what has changed
 * is sent once the round's requests are executed, so that several changes make one answer, and what
 * nobody watches costs nothing. Invariant: a client is in the server's list exactly while it
 * watches.
 */
#include <endian.h>
#include <string.h>

#include "store/server/server.h"

static bool concerns(const tddp_server_client *client, tddp_slice key)
{
    size_t size = client->prefix.size;
    return key.size >= size && (size == 0 || memcmp(key.data, client->prefix.data, size) == 0);
}

void tddp_server_note_change(tddp_store_server *server, tddp_slice key)
{
    tddp_server_client *each;
    LIST_FOREACH(each, &server->watching, of_watching)
    {
        if (!each->changed && concerns(each, key)) {
            each->changed = true;
            server->changed = true;
        }
    }
}

static tddp_status put_entries(const tddp_store_server *server, tddp_server_client *client)
{
    uint64_t count = 0;
    tddp_bytes *out = &client->out;
    size_t start = out->size;
    tddp_status status = tddp_wire_put_byte(out, TDDP_WIRE_STOP_WAITING);
    status = status ? status : tddp_wire_put_u64(out, 0);
    const tddp_store_entry *entry = tddp_store_map_next(&server->values, NULL);
    while (entry && status == TDDP_OK) {
        if (concerns(client, tddp_store_entry_key(entry))) {
            status = tddp_server_put_part(server, client, tddp_store_entry_key(entry));
            status = status ? status
                            : tddp_server_put_part(server, client, tddp_store_entry_value(entry));
            count++;
        }
        entry = tddp_store_map_next(&server->values, entry);
    }
    if (status) {
        out->size = start; /* no half answers */
        return status;
    }
    count = htole64(count);
    memcpy(out->data + start + 1, &count, sizeof count);
    client->changed = false;
    client->watch_waits = false;
    return TDDP_OK;
}

tddp_status tddp_server_watch(tddp_store_server *server, tddp_server_client *client,
                              tddp_slice prefix, bool at_once)
{
    tddp_server_wait_cancel(client);
    bool same = client->watching && client->prefix.size == prefix.size && concerns(client, prefix);
    if (same && !at_once && !client->changed) {
        client->watch_waits = true;
        return TDDP_OK;
    }
    if (!client->watching) {
        LIST_INSERT_HEAD(&server->watching, client, of_watching);
        client->watching = true;
    }
    if (!same) {
        client->prefix.size = 0;
        tddp_status status = tddp_bytes_append(&client->prefix, prefix.data, prefix.size);
        if (status) {
            return status;
        }
    }
    return put_entries(server, client);
}

void tddp_server_watch_end(tddp_server_client *client)
{
    if (client->watching) {
        LIST_REMOVE(client, of_watching);
    }
    client->watching = false;
    tddp_bytes_free(&client->prefix);
}

static void answer_all(tddp_store_server *server)
{
    for (tddp_server_client *each = LIST_FIRST(&server->watching), *next; each; each = next) {
        next = LIST_NEXT(each, of_watching);
        if (!each->watch_waits || !each->changed) {
            continue;
        }
        if (put_entries(server, each) == TDDP_OK) {
            tddp_server_client_unsent(server, each);
            tddp_server_count_buffers(server, each);
        } else {
            tddp_server_client_drop(server, each, tddp_error_message());
        }
    }
}

/* Those who cannot be sent anything are dropped, and their keys with them: which is a change. */
void tddp_server_answer_watches(tddp_store_server *server)
{
    while (server->changed && !tddp_server_is_full(server)) {
        server->changed = false;
        answer_all(server);
        tddp_server_flush_unsent(server);
    }
}
