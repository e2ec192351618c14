/* What operations with several buffers refuse, before anything is sent. */
#include <stdbool.h>
#include <stdint.h>

#include "ranks.h"

enum { RANKS = 3 };

typedef struct lists {
    tddp_buffer in[RANKS];
    tddp_buffer out[RANKS];
    tddp_buffer one;
} lists;

static float memory[RANKS][64];

/* Two elements for each rank, none in another's way. */
static lists good(int rank)
{
    lists self;
    for (int i = 0; i < RANKS; i++) {
        self.in[i] = buffer_of(&memory[rank][2 * i], 2, TDDP_FLOAT32);
        self.out[i] = buffer_of(&memory[rank][16 + 2 * i], 2, TDDP_FLOAT32);
    }
    self.one = buffer_of(&memory[rank][32], 2, TDDP_FLOAT32);
    return self;
}

/* Every operation with parts, at the root. */
static tddp_status call(tddp_group *group, tddp_op_kind kind, const lists *with, size_t count)
{
    int own = tddp_group_rank(group);
    tddp_work *work = NULL;
    tddp_status status = TDDP_INTERNAL;
    switch (kind) {
    case TDDP_OP_ALL_GATHER:
        status = tddp_all_gather_list(group, with->one, with->out, count, &work);
        break;
    case TDDP_OP_GATHER:
        status = tddp_gather(group, with->one, with->out, count, own, &work);
        break;
    case TDDP_OP_SCATTER:
        status = tddp_scatter(group, with->one, with->in, count, own, &work);
        break;
    case TDDP_OP_REDUCE_SCATTER:
        status =
            tddp_reduce_scatter_list(group, with->in, count, with->one, TDDP_REDUCE_SUM, 0, &work);
        break;
    case TDDP_OP_ALL_TO_ALL:
        status = tddp_all_to_all(group, with->in, with->out, count, &work);
        break;
    default:
        break;
    }
    CHECK(work == NULL);
    return status;
}

static void refused(tddp_group *group, tddp_op_kind kind, const lists *with, const char *text)
{
    CHECK_STATUS(call(group, kind, with, RANKS), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), text);
    CHECK_CONTAINS(tddp_error_message(), tddp_op_name(kind));
}

static const tddp_op_kind with_parts[] = {TDDP_OP_ALL_GATHER, TDDP_OP_GATHER, TDDP_OP_SCATTER,
                                          TDDP_OP_REDUCE_SCATTER, TDDP_OP_ALL_TO_ALL};

static bool has_outputs(tddp_op_kind kind)
{
    return kind == TDDP_OP_ALL_GATHER || kind == TDDP_OP_GATHER || kind == TDDP_OP_ALL_TO_ALL;
}

static void each_part(tddp_group *group, tddp_op_kind kind)
{
    int own = tddp_group_rank(group);
    int other = (own + 1) % RANKS;
    lists with = good(own);
    CHECK_STATUS(call(group, kind, &with, RANKS - 1), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "are 2: expected 3, one for each rank");
    tddp_buffer *parts = has_outputs(kind) ? with.out : with.in;
    parts[other].dtype = TDDP_INT32;
    refused(group, kind, &with, "expected the same");
    with = good(own);
    parts[other].dtype = (tddp_dtype)50;
    refused(group, kind, &with, "dtype 50");
    with = good(own);
    parts[other].data = NULL;
    refused(group, kind, &with, "is NULL, but has 2 elements");
    with = good(own);
    parts[other].device_index = 1;
    refused(group, kind, &with, "cpu:1");
    with = good(own);
    parts[other].device_type = TDDP_CUDA;
    CHECK_STATUS(call(group, kind, &with, RANKS), TDDP_UNSUPPORTED);
    with = good(own);
    parts[other].count = (size_t)PTRDIFF_MAX / 4 - 1;
    refused(group, kind, &with, "more elements than memory can hold");
    with = good(own);
    parts[other].count = SIZE_MAX / 2;
    refused(group, kind, &with, "than memory can hold");
    with = good(own);
    parts[own].count = 1;
    refused(group, kind, &with, "expected the same on rank");
}

