/*
 * Connections to the endpoints' stores, for the election's thread. An endpoint that does not answer
 * costs a step's time at most once a second, and nothing while it is not to be tried again. Leaves
 * to election.c what is asked and what an answer means.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "launch/rendezvous/voter.h"
#include "net/net.h"

enum { FIRST_PAUSE_MS = 50, LAST_PAUSE_MS = 1000 };

/* No value is this, so comparing with it only looks. */
static const char nothing[] = "?";

void tddp_launch_voters_init(tddp_launch_voters *voters, const tddp_launch_endpoint *endpoints,
                             int count, int self, const char *address, int port, const char *run_id,
                             int64_t answer_ms, tddp_cancel *cancel)
{
    *voters = (tddp_launch_voters){
        .count = count, .run_id = run_id, .answer_ms = answer_ms, .cancel = cancel};
    for (int i = 0; i < count; i++) {
        tddp_launch_voter *voter = &voters->voters[i];
        (void)snprintf(voter->host, sizeof voter->host, "%s",
                       i == self ? address : endpoints[i].host);
        voter->port = i == self ? port : endpoints[i].port;
    }
}

void tddp_launch_voters_close(tddp_launch_voters *voters)
{
    for (int i = 0; i < voters->count; i++) {
        tddp_store_release(voters->voters[i].store);
        voters->voters[i].store = NULL;
    }
}

/* The store's own opening tries until its time is up; this tells at once whether somebody listens.
 */
static tddp_status knock(const char *host, int port, int64_t limit_ms, tddp_cancel *cancel)
{
    int fd;
    tddp_status status = tddp_net_connect_host(host, port, tddp_deadline_after_ms(limit_ms),
                                               tddp_cancel_fd(cancel), &fd);
    if (status == TDDP_OK) {
        tddp_net_close(fd);
    }
    return status;
}

tddp_status tddp_launch_voter_open(const char *host, int port, const char *prefix, int64_t limit_ms,
                                   tddp_cancel *cancel, tddp_store **out)
{
    tddp_tcp_store_opts opts = TDDP_TCP_STORE_OPTS_INIT;
    tddp_wait wait = {limit_ms, cancel};
    tddp_store *plain;
    opts.host = host;
    opts.port = port;
    opts.wait_for_workers = 0;
    opts.timeout_ms = limit_ms;
    tddp_status status = knock(host, port, limit_ms, cancel);
    if (status == TDDP_OK) {
        status = tddp_tcp_store_open(&opts, &wait, &plain);
    }
    if (status == TDDP_OK) {
        status = tddp_prefix_store_create(prefix, plain, out);
        tddp_store_release(plain);
    }
    return status;
}

static tddp_status connect_voter(const tddp_launch_voters *voters, tddp_launch_voter *voter)
{
    int64_t now = tddp_now_ns();
    if (now < voter->retry_ns) {
        return TDDP_NETWORK;
    }
    char *prefix = tddp_format("torchrun/%s", voters->run_id);
    tddp_status status =
        prefix ? tddp_launch_voter_open(voter->host, voter->port, prefix, voters->answer_ms,
                                        voters->cancel, &voter->store)
               : TDDP_OUT_OF_MEMORY;
    free(prefix);
    if (status == TDDP_OK) {
        voter->pause_ns = 0;
        return status;
    }
    voter->pause_ns = voter->pause_ns ? voter->pause_ns * 2 : FIRST_PAUSE_MS * TDDP_NS_PER_MS;
    if (voter->pause_ns > LAST_PAUSE_MS * TDDP_NS_PER_MS) {
        voter->pause_ns = LAST_PAUSE_MS * TDDP_NS_PER_MS;
    }
    voter->retry_ns = tddp_now_ns() + voter->pause_ns;
    return status;
}

tddp_status tddp_launch_voters_exchange(void *context, int index, const char *key,
                                        const char *expected, const char *desired,
                                        char present[TDDP_LAUNCH_LEASE_BYTES])
{
    tddp_launch_voters *voters = context;
    tddp_launch_voter *voter = &voters->voters[index];
    tddp_wait wait = {voters->answer_ms, voters->cancel};
    tddp_blob value;
    tddp_status status = voter->store ? TDDP_OK : connect_voter(voters, voter);
    if (status != TDDP_OK) {
        return status;
    }
    expected = desired ? expected : nothing;
    desired = desired ? desired : nothing;
    status = tddp_store_compare_set(voter->store, (tddp_slice){key, strlen(key)},
                                    (tddp_slice){expected, strlen(expected)},
                                    (tddp_slice){desired, strlen(desired)}, &wait, &value);
    if (status != TDDP_OK) {
        tddp_store_release(voter->store); /* whether it was done nobody knows */
        voter->store = NULL;
        return status;
    }
    /* Had it held `expected`, it would be `desired` now: the store says so of a key that is absent.
     */
    bool absent = expected[0] && strcmp(value.data, expected) == 0 &&
                  (expected == nothing || strcmp(expected, desired) != 0);
    (void)snprintf(present, TDDP_LAUNCH_LEASE_BYTES, "%s", absent ? "" : value.data);
    tddp_blob_free(&value);
    return TDDP_OK;
}
