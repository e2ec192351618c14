/*
 * One request and its answer on a store's connection. Any thread; one at a time has the lock.
 * Invariant: when the lock is released no answer is unread on the connection, or it is given up
 * (the next call makes a new one), or the store is marked as broken. A server that is silent costs
 * the connection, never the store: it may only have been stopped for a moment.
 */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "store/tcp/tcp.h"

int64_t tddp_tcp_grace_ms = 2000;

enum {
    LOOK_FIRST_MS = 100,
    /* Above these, servers commonly refuse. */
    COMMON_KEY_BYTES = 8 << 10,
    COMMON_VALUE_BYTES = 8 << 20,
};

static tddp_status acquire(const tddp_tcp_exchange *exchange)
{
    tddp_tcp_store *store = exchange->store;
    tddp_status status = tddp_tcp_lock_acquire(&store->lock, exchange->call);
    if (status == TDDP_TIMEOUT) {
        return tddp_fail(status, "timed out after %lld ms waiting for another thread's call (%s)",
                         (long long)exchange->call->timeout_ms, store->name);
    }
    return status;
}

tddp_status tddp_tcp_check_process(const tddp_tcp_store *store)
{
    if (store->pid != getpid()) {
        return tddp_fail(TDDP_FORKED,
                         "%s was opened by process %d: a forked child opens a store of its own",
                         store->name, (int)store->pid);
    }
    return TDDP_OK;
}

tddp_status tddp_tcp_renew(tddp_tcp_exchange *exchange)
{
    tddp_tcp_store *store = exchange->store;
    const tddp_store_call *call = exchange->call;
    if (store->fd >= 0) {
        return TDDP_OK;
    }
    int64_t least = tddp_deadline_after_ms(tddp_tcp_grace_ms);
    int64_t until = call->deadline_ns > least ? call->deadline_ns : least;
    tddp_status status = tddp_tcp_reconnect(store, until, tddp_store_call_cancel_fd(call));
    if (status == TDDP_NETWORK || status == TDDP_PROTOCOL) {
        status = tddp_fail(status, "%s, %s: the connection could not be made again: %s",
                           store->name, exchange->operation, tddp_error_message());
        return tddp_tcp_break(store, status);
    }
    if (status == TDDP_TIMEOUT) {
        status = tddp_fail(status, "%s, %s: the server does not answer: %s", store->name,
                           exchange->operation, tddp_error_message());
    }
    exchange->silent = status != TDDP_OK;
    return status;
}

tddp_status tddp_tcp_begin(tddp_tcp_exchange *exchange)
{
    tddp_tcp_store *store = exchange->store;
    tddp_status status = tddp_tcp_check_process(store);
    status = status ? status : acquire(exchange);
    if (status) {
        return status;
    }
    if (store->broken) {
        status = tddp_fail(TDDP_NETWORK, "%s is of no further use since an earlier failure: %s",
                           store->name, store->broken_why);
        return tddp_tcp_end(exchange, status);
    }
    status = tddp_tcp_renew(exchange);
    if (status == TDDP_OK && store->watch_sent && !exchange->watches) {
        status = tddp_tcp_end_watch(exchange);
    }
    return status ? tddp_tcp_end(exchange, status) : TDDP_OK;
}

tddp_status tddp_tcp_end(tddp_tcp_exchange *exchange, tddp_status status)
{
    tddp_bytes_free(&exchange->request);
    tddp_tcp_lock_release(&exchange->store->lock);
    return status;
}

tddp_status tddp_tcp_break(tddp_tcp_store *store, tddp_status status)
{
    if (!store->broken) {
        store->broken = true;
        tddp_tcp_count(store, false);
        snprintf(store->broken_why, sizeof store->broken_why, "%.500s", tddp_error_message());
    }
    return status;
}

/* Gives the connection up: an answer may still come on it. */
static void give_up(tddp_tcp_store *store)
{
    tddp_tcp_count(store, false);
    tddp_net_close(store->fd);
    store->fd = -1;
    store->watch_sent = false;
}

