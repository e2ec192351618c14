/*
 * Collectives over shared memory that only move data, beyond what random sequences
 * (test/c/sequences) do: eight ranks, many chunks in registered and other memory, each requested
 * algorithm, late ranks, parts of different size.
 */
#include "moving.h"
#include "ranks.h"

static mover mover_of(shm_rank *rank, moving_memory memory)
{
    return (mover){.group = rank->group, .rank = rank->rank, .size = rank->size, .memory = memory};
}

/* More than an area of staging holds: its chunks are reused many times. */
static void many_chunks(shm_rank *rank)
{
    for (int memory = 0; memory < MOVING_MEMORIES; memory++) {
        mover it = mover_of(rank, (moving_memory)memory);
        moving_all(&it, 1500007, TDDP_UINT8);
    }
}

#define SIZES(body, size)                                \
    MULTI_TEST(body##_of_##size##_threads, 1, 60)        \
    {                                                    \
        run_shm_groups(SHM_THREADS, size, body, NULL);   \
    }                                                    \
    MULTI_TEST(body##_of_##size##_processes, 1, 60)      \
    {                                                    \
        run_shm_groups(SHM_PROCESSES, size, body, NULL); \
    }

SIZES(many_chunks, 3)
MULTI_TEST(many_chunks_of_2_processes, 1, 60)
{
    run_shm_groups(SHM_PROCESSES, 2, many_chunks, NULL);
}
MULTI_TEST(many_chunks_of_4_processes, 1, 60)
{
    run_shm_groups(SHM_PROCESSES, 4, many_chunks, NULL);
}

static void eight(shm_rank *rank)
{
    for (int memory = 0; memory < MOVING_MEMORIES; memory++) {
        mover it = mover_of(rank, (moving_memory)memory);
        moving_all(&it, 9, TDDP_FLOAT32);
        moving_all(&it, 25001, TDDP_FLOAT32);
    }
}

MULTI_TEST(eight_ranks, 1, 60)
{
    run_shm_groups(SHM_PROCESSES, 8, eight, NULL);
}

/* Large enough for stores past the cache. */
static void large(shm_rank *rank)
{
    for (int memory = 0; memory < MOVING_MEMORIES; memory++) {
        mover it = mover_of(rank, (moving_memory)memory);
        it.count = 40000003;
        it.dtype = TDDP_UINT8;
        moving_call(&it, memory == MOVING_MIXED ? 1 : 0, 1);
        moving_call(&it, 6, 0);
    }
}

MULTI_TEST(a_hundred_megabytes, 1, 60)
{
    run_shm_groups(SHM_PROCESSES, 2, large, NULL);
}

/* Each rank in turn is late, while the others continue as far as they can. */
static void late(shm_rank *rank)
{
    mover it = mover_of(rank, MOVING_MIXED);
    it.dtype = TDDP_FLOAT32;
    for (int i = 0; i < 36; i++) {
        if (i % rank->size == rank->rank) {
            nanosleep(&(struct timespec){0, 3000000}, NULL);
        }
        it.count = i % 2 ? 100 : 50000;
        moving_call(&it, i % MOVING_KINDS, i % rank->size);
    }
}

SIZES(late, 3)

/* Every algorithm that can be requested. */
static void forced(shm_rank *rank)
{
    static const size_t bytes[] = {0, 5, 16384, 16385, 400009};
    for (int memory = 0; memory < MOVING_MEMORIES; memory++) {
        mover it = mover_of(rank, (moving_memory)memory);
        for (size_t i = 0; i < sizeof bytes / sizeof *bytes; i++) {
            moving_all(&it, bytes[i], TDDP_UINT8);
        }
    }
}

static void run_forced(const char *algorithms)
{
    CHECK_INT(setenv("TDDP_SHM_ALGORITHM", algorithms, 1), 0);
    run_shm_groups(SHM_PROCESSES, 2, forced, NULL);
    run_shm_groups(SHM_PROCESSES, 3, forced, NULL);
}

TEST(forced_inline)
{
    run_forced("broadcast=inline,all_gather=inline,gather=inline,scatter=inline,all_to_all=inline");
}

TEST(forced_staged)
{
    run_forced("broadcast=staged,all_gather=staged,gather=staged,scatter=staged,all_to_all=staged");
}

TEST(forced_direct)
{
    run_forced("broadcast=direct,all_gather=direct,gather=direct,scatter=direct,all_to_all=direct");
}

TEST(forced_sliced)
{
    run_forced("broadcast=sliced");
}

/* --- calls that differ ----------------------------------------------------------------------- */

/* All ranks send and expect 10 elements, except that the last rank's first part, or its own
 * part, has 11. */
static tddp_status call_differently(shm_rank *it, tddp_op_kind kind)
{
    static float memory[2 * SHM_MAX_RANKS][16];
    tddp_buffer inputs[SHM_MAX_RANKS];
    tddp_buffer outputs[SHM_MAX_RANKS];
    bool odd = it->rank == it->size - 1;
    size_t size = (size_t)it->size;
    for (int r = 0; r < it->size; r++) {
        bool other = odd && r == 0;
        inputs[r] = shm_buffer(memory[r], 10, TDDP_FLOAT32);
        outputs[r] = shm_buffer(memory[SHM_MAX_RANKS + r], 10, TDDP_FLOAT32);
        inputs[r].count += other && kind == TDDP_OP_ALL_TO_ALL;
        outputs[r].count += other && kind == TDDP_OP_ALL_GATHER;
    }
    inputs[it->rank].count += odd && kind == TDDP_OP_GATHER;
    outputs[it->rank].count += odd && kind == TDDP_OP_SCATTER;
    bool root = it->rank == 0;
    switch (kind) {
    case TDDP_OP_BROADCAST:
        inputs[0].count += odd;
        return tddp_broadcast(it->group, inputs[0], 0, NULL);
    case TDDP_OP_ALL_GATHER:
        return tddp_all_gather_list(it->group, inputs[it->rank], outputs, size, NULL);
    case TDDP_OP_GATHER:
        return tddp_gather(it->group, inputs[it->rank], root ? outputs : NULL, root ? size : 0, 0,
                           NULL);
    case TDDP_OP_SCATTER:
        return tddp_scatter(it->group, outputs[it->rank], root ? inputs : NULL, root ? size : 0, 0,
                            NULL);
    default:
        return tddp_all_to_all(it->group, inputs, outputs, size, NULL);
    }
}

enum { DONE }; /* an event */

static void differs(shm_rank *it)
{
    CHECK_OK(tddp_barrier(it->group, NULL));
    tddp_status status = call_differently(it, *(tddp_op_kind *)it->data);
    if (status == TDDP_OK && it->rank > 0 && it->rank < it->size - 1) {
        /* This rank agrees with all others and has what it expects: the others report their
         * mismatch to it. */
        status = tddp_barrier(it->group, NULL);
    }
    CHECK_STATUS(status, TDDP_MISMATCH);
    CHECK_CONTAINS(tddp_error_message(), "10");
    CHECK_CONTAINS(tddp_error_message(), "11");
    CHECK_CONTAINS(tddp_error_message(), it->size == 2 ? "rank 1" : "rank 2");
    /* A rank that has ended would be reported instead of the mismatch. */
    CHECK_MEET(DONE, it->size);
}

TEST(parts_of_different_size)
{
    static tddp_op_kind kinds[] = {TDDP_OP_BROADCAST, TDDP_OP_ALL_GATHER, TDDP_OP_GATHER,
                                   TDDP_OP_SCATTER, TDDP_OP_ALL_TO_ALL};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        run_shm_groups(SHM_PROCESSES, 2, differs, &kinds[i]);
        run_shm_groups(SHM_PROCESSES, 3, differs, &kinds[i]);
    }
}
