/*
 * Limits the memory of all clients' buffers together. Server thread only. Invariant: in_bytes and
 * out_bytes of the server are the sums of the clients', which lag behind a client's buffers only
 * while it is being served.
 *
 * Half of the limit is for input: requests half received, and keys that clients wait for or
 * prefixes that they watch. Beyond it the client with the largest share is dropped, since an
 * attacker looks like any other. The other half is for answers: beyond it requests are held back,
 * since clients that read make room, and those that do not are dropped in time (admit.c). Requests
 * with long answers are held back from a quarter on, so that clients that do not read cannot block
 * barriers of the others.
 */
#include <stdio.h>

#include "store/server/server.h"

enum { LONG_ANSWER_BYTES = 64 << 10 };

void tddp_server_count_buffers(tddp_store_server *server, tddp_server_client *client)
{
    size_t waits = client->missing * (sizeof(tddp_server_wait) + TDDP_STORE_ENTRY_BYTES);
    size_t in = client->in.capacity + waits + client->waiting_bytes + client->prefix.capacity;
    size_t out = client->out.capacity;
    if (client->dropped) {
        in = out = 0;
    }
    server->in_bytes += in - client->in_bytes;
    server->out_bytes += out - client->out_bytes;
    client->in_bytes = in;
    client->out_bytes = out;
}

static tddp_server_client *largest(tddp_store_server *server)
{
    tddp_server_client *found = NULL;
    tddp_server_client *each;
    LIST_FOREACH(each, &server->clients, of_all)
    {
        if (!each->dropped && (!found || each->in_bytes > found->in_bytes)) {
            found = each;
        }
    }
    return found;
}

void tddp_server_limit_input(tddp_store_server *server)
{
    while (server->in_bytes > server->most_buffered / 2) {
        tddp_server_client *client = largest(server);
        if (!client) {
            return;
        }
        char why[160];
        snprintf(why, sizeof why,
                 "%zu bytes of its requests are held, the most of all clients, who have %llu of "
                 "%llu (TDDP_STORE_MAX_BUFFERED_BYTES)",
                 client->in_bytes, (unsigned long long)server->in_bytes,
                 (unsigned long long)(server->most_buffered / 2));
        tddp_server_client_drop(server, client, why);
    }
}

bool tddp_server_is_full(const tddp_store_server *server)
{
    return server->out_bytes > server->most_buffered / 2;
}

static uint64_t bytes_of(const tddp_store_server *server, tddp_slice key)
{
    const tddp_store_entry *entry = tddp_store_map_find(&server->values, key);
    return entry ? entry->value.size : 0;
}

/* Of those kinds whose answers may be long. */
static uint64_t answer_bytes(const tddp_store_server *server, const tddp_wire_request *request)
{
    tddp_slice list = request->list;
    uint64_t bytes = 0;
    switch (request->kind) {
    case TDDP_WIRE_GET:
        return bytes_of(server, request->key);
    case TDDP_WIRE_MULTI_GET:
        for (uint64_t i = 0; i < request->count; i++) {
            bytes += bytes_of(server, tddp_wire_next(&list));
        }
        return bytes;
    case TDDP_WIRE_LIST_KEYS:
    case TDDP_WIRE_WATCH:
        return server->values.bytes;
    default:
        return 0;
    }
}

bool tddp_server_holds(tddp_store_server *server, const tddp_wire_request *request)
{
    uint64_t out = server->out_bytes;
    bool holds = tddp_server_is_full(server) || (out > server->most_buffered / 4 &&
                                                 answer_bytes(server, request) > LONG_ANSWER_BYTES);
    if (holds) {
        server->held_at = out;
    }
    return holds;
}

void tddp_server_resume(tddp_store_server *server)
{
    if (server->held_at == 0 || server->out_bytes >= server->held_at) {
        return;
    }
    server->held_at = 0;
    tddp_server_client *each;
    LIST_FOREACH(each, &server->clients, of_all)
    {
        if (!each->dropped && each->in.size && each->in.size >= each->in_needed) {
            tddp_server_client_unsent(server, each);
        }
    }
    tddp_server_flush_unsent(server);
}
