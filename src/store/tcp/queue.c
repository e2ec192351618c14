/*
 * The operations that only newer servers have: queues, the list of keys, the barrier. Any thread.
 * A server does not say what it lacks: it hangs up. So each feature is probed before its first use,
 * with requests that leave nothing behind; a server that hangs up and then accepts a new connection
 * is remembered as one that lacks it.
 */
#include <string.h>

#include "store/tcp/tcp.h"

enum {
    /* A server pushes to one waiter, who may not be one that pops, or may have ended: so who pops
     * looks again so often. */
    LOOK_AGAIN_MS = 1000,
    LAST_PAUSE_MS = 50,
    /* Who hangs up on an opcode does it at once. */
    HANG_UP_MS = 5000,
    /* A longer key is another reason to hang up. */
    COMMON_KEY_BYTES = 8 << 10,
    FIRST_KEYS = 64,
};

/* Without a slash in front, as `init/`: no user's key is like it. */
static const tddp_slice trial_key = {"tddp/barrier", 12};

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

static tddp_status ask_length(tddp_tcp_exchange *exchange, tddp_wire_kind kind, tddp_slice key,
                              uint64_t *out)
{
    tddp_status status = tddp_tcp_send(exchange, tddp_tcp_put_head(exchange, kind, key));
    return status ? status : tddp_tcp_receive_u64(exchange, out);
}

/* QUEUE_LEN, which also shows whether there are queues at all. */
static tddp_status length_of(tddp_tcp_exchange *exchange, tddp_slice key, uint64_t *out)
{
    int64_t start = tddp_now_ns();
    return learn(exchange, TDDP_TCP_QUEUES, start,
                 ask_length(exchange, TDDP_WIRE_QUEUE_LEN, key, out));
}

static tddp_status need_queues(tddp_tcp_exchange *exchange, tddp_slice key)
{
    uint64_t length;
    switch (exchange->store->traits.support[TDDP_TCP_QUEUES]) {
    case TDDP_TCP_HAS:
        return TDDP_OK;
    case TDDP_TCP_LACKS:
        return fail_lacking(exchange);
    default:
        return length_of(exchange, key, &length);
    }
}

tddp_status tddp_tcp_queue_push(tddp_store *store, tddp_slice key, tddp_slice value,
                                const tddp_store_call *call)
{
    TDDP_TCP_BEGIN("queue_push");
    status = need_queues(&exchange, key);
    status = status ? status : tddp_tcp_put_head(&exchange, TDDP_WIRE_QUEUE_PUSH, key);
    status = status ? status : tddp_wire_put_string(&exchange.request, value);
    return tddp_tcp_end(&exchange, tddp_tcp_send(&exchange, status));
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
    int64_t pause_ms = 0;
    for (;;) {
        int64_t start = tddp_now_ns();
        tddp_status status = wait_a_while(exchange, key);
        status = status ? status : tddp_tcp_renew(exchange);
        status = status ? status : pop_once(exchange, key, out);
        if (status != TDDP_NOT_FOUND) {
            return status;
        }
        /* Others were quicker; or a key of the queue's name ends every wait at once. */
        bool at_once = tddp_now_ns() - start < LAST_PAUSE_MS * TDDP_NS_PER_MS;
        pause_ms = !at_once                           ? 0
                   : pause_ms * 2 + 1 < LAST_PAUSE_MS ? pause_ms * 2 + 1
                                                      : LAST_PAUSE_MS;
        if (tddp_net_sleep(tddp_deadline_after_ms(pause_ms),
                           tddp_store_call_cancel_fd(exchange->call))) {
            return tddp_store_fail_wait(TDDP_CANCELED, &key, 1, exchange->call,
                                        exchange->store->name);
        }
        if (tddp_now_ns() >= exchange->call->deadline_ns) {
            return tddp_store_fail_wait(TDDP_TIMEOUT, &key, 1, exchange->call,
                                        exchange->store->name);
        }
    }
}

tddp_status tddp_tcp_queue_pop(tddp_store *store, tddp_slice key, bool block,
                               const tddp_store_call *call, tddp_blob *out)
{
    TDDP_TCP_BEGIN("queue_pop");
    status = need_queues(&exchange, key);
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
    bool lacking = exchange.store->traits.support[TDDP_TCP_QUEUES] == TDDP_TCP_LACKS;
    status = lacking ? fail_lacking(&exchange) : length_of(&exchange, key, &length);
    if (status == TDDP_OK) {
        *out = (int64_t)length;
    }
    return tddp_tcp_end(&exchange, status);
}

/* --- the list of keys ------------------------------------------------------------------------ */

