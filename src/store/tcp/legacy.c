/*
 * Servers of PyTorch 1.13, which is Debian 12's: how they are recognised, and the append that they
 * lack. Any thread, holding the lock. Everything is based on COMPARE_SET: if the key is absent and
 * a value is expected, nothing is stored and the expected value is returned; so expecting a random
 * token reads a value safely (a GET of an absent key would end the connection). Invariant: a server
 * is taken for one of these only after it has answered as only they do.
 */
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

#include "store/map.h"
#include "store/tcp/tcp.h"

int64_t tddp_tcp_stale_ms = 5000;

enum { LOCK_PAUSE_MS = 2, TOKEN_BYTES = 16, REASON_BYTES = 512 };

/* Without a slash in front, as `init/`: no user's key is like them. */
static const tddp_slice hello_key = {"tddp/hello", 10};
static const tddp_slice append_key = {"tddp/append", 11};

static tddp_status make_token(char token[TOKEN_BYTES])
{
    ssize_t size = getrandom(token, TOKEN_BYTES, 0);
    return size == TOKEN_BYTES ? TDDP_OK : tddp_fail_errno("getrandom");
}

static tddp_slice slice_of(const tddp_blob *blob)
{
    return (tddp_slice){blob->data, blob->size};
}

static bool holds(const tddp_blob *blob, tddp_slice value)
{
    return tddp_slices_equal(slice_of(blob), value);
}

/* --- which server it is ---------------------------------------------------------------------- */

tddp_status tddp_tcp_legacy_hello(int fd, int64_t deadline_ns, int cancel_fd)
{
    enum { COMPARE_SET_1_13 = 1, ANSWER_BYTES = 8 + TOKEN_BYTES };
    char token[TOKEN_BYTES];
    tddp_bytes hello = {0};
    char answer[ANSWER_BYTES];
    tddp_status status = make_token(token);
    status = status ? status : tddp_wire_put_byte(&hello, COMPARE_SET_1_13);
    status = status ? status : tddp_wire_put_string(&hello, hello_key);
    status = status ? status : tddp_wire_put_string(&hello, (tddp_slice){token, TOKEN_BYTES});
    status = status ? status : tddp_wire_put_string(&hello, (tddp_slice){token, TOKEN_BYTES});
    status = status ? status
                    : tddp_auth_ask(fd, hello.data, hello.size, answer, sizeof answer, deadline_ns,
                                    cancel_fd);
    tddp_bytes_free(&hello);
    if (status == TDDP_OK &&
        (tddp_wire_u64(answer) != TOKEN_BYTES || memcmp(answer + 8, token, TOKEN_BYTES) != 0)) {
        return tddp_fail(TDDP_PROTOCOL, "the hello was answered with other bytes: what listens "
                                        "there is not a store of PyTorch");
    }
    return status;
}

/* The other side may be a server of 1.13; or one that starts or ends just now, or a proxy before
 * it. Only the first answers the older hello; and where a server has both, it did not mean what it
 * did: so the newer one gets another chance. */
tddp_status tddp_tcp_legacy_connect(tddp_tcp_store *tcp, tddp_tcp_attempt *attempt)
{
    char reason[REASON_BYTES];
    snprintf(reason, sizeof reason, "%.500s", tddp_error_message());
    tddp_tcp_attempt old = *attempt;
    tcp->traits.dialect = &tddp_wire_1_13;
    tddp_status status = tddp_tcp_attempt_once(tcp, &old);
    tcp->traits.dialect = &tddp_wire_2x;
    if (status) {
        bool final = status == TDDP_CANCELED || status == TDDP_OUT_OF_MEMORY;
        return final ? status : tddp_fail(TDDP_NETWORK, "%s", reason);
    }
    status = tddp_tcp_attempt_once(tcp, attempt);
    if (!attempt->hung_up) {
        tddp_net_close(old.fd);
        return status;
    }
    attempt->fd = old.fd;
    tcp->traits.dialect = &tddp_wire_1_13;
    return TDDP_OK;
}

/* --- append ---------------------------------------------------------------------------------- */

