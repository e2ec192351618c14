/*
 * The operations that not every server has: queues, the list of keys, the barrier, and those that
 * only ours has, ephemeral keys and watches. Any thread. A server does not say what it lacks: it
 * hangs up. So each feature is probed before its first use, with requests that leave nothing
 * behind; a server that hangs up and then accepts a new connection is remembered as one that lacks
 * it.
 */
#include <poll.h>

#include "store/map.h"
#include "store/tcp/tcp.h"

enum {
    /* A server pushes to one waiter, who may not be one that pops, or may have ended: so who pops
     * looks again so often. */
    LOOK_AGAIN_MS = 1000,
    /* Others were quicker; or a key of the queue's name ends every wait at once. */
    POP_PAUSE_MS = 10,
    /* Who hangs up on an opcode does it at once. */
    HANG_UP_MS = 5000,
    /* A longer key is another reason to hang up. */
    COMMON_KEY_BYTES = 8 << 10,
};

/* Without a slash in front, as `init/`: no user's key is like them. */
static const tddp_slice trial_key = {"tddp/barrier", 12};
static const tddp_slice trial_prefix = {"tddp/nothing", 12};

static tddp_status fail_lacking(const tddp_tcp_exchange *exchange)
{
    return tddp_fail(
        TDDP_UNSUPPORTED,
        "%s: its server hangs up at a request for %s, so it is a PyTorch that lacks it "
        "(queues need its libuv backend); host the store with torch-ddp",
        exchange->store->name, exchange->operation);
}

/* Returns the status of the first use of a feature, and remembers whether the server has it. */
static tddp_status learn(tddp_tcp_exchange *exchange, tddp_tcp_feature feature, int64_t start_ns,
                         tddp_status status)
{
    tddp_tcp_store *store = exchange->store;
    tddp_tcp_support *support = &store->traits.support[feature];
    if (*support != TDDP_TCP_UNKNOWN || status == TDDP_UNSUPPORTED) {
        return status;
    }
    if (status == TDDP_OK) {
        *support = TDDP_TCP_HAS;
    } else if (status == TDDP_NETWORK && store->broken && exchange->sent < COMMON_KEY_BYTES &&
               tddp_now_ns() - start_ns < HANG_UP_MS * TDDP_NS_PER_MS) {
        if (!tddp_tcp_recover(exchange)) {
            return tddp_fail(status, "%s", store->broken_why);
        }
        *support = TDDP_TCP_LACKS;
        return fail_lacking(exchange);
    }
    return status;
}

/* What is sent to find out, and the size of its answer. A barrier of one removes its key, so that a
 * server that hangs up later has another reason: a value that is no number, for instance. */
static tddp_status put_probe(tddp_tcp_exchange *exchange, tddp_tcp_feature feature, size_t *answer)
{
    tddp_status status;
    switch (feature) {
    case TDDP_TCP_BARRIER:
        *answer = 1 + 8;
        status = tddp_tcp_put_number(exchange, TDDP_WIRE_BARRIER, trial_key, 1);
        return status ? status : tddp_tcp_put_head(exchange, TDDP_WIRE_DELETE_KEY, trial_key);
    case TDDP_TCP_EPHEMERAL:
        *answer = 1 + 8;
        status = tddp_tcp_put_head(exchange, TDDP_WIRE_WATCH, trial_prefix);
        return status ? status : tddp_wire_put_byte(&exchange->request, 1);
    default:
        *answer = 8;
        return tddp_tcp_put_head(exchange, TDDP_WIRE_QUEUE_LEN, trial_key);
    }
}

static tddp_status need(tddp_tcp_exchange *exchange, tddp_tcp_feature feature)
{
    char answer[16];
    size_t size;
    int64_t start = tddp_now_ns();
    tddp_tcp_support known = exchange->store->traits.support[feature];
    if (known != TDDP_TCP_UNKNOWN) {
        return known == TDDP_TCP_HAS ? TDDP_OK : fail_lacking(exchange);
    }
    tddp_status status = tddp_tcp_send(exchange, put_probe(exchange, feature, &size));
    status = status ? status : tddp_tcp_receive(exchange, answer, size);
    return learn(exchange, feature, start, status);
}

/* --- queues ---------------------------------------------------------------------------------- */

static tddp_status ask_length(tddp_tcp_exchange *exchange, tddp_wire_kind kind, tddp_slice key,
                              uint64_t *out)
{
    return tddp_tcp_ask(exchange, tddp_tcp_put_head(exchange, kind, key), out);
}

tddp_status tddp_tcp_queue_push(tddp_store *store, tddp_slice key, tddp_slice value,
                                const tddp_store_call *call)
{
    TDDP_TCP_BEGIN("queue_push");
    status = need(&exchange, TDDP_TCP_QUEUES);
    status = status ? status : tddp_tcp_send_value(&exchange, TDDP_WIRE_QUEUE_PUSH, key, value);
    return tddp_tcp_end(&exchange, status);
}

