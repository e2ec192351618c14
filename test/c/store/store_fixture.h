/*
 * What the store tests share: slices from text, stores of every kind, a server on loopback, raw
 * sockets that take and return hex.
 */
#ifndef TDDP_STORE_FIXTURE_H
#define TDDP_STORE_FIXTURE_H

#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <tddp/store.h>

#include "base/base.h"
#include "events.h"
#include "net/net.h"

static inline tddp_slice text(const char *bytes)
{
    return (tddp_slice){bytes, strlen(bytes)};
}

static inline tddp_wait within_ms(int64_t ms)
{
    return (tddp_wait){.timeout_ms = ms};
}

static inline tddp_store_server *start(const tddp_store_server_opts *opts)
{
    tddp_store_server *server;
    CHECK_OK(tddp_store_server_start(opts, &server));
    return server;
}

static inline tddp_store_server *loopback_server(void)
{
    tddp_store_server_opts opts = TDDP_STORE_SERVER_OPTS_INIT;
    opts.host = "127.0.0.1";
    return start(&opts);
}

static inline tddp_store *client_of(int port)
{
    tddp_tcp_store_opts opts = TDDP_TCP_STORE_OPTS_INIT;
    opts.host = "127.0.0.1";
    opts.port = port;
    opts.timeout_ms = 20000;
    tddp_store *store;
    CHECK_OK(tddp_tcp_store_open(&opts, NULL, &store));
    return store;
}

#define CHECK_VALUE(store, key, expected)                             \
    do {                                                              \
        tddp_blob got_value;                                          \
        CHECK_OK(tddp_store_get(store, text(key), NULL, &got_value)); \
        CHECK_TEXT(got_value.data, expected);                         \
        CHECK_INT(got_value.size, strlen(expected));                  \
        tddp_blob_free(&got_value);                                   \
    } while (0)

/* Bytes from hex; blanks are passed over, and [n] is the eight bytes of a length. */
static inline size_t from_hex(const char *hex, char *bytes)
{
    size_t size = 0;
    while (*hex) {
        if (*hex == ' ') {
            hex++;
        } else if (*hex == '[') {
            uint64_t number = strtoull(hex + 1, (char **)(uintptr_t)&hex, 10);
            for (int i = 0; i < 8; i++) {
                bytes[size++] = (char)(number >> (8 * i));
            }
            hex++;
        } else {
            unsigned byte;
            CHECK_INT(sscanf(hex, "%2x", &byte), 1);
            bytes[size++] = (char)byte;
            hex += 2;
        }
    }
    return size;
}

static inline int raw_connect(int port)
{
    int fd;
    CHECK_OK(tddp_net_connect_host("127.0.0.1", port, tddp_deadline_after_ms(10000), -1, &fd));
    return fd;
}

static inline void raw_send(int fd, const char *hex)
{
    char bytes[4096];
    size_t done = 0;
    CHECK_OK(
        tddp_net_send(fd, bytes, from_hex(hex, bytes), &done, tddp_deadline_after_ms(10000), -1));
}

static inline void check_raw(const char *file, int line, int fd, const char *hex)
{
    char expected[4096];
    char got[4096];
    size_t done = 0;
    size_t size = from_hex(hex, expected);
    tddp_status status = tddp_net_recv(fd, got, size, &done, tddp_deadline_after_ms(10000), -1);
    char shown[8200] = "";
    for (size_t i = 0; i < done; i++) {
        snprintf(shown + 2 * i, 3, "%02x", (unsigned char)got[i]);
    }
    if (status || memcmp(got, expected, size) != 0) {
        check_failed(file, line, "got %s (%s), expected %s", shown,
                     status ? tddp_error_message() : "all there", hex);
    }
}
#define CHECK_RAW(fd, hex) check_raw(__FILE__, __LINE__, fd, hex)

/* The other side hangs up, with nothing more said. */
static inline void check_hung_up(const char *file, int line, int fd)
{
    char byte;
    size_t done = 0;
    tddp_status status = tddp_net_recv(fd, &byte, 1, &done, tddp_deadline_after_ms(10000), -1);
    check_status(file, line, "receiving", status, TDDP_NETWORK);
}
#define CHECK_HUNG_UP(fd) check_hung_up(__FILE__, __LINE__, fd)

/* Nothing arrives for a moment. */
static inline void check_silent(const char *file, int line, int fd)
{
    char byte;
    size_t done = 0;
    check_status(file, line, "receiving",
                 tddp_net_recv(fd, &byte, 1, &done, tddp_deadline_after_ms(100), -1), TDDP_TIMEOUT);
}
#define CHECK_SILENT(fd) check_silent(__FILE__, __LINE__, fd)

/* What PyTorch 2.x sends first. */
#define HELLO "00 cef7853c 0d d5590000"

static inline int greet(int port)
{
    int fd = raw_connect(port);
    raw_send(fd, HELLO);
    CHECK_RAW(fd, "d5590000");
    return fd;
}

/* The last line logged, and how many. */
static inline int *log_count(void)
{
    static int count;
    return &count;
}
static inline char *last_log(void)
{
    static char line[2048];
    return line;
}
static inline pthread_mutex_t *log_lock(void)
{
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    return &mutex;
}
static inline void keep_log(tddp_log_level level, const char *room, const char *line, void *data)
{
    (void)level;
    (void)room;
    (void)data;
    pthread_mutex_lock(log_lock());
    ++*log_count();
    snprintf(last_log(), 2048, "%s", line);
    pthread_mutex_unlock(log_lock());
}
static inline int log_lines(void)
{
    pthread_mutex_lock(log_lock());
    int count = *log_count();
    pthread_mutex_unlock(log_lock());
    return count;
}
/* Waits until there are so many; more are too many. */
static inline void check_log_lines(const char *file, int line, int expected)
{
    CHECK_UNTIL(log_lines() >= expected);
    check_int(file, line, "log lines", log_lines(), expected);
}
#define CHECK_LOG_LINES(expected) check_log_lines(__FILE__, __LINE__, expected)
static inline int logged(const char *part)
{
    pthread_mutex_lock(log_lock());
    int found = strstr(last_log(), part) != NULL;
    pthread_mutex_unlock(log_lock());
    return found;
}
#define CHECK_LOG(part) CHECK_UNTIL(logged(part))

/* For a server whose log is kept. */
static inline tddp_store_server_opts loopback_opts(void)
{
    tddp_log_set_sink(keep_log, NULL);
    tddp_store_server_opts opts = TDDP_STORE_SERVER_OPTS_INIT;
    opts.host = "127.0.0.1";
    return opts;
}

#endif
