/*
 * torchrun-check: joins the other ranks as any worker does, by the environment that torchrun gives
 * it, measures, and has rank 0 print. Ends with 1 if something does not work or a link is slow; the
 * reason goes to the error file that torchrun's report is made from.
 */
#include <stdlib.h>
#include <string.h>

#include "check/check.h"

enum { TIMEOUT_MS = 60000, TEXT_BYTES = 1024, MOST_RANKS = 1 << 20 };

static int read_number(const char *name, int min, int max)
{
    const char *text = getenv(name);
    char *end;
    long value = text ? strtol(text, &end, 10) : 0; /* beyond a long: its limit */
    if (!text || *text == '\0' || *end != '\0' || value < min || value > max) {
        fprintf(stderr,
                "torchrun-check: %s is %s: expected a number from %d to %d; start it by "
                "torchrun --check\n",
                name, text ? text : "not set", min, max);
        exit(EXIT_FAILURE);
    }
    return (int)value;
}

/* On rank 0. False: a link is slow. */
static bool print_results(tddp_group *group, tddp_check_results *results)
{
    char verdict[TEXT_BYTES];
    results->peers = tddp_check_allocate((size_t)results->world_size, sizeof *results->peers);
    for (int rank = 0; rank < results->world_size; rank++) {
        tddp_check_must(group, tddp_group_peer(group, rank, &results->peers[rank]));
    }
    tddp_check_classify(results);
    tddp_check_print(stdout, results);
    bool good = tddp_check_verdict(results, verdict, sizeof verdict);
    printf("%s\n", verdict);
    if (!good) {
        tddp_check_write_reason(verdict);
    }
    free(results->peers);
    return good;
}

int main(void)
{
    const char *hosted = getenv("TORCHELASTIC_USE_AGENT_STORE"); /* the launcher hosts the store */
    const char *attempt = getenv("TORCHELASTIC_RESTART_COUNT");  /* an earlier one left keys */
    tddp_tcp_store_opts at = TDDP_TCP_STORE_OPTS_INIT;
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    char prefix[64];
    tddp_store *store;
    tddp_group *group;
    at.host = getenv("MASTER_ADDR");
    if (!at.host || *at.host == '\0') {
        fprintf(stderr, "torchrun-check: MASTER_ADDR is not set: expected an address; start it by "
                        "torchrun --check\n");
        return EXIT_FAILURE;
    }
    at.port = read_number("MASTER_PORT", 1, 65535);
    opts.world_size = read_number("WORLD_SIZE", 1, MOST_RANKS);
    opts.rank = read_number("RANK", 0, opts.world_size - 1);
    at.is_server = opts.rank == 0 && !(hosted && strcmp(hosted, "True") == 0);
    at.timeout_ms = opts.timeout_ms = TIMEOUT_MS;
    tddp_check_must(NULL, tddp_tcp_store_open(&at, NULL, &store));
    (void)snprintf(prefix, sizeof prefix, "check/%.32s", attempt ? attempt : "0");
    tddp_check_must(NULL, tddp_prefix_store_create(prefix, store, &opts.store));
    opts.backend = "gloo";
    tddp_check_must(NULL, tddp_group_create(&opts, NULL, &group));
    tddp_check_results results = {.world_size = opts.world_size,
                                  .carrier = tddp_group_carrier(group)};
    tddp_check_measure(group, opts.store, &results);
    /* The others may end before a slow link ends rank 0. */
    tddp_check_must(group, tddp_barrier(group, NULL));
    bool good = opts.rank != 0 || print_results(group, &results);
    free(results.links);
    tddp_group_shutdown(group, TDDP_CHECK_SHUTDOWN_MS);
    tddp_group_release(group);
    tddp_store_release(opts.store);
    tddp_store_release(store);
    return fflush(stdout) == 0 && good ? EXIT_SUCCESS : EXIT_FAILURE;
}