/* TDDP_NOT_FOUND, without a text, if the queue is empty. */
static tddp_status pop_once(tddp_tcp_exchange *exchange, tddp_slice key, tddp_blob *out)
{
    uint64_t length;
    tddp_status status = ask_length(exchange, TDDP_WIRE_QUEUE_POP, key, &length);
    if (status) {
        return status;
    }
    return length ? tddp_tcp_receive_blob(exchange, out) : TDDP_NOT_FOUND;
}

/* Waits for the queue at most until it is time to look again. */
static tddp_status wait_a_while(tddp_tcp_exchange *exchange, tddp_slice key)
{
    const tddp_store_call *call = exchange->call;
    tddp_store_call turn = *call;
    int64_t look_again = tddp_deadline_after_ms(LOOK_AGAIN_MS);
    bool last = call->deadline_ns <= look_again;
    turn.deadline_ns = last ? call->deadline_ns : look_again;
    exchange->call = &turn;
    exchange->grace_ns = 0;
    tddp_status status = tddp_tcp_wait(exchange, &key, 1);
    exchange->call = call;
    exchange->grace_ns = 0;
    return status == TDDP_TIMEOUT && !last && !exchange->store->broken ? TDDP_OK : status;
}

static tddp_status pop_with_retries(tddp_tcp_exchange *exchange, tddp_slice key, tddp_blob *out)
{
    const tddp_store_call *call = exchange->call;
    for (;;) {
        tddp_status status = wait_a_while(exchange, key);
        status = status ? status : tddp_tcp_renew(exchange);
        status = status ? status : pop_once(exchange, key, out);
        if (status != TDDP_NOT_FOUND) {
            return status;
        }
        status =
            tddp_net_sleep(tddp_deadline_after_ms(POP_PAUSE_MS), tddp_store_call_cancel_fd(call));
        status = status || tddp_now_ns() < call->deadline_ns ? status : TDDP_TIMEOUT;
        if (status) {
            return tddp_store_fail_wait(status, &key, 1, call, exchange->store->name);
        }
    }
}

tddp_status tddp_tcp_queue_pop(tddp_store *store, tddp_slice key, bool block,
                               const tddp_store_call *call, tddp_blob *out)
{
    TDDP_TCP_BEGIN("queue_pop");
    status = need(&exchange, TDDP_TCP_QUEUES);
    if (status == TDDP_OK) {
        status = block ? pop_with_retries(&exchange, key, out) : pop_once(&exchange, key, out);
    }
    return tddp_tcp_end(&exchange, status);
}

tddp_status tddp_tcp_queue_len(tddp_store *store, tddp_slice key, const tddp_store_call *call,
                               int64_t *out)
{
    TDDP_TCP_BEGIN("queue_len");
    uint64_t length;
    status = need(&exchange, TDDP_TCP_QUEUES);
    status = status ? status : ask_length(&exchange, TDDP_WIRE_QUEUE_LEN, key, &length);
    if (status == TDDP_OK) {
        *out = (int64_t)length;
    }
    return tddp_tcp_end(&exchange, status);
}

/* --- the list of keys, the barrier ----------------------------------------------------------- */

tddp_status tddp_tcp_list_keys(tddp_store *store, const tddp_store_call *call, tddp_blob_list *out)
{
    TDDP_TCP_BEGIN("list_keys");
    if (exchange.store->traits.support[TDDP_TCP_LIST_KEYS] == TDDP_TCP_LACKS) {
        return tddp_tcp_end(&exchange, fail_lacking(&exchange));
    }
    int64_t start = tddp_now_ns();
    status = tddp_tcp_send(&exchange, tddp_tcp_put_kind(&exchange, TDDP_WIRE_LIST_KEYS));
    status = status ? status : tddp_tcp_receive_list(&exchange, out, NULL);
    return tddp_tcp_end(&exchange, learn(&exchange, TDDP_TCP_LIST_KEYS, start, status));
}

/* How many callers have arrived; negative if unknown. The server counts them in the key. */
static int64_t arrived_at(tddp_tcp_exchange *exchange, tddp_slice key)
{
    uint64_t sum;
    tddp_status status = tddp_tcp_put_number(exchange, TDDP_WIRE_ADD, key, 0);
    return tddp_tcp_ask(exchange, status, &sum) ? -1 : (int64_t)sum;
}

