/*
 * A server's limits, time limit and secret: the option's value, else the environment's, else the
 * default. Runs once, before the server's thread. The variables are listed in <tddp/store.h>.
 */
#include <stdlib.h>
#include <sys/resource.h>

#include "store/server/server.h"

enum { KEYS = 131072, CLIENTS = 65536, PENDING = 1024, CLIENT_TIMEOUT_MS = 60 * 1000 };

/* Buffers: a request half received may take up twice its size, and has half of them. */
enum { BUFFERED_REQUESTS = 4 };

#define TOTAL_BYTES (UINT64_C(1) << 30)
#define BUFFERED_BYTES (UINT64_C(1) << 30)

/* Leaves `*value` alone if it is given, or if the variable is not set. */
static tddp_status from_environment(const char *name, uint64_t *value)
{
    const char *text = getenv(name);
    int64_t number;
    if (*value || !text) {
        return TDDP_OK;
    }
    if (!tddp_parse_int(text, 1, INT64_MAX, &number)) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "%s is \"%.100s\": expected a whole number of 1 or more", name, text);
    }
    *value = (uint64_t)number;
    return TDDP_OK;
}

static uint64_t or_default(uint64_t value, uint64_t by_default)
{
    value = value ? value : by_default;
    return value < TDDP_WIRE_MOST ? value : TDDP_WIRE_MOST;
}

/* The server shares the descriptors with the program that hosts it. */
static uint64_t default_pending(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) || limit.rlim_cur / 4 >= PENDING) {
        return PENDING;
    }
    return limit.rlim_cur / 4 + 1;
}

static uint64_t default_buffered(uint64_t request_bytes)
{
    uint64_t needed = BUFFERED_REQUESTS * request_bytes;
    return needed > BUFFERED_BYTES ? needed : BUFFERED_BYTES;
}

tddp_status tddp_server_configure(tddp_store_server *server, const tddp_store_server_opts *opts)
{
    uint64_t client_timeout_ms =
        opts->client_timeout_ms > 0 ? (uint64_t)opts->client_timeout_ms : 0;
    uint64_t key = opts->max_key_bytes;
    uint64_t value = opts->max_value_bytes;
    uint64_t keys = opts->max_keys;
    uint64_t request = opts->max_request_bytes;
    uint64_t total = opts->max_total_bytes;
    uint64_t clients = opts->max_clients;
    uint64_t pending = opts->max_pending;
    uint64_t buffered = opts->max_buffered_bytes;
    const struct {
        const char *name;
        uint64_t *value;
    } rows[] = {
        {"TDDP_STORE_MAX_KEY_BYTES", &key},
        {"TDDP_STORE_MAX_VALUE_BYTES", &value},
        {"TDDP_STORE_MAX_KEYS", &keys},
        {"TDDP_STORE_MAX_REQUEST_BYTES", &request},
        {"TDDP_STORE_MAX_TOTAL_BYTES", &total},
        {"TDDP_STORE_MAX_CLIENTS", &clients},
        {"TDDP_STORE_MAX_PENDING", &pending},
        {"TDDP_STORE_MAX_BUFFERED_BYTES", &buffered},
        {"TDDP_STORE_CLIENT_TIMEOUT_MS", &client_timeout_ms},
    };
    tddp_status status = TDDP_OK;
    for (size_t i = 0; i < sizeof rows / sizeof *rows && status == TDDP_OK; i++) {
        status = from_environment(rows[i].name, rows[i].value);
    }
    if (status) {
        return status;
    }
    server->limits = tddp_wire_limits_of(key, value);
    server->limits.keys = or_default(keys, KEYS);
    server->limits.request_bytes = or_default(request, server->limits.request_bytes);
    server->most_bytes = or_default(total, TOTAL_BYTES);
    server->most_clients = or_default(clients, CLIENTS);
    server->most_pending = or_default(pending, default_pending());
    server->most_buffered = or_default(buffered, default_buffered(server->limits.request_bytes));
    server->client_timeout_ms = (int64_t)or_default(client_timeout_ms, CLIENT_TIMEOUT_MS);
    return opts->secret ? tddp_auth_secret_copy(opts->secret, &server->secret)
                        : tddp_auth_secret(&server->secret);
}
