/*
 * The operations of a TCP store: each serialises a request, sends it, and parses the answer. Any
 * thread. exchange.c has the lock, the deadlines and the state of the connection.
 */
#include <stdlib.h>

#include "store/server/server.h"
#include "store/tcp/tcp.h"

tddp_status tddp_tcp_send_value(tddp_tcp_exchange *exchange, tddp_wire_kind kind, tddp_slice key,
                                tddp_slice value)
{
    tddp_status status = tddp_tcp_put_head(exchange, kind, key);
    status = status ? status : tddp_wire_put_string(&exchange->request, value);
    return tddp_tcp_send(exchange, status);
}

/* Whether several keys are several requests. */
static bool one_by_one(const tddp_tcp_exchange *exchange, size_t count)
{
    return count == 1 || tddp_tcp_is_legacy(exchange->store);
}

static tddp_status tcp_set(tddp_store *store, const tddp_slice *keys, const tddp_slice *values,
                           size_t count, const tddp_store_call *call)
{
    TDDP_TCP_BEGIN(count == 1 ? "set" : "multi_set");
    bool singly = one_by_one(&exchange, count);
    tddp_bytes *request = &exchange.request;
    if (!singly) {
        status = tddp_tcp_put_kind(&exchange, TDDP_WIRE_MULTI_SET);
        status = status ? status : tddp_wire_put_u64(request, count);
    }
    for (size_t i = 0; i < count && status == TDDP_OK; i++) {
        status = singly ? tddp_tcp_put_head(&exchange, TDDP_WIRE_SET, keys[i])
                        : tddp_wire_put_string(request, keys[i]);
        status = status ? status : tddp_wire_put_string(request, values[i]);
    }
    return tddp_tcp_end(&exchange, tddp_tcp_send(&exchange, status));
}

static tddp_status tcp_append(tddp_store *store, tddp_slice key, tddp_slice value,
                              const tddp_store_call *call)
{
    TDDP_TCP_BEGIN("append");
    status = tddp_tcp_is_legacy(exchange.store)
                 ? tddp_tcp_legacy_append(&exchange, key, value)
                 : tddp_tcp_send_value(&exchange, TDDP_WIRE_APPEND, key, value);
    return tddp_tcp_end(&exchange, status);
}

static tddp_status tcp_get(tddp_store *store, const tddp_slice *keys, size_t count,
                           const tddp_store_call *call, tddp_blob *out)
{
    TDDP_TCP_BEGIN(count == 1 ? "get" : "multi_get");
    bool singly = one_by_one(&exchange, count);
    status = tddp_tcp_wait(&exchange, keys, count);
    if (status == TDDP_OK && !singly) {
        status = tddp_tcp_send(&exchange,
                               tddp_tcp_put_keys(&exchange, TDDP_WIRE_MULTI_GET, keys, count));
    }
    for (size_t i = 0; i < count && status == TDDP_OK; i++) {
        if (singly) {
            status = tddp_tcp_send(&exchange, tddp_tcp_put_head(&exchange, TDDP_WIRE_GET, keys[i]));
        }
        status = status ? status : tddp_tcp_receive_blob(&exchange, &out[i]);
    }
    return tddp_tcp_end(&exchange, status);
}

static tddp_status tcp_add(tddp_store *store, tddp_slice key, int64_t delta,
                           const tddp_store_call *call, int64_t *out)
{
    TDDP_TCP_BEGIN("add");
    uint64_t sum;
    status = tddp_tcp_put_number(&exchange, TDDP_WIRE_ADD, key, (uint64_t)delta);
    status = tddp_tcp_ask(&exchange, status, &sum);
    if (status == TDDP_OK) {
        *out = (int64_t)sum;
    }
    return tddp_tcp_end(&exchange, status);
}

tddp_status tddp_tcp_swap(tddp_tcp_exchange *exchange, tddp_slice key, tddp_slice expected,
                          tddp_slice desired, tddp_blob *out)
{
    tddp_status status = tddp_tcp_put_head(exchange, TDDP_WIRE_COMPARE_SET, key);
    status = status ? status : tddp_wire_put_string(&exchange->request, expected);
    status = status ? status : tddp_wire_put_string(&exchange->request, desired);
    status = tddp_tcp_send(exchange, status);
    return status ? status : tddp_tcp_receive_blob(exchange, out);
}

static tddp_status tcp_compare_set(tddp_store *store, tddp_slice key, tddp_slice expected,
                                   tddp_slice desired, const tddp_store_call *call, tddp_blob *out)
{
    TDDP_TCP_BEGIN("compare_set");
    return tddp_tcp_end(&exchange, tddp_tcp_swap(&exchange, key, expected, desired, out));
}

static tddp_status tcp_delete_key(tddp_store *store, tddp_slice key, const tddp_store_call *call,
                                  int *deleted)
{
    TDDP_TCP_BEGIN("delete_key");
    uint64_t count;
    status =
        tddp_tcp_ask(&exchange, tddp_tcp_put_head(&exchange, TDDP_WIRE_DELETE_KEY, key), &count);
    if (status == TDDP_OK) {
        *deleted = count > 0;
    }
    return tddp_tcp_end(&exchange, status);
}

