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

/* The option's value, if it is not 0; else the variable's; else the default. */
static tddp_status choose(const char *name, uint64_t given, uint64_t by_default, uint64_t *out)
{
    const char *text = given ? NULL : getenv(name);
    int64_t number = 0;
    if (text && !tddp_parse_int(text, 1, INT64_MAX, &number)) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "%s is \"%.100s\": expected a whole number of 1 or more", name, text);
    }
    uint64_t value = given ? given : text ? (uint64_t)number : by_default;
    *out = value < TDDP_WIRE_MOST ? value : TDDP_WIRE_MOST;
    return TDDP_OK;
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
    tddp_wire_limits *limits = &server->limits;
    uint64_t timeout = opts->client_timeout_ms > 0 ? (uint64_t)opts->client_timeout_ms : 0;
    uint64_t key;
    uint64_t value;
    STAILQ_INIT(&server->unsent);
    TAILQ_INIT(&server->late);
    tddp_status status = choose("TDDP_STORE_MAX_KEY_BYTES", opts->max_key_bytes, 0, &key);
    status =
        status ? status : choose("TDDP_STORE_MAX_VALUE_BYTES", opts->max_value_bytes, 0, &value);
    if (status) {
        return status;
    }
    *limits = tddp_wire_limits_of(key, value);
    status = choose("TDDP_STORE_MAX_REQUEST_BYTES", opts->max_request_bytes, limits->request_bytes,
                    &limits->request_bytes);
    const struct {
        const char *name;
        uint64_t given;
        uint64_t by_default;
        uint64_t *out;
    } rows[] = {
        {"TDDP_STORE_MAX_KEYS", opts->max_keys, KEYS, &limits->keys},
        {"TDDP_STORE_MAX_TOTAL_BYTES", opts->max_total_bytes, TOTAL_BYTES, &server->most_bytes},
        {"TDDP_STORE_MAX_CLIENTS", opts->max_clients, CLIENTS, &server->most_clients},
        {"TDDP_STORE_MAX_PENDING", opts->max_pending, default_pending(), &server->most_pending},
        {"TDDP_STORE_MAX_BUFFERED_BYTES", opts->max_buffered_bytes,
         default_buffered(limits->request_bytes), &server->most_buffered},
        {"TDDP_STORE_CLIENT_TIMEOUT_MS", timeout, CLIENT_TIMEOUT_MS, &timeout},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows && status == TDDP_OK; i++) {
        status = choose(rows[i].name, rows[i].given, rows[i].by_default, rows[i].out);
    }
    if (status) {
        return status;
    }
    server->client_timeout_ms = (int64_t)timeout;
    return opts->secret ? tddp_auth_secret_copy(opts->secret, &server->secret)
                        : tddp_auth_secret(&server->secret);
}