/* Takes over a key of the server's, and keeps it if it is a user's. */
static tddp_status keep_key(tddp_blob_list *list, size_t *capacity, tddp_blob *key)
{
    if (key->size == 0 || key->data[0] != '/') {
        tddp_blob_free(key);
        return TDDP_OK;
    }
    if (list->count == *capacity) {
        size_t more = *capacity ? *capacity * 2 : FIRST_KEYS;
        tddp_blob *blobs = tddp_resize(list->blobs, more * sizeof *blobs);
        if (!blobs) {
            tddp_blob_free(key);
            return TDDP_OUT_OF_MEMORY;
        }
        list->blobs = blobs;
        *capacity = more;
    }
    memmove(key->data, key->data + 1, key->size);
    key->size--;
    list->blobs[list->count++] = *key;
    return TDDP_OK;
}

static tddp_status receive_keys(tddp_tcp_exchange *exchange, tddp_blob_list *out)
{
    uint64_t count;
    size_t capacity = 0;
    tddp_status status = tddp_tcp_receive_u64(exchange, &count);
    /* Every key is read, also when memory has run out, so that the next call finds its answer. */
    for (uint64_t i = 0; status == TDDP_OK || status == TDDP_OUT_OF_MEMORY; i++) {
        if (i == count) {
            break;
        }
        tddp_blob key = {0};
        tddp_status received = tddp_tcp_receive_blob(exchange, &key);
        received = received ? received : keep_key(out, &capacity, &key);
        status = received ? received : status;
    }
    return status;
}

tddp_status tddp_tcp_list_keys(tddp_store *store, const tddp_store_call *call, tddp_blob_list *out)
{
    TDDP_TCP_BEGIN("list_keys");
    if (exchange.store->traits.support[TDDP_TCP_LIST_KEYS] == TDDP_TCP_LACKS) {
        return tddp_tcp_end(&exchange, fail_lacking(&exchange));
    }
    int64_t start = tddp_now_ns();
    status = tddp_tcp_send(&exchange, tddp_tcp_put_kind(&exchange, TDDP_WIRE_LIST_KEYS));
    status = status ? status : receive_keys(&exchange, out);
    return tddp_tcp_end(&exchange, learn(&exchange, TDDP_TCP_LIST_KEYS, start, status));
}

/* --- the barrier ----------------------------------------------------------------------------- */

/* How many callers have arrived; negative if unknown. The server counts them in the key. */
static int64_t arrived_at(tddp_tcp_exchange *exchange, tddp_slice key)
{
    uint64_t sum;
    tddp_status status = tddp_tcp_put_head(exchange, TDDP_WIRE_ADD, key);
    status = status ? status : tddp_wire_put_u64(&exchange->request, 0);
    status = tddp_tcp_send(exchange, status);
    return status || tddp_tcp_receive_u64(exchange, &sum) ? -1 : (int64_t)sum;
}

/* Passes a barrier of one and removes its key, so that a server that hangs up later has another
 * reason: a value that is no number, for instance. */
static tddp_status try_barrier(tddp_tcp_exchange *exchange)
{
    unsigned char passed;
    uint64_t deleted;
    tddp_bytes *request = &exchange->request;
    tddp_status status = tddp_tcp_put_kind(exchange, TDDP_WIRE_BARRIER);
    status = status ? status : tddp_wire_put_string(request, trial_key);
    status = status ? status : tddp_wire_put_u64(request, 1);
    status = status ? status : tddp_tcp_put_kind(exchange, TDDP_WIRE_DELETE_KEY);
    status = status ? status : tddp_wire_put_string(request, trial_key);
    status = tddp_tcp_send(exchange, status);
    status = status ? status : tddp_tcp_receive(exchange, &passed, 1);
    return status ? status : tddp_tcp_receive_u64(exchange, &deleted);
}

static tddp_status need_barrier(tddp_tcp_exchange *exchange)
{
    int64_t start = tddp_now_ns();
    switch (exchange->store->traits.support[TDDP_TCP_BARRIER]) {
    case TDDP_TCP_HAS:
        return TDDP_OK;
    case TDDP_TCP_LACKS:
        return fail_lacking(exchange);
    default:
        return learn(exchange, TDDP_TCP_BARRIER, start, try_barrier(exchange));
    }
}

static tddp_status pass(tddp_tcp_exchange *exchange, tddp_slice key, int world_size)
{
    tddp_status status = need_barrier(exchange);
    status = status ? status : tddp_tcp_put_head(exchange, TDDP_WIRE_BARRIER, key);
    status = status ? status : tddp_wire_put_u64(&exchange->request, (uint64_t)world_size);
    status = tddp_tcp_send(exchange, status);
    return status ? status : tddp_tcp_await(exchange);
}

tddp_status tddp_tcp_barrier(tddp_store *store, tddp_slice key, int world_size,
                             const tddp_store_call *call)
{
    TDDP_TCP_BEGIN("barrier");
    status = pass(&exchange, key, world_size);
    if ((status == TDDP_TIMEOUT || status == TDDP_CANCELED) &&
        tddp_tcp_is_connected(exchange.store)) {
        int64_t arrived = status == TDDP_TIMEOUT ? arrived_at(&exchange, key) : -1;
        status =
            tddp_store_fail_barrier(status, key, arrived, world_size, call, exchange.store->name);
    }
    return tddp_tcp_end(&exchange, status);
}
