/*
 * Keys that go with their client. Server thread only. A key expires when nothing has come from its
 * client for its limit, and then again for a moment in which this thread turned: what the sockets
 * hold is read first, and the time in which the process was stopped, with or without its clients,
 * counts for nothing. Invariant: the `data` of a value is its record, which is in its client's
 * list.
 */
#include <stdlib.h>
#include <sys/epoll.h>

#include "store/server/server.h"

static const int64_t moment_ns = 100 * TDDP_NS_PER_MS;

/* What a record adds to its key's bytes. */
enum { RECORD_BYTES = sizeof(tddp_server_ephemeral) + 16 };

void tddp_server_disown(tddp_store_server *server, tddp_store_entry *entry)
{
    tddp_server_ephemeral *own = entry->data;
    if (!own) {
        return;
    }
    LIST_REMOVE(own, of_client);
    server->values.bytes -= RECORD_BYTES;
    entry->data = NULL;
    free(own);
}

/* No key may expire earlier than the server looks. */
static void look_at(tddp_store_server *server, int64_t when_ns)
{
    if (server->expire_ns == 0 || when_ns < server->expire_ns) {
        server->expire_ns = when_ns;
    }
}

tddp_status tddp_server_own(tddp_store_server *server, tddp_server_client *client,
                            tddp_store_entry *entry, int64_t limit_ms)
{
    tddp_server_ephemeral *own = tddp_alloc(sizeof *own);
    if (!own) {
        return TDDP_OUT_OF_MEMORY;
    }
    tddp_server_disown(server, entry);
    own->entry = entry;
    own->client = client;
    own->limit_ns = limit_ms > 0 && limit_ms < INT32_MAX ? limit_ms * TDDP_NS_PER_MS : 0;
    LIST_INSERT_HEAD(&client->ephemerals, own, of_client);
    entry->data = own;
    server->values.bytes += RECORD_BYTES;
    tddp_server_note_received(client);
    if (own->limit_ns) {
        look_at(server, client->received_ns + own->limit_ns);
    }
    return TDDP_OK;
}

void tddp_server_note_received(tddp_server_client *client)
{
    client->overdue = false;
    client->received_ns = LIST_EMPTY(&client->ephemerals) ? 0 : tddp_now_ns();
}

void tddp_server_delete_owned(tddp_store_server *server, tddp_server_client *client)
{
    while (!LIST_EMPTY(&client->ephemerals)) {
        tddp_server_delete(server, LIST_FIRST(&client->ephemerals)->entry);
    }
}

/* `confirmed`: who is overdue was so a moment ago, and the server has turned since. */
static void expire_of(tddp_store_server *server, tddp_server_client *client, int64_t now,
                      bool confirmed)
{
    bool overdue = false;
    if (!(client->events & EPOLLIN)) {
        tddp_server_note_received(client); /* it is not read from just now */
    }
    for (tddp_server_ephemeral *own = LIST_FIRST(&client->ephemerals), *next; own; own = next) {
        next = LIST_NEXT(own, of_client);
        int64_t end = client->received_ns + own->limit_ns;
        if (own->limit_ns == 0) {
            continue;
        }
        if (end > now) {
            look_at(server, end);
        } else if (client->overdue && confirmed) {
            tddp_server_delete(server, own->entry);
        } else {
            overdue = true;
            look_at(server, now + moment_ns);
        }
    }
    client->overdue = overdue;
}

void tddp_server_expire(tddp_store_server *server)
{
    int64_t now = server->expire_ns ? tddp_now_ns() : 0;
    if (server->expire_ns == 0 || now < server->expire_ns) {
        return;
    }
    bool confirmed = now - server->expire_ns < moment_ns;
    server->expire_ns = 0;
    tddp_server_client *each;
    LIST_FOREACH(each, &server->clients, of_all)
    {
        expire_of(server, each, now, confirmed);
    }
}
