/*
 * torchrun-check: joins the other ranks as any worker does, by the environment that torchrun gives
 * it, measures, and has rank 0 print. Ends with 1 if something does not work or a link is slow; the
 * reason goes to the error file that torchrun's report is made from.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "check/check.h"

enum { TIMEOUT_MS = 60000, GOODBYE_MS = 2000, TEXT_BYTES = 1024, MOST_RANKS = 1 << 20 };

/* Where this rank stands. */
typedef struct place {
    const char *host;
    int port;
    int rank;
    int world_size;
    const char *attempt; /* ranks of an earlier one may have left keys */
    bool hosted;         /* the launcher hosts the store */
} place;

/* --- the environment ------------------------------------------------------------------------- */

static bool read_number(const char *name, int min, int max, int *out)
{
    const char *text = getenv(name);
    char *end;
    errno = 0;
    long value = text ? strtol(text, &end, 10) : -1;
    if (!text || *text == '\0' || *end != '\0' || errno != 0 || value < min || value > max) {
        fprintf(stderr,
                "torchrun-check: %s is %s: expected a number from %d to %d; start it by "
                "torchrun --check\n",
                name, text ? text : "not set", min, max);
        return false;
    }
    *out = (int)value;
    return true;
}

static bool read_place(place *out)
{
    place made = {.host = getenv("MASTER_ADDR")};
    const char *agent = getenv("TORCHELASTIC_USE_AGENT_STORE");
    const char *attempt = getenv("TORCHELASTIC_RESTART_COUNT");
    if (!made.host || *made.host == '\0') {
        fprintf(stderr, "torchrun-check: MASTER_ADDR is not set: expected an address; start it by "
                        "torchrun --check\n");
        return false;
    }
    made.hosted = agent && strcmp(agent, "True") == 0;
    made.attempt = attempt ? attempt : "0";
    if (!read_number("MASTER_PORT", 1, 65535, &made.port) ||
        !read_number("WORLD_SIZE", 1, MOST_RANKS, &made.world_size) ||
        !read_number("RANK", 0, made.world_size - 1, &made.rank)) {
        return false;
    }
    *out = made;
    return true;
}

/* --- what went wrong ------------------------------------------------------------------------- */

static void write_json(FILE *to, const char *text)
{
    for (; *text != '\0'; text++) {
        unsigned char character = (unsigned char)*text;
        if (character == '"' || character == '\\') {
            fprintf(to, "\\%c", character);
        } else if (character < ' ') {
            fprintf(to, "\\u%04x", character);
        } else {
            fputc(character, to);
        }
    }
}

/* In the form of PyTorch's error files. Without one the report has the exit status alone. */
static void leave_reason(const char *text)
{
    const char *path = getenv("TORCHELASTIC_ERROR_FILE");
    FILE *file = path && *path != '\0' ? fopen(path, "we") : NULL;
    if (!file) {
        return;
    }
    fputs("{\"message\": {\"message\": \"", file);
    write_json(file, text);
    fprintf(file, "\", \"extraInfo\": {\"timestamp\": \"%lld\"}}}\n", (long long)time(NULL));
    (void)fclose(file);
}

static int fail(const place *here)
{
    char text[TEXT_BYTES];
    (void)snprintf(text, sizeof text, "%s", tddp_error_message());
    fprintf(stderr, "torchrun-check: rank %d: %s\n", here->rank, text);
    leave_reason(text);
    return EXIT_FAILURE;
}

/* --- the check ------------------------------------------------------------------------------- */

static tddp_status join(const place *here, tddp_group **out)
{
    tddp_tcp_store_opts store_opts = TDDP_TCP_STORE_OPTS_INIT;
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    char prefix[64];
    tddp_store *store;
    store_opts.host = here->host;
    store_opts.port = here->port;
    store_opts.is_server = !here->hosted && here->rank == 0;
    store_opts.wait_for_workers = 0;
    store_opts.timeout_ms = TIMEOUT_MS;
    tddp_status status = tddp_tcp_store_open(&store_opts, NULL, &store);
    if (status != TDDP_OK) {
        return status;
    }
    (void)snprintf(prefix, sizeof prefix, "check/%.32s", here->attempt);
    status = tddp_prefix_store_create(prefix, store, &opts.store);
    tddp_store_release(store);
    if (status != TDDP_OK) {
        return status;
    }
    opts.backend = "gloo";
    opts.rank = here->rank;
    opts.world_size = here->world_size;
    opts.timeout_ms = TIMEOUT_MS;
    status = tddp_group_create(&opts, NULL, out);
    tddp_store_release(opts.store);
    return status;
}

/* Fills hosts of `results`; `names` and `ids` have room for all ranks. */
static tddp_status find_hosts(const tddp_group *group, tddp_check_results *results,
                              const char **names, const char **ids)
{
    for (int rank = 0; rank < results->world_size; rank++) {
        tddp_peer peer;
        tddp_status status = tddp_group_peer(group, rank, &peer);
        if (status != TDDP_OK) {
            return status;
        }
        names[rank] = peer.host;
        ids[rank] = peer.host_id;
        bool known = false;
        for (int other = 0; other < rank; other++) {
            known = known || strcmp(ids[other], peer.host_id) == 0;
        }
        results->hosts += !known;
    }
    results->host_of = names;
    return TDDP_OK;
}

/* On rank 0: prints; a slow link is an outcome of its own, reported in `*good`. */
static tddp_status print_results(const tddp_group *group, tddp_check_results *results, bool *good)
{
    size_t size = (size_t)results->world_size;
    const char **names = calloc(2 * size, sizeof *names);
    if (!names) {
        return TDDP_OUT_OF_MEMORY;
    }
    tddp_status status = find_hosts(group, results, names, names + size);
    if (status == TDDP_OK) {
        status = tddp_check_judge(results->links, results->link_count, false, &results->local);
    }
    if (status == TDDP_OK) {
        status = tddp_check_judge(results->links, results->link_count, true, &results->remote);
    }
    if (status == TDDP_OK) {
        char verdict[TEXT_BYTES];
        tddp_check_print(stdout, results);
        *good = tddp_check_verdict(results, verdict, sizeof verdict);
        printf("%s\n", verdict);
        if (!*good) {
            leave_reason(verdict);
        }
    }
    free(names);
    return status;
}

static tddp_status run(tddp_group *group, bool *good)
{
    tddp_check_results results = {.world_size = tddp_group_world_size(group)};
    tddp_check_link *links = NULL;
    tddp_status status = tddp_check_measure(group, &results.times);
    if (status == TDDP_OK) {
        status = tddp_check_pairs(group, &links, &results.link_count);
    }
    results.links = links;
    if (status == TDDP_OK) {
        status = tddp_check_memory(group, &results.memory);
    }
    if (status == TDDP_OK) {
        status = tddp_barrier(group, NULL); /* the others may go before a slow link ends rank 0 */
    }
    if (status == TDDP_OK && tddp_group_rank(group) == 0) {
        status = print_results(group, &results, good);
    }
    free(links);
    return status;
}

int main(void)
{
    place here;
    tddp_group *group;
    bool good = true;
    if (!read_place(&here)) {
        return EXIT_FAILURE;
    }
    if (join(&here, &group) != TDDP_OK) {
        return fail(&here);
    }
    tddp_status status = run(group, &good);
    int code = status != TDDP_OK ? fail(&here) : good ? EXIT_SUCCESS : EXIT_FAILURE;
    tddp_group_shutdown(group, GOODBYE_MS);
    tddp_group_release(group);
    return fflush(stdout) == 0 ? code : EXIT_FAILURE;
}