static void overlaps(tddp_group *group, tddp_op_kind kind)
{
    int own = tddp_group_rank(group);
    int other = (own + 1) % RANKS;
    lists with = good(own);
    if (has_outputs(kind)) {
        with.out[other].data = (float *)with.out[own].data + 1;
        refused(group, kind, &with, "overlap: expected memory of their own");
        with = good(own);
    }
    tddp_buffer *parts = has_outputs(kind) ? with.out : with.in;
    tddp_buffer *piece = kind == TDDP_OP_ALL_TO_ALL ? &with.in[own] : &with.one;
    piece->data = parts[other].data;
    refused(group, kind, &with, "may be the same memory");
    with = good(own);
    piece->data = (float *)parts[own].data + 1;
    refused(group, kind, &with, "overlap");
}

static void refusals(int rank, int world, tddp_store *store, void *data)
{
    (void)data;
    tddp_group *group = make_group("fake", rank, world, store, 5000);
    lists with = good(rank);
    int other = (rank + 1) % world;
    for (size_t i = 0; i < sizeof with_parts / sizeof *with_parts; i++) {
        each_part(group, with_parts[i]);
        overlaps(group, with_parts[i]);
    }
    tddp_work *work = NULL;
    CHECK_STATUS(tddp_all_gather_list(group, with.one, NULL, RANKS, &work), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "outputs are 3 (NULL)");
    CHECK_STATUS(tddp_all_gather_list(NULL, with.one, with.out, RANKS, &work),
                 TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_gather(group, with.one, with.out, RANKS, other, &work),
                 TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "gather: outputs given on rank");
    CHECK_STATUS(tddp_gather(group, with.one, NULL, RANKS, other, &work), TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_gather(group, with.one, NULL, 0, rank, &work), TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_gather(group, with.one, with.out, RANKS, RANKS, &work),
                 TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "root 3: expected 0 to 2");
    CHECK_STATUS(tddp_scatter(group, with.one, with.in, RANKS, other, &work),
                 TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "scatter: inputs given on rank");
    CHECK_STATUS(tddp_scatter(group, with.one, with.in, RANKS, -1, &work), TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_reduce(group, with.one, TDDP_REDUCE_SUM, 0, 3, &work), TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_reduce(group, with.one, TDDP_REDUCE_BXOR, 0, 0, &work), TDDP_UNSUPPORTED);
    CHECK_STATUS(
        tddp_reduce_scatter_list(group, with.in, RANKS, with.one, TDDP_REDUCE_BAND, 0, &work),
        TDDP_UNSUPPORTED);
    CHECK_STATUS(tddp_all_reduce_coalesced(group, NULL, 2, TDDP_REDUCE_SUM, 0, &work),
                 TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "buffers is NULL: expected at least one buffer");
    CHECK_STATUS(tddp_all_reduce_coalesced(group, with.in, 0, TDDP_REDUCE_SUM, 0, &work),
                 TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_all_reduce_coalesced(group, with.in, 3, TDDP_REDUCE_BOR, 0, &work),
                 TDDP_UNSUPPORTED);
    with.in[2].data = with.in[0].data;
    CHECK_STATUS(tddp_all_reduce_coalesced(group, with.in, 3, TDDP_REDUCE_SUM, 0, &work),
                 TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "buffers[0] and buffers[2] overlap");
    with.in[1].dtype = TDDP_FLOAT16;
    CHECK_STATUS(tddp_all_reduce_coalesced(group, with.in, 2, TDDP_REDUCE_SUM, 0, &work),
                 TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "buffers[1] is float16, buffers[0] float32");
    CHECK(work == NULL);
    /* None of these was sent. */
    CHECK_OK(tddp_barrier(group, &work));
    CHECK_INT(tddp_work_sequence(work), 1);
    CHECK_OK(tddp_work_wait(work, NULL));
    tddp_work_release(work);
    tddp_group_release(group);
}

TEST(wrong_lists_are_refused_on_every_rank)
{
    run_ranks(RANKS, refusals, NULL);
}

/* Inputs may be the same memory for all ranks: they are only read. */
static void shared_inputs(int rank, int world, tddp_store *store, void *data)
{
    (void)data;
    tddp_group *group = make_group("fake", rank, world, store, 5000);
    lists with = good(rank);
    memory[rank][0] = (float)rank;
    for (int i = 0; i < RANKS; i++) {
        with.in[i].data = memory[rank];
    }
    CHECK_OK(tddp_all_to_all(group, with.in, with.out, RANKS, NULL));
    for (int i = 0; i < RANKS; i++) {
        CHECK_DOUBLE(memory[rank][16 + 2 * i], i, 0);
    }
    tddp_group_release(group);
}