static tddp_status tcp_num_keys(tddp_store *store, const tddp_store_call *call, int64_t *out)
{
    TDDP_TCP_BEGIN("num_keys");
    uint64_t count;
    status = tddp_tcp_ask(&exchange, tddp_tcp_put_kind(&exchange, TDDP_WIRE_NUM_KEYS), &count);
    if (status == TDDP_OK) {
        *out = (int64_t)count;
    }
    return tddp_tcp_end(&exchange, status);
}

static tddp_status tcp_wait(tddp_store *store, const tddp_slice *keys, size_t count,
                            const tddp_store_call *call)
{
    TDDP_TCP_BEGIN("wait");
    return tddp_tcp_end(&exchange, tddp_tcp_wait(&exchange, keys, count));
}

tddp_status tddp_tcp_look(tddp_tcp_exchange *exchange, const tddp_slice *keys, size_t count,
                          bool *there)
{
    unsigned char answer;
    tddp_status status =
        tddp_tcp_send(exchange, tddp_tcp_put_keys(exchange, TDDP_WIRE_CHECK, keys, count));
    status = status ? status : tddp_tcp_receive(exchange, &answer, 1);
    if (status == TDDP_OK && answer > TDDP_WIRE_NOT_READY) {
        status = tddp_fail(TDDP_PROTOCOL, "%s answered check with %u, expected 0 or 1",
                           exchange->store->name, answer);
        return tddp_tcp_break(exchange->store, status);
    }
    if (status == TDDP_OK) {
        *there = answer == TDDP_WIRE_READY;
    }
    return status;
}

static tddp_status tcp_check(tddp_store *store, const tddp_slice *keys, size_t count,
                             const tddp_store_call *call, int *all_exist)
{
    TDDP_TCP_BEGIN("check");
    bool there;
    status = tddp_tcp_look(&exchange, keys, count, &there);
    if (status == TDDP_OK) {
        *all_exist = there;
    }
    return tddp_tcp_end(&exchange, status);
}

static bool tcp_extended(const tddp_store *store)
{
    return !tddp_tcp_is_legacy((const tddp_tcp_store *)store);
}

static tddp_status tcp_clone(tddp_store *store, const tddp_store_call *call, tddp_store **out)
{
    const tddp_tcp_store *tcp = (const tddp_tcp_store *)store;
    tddp_tcp_store *clone;
    tddp_status status = tddp_tcp_check_process(tcp);
    if (status) {
        return status;
    }
    status = tddp_tcp_connect(tcp->host, tcp->reach_at, tcp->port, tcp->server,
                              tddp_store_timeout(store), &tcp->traits, call, &clone);
    if (status == TDDP_OK) {
        *out = &clone->base;
    }
    return status;
}

/* Beside the connection, which can be used meanwhile. */
static tddp_status tcp_await_clients(tddp_store *store, const tddp_slice *keys, size_t count,
                                     const tddp_store_call *call)
{
    const tddp_tcp_store *tcp = (const tddp_tcp_store *)store;
    if (!tcp->server) {
        return TDDP_OK;
    }
    tddp_status status = tddp_tcp_check_process(tcp);
    return status ? status
                  : tddp_server_await_clients(tcp->server->server, &tcp->server->connections, keys,
                                              count, call);
}

/* The TCP store that `store` is or looks into; NULL if it is another kind. */
static const tddp_tcp_store *tcp_beneath(const tddp_store *store)
{
    return store && store->ops == &tddp_tcp_ops ? (const tddp_tcp_store *)tddp_store_base(store)
                                                : NULL;
}

const char *tddp_tcp_store_host(const tddp_store *store)
{
    const tddp_tcp_store *tcp = tcp_beneath(store);
    return tcp ? tcp->host : NULL;
}

int tddp_tcp_store_port(const tddp_store *store)
{
    const tddp_tcp_store *tcp = tcp_beneath(store);
    return tcp ? tcp->port : -1;
}

const tddp_store_ops tddp_tcp_ops = {
    .set = tcp_set,
    .get = tcp_get,
    .add = tcp_add,
    .compare_set = tcp_compare_set,
    .delete_key = tcp_delete_key,
    .num_keys = tcp_num_keys,
    .wait = tcp_wait,
    .check = tcp_check,
    .append = tcp_append,
    .queue_push = tddp_tcp_queue_push,
    .queue_pop = tddp_tcp_queue_pop,
    .queue_len = tddp_tcp_queue_len,
    .list_keys = tddp_tcp_list_keys,
    .barrier = tddp_tcp_barrier,
    .set_ephemeral = tddp_tcp_set_ephemeral,
    .watch = tddp_tcp_watch,
    .extended = tcp_extended,
    .await_clients = tcp_await_clients,
    .clone = tcp_clone,
    .destroy = tddp_tcp_destroy,
};
