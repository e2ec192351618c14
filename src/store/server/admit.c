/*
 * Who is let in, and how long a client may owe the rest of a message. Server thread only. The list
 * of late clients is ordered by its moments, since all have the same patience: looking at its head
 * is enough. Invariant: a client is in the list exactly while its late_ns is not 0.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "store/server/server.h"

/* --- the secret ------------------------------------------------------------------------------ */

tddp_status tddp_server_may_send(tddp_store_server *server, tddp_server_client *client,
                                 unsigned char opcode)
{
    if (!server->secret) {
        return TDDP_OK;
    }
    if (client->dialect == &tddp_wire_1_13) {
        return tddp_fail(TDDP_STORE, "it speaks the store protocol of PyTorch 1.13, which cannot "
                                     "prove that it knows the secret that is set here "
                                     "(TDDP_STORE_SECRET)");
    }
    if (opcode == TDDP_WIRE_VALIDATE || opcode == TDDP_WIRE_AUTH_OPCODE ||
        opcode == TDDP_WIRE_AUTH_OPCODE + 1) {
        return TDDP_OK;
    }
    if (opcode == TDDP_WIRE_PING) {
        tddp_status status = tddp_wire_put_u32(&client->out, TDDP_AUTH_WANTED);
        if (status) {
            return status;
        }
    }
    return tddp_fail(TDDP_STORE, "it did not prove that it knows the secret that is set here "
                                 "(TDDP_STORE_SECRET)");
}

static tddp_status refuse(tddp_server_client *client, const char *why)
{
    tddp_status status = tddp_wire_put_byte(&client->out, TDDP_AUTH_REFUSED);
    return status ? status : tddp_fail(TDDP_STORE, "%s", why);
}

static tddp_status grant(tddp_server_client *client, const unsigned char bytes[32])
{
    tddp_status status = tddp_bytes_reserve(&client->out, 1 + TDDP_WIRE_AUTH_BYTES);
    status = status ? status : tddp_wire_put_byte(&client->out, TDDP_AUTH_GRANTED);
    return status ? status : tddp_bytes_append(&client->out, bytes, TDDP_WIRE_AUTH_BYTES);
}

static tddp_status begin(tddp_server_client *client, const char *theirs)
{
    if (client->auth) {
        return tddp_fail(TDDP_PROTOCOL, "it began to prove its secret twice");
    }
    client->auth = tddp_alloc(sizeof *client->auth);
    if (!client->auth) {
        return TDDP_OUT_OF_MEMORY;
    }
    memcpy(client->auth->client, theirs, TDDP_WIRE_AUTH_BYTES);
    tddp_status status = tddp_auth_random(client->auth->server);
    return status ? status : grant(client, client->auth->server);
}

static tddp_status prove(const char *secret, tddp_server_client *client, const char *theirs)
{
    unsigned char proof[TDDP_WIRE_AUTH_BYTES];
    if (!client->auth) {
        return tddp_fail(TDDP_PROTOCOL, "it proved a secret that it was not asked for");
    }
    tddp_auth_proof(secret, false, client->auth, proof);
    if (!tddp_equal_bytes(proof, theirs, sizeof proof)) {
        return refuse(client, "its secret is not the one that is set here (TDDP_STORE_SECRET)");
    }
    tddp_auth_proof(secret, true, client->auth, proof);
    free(client->auth);
    client->auth = NULL;
    client->admitted = true;
    return grant(client, proof);
}

tddp_status tddp_server_authenticate(tddp_store_server *server, tddp_server_client *client,
                                     const tddp_wire_request *request)
{
    if (client->admitted || !client->validated) {
        return tddp_fail(TDDP_PROTOCOL, "it proves a secret out of turn");
    }
    if (!server->secret) {
        return refuse(client, "it knows a secret, and none is set here (TDDP_STORE_SECRET)");
    }
    tddp_server_client_unsent(server, client);
    return request->kind == TDDP_WIRE_AUTH_BEGIN
               ? begin(client, request->values[0].data)
               : prove(server->secret, client, request->values[0].data);
}

