/*
 * Admits clients, and drops those that do not complete a message, or do not read their answers, in
 * time. Server thread only. The list of late clients is ordered by deadline, since all periods have
 * the same length: checking its head is enough. Invariant: a client is in the list exactly while
 * its late_ns is not 0; pending_count is the number of clients that are not admitted.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "store/server/server.h"

/* The least rate of a client that has to send or read something. */
enum { LEAST_BYTES_A_SECOND = 1024 };

static void let_in(tddp_store_server *server, tddp_server_client *client)
{
    client->admitted = true;
    server->pending_count--;
}

/* --- the secret ------------------------------------------------------------------------------ */

tddp_status tddp_server_may_send(tddp_store_server *server, tddp_server_client *client,
                                 unsigned char opcode)
{
    if (!server->secret) {
        return TDDP_OK;
    }
    if (client->dialect == &tddp_wire_1_13) {
        return tddp_fail(TDDP_STORE, "it uses the store protocol of PyTorch 1.13, which cannot "
                                     "prove that it knows the secret that is set here "
                                     "(TDDP_STORE_SECRET)");
    }
    tddp_wire_kind kind = tddp_wire_kind_of(client->dialect, opcode);
    if (kind == TDDP_WIRE_VALIDATE || kind == TDDP_WIRE_AUTH_BEGIN ||
        kind == TDDP_WIRE_AUTH_PROVE) {
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

static tddp_status prove(tddp_store_server *server, tddp_server_client *client, const char *theirs)
{
    const char *secret = server->secret;
    unsigned char proof[TDDP_WIRE_AUTH_BYTES];
    if (!client->auth) {
        return tddp_fail(TDDP_PROTOCOL, "it sent an unexpected proof of a secret");
    }
    tddp_auth_proof(secret, false, client->auth, proof);
    if (!tddp_equal_bytes(proof, theirs, sizeof proof)) {
        return refuse(client, "its secret is not the one that is set here (TDDP_STORE_SECRET)");
    }
    tddp_auth_proof(secret, true, client->auth, proof);
    free(client->auth);
    client->auth = NULL;
    let_in(server, client);
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
    return request->kind == TDDP_WIRE_AUTH_BEGIN ? begin(client, request->values[0].data)
                                                 : prove(server, client, request->values[0].data);
}

/* --- the first message ----------------------------------------------------------------------- */

void tddp_server_admit(tddp_store_server *server, tddp_server_client *client, tddp_wire_kind kind)
{
    /* Else the proof, or a first request, has not arrived yet. */
    if (!server->secret && kind != TDDP_WIRE_VALIDATE) {
        server->old_clients += client->dialect == &tddp_wire_1_13;
        let_in(server, client);
    }
}

void tddp_server_forget(tddp_store_server *server, tddp_server_client *client)
{
    tddp_server_in_time(server, client);
    tddp_server_count_buffers(server, client);
    server->pending_count -= !client->admitted;
    server->old_clients -= client->admitted && client->dialect == &tddp_wire_1_13;
    free(client->auth);
    client->auth = NULL;
}

/* --- time limits ----------------------------------------------------------------------------- */

void tddp_server_in_time(tddp_store_server *server, tddp_server_client *client)
{
    if (client->late_ns) {
        TAILQ_REMOVE(&server->late, client, of_late);
    }
    client->late_ns = 0;
}

void tddp_server_late(tddp_store_server *server, tddp_server_client *client)
{
    tddp_server_in_time(server, client);
    client->moved = 0;
    client->late_ns = tddp_deadline_after_ms(server->client_timeout_ms);
    TAILQ_INSERT_TAIL(&server->late, client, of_late);
}

/* Answers that were made but not yet offered to the connection are none that it owes reading. */
static bool owes_reading(const tddp_server_client *client)
{
    return client->out.size > 0 && !client->unsent;
}

static bool owes_bytes(const tddp_server_client *client)
{
    return client->in.size > 0 && client->in.size < client->in_needed;
}

void tddp_server_note_progress(tddp_store_server *server, tddp_server_client *client,
                               bool completed)
{
    /* The first message has a single period, which progress does not extend. */
    if (!client->admitted || client->dropped) {
        return;
    }
    bool reading = owes_reading(client);
    if (!reading && !owes_bytes(client)) {
        tddp_server_in_time(server, client);
    } else if (!client->late_ns || (completed && !reading)) {
        tddp_server_late(server, client);
    }
}

static void drop_late(tddp_store_server *server, tddp_server_client *client)
{
    char what[112];
    char why[176];
    if (!client->received) {
        snprintf(what, sizeof what, "it sent nothing for");
    } else if (!client->admitted) {
        snprintf(what, sizeof what, "its first message is not complete after");
    } else if (owes_reading(client)) {
        snprintf(what, sizeof what, "%zu bytes of its answers are left, of which it read %llu in",
                 client->out.size - client->out_sent, (unsigned long long)client->moved);
    } else {
        snprintf(what, sizeof what,
                 "%zu bytes of a message of %zu or more arrived, only %llu more in",
                 client->in.size, client->in_needed, (unsigned long long)client->moved);
    }
    snprintf(why, sizeof why, "%s %g s (TDDP_STORE_CLIENT_TIMEOUT_MS)", what,
             (double)server->client_timeout_ms / 1000);
    tddp_server_client_drop(server, client, why);
}

/* Each client of 1.13 has a second connection, for events, on which it sends nothing. */
static bool may_be_silent(const tddp_store_server *server, const tddp_server_client *client)
{
    return !client->received && server->old_clients > 0;
}

static bool moves(const tddp_store_server *server, const tddp_server_client *client)
{
    uint64_t least = (uint64_t)server->client_timeout_ms * LEAST_BYTES_A_SECOND / 1000;
    return client->admitted && client->moved > 0 && client->moved >= least;
}

void tddp_server_late_drop(tddp_store_server *server)
{
    tddp_server_client *client = TAILQ_FIRST(&server->late);
    int64_t now = client ? tddp_now_ns() : 0;
    while (client && client->late_ns <= now) {
        if (may_be_silent(server, client) || moves(server, client)) {
            tddp_server_late(server, client);
        } else {
            drop_late(server, client);
        }
        client = TAILQ_FIRST(&server->late);
    }
}

/* --- places ---------------------------------------------------------------------------------- */

static tddp_server_client *oldest_pending(const tddp_store_server *server)
{
    tddp_server_client *client = TAILQ_FIRST(&server->late);
    while (client && (client->admitted || may_be_silent(server, client))) {
        client = TAILQ_NEXT(client, of_late);
    }
    return client;
}

bool tddp_server_evict(tddp_store_server *server)
{
    tddp_server_client *client = oldest_pending(server);
    uint64_t before = server->pending_count;
    if (!client) {
        return false;
    }
    /* Its message may have arrived by now. */
    tddp_server_client_receive(server, client);
    tddp_server_flush_unsent(server);
    if (server->pending_count == before) {
        char why[160];
        snprintf(why, sizeof why,
                 "it has not sent a complete message and gives way to a new one: %llu such are "
                 "connected (TDDP_STORE_MAX_PENDING)",
                 (unsigned long long)before);
        tddp_server_client_drop(server, client, why);
    }
    return true;
}
