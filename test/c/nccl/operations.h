/*
 * Every operation of a group of the nccl backend, with its values: over stand-ins for its logic
 * (test/c/nccl), on a GPU for everything (test/gpu).
 */
#ifndef TDDP_TEST_NCCL_OPERATIONS_H
#define TDDP_TEST_NCCL_OPERATIONS_H

#include <math.h>
#include <stdbool.h>

#include "args.h"
#include "nccl/device_memory.h"
#include "nccl/elements.h"
#include "nccl/world.h"

enum { MOST = 200000 };

static const size_t sizes[] = {0, 1, 3, 1000, MOST};

static inline double value(int rank, size_t i)
{
    return (double)((int)(i % 7) + 1 + rank);
}

static inline double reduced(tddp_reduce_op op, int ranks, size_t i)
{
    double all = op == TDDP_REDUCE_PREMUL_SUM ? 0 : value(0, i);
    for (int rank = op == TDDP_REDUCE_PREMUL_SUM ? 0 : 1; rank < ranks; rank++) {
        double one = value(rank, i);
        all = op == TDDP_REDUCE_PRODUCT      ? all * one
              : op == TDDP_REDUCE_MIN        ? fmin(all, one)
              : op == TDDP_REDUCE_MAX        ? fmax(all, one)
              : op == TDDP_REDUCE_PREMUL_SUM ? all + one * (rank + 1)
                                             : all + one;
    }
    return op == TDDP_REDUCE_AVG ? all / ranks : all;
}

static inline void fill(float *data, size_t count, int rank)
{
    for (size_t i = 0; i < count; i++) {
        data[i] = (float)value(rank, i);
    }
}

static inline void check_reductions(tddp_group *group, int rank, int ranks)
{
    static float data[MOST];
    static const tddp_reduce_op ops[] = {TDDP_REDUCE_SUM, TDDP_REDUCE_AVG, TDDP_REDUCE_PRODUCT,
                                         TDDP_REDUCE_MIN, TDDP_REDUCE_MAX, TDDP_REDUCE_PREMUL_SUM};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        for (size_t o = 0; o < sizeof ops / sizeof *ops; o++) {
            fill(data, sizes[s], rank);
            tddp_buffer buffer = to_device(data, sizes[s], TDDP_FLOAT32);
            CHECK_OK(tddp_all_reduce(group, buffer, ops[o], rank + 1, NULL));
            from_device(data, buffer);
            for (size_t i = 0; i < sizes[s]; i++) {
                CHECK_DOUBLE((double)data[i], reduced(ops[o], ranks, i), 1e-4);
            }
            fill(data, sizes[s], rank);
            buffer = to_device(data, sizes[s], TDDP_FLOAT32);
            CHECK_OK(tddp_reduce(group, buffer, ops[o], rank + 1, ranks - 1, NULL));
            from_device(data, buffer);
            for (size_t i = 0; i < sizes[s]; i++) {
                CHECK_DOUBLE((double)data[i],
                             rank == ranks - 1 ? reduced(ops[o], ranks, i) : value(rank, i), 1e-4);
            }
        }
    }
}

/* Each dtype that NCCL reduces, with the operations that it supports; the products of four ranks
 * fit an int8. */
static inline void check_dtypes(tddp_group *group, int rank, int ranks)
{
    enum { COUNT = 101 };
    static const tddp_dtype dtypes[] = {TDDP_UINT8,     TDDP_INT8,      TDDP_INT32,   TDDP_INT64,
                                        TDDP_FLOAT16,   TDDP_BFLOAT16,  TDDP_FLOAT32, TDDP_FLOAT64,
                                        TDDP_COMPLEX64, TDDP_COMPLEX128};
    static const tddp_reduce_op ops[] = {TDDP_REDUCE_SUM, TDDP_REDUCE_PRODUCT, TDDP_REDUCE_MIN,
                                         TDDP_REDUCE_MAX};
    unsigned char data[COUNT * 16];
    for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++) {
        const tddp_dtype dtype = dtypes[d];
        const bool is_complex = dtype == TDDP_COMPLEX64 || dtype == TDDP_COMPLEX128;
        for (size_t o = 0; o < (is_complex ? 1 : sizeof ops / sizeof *ops); o++) {
            for (size_t i = 0; i < COUNT; i++) {
                set_element(data, dtype, i, value(rank, i % 2));
            }
            tddp_buffer buffer = to_device(data, COUNT, dtype);
            CHECK_OK(tddp_all_reduce(group, buffer, ops[o], 0, NULL));
            from_device(data, buffer);
            for (size_t i = 0; i < COUNT; i++) {
                double got = element(data, dtype, i);
                double expected = reduced(ops[o], ranks, i % 2);
                if (got != expected) {
                    check_failed(__FILE__, __LINE__, "%s of %s, element %zu: %g, expected %g",
                                 tddp_reduce_op_name(ops[o]), tddp_dtype_name(dtype), i, got,
                                 expected);
                }
            }
        }
    }
}

