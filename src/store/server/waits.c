/*
 * Which clients wait for a key, or for a barrier's: lists by key, so that a SET visits only the
 * clients that want this key. Server thread only. Invariant: a key has an entry in the map of waits
 * (or of barriers) exactly while a client waits for it, and client->missing is the number of the
 * client's waits with an entry.
 */
#include <stdint.h>
#include <stdlib.h>

#include "store/server/server.h"

tddp_status tddp_server_wait_for(tddp_store_map *map, tddp_server_client *client, tddp_slice key)
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
    wait->next_of_client = client->waits;
    client->waits = wait;
    client->missing++;
    client->waiting_bytes += key.size;
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

void tddp_server_wait_cancel(tddp_server_client *client)
{
    while (client->waits) {
        tddp_server_wait *wait = client->waits;
        client->waits = wait->next_of_client;
        if (wait->entry) {
            detach(wait);
        }
        free(wait);
    }
    client->missing = 0;
    client->waiting_bytes = 0;
    client->watch_waits = false;
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