static tddp_status fail_locked(const tddp_tcp_exchange *exchange)
{
    return tddp_fail(TDDP_TIMEOUT,
                     "timed out after %lld ms waiting for another client's append (%s)",
                     (long long)exchange->call->timeout_ms, exchange->store->name);
}

static tddp_status pause_for_lock(const tddp_tcp_exchange *exchange)
{
    const tddp_store_call *call = exchange->call;
    if (tddp_now_ns() >= call->deadline_ns) {
        return fail_locked(exchange);
    }
    return tddp_net_sleep(tddp_deadline_after_ms(LOCK_PAUSE_MS), tddp_store_call_cancel_fd(call));
}

/* Takes the lock that all appends on this server share, or that of a client that was killed:
 * without it two of the same value could not say whose value was stored. The token makes the answer
 * unambiguous here. */
static tddp_status take_lock(tddp_tcp_exchange *exchange, tddp_slice mine)
{
    tddp_blob seen = {0};
    int64_t since = tddp_now_ns();
    bool taken = false;
    tddp_status status = TDDP_OK;
    while (!taken && status == TDDP_OK) {
        bool stale = tddp_now_ns() - since > tddp_tcp_stale_ms * TDDP_NS_PER_MS;
        tddp_slice expected = stale ? slice_of(&seen) : (tddp_slice){"", 0};
        tddp_blob holder = {0};
        status = tddp_tcp_swap(exchange, append_key, expected, mine, &holder);
        if (status == TDDP_TIMEOUT && seen.data) { /* the lock is held, whatever this call did */
            status = fail_locked(exchange);
        }
        taken = status == TDDP_OK && holds(&holder, mine);
        since = holds(&holder, slice_of(&seen)) ? since : tddp_now_ns();
        tddp_blob_free(&seen);
        seen = holder;
        status = status || taken ? status : pause_for_lock(exchange);
    }
    tddp_blob_free(&seen);
    return status;
}

/* Puts the value behind what is there, which may change meanwhile by other means than append. What
 * is not there is SET: there only the first COMPARE_SET wakes who waits for the key. */
static tddp_status append_locked(tddp_tcp_exchange *exchange, tddp_slice mine, tddp_slice key,
                                 tddp_slice value)
{
    tddp_blob now = {0};
    tddp_status status = tddp_tcp_swap(exchange, key, mine, mine, &now); /* only reads */
    bool absent = status == TDDP_OK && holds(&now, mine);
    bool stored = false;
    while (status == TDDP_OK && !absent && !stored) {
        tddp_bytes joined = {0};
        tddp_blob answer = {0};
        status = tddp_bytes_append(&joined, now.data, now.size);
        status = status ? status : tddp_bytes_append(&joined, value.data, value.size);
        tddp_slice wanted = {joined.data, joined.size};
        if (status == TDDP_OK) {
            status = tddp_tcp_swap(exchange, key, slice_of(&now), wanted, &answer);
        }
        stored = status == TDDP_OK && holds(&answer, wanted);
        absent = status == TDDP_OK && !stored && now.size && holds(&answer, slice_of(&now));
        tddp_bytes_free(&joined);
        tddp_blob_free(&now);
        now = answer;
    }
    tddp_blob_free(&now);
    return absent ? tddp_tcp_send_value(exchange, TDDP_WIRE_SET, key, value) : status;
}

tddp_status tddp_tcp_legacy_append(tddp_tcp_exchange *exchange, tddp_slice key, tddp_slice value)
{
    char token[TOKEN_BYTES];
    tddp_slice mine = {token, sizeof token};
    tddp_blob holder = {0};
    tddp_status status = make_token(token);
    status = status ? status : take_lock(exchange, mine);
    status = status ? status : append_locked(exchange, mine, key, value);
    if (!exchange->store->broken && !exchange->silent) {
        /* Also after a failure, of which it may not be known whether the lock was taken. */
        char reason[REASON_BYTES];
        (void)snprintf(reason, sizeof reason, "%.500s", tddp_error_message());
        tddp_status left = tddp_tcp_renew(exchange);
        left =
            left ? left : tddp_tcp_swap(exchange, append_key, mine, (tddp_slice){"", 0}, &holder);
        status = status ? tddp_fail(status, "%s", reason) : left;
        tddp_blob_free(&holder);
    }
    return status;
}
