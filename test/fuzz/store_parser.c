/*
 * The store's wire from arbitrary bytes: what one connection may send, parsed and carried out on a
 * server without sockets, for two clients in turn so that they wake each other. Whatever the bytes
 * are, the parser stays inside them, keeps its promises, and says the same of every shorter piece.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "store/server.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void demand(bool promise)
{
    if (!promise) {
        abort();
    }
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
    demand(tddp_wire_read(dialect, limits, data, cut, &parse) == TDDP_WIRE_MORE);
    demand(parse.needed > cut && parse.needed <= whole);
}

static void forget_output(tddp_store_server *server)
{
    while (server->unsent) {
        tddp_server_client *client = server->unsent;
        server->unsent = client->next_unsent;
        client->unsent = false;
        tddp_bytes_free(&client->out);
    }
    server->unsent_end = &server->unsent;
}

static void serve(tddp_store_server *server, tddp_server_client clients[2], const char *data,
                  size_t size)
{
    size_t done = 0;
    for (int turn = 0; done < size; turn++) {
        tddp_wire_parse parse;
        tddp_wire_result result =
            tddp_wire_read(clients[0].dialect, &server->limits, data + done, size - done, &parse);
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
        if (tddp_server_execute(server, &clients[turn % 2], &parse.request)) {
            demand(*tddp_error_message() != '\0');
        }
        forget_output(server);
        done += parse.request.size;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static tddp_store_server server;
    tddp_server_client clients[2] = {{.fd = -1}, {.fd = -1}};
    server.limits = tddp_wire_limits_of(64, 1024);
    server.limits.request_bytes = 4096;
    server.unsent_end = &server.unsent;
    /* A copy of its own size, so that a step beyond is seen. */
    char *copy = malloc(size ? size : 1);
    if (!copy) {
        return 0;
    }
    if (size) {
        memcpy(copy, data, size);
    }
    /* What begins like neither dialect is read as the newer one all the same. */
    const tddp_wire_dialect *dialect = &tddp_wire_2x;
    tddp_wire_parse parse;
    tddp_wire_result hello = tddp_wire_choose(copy, size, &dialect, &parse);
    demand(hello != TDDP_WIRE_MORE || size < 5);
    clients[0].dialect = dialect;
    clients[1].dialect = dialect;
    serve(&server, clients, copy, size);
    for (int i = 0; i < 2; i++) {
        tddp_server_wait_cancel(&clients[i]);
        tddp_server_watch_cancel(&clients[i]);
        demand(clients[i].missing == 0 && clients[i].watching == 0);
    }
    demand(server.waits.count == 0 && server.barriers.count == 0 && server.watches.count == 0);
    tddp_store_map_clear(&server.values);
    tddp_store_map_clear(&server.queues);
    tddp_store_map_clear(&server.waits);
    tddp_store_map_clear(&server.barriers);
    tddp_store_map_clear(&server.watches);
    free(copy);
    return 0;
}