TEST(inputs_may_share_memory)
{
    run_ranks(RANKS, shared_inputs, NULL);
}

/* A backend that supports only barriers. */
static tddp_status create(const tddp_backend_opts *opts, const tddp_wait *wait, void **context)
{
    (void)opts;
    (void)wait;
    *context = NULL;
    return TDDP_OK;
}

static void nothing(void *context)
{
    (void)context;
}

TEST(operations_that_a_backend_lacks_are_unsupported)
{
    static const tddp_backend_v1 poor = {.abi = TDDP_BACKEND_ABI,
                                         .size = sizeof(tddp_backend_v1),
                                         .name = "poor",
                                         .device_types = 1,
                                         .create = create,
                                         .abort = nothing,
                                         .destroy = nothing,
                                         .op_count = 1};
    tddp_store *store;
    CHECK_OK(tddp_backend_register(&poor));
    CHECK_OK(tddp_hash_store_create(5000, &store));
    tddp_group *group = make_group("poor", 0, 1, store, 5000);
    lists with = good(0);
    CHECK_STATUS(tddp_send(group, with.one, 0, 0, NULL), TDDP_UNSUPPORTED);
    CHECK_CONTAINS(tddp_error_message(), "backend poor has no send");
    CHECK_STATUS(tddp_recv(group, with.one, 0, 0, NULL), TDDP_UNSUPPORTED);
    CHECK_STATUS(tddp_gather(group, with.one, with.out, 1, 0, NULL), TDDP_UNSUPPORTED);
    CHECK_STATUS(tddp_all_reduce_coalesced(group, with.in, 2, TDDP_REDUCE_SUM, 0, NULL),
                 TDDP_UNSUPPORTED);
    tddp_group_release(group);
    tddp_store_release(store);
}

/* Lists that the kind doesn't have. */
TEST(submit_reads_no_list_that_the_kind_has_not)
{
    tddp_store *store;
    tddp_group *group = lone_group(NULL, 5000, &store);
    float x[2] = {3, 4};
    const tddp_buffer other = buffer_of(x, 2, TDDP_FLOAT32);
    const tddp_op_kind kinds[] = {TDDP_OP_ALL_REDUCE, TDDP_OP_ALL_GATHER, TDDP_OP_REDUCE_SCATTER,
                                  TDDP_OP_BROADCAST};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        tddp_op_args args = TDDP_OP_ARGS_INIT;
        args.kind = kinds[i];
        args.input = args.output = other;
        if (kinds[i] == TDDP_OP_REDUCE_SCATTER) {
            args.outputs = &other;
            args.output_count = 7;
        } else {
            args.inputs = &other;
            args.input_count = 7;
        }
        CHECK_OK(tddp_submit(group, &args, NULL));
        CHECK_DOUBLE((double)x[1], 4, 0);
    }
    drop(group, store);
}

TEST(submit_accepts_known_kinds_and_structs_of_other_sizes)
{
    struct {
        tddp_op_args known;
        int64_t unknown;
    } args;
    tddp_store *store;
    tddp_group *group = lone_group(NULL, 5000, &store);
    tddp_op_args_init(&args.known, sizeof args);
    CHECK_INT(args.known.kind, TDDP_OP_ALL_REDUCE);
    args.known.kind = TDDP_OP_BARRIER;
    CHECK_OK(tddp_submit(group, &args.known, NULL));
    args.known.kind = TDDP_OP_COUNT;
    CHECK_STATUS(tddp_submit(group, &args.known, NULL), TDDP_INVALID_ARGUMENT);
    CHECK_TEXT(tddp_error_message(), "operation of kind 11: expected 0 to 10");
    args.known.kind = TDDP_OP_BARRIER;
    args.unknown = 1;
    CHECK_STATUS(tddp_submit(group, &args.known, NULL), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "TDDP_OP_ARGS_INIT");
    CHECK_STATUS(tddp_submit(group, NULL, NULL), TDDP_INVALID_ARGUMENT);
    args.unknown = 0;
    CHECK_STATUS(tddp_submit(NULL, &args.known, NULL), TDDP_INVALID_ARGUMENT);
    CHECK_TEXT(tddp_error_message(), "barrier: group is NULL");
    drop(group, store);
}
