/* A rank of a test as the transport sees it, and waits as tddp_coll does them. */
#ifndef TDDP_TEST_UCX_RANKS_H
#define TDDP_TEST_UCX_RANKS_H

#include <stdio.h>
#include <string.h>

#include "backend/ucx/ucx.h"
#include "base/base.h"
#include "hosted_store.h"

static const tddp_transport_ops *const ops = &tddp_ucx_transport;

static inline tddp_ucx *open_rank(int rank, int world_size, int port)
{
    tddp_ucx *ucx;
    static int groups;
    char prefix[16];
    tddp_store *whole = open_store(rank, world_size, port);
    tddp_store *store;
    (void)snprintf(prefix, sizeof prefix, "group %d", groups++);
    CHECK_OK(tddp_prefix_store_create(prefix, whole, &store));
    tddp_store_release(whole);
    const tddp_backend_opts opts = {.size = sizeof opts,
                                    .rank = rank,
                                    .world_size = world_size,
                                    .store = store,
                                    .timeout_ms = 20000,
                                    .group = "test"};
    CHECK_OK(tddp_ucx_open(&opts, NULL, &ucx));
    tddp_store_release(store);
    return ucx;
}

static inline void *post_send(tddp_ucx *ucx, int peer, uint64_t tag, const void *data, size_t bytes)
{
    void *transfer;
    CHECK_OK(ops->send(ucx, peer, tag, data, bytes, &transfer));
    return transfer;
}

static inline void *post_recv(tddp_ucx *ucx, int peer, uint64_t tag, void *data, size_t bytes)
{
    void *transfer;
    CHECK_OK(ops->recv(ucx, peer, tag, data, bytes, &transfer));
    return transfer;
}

/* Waits as a thread that sleeps does, or as one that spins. A wake-up that is lost ends the test.
 */
static inline tddp_status await(tddp_ucx *ucx, void *transfer, int peer, bool spins, int *source)
{
    tddp_status failure = TDDP_OK;
    for (;;) {
        const uint32_t seen = tddp_eventcount_read(ucx->events);
        int complete;
        ops->progress(ucx);
        tddp_status status = ops->test(ucx, transfer, &complete, source);
        if (complete || status || failure) {
            return status ? status : complete ? TDDP_OK : failure;
        }
        if (!spins) {
            ops->arm(ucx);
            tddp_eventcount_wait(ucx->events, seen, 0, 60 * TDDP_NS_PER_S);
            failure = ops->check_peer(ucx, peer, 0);
        }
    }
}

/* Waits for a transfer and frees it. */
static inline tddp_status end_with(tddp_ucx *ucx, void *transfer, int peer)
{
    const tddp_status status = await(ucx, transfer, peer, false, NULL);
    ops->release(ucx, transfer);
    return status;
}

static inline void send_to(tddp_ucx *ucx, int peer, uint64_t tag, const void *data, size_t bytes)
{
    CHECK_OK(end_with(ucx, post_send(ucx, peer, tag, data, bytes), peer));
}

static inline void recv_from(tddp_ucx *ucx, int peer, uint64_t tag, void *data, size_t bytes)
{
    CHECK_OK(end_with(ucx, post_recv(ucx, peer, tag, data, bytes), peer));
}

/* All ranks have come as far. */
static inline void meet(tddp_ucx *ucx, uint64_t tag)
{
    for (int step = 1; step < ucx->size; step *= 2) {
        char token = 1;
        const int to = (ucx->rank + step) % ucx->size;
        const int from = (ucx->rank + ucx->size - step) % ucx->size;
        void *sent = post_send(ucx, to, tag, &token, 1);
        char got = 0;
        recv_from(ucx, from, tag, &got, 1);
        CHECK_OK(end_with(ucx, sent, to));
    }
}

/* Contents that depend on who sends what. */
static inline void fill(uint8_t *data, size_t bytes, unsigned seed)
{
    for (size_t i = 0; i < bytes; i++) {
        data[i] = (uint8_t)(i * 31 + (i >> 8) + seed);
    }
}

static inline void check_filled(const uint8_t *data, size_t bytes, unsigned seed)
{
    for (size_t i = 0; i < bytes; i++) {
        if (data[i] != (uint8_t)(i * 31 + (i >> 8) + seed)) {
            check_failed(__FILE__, __LINE__, "byte %zu of %zu is %u, seed %u", i, bytes, data[i],
                         seed);
        }
    }
}

#endif
