/*
 * Emulates what a server of PyTorch 1.13 lacks: the hello, APPEND, MULTI_GET and MULTI_SET. Any
 * thread, holding the lock. Everything is based on COMPARE_SET: if the key is absent and a value is
 * expected, nothing is stored and the expected value is returned; so expecting a random token reads
 * a value safely (a GET of an absent key would end the connection).
 */
#include <string.h>
#include <sys/random.h>

#include "store/tcp/tcp.h"

int64_t tddp_tcp_stale_ms = 5000;

enum {
    FIRST_PAUSE_MS = 1,
    LAST_PAUSE_MS = 20,
    /* Requests that are sent before their answers are read must fit into the sockets' buffers. */
    PIPELINED_BYTES = 16 << 10,
    TOKEN_BYTES = 16,
};

/* Without a slash in front, as `init/`: no user's key is like them. */
static const tddp_slice hello_key = {"tddp/hello", 10};
static const tddp_slice append_key = {"tddp/append", 11};

typedef struct token {
    unsigned char bytes[TOKEN_BYTES];
} token;

static tddp_status make_token(token *out)
{
    ssize_t size = getrandom(out->bytes, sizeof out->bytes, 0);
    return size == (ssize_t)sizeof out->bytes ? TDDP_OK : tddp_fail_errno("getrandom");
}

static tddp_slice token_slice(const token *t)
{
    return (tddp_slice){(const char *)t->bytes, sizeof t->bytes};
}

static bool equal(tddp_slice a, tddp_slice b)
{
    return a.size == b.size && (a.size == 0 || memcmp(a.data, b.data, a.size) == 0);
}

static tddp_slice slice_of(const tddp_blob *blob)
{
    return (tddp_slice){blob->data, blob->size};
}

tddp_status tddp_tcp_legacy_hello(int fd, int64_t deadline_ns, int cancel_fd)
{
    enum { COMPARE_SET_1_13 = 1, ANSWER_BYTES = 8 + TOKEN_BYTES };
    token t;
    tddp_bytes hello = {0};
    char answer[ANSWER_BYTES];
    size_t done = 0;
    tddp_status status = make_token(&t);
    status = status ? status : tddp_wire_put_byte(&hello, COMPARE_SET_1_13);
    status = status ? status : tddp_wire_put_string(&hello, hello_key);
    status = status ? status : tddp_wire_put_string(&hello, token_slice(&t));
    status = status ? status : tddp_wire_put_string(&hello, token_slice(&t));
    if (status == TDDP_OK) {
        status = tddp_net_send(fd, hello.data, hello.size, &done, deadline_ns, cancel_fd);
    }
    tddp_bytes_free(&hello);
    done = 0;
    if (status == TDDP_OK) {
        status = tddp_net_recv(fd, answer, sizeof answer, &done, deadline_ns, cancel_fd);
    }
    if (status == TDDP_OK &&
        (tddp_wire_u64(answer) != TOKEN_BYTES || memcmp(answer + 8, t.bytes, TOKEN_BYTES) != 0)) {
        return tddp_fail(TDDP_PROTOCOL, "the hello was answered with other bytes: what listens "
                                        "there is not a store of PyTorch");
    }
    return status;
}

/* --- append ---------------------------------------------------------------------------------- */

static tddp_status send_swap(tddp_tcp_exchange *exchange, bool prefixed, tddp_slice key,
                             tddp_slice expected, tddp_slice desired)
{
    tddp_bytes *request = &exchange->request;
    tddp_status status = tddp_tcp_put_kind(exchange, TDDP_WIRE_COMPARE_SET);
    if (status == TDDP_OK) {
        status = prefixed ? tddp_tcp_put_key(request, key) : tddp_wire_put_string(request, key);
    }
    status = status ? status : tddp_wire_put_string(request, expected);
    status = status ? status : tddp_wire_put_string(request, desired);
    return tddp_tcp_send(exchange, status);
}

/* COMPARE_SET; the caller frees `out`. */
static tddp_status swap(tddp_tcp_exchange *exchange, tddp_slice key, tddp_slice expected,
                        tddp_slice desired, tddp_blob *out)
{
    tddp_status status = send_swap(exchange, true, key, expected, desired);
    return status ? status : tddp_tcp_receive_blob(exchange, out);
}

/* Who has the lock: a token, or nothing. Of a fixed size, so that no lack of memory leaves it taken
 * and unknown. */
typedef struct holder {
    char bytes[TOKEN_BYTES];
    uint64_t size;
} holder;

static tddp_slice holder_slice(const holder *h)
{
    return (tddp_slice){h->bytes, (size_t)h->size};
}

/* COMPARE_SET of the lock. */
static tddp_status swap_lock(tddp_tcp_exchange *exchange, tddp_slice expected, tddp_slice desired,
                             holder *out)
{
    tddp_status status = send_swap(exchange, false, append_key, expected, desired);
    status = status ? status : tddp_tcp_receive_u64(exchange, &out->size);
    if (status == TDDP_OK && out->size > sizeof out->bytes) {
        status = tddp_fail(TDDP_PROTOCOL, "%s: the key \"%s\" holds %llu bytes, expected %d",
                           exchange->store->name, append_key.data, (unsigned long long)out->size,
                           TOKEN_BYTES);
        return tddp_tcp_break(exchange->store, status);
    }
    return status ? status : tddp_tcp_receive(exchange, out->bytes, (size_t)out->size);
}

