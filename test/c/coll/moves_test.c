/*
 * The collectives that move data: parts of all sizes, none among them, contiguous and not, each
 * rank interrupted at moments of its own. A byte says from whom it is, to whom and where it stands.
 */
#include <stdlib.h>
#include <string.h>

#include "mailbox.h"

enum { ROUNDS = 12 };

static unsigned char byte_of(int from, int to, size_t i)
{
    return (unsigned char)((unsigned)from * 59u + (unsigned)to * 17u + i * 7u + i / 251u);
}

/* Sizes that all ranks know of the part that goes from one rank to another. */
static size_t part_bytes(const tddp_op *op, int from, int to)
{
    static const size_t sizes[] = {0, 1, 777, 65536, 65537, 200001};
    unsigned seed = (unsigned)op->sequence * 91u + (unsigned)from * 7u;
    seed += op->kind == TDDP_OP_ALL_TO_ALL || op->kind == TDDP_OP_SCATTER ? (unsigned)to * 3u : 0;
    return sizes[coll_random(&seed, sizeof sizes / sizeof *sizes)];
}

static bool sends(const tddp_op *op, int rank)
{
    return op->kind != TDDP_OP_SCATTER || rank == op->root;
}

static bool receives(const tddp_op *op, int rank)
{
    return op->kind != TDDP_OP_GATHER || rank == op->root;
}

static tddp_buffer make_part(size_t bytes)
{
    if (bytes == 0) {
        return coll_buffer(NULL, 0, TDDP_UINT8);
    }
    char *data = malloc(bytes);
    CHECK(data);
    memset(data, 0x5a, bytes);
    return coll_buffer(data, bytes, TDDP_UINT8);
}

/* What goes to every rank alike is written as if it went to rank 0. */
static tddp_buffer filled_part(const coll_rank *it, const tddp_op *op, int to)
{
    const bool to_all = op->kind == TDDP_OP_ALL_GATHER || op->kind == TDDP_OP_GATHER;
    tddp_buffer part = make_part(part_bytes(op, it->rank, to));
    for (size_t i = 0; i < part.count; i++) {
        ((unsigned char *)part.data)[i] = byte_of(it->rank, to_all ? 0 : to, i);
    }
    return part;
}

static void check_part(const coll_rank *it, const tddp_op *op, const tddp_buffer *part, int from)
{
    const bool to_all = op->kind == TDDP_OP_ALL_GATHER || op->kind == TDDP_OP_GATHER;
    CHECK_INT(part->count, part_bytes(op, from, it->rank));
    for (size_t i = 0; i < part->count; i++) {
        const unsigned char expected = byte_of(from, to_all ? 0 : it->rank, i);
        if (((unsigned char *)part->data)[i] != expected) {
            check_failed(__FILE__, __LINE__, "%s on rank %d of %d: byte %zu of %zu of rank %d",
                         tddp_op_name(op->kind), it->rank, it->size, i, part->count, from);
        }
    }
}

static void check_moves(coll_rank *it, tddp_op_kind kind)
{
    tddp_buffer in[MOST_RANKS] = {0};
    tddp_buffer out[MOST_RANKS] = {0};
    const bool in_parts = kind == TDDP_OP_SCATTER || kind == TDDP_OP_ALL_TO_ALL;
    const bool out_parts = kind != TDDP_OP_SCATTER;
    tddp_op op = coll_op(it, kind);
    op.input = op.output = coll_buffer(NULL, 0, TDDP_UINT8);
    op.root = kind == TDDP_OP_GATHER || kind == TDDP_OP_SCATTER
                  ? (int)(op.sequence % (uint64_t)it->size)
                  : 0;
    const int to = in_parts && sends(&op, it->rank) ? it->size : !in_parts;
    const int from = out_parts && receives(&op, it->rank) ? it->size : !out_parts;
    for (int peer = 0; peer < to; peer++) {
        in[peer] = filled_part(it, &op, peer);
    }
    for (int peer = 0; peer < from; peer++) {
        out[peer] = make_part(part_bytes(&op, out_parts ? peer : op.root, it->rank));
    }
    op.input = !in_parts ? in[0] : op.input;
    op.output = !out_parts ? out[0] : op.output;
    op.input_parts = in_parts && to > 0 ? in : NULL;
    op.output_parts = out_parts && from > 0 ? out : NULL;
    coll_run(it, &op);
    for (int peer = 0; peer < from; peer++) {
        check_part(it, &op, &out[peer], out_parts ? peer : op.root);
    }
    for (int peer = 0; peer < it->size; peer++) {
        free(in[peer].data);
        free(out[peer].data);
    }
}

static void check_broadcast(coll_rank *it, size_t bytes)
{
    tddp_op op = coll_op(it, TDDP_OP_BROADCAST);
    op.root = (int)(op.sequence % (uint64_t)it->size);
    unsigned char *data = malloc(bytes + 1);
    CHECK(data);
    for (size_t i = 0; i < bytes; i++) {
        data[i] = it->rank == op.root ? byte_of(op.root, 0, i) : 0;
    }
    data[bytes] = 0x5a;
    op.input = op.output = coll_buffer(data, bytes, TDDP_UINT8);
    coll_run(it, &op);
    for (size_t i = 0; i < bytes; i++) {
        CHECK_INT(data[i], byte_of(op.root, 0, i));
    }
    CHECK_INT(data[bytes], 0x5a);
    free(data);
}

static void body(coll_rank *it)
{
    static const size_t broadcasts[] = {0, 1, 65536, 65537, 524288, 524289, 3300001};
    for (int round = 0; round < ROUNDS; round++) {
        check_moves(it, TDDP_OP_ALL_GATHER);
        check_moves(it, TDDP_OP_GATHER);
        check_moves(it, TDDP_OP_SCATTER);
        check_moves(it, TDDP_OP_ALL_TO_ALL);
        check_broadcast(it, broadcasts[round % (int)(sizeof broadcasts / sizeof *broadcasts)]);
        const tddp_op barrier = coll_op(it, TDDP_OP_BARRIER);
        coll_run(it, &barrier);
    }
}

MULTI_TEST(all_sizes, 1, 120)
{
    for (int size = 1; size <= 5; size++) {
        for (unsigned seed = 0; seed < 2; seed++) {
            run_ranks(size, seed * 10 + (unsigned)size, body, NULL);
        }
    }
}

MULTI_TEST(many_ranks, 1, 60)
{
    run_ranks(9, 1, body, NULL);
    run_ranks(12, 2, body, NULL);
}

/* --- barriers -------------------------------------------------------------------------------- */

static _Atomic int entered;

static void enter(coll_rank *it)
{
    for (int i = 1; i <= 20; i++) {
        const tddp_op op = coll_op(it, TDDP_OP_BARRIER);
        atomic_fetch_add(&entered, 1);
        coll_run(it, &op);
        CHECK(atomic_load(&entered) >= i * it->size);
    }
}

TEST(no_rank_leaves_a_barrier_before_all_have_entered)
{
    for (int size = 2; size <= 12; size++) {
        atomic_store(&entered, 0);
        run_ranks(size, (unsigned)size, enter, NULL);
    }
}