bool tddp_tcp_recover(tddp_tcp_exchange *exchange)
{
    tddp_tcp_store *store = exchange->store;
    if (tddp_tcp_reconnect(store, tddp_deadline_after_ms(tddp_tcp_grace_ms),
                           tddp_store_call_cancel_fd(exchange->call))) {
        return false;
    }
    store->broken = false;
    return true;
}

tddp_status tddp_tcp_put_kind(tddp_tcp_exchange *exchange, tddp_wire_kind kind)
{
    const tddp_tcp_store *store = exchange->store;
    const tddp_wire_dialect *dialect = store->traits.dialect;
    for (unsigned opcode = 0; opcode <= UINT8_MAX; opcode++) {
        if (tddp_wire_kind_of(dialect, (unsigned char)opcode) == kind) {
            return tddp_wire_put_byte(&exchange->request, (unsigned char)opcode);
        }
    }
    return tddp_fail(TDDP_UNSUPPORTED,
                     "%s: its server is of PyTorch %s, which has no %s; host the store with "
                     "torch-ddp, or with a newer PyTorch",
                     store->name, dialect->name, exchange->operation);
}

tddp_status tddp_tcp_put_head(tddp_tcp_exchange *exchange, tddp_wire_kind kind, tddp_slice key)
{
    tddp_status status = tddp_tcp_put_kind(exchange, kind);
    return status ? status : tddp_wire_put_string(&exchange->request, key);
}

tddp_status tddp_tcp_put_number(tddp_tcp_exchange *exchange, tddp_wire_kind kind, tddp_slice key,
                                uint64_t number)
{
    tddp_status status = tddp_tcp_put_head(exchange, kind, key);
    return status ? status : tddp_wire_put_u64(&exchange->request, number);
}

tddp_status tddp_tcp_put_keys(tddp_tcp_exchange *exchange, tddp_wire_kind kind,
                              const tddp_slice *keys, size_t count)
{
    tddp_status status = tddp_tcp_put_kind(exchange, kind);
    status = status ? status : tddp_wire_put_u64(&exchange->request, count);
    for (size_t i = 0; i < count && status == TDDP_OK; i++) {
        status = tddp_wire_put_string(&exchange->request, keys[i]);
    }
    return status;
}

/* Sets the text of a failure on the connection; gives the store up, or after a silence only the
 * connection. */
static tddp_status fail_exchange(tddp_tcp_exchange *exchange, tddp_status status)
{
    const char *name = exchange->store->name;
    const char *hint = "";
    if (status == TDDP_NETWORK && exchange->sent > COMMON_VALUE_BYTES) {
        hint = " (values of more than 8 MiB are refused by most servers)";
    } else if (status == TDDP_NETWORK && exchange->sent > COMMON_KEY_BYTES) {
        hint = " (keys of more than 8 KiB are refused by most servers)";
    } else if (status == TDDP_NETWORK && (strcmp(exchange->operation, "add") == 0 ||
                                          strcmp(exchange->operation, "barrier") == 0)) {
        hint = " (the server hangs up also if the key's value is not a number)";
    }
    if (status == TDDP_TIMEOUT) {
        status = tddp_fail(status, "%s did not answer %s within %lld ms", name, exchange->operation,
                           (long long)exchange->call->timeout_ms);
    } else if (status == TDDP_CANCELED) {
        status = tddp_fail(status, "interrupted in %s (%s)", exchange->operation, name);
    } else {
        status = tddp_fail(status, "%s, %s: %s%s", name, exchange->operation, tddp_error_message(),
                           hint);
    }
    if (status == TDDP_TIMEOUT || status == TDDP_CANCELED) {
        exchange->silent = true;
        give_up(exchange->store);
        return status;
    }
    return tddp_tcp_break(exchange->store, status);
}

typedef tddp_status (*mover)(int fd, void *data, size_t size, size_t *done, int64_t deadline_ns,
                             int cancel_fd);

