/*
 * The store's wire from arbitrary bytes: what one connection may send, on a server without sockets.
 *
 *   - parsed and carried out request by request, for two clients in turn so that they wake each
 *     other: whatever the bytes are, the parser stays inside them, keeps its promises, and says the
 *     same of every shorter piece;
 *   - as a connection's bytes, on servers with and without a secret: whole, and in pieces, which
 *     must come to the same.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "store/queue.h"
#include "store/server/server.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void demand(bool promise)
{
    if (!promise) {
        abort();
    }
}

static tddp_wire_result read_whole(const tddp_wire_dialect *dialect, const tddp_wire_limits *limits,
                                   const char *data, size_t size, tddp_wire_parse *out)
{
    tddp_wire_progress none = {0};
    return tddp_wire_read_on(dialect, limits, data, size, &none, out);
}

static void check_list(const tddp_wire_request *request)
{
    tddp_slice list = request->list;
    uint64_t strings = request->count * (request->kind == TDDP_WIRE_MULTI_SET ? 2 : 1);
    size_t bytes = 0;
    for (uint64_t i = 0; i < strings; i++) {
        bytes += 8 + tddp_wire_next(&list).size;
    }
    demand(bytes == request->list.size && list.size == 0);
}

/* A piece of a good request wants more, but never more than the whole. */
static void check_piece(const tddp_wire_dialect *dialect, const tddp_wire_limits *limits,
                        const char *data, size_t whole)
{
    size_t cut = whole * 2 / 3;
    tddp_wire_parse parse;
    demand(read_whole(dialect, limits, data, cut, &parse) == TDDP_WIRE_MORE);
    demand(parse.needed > cut && parse.needed <= whole);
}

static void forget_output(tddp_store_server *server)
{
    while (!STAILQ_EMPTY(&server->unsent)) {
        tddp_server_client *client = STAILQ_FIRST(&server->unsent);
        STAILQ_REMOVE_HEAD(&server->unsent, of_unsent);
        client->unsent = false;
        tddp_bytes_free(&client->out);
        tddp_server_count_buffers(server, client);
    }
}

static void serve(tddp_store_server *server, tddp_server_client clients[2], const char *data,
                  size_t size)
{
    size_t done = 0;
    for (int turn = 0; done < size; turn++) {
        tddp_wire_parse parse;
        tddp_wire_result result =
            read_whole(clients[0].dialect, &server->limits, data + done, size - done, &parse);
        if (result == TDDP_WIRE_MORE) {
            demand(parse.needed > size - done);
            return;
        }
        if (result == TDDP_WIRE_MALFORMED) {
            demand(strnlen(parse.fault, sizeof parse.fault) < sizeof parse.fault);
            return;
        }
        demand(parse.request.size > 0 && parse.request.size <= size - done);
        check_list(&parse.request);
        check_piece(clients[0].dialect, &server->limits, data + done, parse.request.size);
        bool proof = parse.request.kind == TDDP_WIRE_AUTH_BEGIN ||
                     parse.request.kind == TDDP_WIRE_AUTH_PROVE;
        if (!proof && tddp_server_execute(server, &clients[turn % 2], &parse.request)) {
            demand(*tddp_error_message() != '\0');
        }
        forget_output(server);
        done += parse.request.size;
    }
}

/* In place of the system's, so that an input can hold a proof. */
ssize_t getrandom(void *out, size_t size, unsigned flags);
ssize_t getrandom(void *out, size_t size, unsigned flags)
{
    (void)flags;
    memset(out, 0x5e, size);
    return (ssize_t)size;
}

static void hush(tddp_log_level level, const char *room, const char *line, void *data)
{
    demand(level == TDDP_LOG_WARN && *room && *line && !data);
}

static void set_up(tddp_store_server *server, char *secret)
{
    server->limits = tddp_wire_limits_of(64, 1024);
    server->limits.request_bytes = 4096;
    server->most_bytes = 64 << 10;
    STAILQ_INIT(&server->unsent);
    TAILQ_INIT(&server->late);
    server->secret = secret;
    server->client_timeout_ms = 1000;
    server->most_buffered = 1 << 20;
    server->epoll_fd = -1;
}

