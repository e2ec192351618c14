/*
 * An MPI as a partner of the collectives benchmark. In place where ours is: all_reduce, broadcast,
 * reduce.
 *
 * Entered by one thread; whatever threads the MPI has are its own.
 */
#include <mpi.h>
#include <stdio.h>
#include <string.h>

#include "measure.h"

static int rank;
static int ranks;

static void check(int code)
{
    if (code != MPI_SUCCESS) {
        bench_fail("MPI returned %d", code);
    }
}

static const char *obstacle(const bench_call *call)
{
    bool half = call->dtype == BENCH_FLOAT16 || call->dtype == BENCH_BFLOAT16;
    return half ? "MPI has no such type" : NULL;
}

static MPI_Datatype type_of(bench_dtype dtype)
{
    switch (dtype) {
    case BENCH_UINT8:
        return MPI_UINT8_T;
    case BENCH_INT32:
        return MPI_INT32_T;
    case BENCH_INT64:
        return MPI_INT64_T;
    case BENCH_FLOAT32:
        return MPI_FLOAT;
    default:
        return MPI_DOUBLE;
    }
}

static void ping_pong(const bench_call *c, int count, MPI_Datatype type)
{
    if (rank == 0) {
        check(MPI_Send(c->input, count, type, 1, 0, MPI_COMM_WORLD));
        check(MPI_Recv(c->output, count, type, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
    } else if (rank == 1) {
        check(MPI_Recv(c->output, count, type, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
        check(MPI_Send(c->output, count, type, 0, 0, MPI_COMM_WORLD));
    }
}

static void in_parts(const bench_call *c, int part, MPI_Datatype type)
{
    MPI_Comm world = MPI_COMM_WORLD;
    switch (c->operation) {
    case BENCH_ALL_GATHER:
        check(MPI_Allgather(c->input, part, type, c->output, part, type, world));
        break;
    case BENCH_REDUCE_SCATTER:
        check(MPI_Reduce_scatter_block(c->input, c->output, part, type, MPI_SUM, world));
        break;
    case BENCH_ALL_TO_ALL:
        check(MPI_Alltoall(c->input, part, type, c->output, part, type, world));
        break;
    case BENCH_GATHER:
        check(MPI_Gather(c->input, part, type, c->output, part, type, 0, world));
        break;
    default:
        check(MPI_Scatter(c->input, part, type, c->output, part, type, 0, world));
    }
}

static void run(const bench_call *c)
{
    int count = (int)c->count;
    MPI_Datatype type = type_of(c->dtype);
    MPI_Comm world = MPI_COMM_WORLD;
    switch (c->operation) {
    case BENCH_ALL_REDUCE:
        check(MPI_Allreduce(MPI_IN_PLACE, c->input, count, type, MPI_SUM, world));
        break;
    case BENCH_BROADCAST:
        check(MPI_Bcast(c->input, count, type, 0, world));
        break;
    case BENCH_REDUCE:
        check(MPI_Reduce(rank == 0 ? MPI_IN_PLACE : c->input, c->input, count, type, MPI_SUM, 0,
                         world));
        break;
    case BENCH_BARRIER:
        check(MPI_Barrier(world));
        break;
    case BENCH_PING_PONG:
        ping_pong(c, count, type);
        break;
    default:
        in_parts(c, (int)c->part, type);
    }
}

int main(int argc, char **argv)
{
    char version[MPI_MAX_LIBRARY_VERSION_STRING];
    int length;
    check(MPI_Init(&argc, &argv));
    check(MPI_Comm_rank(MPI_COMM_WORLD, &rank));
    check(MPI_Comm_size(MPI_COMM_WORLD, &ranks));
    check(MPI_Get_library_version(version, &length));
    /* Name and number; what follows is who built it. MPICH has a tab between. */
    version[strcspn(version, ",\n\"\\")] = '\0';
    for (char *tab = version; (tab = strchr(tab, '\t'));) {
        *tab = ' ';
    }
    bench_partner partner = {.version = version,
                             .rank = rank,
                             .ranks = ranks,
                             .obstacle = obstacle,
                             .allocate = bench_allocate_plain,
                             .release = bench_release_plain,
                             .run = run};
    int result = bench_serve(&partner);
    check(MPI_Finalize());
    return result;
}