static tddp_status move_out(int fd, void *data, size_t size, size_t *done, int64_t deadline_ns,
                            int cancel_fd)
{
    return tddp_net_send(fd, data, size, done, deadline_ns, cancel_fd);
}

/* Moves all bytes, with some grace when the call's time is up or it is cancelled. */
static tddp_status move(tddp_tcp_exchange *exchange, mover how, void *data, size_t size)
{
    int fd = exchange->store->fd;
    size_t done = 0;
    tddp_status first = TDDP_OK;
    if (exchange->grace_ns == 0) {
        first = how(fd, data, size, &done, exchange->call->deadline_ns,
                    tddp_store_call_cancel_fd(exchange->call));
        if (first != TDDP_TIMEOUT && first != TDDP_CANCELED) {
            return first ? fail_exchange(exchange, first) : TDDP_OK;
        }
        exchange->grace_ns = tddp_deadline_after_ms(tddp_tcp_grace_ms);
    }
    tddp_status status = how(fd, data, size, &done, exchange->grace_ns, -1);
    if (status == TDDP_TIMEOUT && first) {
        status = first;
    }
    return status ? fail_exchange(exchange, status) : TDDP_OK;
}

tddp_status tddp_tcp_send(tddp_tcp_exchange *exchange, tddp_status status)
{
    if (status == TDDP_OK) {
        exchange->sent = exchange->request.size;
        status = move(exchange, move_out, exchange->request.data, exchange->request.size);
    }
    exchange->request.size = 0;
    return status;
}

tddp_status tddp_tcp_receive(tddp_tcp_exchange *exchange, void *data, size_t size)
{
    return move(exchange, tddp_net_recv, data, size);
}

tddp_status tddp_tcp_receive_u64(tddp_tcp_exchange *exchange, uint64_t *out)
{
    char bytes[8];
    tddp_status status = tddp_tcp_receive(exchange, bytes, sizeof bytes);
    if (status == TDDP_OK) {
        *out = tddp_wire_u64(bytes);
    }
    return status;
}

tddp_status tddp_tcp_ask(tddp_tcp_exchange *exchange, tddp_status status, uint64_t *out)
{
    status = tddp_tcp_send(exchange, status);
    return status ? status : tddp_tcp_receive_u64(exchange, out);
}

static tddp_status fail_protocol(tddp_tcp_exchange *exchange, const char *what, uint64_t got)
{
    tddp_status status =
        tddp_fail(TDDP_PROTOCOL, "%s answered %s with %s %llu: it uses another protocol",
                  exchange->store->name, exchange->operation, what, (unsigned long long)got);
    return tddp_tcp_break(exchange->store, status);
}

tddp_status tddp_tcp_receive_blob(tddp_tcp_exchange *exchange, tddp_blob *out)
{
    uint64_t size;
    tddp_status status = tddp_tcp_receive_u64(exchange, &size);
    if (status) {
        return status;
    }
    if (size > UINT64_C(1) << 40) {
        return fail_protocol(exchange, "a value of bytes", size);
    }
    char *data = tddp_alloc((size_t)size + 1);
    if (!data) {
        give_up(exchange->store); /* the rest is unread */
        return TDDP_OUT_OF_MEMORY;
    }
    status = tddp_tcp_receive(exchange, data, (size_t)size);
    if (status) {
        free(data);
        return status;
    }
    *out = (tddp_blob){data, (size_t)size};
    return TDDP_OK;
}

static tddp_status receive_into(tddp_tcp_exchange *exchange, tddp_blob_list *list)
{
    if (tddp_blob_list_grow(list)) {
        give_up(exchange->store);
        return TDDP_OUT_OF_MEMORY;
    }
    tddp_status status = tddp_tcp_receive_blob(exchange, &list->blobs[list->count]);
    list->count += status == TDDP_OK;
    return status;
}

tddp_status tddp_tcp_receive_list(tddp_tcp_exchange *exchange, tddp_blob_list *keys,
                                  tddp_blob_list *values)
{
    uint64_t count;
    tddp_status status = tddp_tcp_receive_u64(exchange, &count);
    for (uint64_t i = 0; status == TDDP_OK && i < count; i++) {
        status = receive_into(exchange, keys);
        status = status || !values ? status : receive_into(exchange, values);
    }
    return status;
}