static void clear(tddp_store_server *server)
{
    demand(server->waits.count == 0 && server->barriers.count == 0);
    demand(LIST_EMPTY(&server->watching) && TAILQ_EMPTY(&server->late));
    demand(server->old_clients == 0 && server->client_count == 0);
    demand(server->pending_count == 0 && server->in_bytes == 0 && server->out_bytes == 0);
    tddp_server_clear(server);
    STAILQ_INIT(&server->unsent);
    server->changed = false;
    server->expire_ns = 0;
}

/* Two clients that send the same; each request is the next one's. */
static void take_turns(const char *data, size_t size)
{
    static tddp_store_server server;
    tddp_server_client clients[2] = {{.fd = -1}, {.fd = -1}};
    set_up(&server, NULL);
    /* What begins like neither dialect is read as the newer one all the same. */
    const tddp_wire_dialect *dialect = &tddp_wire_2x;
    tddp_wire_parse parse;
    tddp_wire_result hello = tddp_wire_choose(data, size, &dialect, &parse);
    demand(hello != TDDP_WIRE_MORE || size < 5);
    clients[0].dialect = dialect;
    clients[1].dialect = dialect;
    serve(&server, clients, data, size);
    for (int i = 0; i < 2; i++) {
        tddp_server_wait_cancel(&clients[i]);
        tddp_server_watch_end(&clients[i]);
        tddp_server_delete_owned(&server, &clients[i]);
        tddp_server_count_buffers(&server, &clients[i]);
        demand(clients[i].missing == 0);
    }
    clear(&server);
}

/* What became of a connection. */
typedef struct outcome {
    tddp_bytes answers;
    bool dropped;
    bool admitted;
    bool late;
    size_t unread;
    size_t missing;
    uint64_t stored;
} outcome;

/* Feeds a client the bytes, all at once or in pieces of a length that depends on them. */
static outcome feed(const char *data, size_t size, char *secret, bool in_pieces)
{
    static tddp_store_server server;
    atomic_int slot = 1;
    set_up(&server, secret);
    tddp_server_client *client = calloc(1, sizeof *client);
    if (!client) {
        abort();
    }
    client->fd = -1;
    client->slot = &slot;
    (void)tddp_net_parse("127.0.0.1", 1, &client->address);
    LIST_INSERT_HEAD(&server.clients, client, of_all);
    server.client_count = 1;
    server.pending_count = 1;
    tddp_server_late(&server, client);
    uint32_t dice = (uint32_t)size;
    for (size_t done = 0; done < size && !client->dropped;) {
        dice = dice * 1664525 + 1013904223 + (unsigned char)data[done];
        size_t part = in_pieces ? 1 + dice % 37 : size;
        part = part < size - done ? part : size - done;
        tddp_server_client_take(&server, client, data + done, part);
        done += part;
    }
    outcome out = {client->out,
                   client->dropped,
                   client->admitted,
                   client->late_ns != 0,
                   client->dropped ? 0 : client->in.size,
                   client->missing,
                   server.values.bytes + server.queues.bytes};
    demand(!secret || client->admitted || out.stored == 0);
    client->out = (tddp_bytes){0};
    tddp_server_client_drop(&server, client, NULL);
    tddp_server_clients_reap(&server);
    clear(&server);
    return out;
}

static void compare(const char *data, size_t size, char *secret)
{
    outcome whole = feed(data, size, secret, false);
    outcome pieces = feed(data, size, secret, true);
    demand(whole.answers.size == pieces.answers.size);
    demand(whole.answers.size == 0 ||
           memcmp(whole.answers.data, pieces.answers.data, whole.answers.size) == 0);
    demand(whole.admitted == pieces.admitted);
    /* A list that is too short for its count is not read before that many bytes are there, so a
     * fault in it may still be unseen; then the client is late, and still has its ephemeral keys.
     */
    if (!whole.dropped || pieces.dropped || !pieces.late) {
        demand(whole.stored == pieces.stored);
        demand(whole.dropped == pieces.dropped && whole.missing == pieces.missing);
        demand(whole.late == pieces.late && whole.unread == pieces.unread);
    }
    tddp_bytes_free(&whole.answers);
    tddp_bytes_free(&pieces.answers);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static char secret[] = "open sesame";
    tddp_log_set_sink(hush, NULL);
    /* A copy of its own size, so that a step beyond is seen. */
    char *copy = malloc(size ? size : 1);
    if (!copy) {
        return 0;
    }
    if (size) {
        memcpy(copy, data, size);
    }
    take_turns(copy, size);
    compare(copy, size, NULL);
    compare(copy, size, secret);
    free(copy);
    return 0;
}
