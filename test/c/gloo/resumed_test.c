/*
 * Operations that a caller's thread begins, and leaves unfinished when other ranks are late: they
 * are finished by another thread, with the results of undisturbed ones. Over one host and, by
 * test/c/CMakeLists.txt, over several made-up ones.
 */
#include <stdbool.h>

#include "fixture.h"

enum { COUNT = 300, MOST = 4, INLINE_US = 3000 };

/* Each case is an operation with a result that is known. */
typedef struct sample {
    tddp_op_kind kind;
    tddp_reduce_op reduce;
    size_t count;
} sample;

static const sample SAMPLES[] = {
    {TDDP_OP_ALL_REDUCE, TDDP_REDUCE_SUM, COUNT},
    {TDDP_OP_ALL_REDUCE, TDDP_REDUCE_AVG, COUNT},
    {TDDP_OP_ALL_REDUCE, TDDP_REDUCE_PREMUL_SUM, COUNT},
    {TDDP_OP_ALL_REDUCE, TDDP_REDUCE_MIN, 1},
    {TDDP_OP_BARRIER, TDDP_REDUCE_SUM, 0},
    {TDDP_OP_BROADCAST, TDDP_REDUCE_SUM, COUNT},
    {TDDP_OP_REDUCE, TDDP_REDUCE_AVG, COUNT},
    {TDDP_OP_ALL_GATHER, TDDP_REDUCE_SUM, COUNT},
    {TDDP_OP_REDUCE_SCATTER, TDDP_REDUCE_AVG, COUNT},
    {TDDP_OP_REDUCE_SCATTER, TDDP_REDUCE_PREMUL_SUM, COUNT},
    /* For these the ranks of several hosts connect first. */
    {TDDP_OP_ALL_TO_ALL, TDDP_REDUCE_SUM, COUNT},
    {TDDP_OP_GATHER, TDDP_REDUCE_SUM, COUNT},
    {TDDP_OP_SCATTER, TDDP_REDUCE_SUM, COUNT},
    {TDDP_OP_ALL_REDUCE, TDDP_REDUCE_SUM, 40000}, /* too large to be begun by a caller */
};
enum { SAMPLE_COUNT = sizeof SAMPLES / sizeof *SAMPLES, RUNS = 2 };

static float in[40000 * MOST];
static float out[40000 * MOST];

static float number(int rank, size_t i)
{
    return (float)(rank + 1) * 8 + (float)(i % 16);
}

static float reduced(tddp_reduce_op reduce, int world_size, size_t i)
{
    float sum = 0;
    for (int rank = 0; rank < world_size; rank++) {
        const float factor = reduce == TDDP_REDUCE_PREMUL_SUM ? (float)(rank + 1) : 1;
        sum += factor * number(rank, i);
    }
    const float mean = sum / (float)world_size;
    return reduce == TDDP_REDUCE_MIN ? number(0, i) : reduce == TDDP_REDUCE_AVG ? mean : sum;
}

/* A list of parts where the operation needs one. */
static void give_parts(const sample *it, int rank, int world_size, tddp_op_args *args)
{
    static tddp_buffer inputs[MOST];
    static tddp_buffer outputs[MOST];
    const bool is_root = rank == args->root;
    for (int peer = 0; peer < world_size; peer++) {
        inputs[peer] = buffer_of(in + (size_t)peer * it->count, it->count, TDDP_FLOAT32);
        outputs[peer] = buffer_of(out + (size_t)peer * it->count, it->count, TDDP_FLOAT32);
    }
    if (it->kind == TDDP_OP_ALL_TO_ALL || (it->kind == TDDP_OP_SCATTER && is_root)) {
        args->inputs = inputs;
        args->input_count = (size_t)world_size;
    }
    if (it->kind == TDDP_OP_ALL_TO_ALL || (it->kind == TDDP_OP_GATHER && is_root)) {
        args->outputs = outputs;
        args->output_count = (size_t)world_size;
    }
}

static tddp_op_args args_of(const sample *it, int rank, int world_size)
{
    const size_t all = it->count * (size_t)world_size;
    const bool in_place = it->kind == TDDP_OP_ALL_REDUCE || it->kind == TDDP_OP_BROADCAST ||
                          it->kind == TDDP_OP_REDUCE;
    tddp_op_args args = TDDP_OP_ARGS_INIT;
    args.kind = it->kind;
    args.reduce = it->reduce;
    args.premul = rank + 1;
    args.root = world_size - 1;
    args.output = buffer_of(out, it->kind == TDDP_OP_ALL_GATHER ? all : it->count, TDDP_FLOAT32);
    args.input = buffer_of(in, it->kind == TDDP_OP_REDUCE_SCATTER ? all : it->count, TDDP_FLOAT32);
    give_parts(it, rank, world_size, &args);
    for (size_t i = 0; i < all; i++) {
        in[i] = number(rank, i);
        out[i] = in_place ? number(rank, i) : -1;
    }
    return args;
}

