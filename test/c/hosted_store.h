/* The TCP store of a test's ranks: on the test's port, hosted by rank 0. */
#ifndef TDDP_TEST_HOSTED_STORE_H
#define TDDP_TEST_HOSTED_STORE_H

#include <tddp.h>

#include "check.h"

static inline tddp_store *open_store(int rank, int world_size, int port)
{
    tddp_tcp_store_opts at = TDDP_TCP_STORE_OPTS_INIT;
    tddp_store *store;
    at.host = "127.0.0.1";
    at.port = port;
    at.is_server = rank == 0;
    at.world_size = world_size;
    at.timeout_ms = 20000;
    CHECK_OK(tddp_tcp_store_open(&at, NULL, &store));
    return store;
}

#endif