/* --- the first message ----------------------------------------------------------------------- */

static tddp_slice host_of(const tddp_net_address *address)
{
    return address->of.any.sa_family == AF_INET6
               ? (tddp_slice){(const char *)&address->of.v6.sin6_addr, 16}
               : (tddp_slice){(const char *)&address->of.v4.sin_addr, 4};
}

tddp_status tddp_server_admit(tddp_store_server *server, tddp_server_client *client,
                              tddp_wire_kind kind)
{
    tddp_store_entry *host;
    if (server->secret || kind == TDDP_WIRE_VALIDATE) {
        return TDDP_OK; /* the proof, or a first request, is still to come */
    }
    if (client->dialect == &tddp_wire_1_13) {
        tddp_status status =
            tddp_store_map_obtain(&server->old_hosts, host_of(&client->address), &host);
        if (status) {
            return status;
        }
        host->data = (void *)((uintptr_t)host->data + 1);
    }
    client->admitted = true;
    return TDDP_OK;
}

void tddp_server_forget(tddp_store_server *server, tddp_server_client *client)
{
    tddp_server_in_time(server, client);
    free(client->auth);
    client->auth = NULL;
    if (client->admitted && client->dialect == &tddp_wire_1_13) {
        tddp_store_entry *host = tddp_store_map_find(&server->old_hosts, host_of(&client->address));
        host->data = (void *)((uintptr_t)host->data - 1);
        if (!host->data) {
            tddp_store_map_remove(&server->old_hosts, host);
        }
    }
}

/* --- patience -------------------------------------------------------------------------------- */

void tddp_server_in_time(tddp_store_server *server, tddp_server_client *client)
{
    if (!client->late_ns) {
        return;
    }
    if (client->previous_late) {
        client->previous_late->next_late = client->next_late;
    } else {
        server->late = client->next_late;
    }
    if (client->next_late) {
        client->next_late->previous_late = client->previous_late;
    } else {
        server->last_late = client->previous_late;
    }
    client->late_ns = 0;
}

void tddp_server_late(tddp_store_server *server, tddp_server_client *client)
{
    tddp_server_in_time(server, client);
    client->late_ns = tddp_deadline_after_ms(server->patience_ms);
    client->next_late = NULL;
    client->previous_late = server->last_late;
    if (server->last_late) {
        server->last_late->next_late = client;
    } else {
        server->late = client;
    }
    server->last_late = client;
}

static void drop_late(tddp_store_server *server, tddp_server_client *client)
{
    char why[160];
    double seconds = (double)server->patience_ms / 1000;
    if (!client->heard) {
        snprintf(why, sizeof why, "it said nothing for %g s (TDDP_STORE_PATIENCE_MS)", seconds);
    } else if (!client->admitted) {
        snprintf(why, sizeof why,
                 "its first message is not whole after %g s "
                 "(TDDP_STORE_PATIENCE_MS)",
                 seconds);
    } else {
        snprintf(why, sizeof why,
                 "%zu bytes of a message of %zu or more came, then nothing for "
                 "%g s (TDDP_STORE_PATIENCE_MS)",
                 client->in.size, client->in_needed, seconds);
    }
    tddp_server_client_drop(server, client, why);
}

void tddp_server_late_drop(tddp_store_server *server)
{
    int64_t now = server->late ? tddp_now_ns() : 0;
    while (server->late && server->late->late_ns <= now) {
        tddp_server_client *client = server->late;
        /* Each client of 1.13 has a second connection that is for events and says nothing. */
        if (!client->heard && !server->secret &&
            tddp_store_map_find(&server->old_hosts, host_of(&client->address))) {
            tddp_server_late(server, client);
        } else {
            drop_late(server, client);
        }
    }
}