/* "Or" and "and" of bools; bytes of a dtype that NCCL does not reduce. */
static inline void check_bytes(tddp_group *group, int rank, int ranks)
{
    unsigned char bools[3] = {1, rank == 0, 0};
    int16_t narrow[3] = {(int16_t)(1000 + rank), -7, 3};
    tddp_buffer buffer = to_device(bools, 3, TDDP_BOOL);
    CHECK_OK(tddp_all_reduce(group, buffer, TDDP_REDUCE_SUM, 0, NULL));
    from_device(bools, buffer);
    CHECK(bools[0] == 1 && bools[1] == 1 && bools[2] == 0);
    bools[1] = rank == 0;
    buffer = to_device(bools, 3, TDDP_BOOL);
    CHECK_OK(tddp_all_reduce(group, buffer, TDDP_REDUCE_PRODUCT, 0, NULL));
    from_device(bools, buffer);
    CHECK(bools[0] == 1 && bools[1] == (ranks == 1) && bools[2] == 0);
    buffer = to_device(narrow, 3, TDDP_INT16);
    CHECK_OK(tddp_broadcast(group, buffer, ranks - 1, NULL));
    from_device(narrow, buffer);
    CHECK(narrow[0] == 1000 + ranks - 1 && narrow[1] == -7 && narrow[2] == 3);
}

static inline void check_moves(tddp_group *group, int rank, int ranks)
{
    static float data[MOST];
    static float parts[4 * MOST];
    for (size_t s = 1; s < sizeof sizes / sizeof *sizes; s++) {
        const size_t each = sizes[s] / 4 + 1;
        const size_t all = each * (size_t)ranks;
        fill(data, each, rank);
        tddp_buffer one = to_device(data, each, TDDP_FLOAT32);
        CHECK_OK(tddp_broadcast(group, one, ranks - 1, NULL));
        from_device(data, one);
        CHECK_DOUBLE((double)data[each - 1], value(ranks - 1, each - 1), 0);
        fill(data, each, rank);
        one = to_device(data, each, TDDP_FLOAT32);
        tddp_buffer whole = to_device(parts, all, TDDP_FLOAT32);
        CHECK_OK(tddp_all_gather(group, one, whole, NULL));
        from_device(data, one);
        from_device(parts, whole);
        for (size_t i = 0; i < all; i++) {
            CHECK_DOUBLE((double)parts[i], value((int)(i / each), i % each), 0);
        }
        fill(parts, all, rank);
        whole = to_device(parts, all, TDDP_FLOAT32);
        one = to_device(data, each, TDDP_FLOAT32);
        CHECK_OK(tddp_reduce_scatter(group, whole, one, TDDP_REDUCE_SUM, 0, NULL));
        from_device(parts, whole);
        from_device(data, one);
        for (size_t i = 0; i < each; i++) {
            CHECK_DOUBLE((double)data[i], reduced(TDDP_REDUCE_SUM, ranks, i + each * (size_t)rank),
                         0);
        }
    }
}

/* Rank r sends r + 1 elements to rank 0, r + 2 to rank 1 and so on. */
static inline void check_uneven(tddp_group *group, int rank, int ranks)
{
    float in[4][8];
    float out[4][8] = {{0}};
    tddp_buffer inputs[4] = {{0}};
    tddp_buffer outputs[4] = {{0}};
    const size_t roots = rank == 0 ? (size_t)ranks : 0;
    for (int peer = 0; peer < ranks; peer++) {
        size_t count = (size_t)(rank + peer + 1);
        fill(in[peer], 8, 10 * rank + peer);
        inputs[peer] = to_device(in[peer], count, TDDP_FLOAT32);
        outputs[peer] = to_device(out[peer], count, TDDP_FLOAT32);
    }
    CHECK_OK(tddp_all_to_all(group, inputs, outputs, (size_t)ranks, NULL));
    for (int peer = 0; peer < ranks; peer++) {
        copy(out[peer], outputs[peer].data, outputs[peer].count * sizeof(float));
        for (int i = 0; i <= rank + peer; i++) {
            CHECK_DOUBLE((double)out[peer][i], value(10 * peer + rank, (size_t)i), 0);
        }
    }
    CHECK_OK(tddp_scatter(group, outputs[0], rank == 0 ? inputs : NULL, roots, 0, NULL));
    copy(out[0], outputs[0].data, outputs[0].count * sizeof(float));
    CHECK_DOUBLE((double)out[0][rank], value(rank, (size_t)rank), 0);
    CHECK_OK(tddp_gather(group, inputs[0], rank == 0 ? outputs : NULL, roots, 0, NULL));
    for (int peer = 0; peer < ranks; peer++) {
        from_device(in[peer], inputs[peer]);
        from_device(out[peer], outputs[peer]);
    }
    for (int peer = 0; rank == 0 && peer < ranks; peer++) {
        CHECK_DOUBLE((double)out[peer][peer], value(10 * peer, (size_t)peer), 0);
    }
}

/* Parts in device memory, each `more` elements longer than the one before: contiguous on even
 * ranks, with gaps on odd ones, so that ranks differ only in that. */
