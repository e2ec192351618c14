/*
 * Random programs over everything that carries operations. TDDP_SEQUENCES says how many programs,
 * TDDP_SEQUENCES_SEED with which seed to begin; by default the same few each time.
 */
#include <stdlib.h>

#include "sequences/sequence.h"

static void carry(seq_carrier carrier, int programs)
{
    const tddp_backend_v1 *found[TDDP_DEVICE_TYPES];
    if (tddp_backends_find(carrier.backend, found)) {
        check_skip(tddp_error_message());
    }
    seq_run(&carrier, 1, programs);
}

static const seq_carrier SHARED_MEMORY = {.backend = "shm",
                                          .most = 300000,
                                          .operations = 50,
                                          .cpu = true,
                                          .any_source = true,
                                          .algorithms = true,
                                          .faults = true};
static const seq_carrier GLOO = {.backend = "gloo",
                                 .most = 300000,
                                 .operations = 40,
                                 .cpu = true,
                                 .any_source = true,
                                 .faults = true};

/* Every kind with every dtype and reduction, on four ranks down to one. */
static void carry_all(seq_carrier carrier, int programs)
{
    carrier.sweep = true;
    carry(carrier, programs);
}

MULTI_TEST(over_shared_memory, 1, 900)
{
    CHECK_INT(setenv("LAYOUT", "one", 1), 0);
    carry(SHARED_MEMORY, 12);
}

MULTI_TEST(everything_over_shared_memory, 1, 900)
{
    CHECK_INT(setenv("LAYOUT", "one", 1), 0);
    carry_all(SHARED_MEMORY, 4);
}

/* Threads of one process, whose segments are mapped once: for the thread sanitizer. */
MULTI_TEST(over_threads, 1, 900)
{
    seq_carrier carrier = SHARED_MEMORY;
    CHECK_INT(setenv("LAYOUT", "one", 1), 0);
    carrier.threads = true;
    carry(carrier, 6);
}

MULTI_TEST(everything_over_threads, 1, 900)
{
    seq_carrier carrier = SHARED_MEMORY;
    CHECK_INT(setenv("LAYOUT", "one", 1), 0);
    carrier.threads = true;
    carry_all(carrier, 3);
}

MULTI_TEST(over_gloo, 1, 900)
{
    CHECK_INT(setenv("TDDP_SHM", "0", 1), 0);
    carry(GLOO, 8);
}

MULTI_TEST(everything_over_gloo, 1, 900)
{
    CHECK_INT(setenv("TDDP_SHM", "0", 1), 0);
    carry_all(GLOO, 4);
}

MULTI_TEST(over_hosts, 1, 900)
{
    seq_carrier carrier = GLOO;
    carrier.hosts = carrier.algorithms = true;
    carry(carrier, 8);
}

/* Each program with a layout that its seed draws. */
MULTI_TEST(everything_over_hosts, 1, 900)
{
    seq_carrier carrier = GLOO;
    carrier.hosts = carrier.algorithms = true;
    carry_all(carrier, 4);
}

/* Rank 1 is late with each operation. */
MULTI_TEST(over_delays, 1, 900)
{
    CHECK_INT(setenv("LAYOUT", "one", 1), 0);
    CHECK_INT(setenv("TDDP_FAKE", "delay_ms=1,rank=1", 1), 0);
    carry((seq_carrier){.backend = "fake",
                        .most = 5000,
                        .operations = 30,
                        .cpu = true,
                        .any_source = true,
                        .stores = true},
          4);
}

MULTI_TEST(over_nccl, 1, 900)
{
    CHECK_INT(setenv("TDDP_SHM", "0", 1), 0);
    carry(
        (seq_carrier){
            .backend = "nccl", .most = 70000, .operations = 30, .cuda = true, .nccl = true},
        4);
}

MULTI_TEST(over_one_for_each_device, 1, 900)
{
    CHECK_INT(setenv("LAYOUT", "one", 1), 0);
    carry((seq_carrier){.backend = "cpu:gloo,cuda:nccl",
                        .most = 70000,
                        .operations = 30,
                        .cpu = true,
                        .cuda = true,
                        .nccl = true},
          4);
}