tddp_status tddp_tcp_barrier(tddp_store *store, tddp_slice key, int world_size,
                             const tddp_store_call *call)
{
    TDDP_TCP_BEGIN("barrier");
    status = need(&exchange, TDDP_TCP_BARRIER);
    status = status ? status
                    : tddp_tcp_put_number(&exchange, TDDP_WIRE_BARRIER, key, (uint64_t)world_size);
    status = tddp_tcp_send(&exchange, status);
    status = status ? status : tddp_tcp_await(&exchange);
    if ((status == TDDP_TIMEOUT || status == TDDP_CANCELED) && exchange.store->fd >= 0 &&
        !exchange.store->broken) {
        int64_t arrived = status == TDDP_TIMEOUT ? arrived_at(&exchange, key) : -1;
        status =
            tddp_store_fail_barrier(status, key, arrived, world_size, call, exchange.store->name);
    }
    return tddp_tcp_end(&exchange, status);
}

/* --- ephemeral keys and watches -------------------------------------------------------------- */

tddp_status tddp_tcp_set_ephemeral(tddp_store *store, tddp_slice key, tddp_slice value,
                                   int64_t limit_ms, bool if_absent, const tddp_store_call *call,
                                   int *set, tddp_blob *now)
{
    TDDP_TCP_BEGIN("set_ephemeral");
    unsigned char answer;
    tddp_bytes *request = &exchange.request;
    status = need(&exchange, TDDP_TCP_EPHEMERAL);
    status = status ? status : tddp_tcp_put_head(&exchange, TDDP_WIRE_SET_EPHEMERAL, key);
    status = status ? status : tddp_wire_put_string(request, value);
    status = status ? status : tddp_wire_put_u64(request, (uint64_t)limit_ms);
    status = status ? status : tddp_wire_put_byte(request, if_absent);
    status = tddp_tcp_send(&exchange, status);
    status = status ? status : tddp_tcp_receive(&exchange, &answer, 1);
    status = status ? status : tddp_tcp_receive_blob(&exchange, now);
    if (status == TDDP_OK) {
        *set = answer == TDDP_WIRE_WON;
    }
    return tddp_tcp_end(&exchange, status);
}

static tddp_status send_watch(tddp_tcp_exchange *exchange, tddp_slice prefix)
{
    tddp_tcp_store *store = exchange->store;
    tddp_status status = store->watch_sent ? tddp_tcp_end_watch(exchange) : TDDP_OK;
    status = status ? status : need(exchange, TDDP_TCP_EPHEMERAL);
    store->watched.size = 0;
    status = status ? status : tddp_bytes_append(&store->watched, prefix.data, prefix.size);
    status = status ? status : tddp_tcp_put_head(exchange, TDDP_WIRE_WATCH, prefix);
    status = status ? status : tddp_wire_put_byte(&exchange->request, store->watch_missed);
    status = tddp_tcp_send(exchange, status);
    store->watch_sent = status == TDDP_OK;
    store->watch_missed = store->watch_missed && status;
    return status;
}

static tddp_status receive_watch(tddp_tcp_exchange *exchange, tddp_store_entries *out)
{
    unsigned char answer;
    tddp_status status = tddp_tcp_receive(exchange, &answer, 1);
    status = status ? status : tddp_tcp_receive_list(exchange, &out->keys, &out->values);
    exchange->store->watch_sent = false;
    return status;
}

tddp_status tddp_tcp_watch(tddp_store *store, tddp_slice prefix, const tddp_store_call *call,
                           tddp_store_entries *out)
{
    tddp_tcp_store *tcp = (tddp_tcp_store *)store;
    tddp_tcp_exchange exchange = {
        .store = tcp, .call = call, .operation = "watch", .watches = true};
    char text[TDDP_STORE_KEYS_TEXT_BYTES];
    tddp_status status = tddp_tcp_begin(&exchange);
    if (status) {
        return status;
    }
    tddp_slice watched = {tcp->watched.data, tcp->watched.size};
    bool goes_on = tcp->watch_sent && tddp_slices_equal(watched, prefix);
    status = goes_on ? TDDP_OK : send_watch(&exchange, prefix);
    if (status) {
        return tddp_tcp_end(&exchange, status);
    }
    /* If time is up the request stays: the next call of this kind goes on with it, and any other
     * ends it. So a server that is silent for a while costs a watch neither its connection nor the
     * keys that belong to that. */
    status = tddp_net_poll(tcp->fd, POLLIN, call->deadline_ns, tddp_store_call_cancel_fd(call));
    if (status == TDDP_TIMEOUT || status == TDDP_CANCELED) {
        (void)tddp_store_keys_text(&prefix, 1, text);
        status =
            status == TDDP_CANCELED
                ? tddp_fail(status, "interrupted while watching keys that begin with %s (%s)", text,
                            tcp->name)
                : tddp_fail(status, "timed out after %lld ms watching keys that begin with %s (%s)",
                            (long long)call->timeout_ms, text, tcp->name);
    } else {
        status = receive_watch(&exchange, out);
    }
    return tddp_tcp_end(&exchange, status);
}
