/* The TCP store of a test's ranks: on the test's port, hosted by the ranks' parent. */
#ifndef TDDP_TEST_HOSTED_STORE_H
#define TDDP_TEST_HOSTED_STORE_H

#include <unistd.h>

#include <tddp.h>

#include "events.h"

static inline void *start_hosted_store(int listener)
{
    tddp_store_server_opts opts = TDDP_STORE_SERVER_OPTS_INIT;
    tddp_store_server *server;
    opts.host = "127.0.0.1";
    opts.listen_fd = listener;
    CHECK_OK(tddp_store_server_start(&opts, &server));
    return server;
}

static inline void stop_hosted_store(void *server)
{
    tddp_store_server_stop((tddp_store_server *)server);
}

__attribute__((constructor)) static void register_hosted_store(void)
{
    static const check_service service = {start_hosted_store, stop_hosted_store};
    check_serve(&service);
}

static inline tddp_store *open_store(int rank, int world_size, int port)
{
    (void)rank; /* all are clients */
    (void)world_size;
    tddp_tcp_store_opts at = TDDP_TCP_STORE_OPTS_INIT;
    tddp_store *store;
    at.host = "127.0.0.1";
    at.port = port;
    at.wait_for_workers = 0;
    at.timeout_ms = 20000;
    CHECK_OK(tddp_tcp_store_open(&at, NULL, &store));
    return store;
}

/* A store of another kind: hosted by rank 0 and gone with it. Its port goes by way of an event. */
static inline tddp_store *open_store_of_rank_0(int rank, int world_size, int event)
{
    if (rank != 0) {
        CHECK_AWAIT(event, 1);
        return open_store(rank, world_size, check_signals(event));
    }
    tddp_tcp_store_opts at = TDDP_TCP_STORE_OPTS_INIT;
    tddp_store *store;
    at.host = "127.0.0.1";
    at.is_server = 1;
    at.wait_for_workers = 0;
    at.timeout_ms = 20000;
    CHECK_OK(tddp_tcp_store_open(&at, NULL, &store));
    check_post(event, tddp_tcp_store_port(store));
    return store;
}

#endif