static void check_result(const sample *it, int rank, int world_size)
{
    const int root = world_size - 1;
    for (size_t i = 0; i < it->count; i++) {
        switch (it->kind) {
        case TDDP_OP_BROADCAST:
            CHECK_DOUBLE(out[i], number(root, i), 0);
            break;
        case TDDP_OP_REDUCE:
            if (rank == root) {
                CHECK_DOUBLE(out[i], reduced(it->reduce, world_size, i), 1e-4);
            }
            break;
        case TDDP_OP_ALL_GATHER:
        case TDDP_OP_GATHER:
            for (int from = 0; from < (it->kind == TDDP_OP_GATHER && rank != root ? 0 : world_size);
                 from++) {
                CHECK_DOUBLE(out[(size_t)from * it->count + i], number(from, i), 0);
            }
            break;
        case TDDP_OP_ALL_TO_ALL:
            for (int from = 0; from < world_size; from++) {
                CHECK_DOUBLE(out[(size_t)from * it->count + i],
                             number(from, (size_t)rank * it->count + i), 0);
            }
            break;
        case TDDP_OP_SCATTER:
            CHECK_DOUBLE(out[i], number(root, (size_t)rank * it->count + i), 0);
            break;
        case TDDP_OP_REDUCE_SCATTER:
            CHECK_DOUBLE(out[i], reduced(it->reduce, world_size, (size_t)rank * it->count + i),
                         1e-4);
            break;
        default:
            CHECK_DOUBLE(out[i], reduced(it->reduce, world_size, i), 1e-4);
        }
    }
}

/* The first ranks begin, and give up before the last ones come. */
static void late_ranks(int rank, int world_size, int port, int early)
{
    world here = open_world(rank, world_size, port, 20000);
    for (int i = 0; i < SAMPLE_COUNT * RUNS; i++) {
        const sample *it = &SAMPLES[i % SAMPLE_COUNT];
        tddp_op_args args = args_of(it, rank, world_size);
        tddp_work *work = NULL;
        if (rank < early) {
            args.inline_us = INLINE_US;
            CHECK_OK(tddp_submit(here.group, &args, &work));
            CHECK(!tddp_work_completed(work));
            check_signal(i);
            CHECK_OK(end(work));
        } else {
            CHECK_AWAIT(i, early);
            CHECK_OK(tddp_submit(here.group, &args, NULL));
        }
        check_result(it, rank, world_size);
    }
    close_world(here);
}

MULTI_TEST(the_last_rank_is_late, 4, 60)
{
    late_ranks(rank, world_size, port, 3);
}

MULTI_TEST(half_of_the_ranks_are_late, 4, 60)
{
    late_ranks(rank, world_size, port, 2);
}

MULTI_TEST(one_rank_is_early, 3, 60)
{
    late_ranks(rank, world_size, port, 1);
}

MULTI_TEST(one_of_two_is_early, 2, 60)
{
    late_ranks(rank, world_size, port, 1);
}

/* A wait that is interrupted again and again, at whatever point. */
MULTI_TEST(interrupted_again_and_again, 4, 60)
{
    world here = open_world(rank, world_size, port, 20000);
    for (int i = 0; i < SAMPLE_COUNT * 40; i++) {
        const sample *it = &SAMPLES[i % (SAMPLE_COUNT - 1)];
        tddp_op_args args = args_of(it, rank, world_size);
        args.inline_us = 1 + i % 37;
        tddp_work *work = NULL;
        CHECK_OK(tddp_submit(here.group, &args, &work));
        CHECK_OK(end(work));
        check_result(it, rank, world_size);
    }
    close_world(here);
}

/* A caller that waits for the result hears of a rank that dies meanwhile, and of one that calls
 * something else. */
MULTI_TEST(a_late_rank_dies, 3, 60)
{
    world here = open_world(rank, world_size, port, 20000);
    CHECK_OK(tddp_barrier(here.group, NULL));
    if (rank == 2) {
        CHECK_AWAIT_BLOCKED(0);
        die();
    }
    check_will_block(rank);
    tddp_op_args args = args_of(&SAMPLES[0], rank, world_size);
    CHECK_STATUS(tddp_submit(here.group, &args, NULL), TDDP_PEER_LOST);
    CHECK_CONTAINS(tddp_error_message(), "rank 2");
    abandon_world(here);
}
