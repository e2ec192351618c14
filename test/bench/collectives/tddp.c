/*
 * libtddp as a partner of the collectives benchmark: bench_collectives_tddp BACKEND. TDDP_SHM says
 * whether "gloo" uses shared memory. "registered" is memory of the group's, "any" is plain memory.
 *
 * Entered by one thread; the group has its own.
 */
#include <stdio.h>
#include <stdlib.h>

#include <tddp.h>

#include "measure.h"

enum { TIMEOUT_MS = 60000, MOST_RANKS = 64 };

static tddp_group *group;

static void check(tddp_status status)
{
    if (status) {
        bench_fail("%s: %s", tddp_status_name(status), tddp_error_message());
    }
}

static tddp_dtype dtype_of(bench_dtype dtype)
{
    static const tddp_dtype dtypes[] = {
#define ROW(name, word, size) TDDP_##name,
        BENCH_DTYPES(ROW)
#undef ROW
    };
    return dtypes[dtype];
}

static tddp_buffer buffer_of(const bench_call *c, void *data, size_t first, size_t count)
{
    return (tddp_buffer){
        (char *)data + first * c->element, count, dtype_of(c->dtype), TDDP_CPU, 0, NULL};
}

static void allocate(bench_memory *memory, bool registered, int which)
{
    if (!registered) {
        bench_allocate_plain(memory, registered, which);
        return;
    }
    tddp_group_memory *made;
    check(tddp_group_memory_create(group, memory->bytes, &made));
    memory->handle = made;
    memory->data = tddp_group_memory_data(made);
}

static void release(bench_memory *memory, bool registered)
{
    if (registered) {
        tddp_group_memory_release(memory->handle);
    } else {
        bench_release_plain(memory, registered);
    }
}

static void ping_pong(const bench_call *c)
{
    tddp_buffer out = buffer_of(c, c->input, 0, c->count);
    tddp_buffer in = buffer_of(c, c->output, 0, c->count);
    int rank = tddp_group_rank(group);
    if (rank == 0) {
        check(tddp_send(group, out, 1, 0, NULL));
        check(tddp_recv(group, in, 1, 0, NULL));
    } else if (rank == 1) {
        check(tddp_recv(group, in, 0, 0, NULL));
        check(tddp_send(group, in, 0, 0, NULL));
    }
}

static void in_parts(const bench_call *c)
{
    tddp_buffer ins[MOST_RANKS];
    tddp_buffer outs[MOST_RANKS];
    size_t ranks = (size_t)tddp_group_world_size(group);
    bool root = tddp_group_rank(group) == 0;
    for (size_t r = 0; r < ranks; r++) {
        ins[r] = buffer_of(c, c->input, r * c->part, c->part);
        outs[r] = buffer_of(c, c->output, r * c->part, c->part);
    }
    if (c->operation == BENCH_ALL_TO_ALL) {
        check(tddp_all_to_all(group, ins, outs, ranks, NULL));
    } else if (c->operation == BENCH_GATHER) {
        check(tddp_gather(group, ins[0], root ? outs : NULL, root ? ranks : 0, 0, NULL));
    } else {
        check(tddp_scatter(group, outs[0], root ? ins : NULL, root ? ranks : 0, 0, NULL));
    }
}

static void run(const bench_call *c)
{
    tddp_buffer input = buffer_of(c, c->input, 0, c->count);
    tddp_buffer output = buffer_of(c, c->output, 0, c->count);
    switch (c->operation) {
    case BENCH_ALL_REDUCE:
        check(tddp_all_reduce(group, input, TDDP_REDUCE_SUM, 0, NULL));
        break;
    case BENCH_BROADCAST:
        check(tddp_broadcast(group, input, 0, NULL));
        break;
    case BENCH_REDUCE:
        check(tddp_reduce(group, input, TDDP_REDUCE_SUM, 0, 0, NULL));
        break;
    case BENCH_ALL_GATHER:
        check(tddp_all_gather(group, buffer_of(c, c->input, 0, c->part), output, NULL));
        break;
    case BENCH_REDUCE_SCATTER:
        check(tddp_reduce_scatter(group, input, buffer_of(c, c->output, 0, c->part),
                                  TDDP_REDUCE_SUM, 0, NULL));
        break;
    case BENCH_BARRIER:
        check(tddp_barrier(group, NULL));
        break;
    case BENCH_PING_PONG:
        ping_pong(c);
        break;
    default:
        in_parts(c);
    }
}

int main(int argc, char **argv)
{
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    const char *folder = getenv("BENCH_FOLDER");
    char path[4096];
    char version[256];
    if (argc != 2 || !folder) {
        fprintf(stderr, "usage: %s BACKEND, started by the driver\n", argv[0]);
        return 2;
    }
    opts.backend = argv[1];
    opts.rank = bench_environment("RANK");
    opts.world_size = bench_environment("WORLD_SIZE");
    opts.timeout_ms = TIMEOUT_MS;
    if (opts.world_size > MOST_RANKS) {
        bench_fail("WORLD_SIZE %d: expected at most %d", opts.world_size, MOST_RANKS);
    }
    snprintf(path, sizeof path, "%s/store", folder);
    check(tddp_file_store_open(path, opts.world_size, TIMEOUT_MS, &opts.store));
    check(tddp_group_create(&opts, NULL, &group));
    snprintf(version, sizeof version, "libtddp %s, %s over %s", TDDP_VERSION,
             tddp_group_backend(group), tddp_group_carrier(group));
    bench_partner partner = {.version = version,
                             .rank = opts.rank,
                             .ranks = opts.world_size,
                             .allocate = allocate,
                             .release = release,
                             .run = run};
    int result = bench_serve(&partner);
    tddp_group_shutdown(group, 1000);
    tddp_group_release(group);
    tddp_store_release(opts.store);
    return result;
}