static tddp_status pause_for_lock(const tddp_tcp_exchange *exchange, int64_t *pause_ms)
{
    const tddp_store_call *call = exchange->call;
    if (tddp_now_ns() >= call->deadline_ns) {
        return tddp_fail(TDDP_TIMEOUT,
                         "timed out after %lld ms waiting for another client's append (%s)",
                         (long long)call->timeout_ms, exchange->store->name);
    }
    int64_t until = tddp_deadline_after_ms(*pause_ms);
    *pause_ms = *pause_ms * 2 < LAST_PAUSE_MS ? *pause_ms * 2 : LAST_PAUSE_MS;
    return tddp_net_sleep(until, tddp_store_call_cancel_fd(call));
}

/* Takes the lock that all appends on this server share: without it two of the same value could not
 * say whose value was stored. The token makes the answer unambiguous here. */
static tddp_status take_lock(tddp_tcp_exchange *exchange, const token *mine)
{
    holder seen = {.size = 0};
    int64_t since = tddp_now_ns();
    int64_t pause_ms = FIRST_PAUSE_MS;
    for (;;) {
        bool stale = tddp_now_ns() - since > tddp_tcp_stale_ms * TDDP_NS_PER_MS;
        holder now;
        tddp_slice expected = stale ? holder_slice(&seen) : (tddp_slice){"", 0};
        tddp_status status = swap_lock(exchange, expected, token_slice(mine), &now);
        if (status || equal(holder_slice(&now), token_slice(mine))) {
            return status;
        }
        if (!equal(holder_slice(&now), holder_slice(&seen))) {
            since = tddp_now_ns();
        }
        seen = now;
        status = pause_for_lock(exchange, &pause_ms);
        if (status) {
            return status;
        }
    }
}

/* Its request is no larger than that which took it, so its memory is there. */
static tddp_status leave_lock(tddp_tcp_exchange *exchange, const token *mine)
{
    holder now;
    return swap_lock(exchange, token_slice(mine), (tddp_slice){"", 0}, &now);
}

/* A SET and not a COMPARE_SET: there only the first wakes who waits for the key. */
static tddp_status create(tddp_tcp_exchange *exchange, tddp_slice key, tddp_slice value)
{
    tddp_status status = tddp_tcp_put_head(exchange, TDDP_WIRE_SET, key);
    status = status ? status : tddp_wire_put_string(&exchange->request, value);
    return tddp_tcp_send(exchange, status);
}

/* Puts the value behind `now`, which may change meanwhile by other means than append. */
static tddp_status extend(tddp_tcp_exchange *exchange, tddp_slice key, tddp_slice value,
                          tddp_blob *now)
{
    for (;;) {
        tddp_bytes joined = {0};
        tddp_blob answer = {0};
        tddp_status status = tddp_bytes_append(&joined, now->data, now->size);
        status = status ? status : tddp_bytes_append(&joined, value.data, value.size);
        tddp_slice wanted = {joined.data, joined.size};
        if (status == TDDP_OK) {
            status = swap(exchange, key, slice_of(now), wanted, &answer);
        }
        bool stored = status == TDDP_OK && equal(slice_of(&answer), wanted);
        bool deleted =
            status == TDDP_OK && !stored && now->size && equal(slice_of(&answer), slice_of(now));
        tddp_bytes_free(&joined);
        tddp_blob_free(now);
        *now = answer;
        if (deleted) {
            return create(exchange, key, value);
        }
        if (status || stored) {
            return status;
        }
    }
}

static tddp_status append_locked(tddp_tcp_exchange *exchange, const token *mine, tddp_slice key,
                                 tddp_slice value)
{
    tddp_blob now = {0};
    tddp_status status =
        swap(exchange, key, token_slice(mine), token_slice(mine), &now); /* only reads */
    if (status == TDDP_OK && equal(slice_of(&now), token_slice(mine))) {
        status = create(exchange, key, value);
    } else if (status == TDDP_OK) {
        status = extend(exchange, key, value, &now);
    }
    tddp_blob_free(&now);
    return status;
}

tddp_status tddp_tcp_legacy_append(tddp_tcp_exchange *exchange, tddp_slice key, tddp_slice value)
{
    token mine;
    tddp_status status = make_token(&mine);
    status = status ? status : take_lock(exchange, &mine);
    if (status) {
        return status;
    }
    status = append_locked(exchange, &mine, key, value);
    if (tddp_tcp_is_connected(exchange->store)) {
        tddp_status left = leave_lock(exchange, &mine);
        status = status ? status : left;
    }
    return status;
}

/* --- several keys ---------------------------------------------------------------------------- */

tddp_status tddp_tcp_legacy_multi_get(tddp_tcp_exchange *exchange, const tddp_slice *keys,
                                      size_t count, tddp_blob *out)
{
    tddp_status status = TDDP_OK;
    for (size_t first = 0, next = 0; first < count && status == TDDP_OK; first = next) {
        while (next < count && exchange->request.size < PIPELINED_BYTES && status == TDDP_OK) {
            status = tddp_tcp_put_head(exchange, TDDP_WIRE_GET, keys[next++]);
        }
        status = tddp_tcp_send(exchange, status);
        bool sent = status == TDDP_OK;
        /* Every answer is read, also when memory has run out. */
        for (size_t i = first; sent && i < next && tddp_tcp_is_connected(exchange->store); i++) {
            tddp_status received = tddp_tcp_receive_blob(exchange, &out[i]);
            status = received ? received : status;
        }
    }
    return status;
}

tddp_status tddp_tcp_legacy_multi_set(tddp_tcp_exchange *exchange, const tddp_slice *keys,
                                      const tddp_slice *values, size_t count)
{
    tddp_status status = TDDP_OK;
    for (size_t i = 0; i < count && status == TDDP_OK; i++) {
        status = tddp_tcp_put_head(exchange, TDDP_WIRE_SET, keys[i]);
        status = status ? status : tddp_wire_put_string(&exchange->request, values[i]);
    }
    return tddp_tcp_send(exchange, status);
}