/* After CANCEL_WAIT the server answers 01; if what was waited for came at that moment, first as it
 * does then (`*came`). */
static tddp_status cancel_wait(tddp_tcp_exchange *exchange, bool *came)
{
    unsigned char cancel = TDDP_WIRE_CANCEL_WAIT;
    unsigned char answer = 0;
    tddp_store_entries missed = {0};
    tddp_status status = move(exchange, move_out, &cancel, 1);
    status = status ? status : tddp_tcp_receive(exchange, &answer, 1);
    *came = status == TDDP_OK && answer == TDDP_WIRE_STOP_WAITING;
    if (*came && exchange->store->watch_sent) {
        status = tddp_tcp_receive_list(exchange, &missed.keys, &missed.values);
        tddp_store_entries_free(&missed);
    }
    if (*came && status == TDDP_OK) {
        status = tddp_tcp_receive(exchange, &answer, 1);
    }
    if (status == TDDP_OK && answer != TDDP_WIRE_WAIT_CANCELED) {
        status = fail_protocol(exchange, "a byte", answer);
    }
    return status;
}

tddp_status tddp_tcp_end_watch(tddp_tcp_exchange *exchange)
{
    bool came;
    tddp_status status = cancel_wait(exchange, &came);
    exchange->store->watch_sent = false;
    exchange->store->watch_missed = exchange->store->watch_missed || came;
    return status;
}

tddp_status tddp_tcp_await(tddp_tcp_exchange *exchange)
{
    tddp_tcp_store *store = exchange->store;
    unsigned char answer = 0;
    size_t done = 0;
    tddp_status status = tddp_net_recv(store->fd, &answer, 1, &done, exchange->call->deadline_ns,
                                       tddp_store_call_cancel_fd(exchange->call));
    if (status == TDDP_TIMEOUT || status == TDDP_CANCELED) {
        tddp_status reason = status;
        bool there;
        if (tddp_tcp_is_legacy(store)) {
            /* A wait cannot be taken back there, and its answer would be taken for another's. */
            give_up(store);
            return reason;
        }
        exchange->grace_ns = tddp_deadline_after_ms(tddp_tcp_grace_ms);
        status = cancel_wait(exchange, &there);
        /* Not even that was answered; or the keys have come after all. */
        return status == TDDP_TIMEOUT || (status == TDDP_OK && !there) ? reason : status;
    }
    if (status) {
        return fail_exchange(exchange, status);
    }
    return answer == TDDP_WIRE_STOP_WAITING ? TDDP_OK : fail_protocol(exchange, "a byte", answer);
}

tddp_status tddp_tcp_wait(tddp_tcp_exchange *exchange, const tddp_slice *keys, size_t count)
{
    const tddp_store_call *call = exchange->call;
    tddp_status status = TDDP_OK;
    bool there = false;
    if (tddp_tcp_is_legacy(exchange->store) &&
        call->deadline_ns - tddp_now_ns() < LOOK_FIRST_MS * TDDP_NS_PER_MS) {
        /* A wait that runs out costs the connection there, and a short one may do so although the
         * keys are there. */
        status = tddp_tcp_look(exchange, keys, count, &there);
        if (status == TDDP_OK && !there && tddp_now_ns() >= call->deadline_ns) {
            status = TDDP_TIMEOUT;
        }
    }
    if (status == TDDP_OK && !there) {
        status = tddp_tcp_send(exchange, tddp_tcp_put_keys(exchange, TDDP_WIRE_WAIT, keys, count));
        status = status ? status : tddp_tcp_await(exchange);
    }
    bool over = status == TDDP_TIMEOUT || status == TDDP_CANCELED;
    return over && !exchange->silent && !exchange->store->broken
               ? tddp_store_fail_wait(status, keys, count, exchange->call, exchange->store->name)
               : status;
}