static inline void lay_out(tddp_buffer room, tddp_buffer *parts, int ranks, size_t each,
                           size_t more, bool gaps)
{
    size_t at = 0;
    for (int part = 0; part < ranks; part++) {
        parts[part] = room;
        parts[part].data = (float *)room.data + at;
        parts[part].count = each + more * (size_t)part;
        at += parts[part].count + (gaps ? 5 : 0);
    }
}

static inline size_t begin_of(const tddp_buffer *room, const tddp_buffer *part)
{
    return (size_t)((const float *)part->data - (const float *)room->data);
}

/* Lists of parts, whose addresses differ between ranks. */
static inline void check_layouts(tddp_group *group, int rank, int ranks, size_t each, size_t more)
{
    enum { ROOM = 4000 };
    static float data[ROOM];
    static float room[ROOM];
    tddp_buffer parts[4];
    const bool gaps = rank % 2 == 1;
    const size_t count = each + more * (size_t)rank;
    const size_t world = (size_t)ranks;
    fill(data, count, rank);
    tddp_buffer one = to_device(data, count, TDDP_FLOAT32);
    tddp_buffer whole = to_device(room, ROOM, TDDP_FLOAT32);
    lay_out(whole, parts, ranks, each, more, gaps);
    CHECK_OK(tddp_all_gather_list(group, one, parts, world, NULL));
    from_device(data, one);
    from_device(room, whole);
    for (int part = 0; part < ranks; part++) {
        for (size_t i = 0; i < parts[part].count; i++) {
            CHECK_DOUBLE((double)room[begin_of(&whole, &parts[part]) + i], value(part, i), 0);
        }
    }
    fill(room, ROOM, rank);
    whole = to_device(room, ROOM, TDDP_FLOAT32);
    one = to_device(data, count, TDDP_FLOAT32);
    lay_out(whole, parts, ranks, each, more, gaps);
    for (int part = 0; part < ranks; part++) {
        fill(data, parts[part].count, rank);
        copy(parts[part].data, data, parts[part].count * sizeof *data);
    }
    CHECK_OK(tddp_reduce_scatter_list(group, parts, world, one, TDDP_REDUCE_SUM, 0, NULL));
    from_device(data, one);
    for (size_t i = 0; i < count; i++) {
        CHECK_DOUBLE((double)data[i], reduced(TDDP_REDUCE_SUM, ranks, i), 0);
    }
    CHECK_OK(tddp_all_reduce_coalesced(group, parts, world, TDDP_REDUCE_SUM, 0, NULL));
    from_device(room, whole);
    for (int part = 0; part < ranks; part++) {
        for (size_t i = 0; i < parts[part].count; i++) {
            CHECK_DOUBLE((double)room[begin_of(&whole, &parts[part]) + i],
                         reduced(TDDP_REDUCE_SUM, ranks, i), 0);
        }
    }
}

/* Each rank sends to its successor and receives from its predecessor, many messages at a time,
 * some of them empty. */
static inline void check_messages(tddp_group *group, int rank, int ranks)
{
    enum { MANY = 20 };
    static float data[1000];
    tddp_buffer out[MANY];
    tddp_buffer in[MANY];
    tddp_work *works[2 * MANY];
    int next = (rank + 1) % ranks;
    int last = (rank + ranks - 1) % ranks;
    for (int i = 0; i < MANY; i++) {
        size_t count = (size_t)(50 * i);
        fill(data, count, rank + i);
        out[i] = to_device(data, count, TDDP_FLOAT32);
        in[i] = to_device(data, count, TDDP_FLOAT32);
    }
    tddp_op_args messages[2 * MANY];
    for (int i = 0; i < MANY; i++) {
        messages[2 * i] = message_to(out[i], next, 0);
        messages[2 * i + 1] = message_from(in[i], last, 0);
    }
    /* In two batches, the second of which finds all connected. */
    CHECK_OK(tddp_batch_send_recv(group, messages, MANY, works));
    CHECK_OK(tddp_batch_send_recv(group, messages + MANY, MANY, works + MANY));
    for (int i = 0; i < 2 * MANY; i++) {
        CHECK_OK(tddp_work_wait(works[i], NULL));
        tddp_work_release(works[i]);
    }
    for (int i = 0; i < MANY; i++) {
        from_device(data, out[i]);
        from_device(data, in[i]);
        for (size_t at = 0; at < in[i].count; at++) {
            CHECK_DOUBLE((double)data[at], value(last + i, at), 0);
        }
    }
}

/* What all ranks do, in its own group. */
static inline void check_all(int rank, int ranks, int port, int device)
{
    tddp_store *store = open_store(rank, ranks, port);
    tddp_group *group = open_group(store, rank, ranks, device, TIMEOUT_MS);
    check_reductions(group, rank, ranks);
    check_moves(group, rank, ranks);
    check_uneven(group, rank, ranks);
    check_layouts(group, rank, ranks, 0, 0);
    check_layouts(group, rank, ranks, 333, 0);
    check_layouts(group, rank, ranks, 0, 3);
    check_layouts(group, rank, ranks, 333, 1);
    check_dtypes(group, rank, ranks);
    check_bytes(group, rank, ranks);
    CHECK_OK(tddp_barrier(group, NULL));
    leave(group, store);
}

#endif
