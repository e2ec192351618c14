/* The comparison of calls, and the texts of mismatches. */
#include <string.h>

#include <tddp/call.h>

#include "check.h"

static tddp_buffer numbers(size_t count, tddp_dtype dtype)
{
    static double memory[64];
    return (tddp_buffer){memory, count, dtype, TDDP_CPU, 0, NULL};
}

static tddp_op sum_of(size_t count)
{
    return (tddp_op){.kind = TDDP_OP_ALL_REDUCE,
                     .sequence = 4,
                     .input = numbers(count, TDDP_FLOAT32),
                     .output = numbers(count, TDDP_FLOAT32)};
}

static tddp_op barrier_at(uint64_t sequence)
{
    return (tddp_op){.kind = TDDP_OP_BARRIER, .sequence = sequence};
}

/* The text that rank 0 reports about rank 1, which called `theirs`; empty if they agree. */
static const char *message(const tddp_op *mine, const tddp_op *theirs, const tddp_calls *before)
{
    static const tddp_calls nothing;
    tddp_calls now = {tddp_call_of(mine, 0, 1), tddp_call_of(theirs, 1, 0)};
    tddp_calls seen_there = {now.theirs, now.mine};
    int agree = tddp_calls_agree(&now.mine, &now.theirs);
    CHECK_INT(agree, tddp_calls_agree(&seen_there.mine, &seen_there.theirs));
    if (agree) {
        return "";
    }
    CHECK_STATUS(tddp_calls_mismatch(0, 1, &now, before ? before : &nothing), TDDP_MISMATCH);
    return tddp_error_message();
}

TEST(calls_that_differ_in_their_factor_agree)
{
    tddp_op mine = sum_of(5);
    tddp_op theirs = sum_of(5);
    CHECK_TEXT(message(&mine, &theirs, NULL), "");
    mine.reduce = theirs.reduce = TDDP_REDUCE_PREMUL_SUM;
    mine.premul = 0.5;
    theirs.premul = 2;
    CHECK_TEXT(message(&mine, &theirs, NULL), "");
    CHECK_DOUBLE(tddp_call_of(&mine, 0, 1).premul, 0.5, 0);
    mine.fingerprint = 7;
    CHECK_TEXT(message(&mine, &theirs, NULL), "");
}

TEST(buffer_counts_differ)
{
    tddp_op mine = sum_of(5);
    tddp_op theirs = sum_of(6);
    CHECK_TEXT(message(&mine, &theirs, NULL),
               "rank 0 runs all_reduce (operation 4, 5 elements of float32, sum), rank 1 runs "
               "all_reduce (operation 4, 6 elements of float32, sum): all ranks must make the same "
               "calls in the same order");
    theirs = sum_of(5);
    theirs.reduce = TDDP_REDUCE_PREMUL_SUM;
    theirs.premul = 0.25;
    CHECK_CONTAINS(message(&mine, &theirs, NULL), "premul_sum by 0.250000)");
    theirs = sum_of(5);
    theirs.kind = TDDP_OP_BROADCAST;
    theirs.root = 1;
    CHECK_CONTAINS(message(&mine, &theirs, NULL),
                   "rank 1 runs broadcast (operation 4, 5 elements of float32, root 1)");
}

TEST(names_differ_where_both_have_them)
{
    tddp_op mine = sum_of(5);
    tddp_op theirs = sum_of(5);
    mine.fingerprint = 7;
    theirs.fingerprint = 8;
    CHECK_TEXT(message(&mine, &theirs, NULL),
               "shapes or names differ between rank 0 and rank 1 in all_reduce (operation 4, 5 "
               "elements of float32, sum): all ranks must describe the same call");
}

TEST(parts_differ_in_size)
{
    tddp_buffer there[2] = {numbers(1, TDDP_INT64), numbers(2, TDDP_INT64)};
    tddp_buffer here[2] = {numbers(1, TDDP_INT64), numbers(3, TDDP_INT64)};
    tddp_op mine = {.kind = TDDP_OP_ALL_GATHER,
                    .sequence = 9,
                    .input = numbers(1, TDDP_INT64),
                    .output_parts = here};
    tddp_op theirs = mine;
    theirs.input = numbers(2, TDDP_INT64);
    theirs.output_parts = there;
    CHECK_TEXT(message(&mine, &theirs, NULL),
               "all_gather (operation 9): rank 1 sends 2 elements of int64, rank 0 expects 3: a "
               "part must be as large as its receiver expects");
    here[1].count = 2;
    CHECK_TEXT(message(&mine, &theirs, NULL), "");
}

TEST(a_missing_call_and_a_repeated_call)
{
    tddp_op mine = sum_of(5);
    tddp_op theirs = barrier_at(6);
    CHECK_TEXT(message(&mine, &theirs, NULL),
               "rank 0 is at operation 4, all_reduce, 5 elements of float32, sum; rank 1 is at "
               "operation 6, barrier: all ranks must make the same calls in the same order");
    tddp_op last = barrier_at(3);
    tddp_calls before = {tddp_call_of(&last, 0, 1), tddp_call_of(&last, 1, 0)};
    theirs = barrier_at(4);
    CHECK_CONTAINS(
        message(&mine, &theirs, &before),
        "; rank 1 calls what both called in operation 3: it has left out a call, or made "
        "that one twice");
}

TEST(a_part_of_an_operation_reports_the_operation)
{
    tddp_op operation = sum_of(50);
    tddp_op part = {.kind = TDDP_OP_REDUCE_SCATTER, .sequence = 90, .part_of = &operation};
    tddp_op shorter = sum_of(49);
    tddp_op other_part = part;
    CHECK_TEXT(message(&part, &other_part, NULL), "");
    other_part.part_of = &shorter;
    CHECK_CONTAINS(message(&part, &other_part, NULL),
                   "rank 1 runs all_reduce (operation 4, 49 elements of float32, sum)");
    tddp_op barrier = barrier_at(4);
    other_part.part_of = &barrier;
    CHECK_CONTAINS(message(&part, &other_part, NULL), "rank 1 runs barrier (operation 4)");
}

TEST(a_stage_has_its_own_factor)
{
    tddp_op operation = sum_of(50);
    operation.reduce = TDDP_REDUCE_AVG;
    tddp_op part = sum_of(5);
    part.part_of = &operation;
    part.reduce = TDDP_REDUCE_PREMUL_SUM;
    part.premul = 0.75;
    CHECK_DOUBLE(tddp_call_of(&part, 0, 1).premul, 0.75, 0);
    CHECK_INT(tddp_call_of(&part, 0, 1).reduce, TDDP_REDUCE_AVG);
}

TEST(stages_are_compared_by_their_layout)
{
    tddp_buffer parts[2] = {numbers(1, TDDP_INT8), numbers(2, TDDP_INT8)};
    tddp_op operation = {
        .kind = TDDP_OP_ALL_GATHER, .sequence = 9, .input = parts[0], .output_parts = parts};
    tddp_op mine = {
        .kind = TDDP_OP_BARRIER, .sequence = 1, .part_of = &operation, .fingerprint = 5};
    tddp_op theirs = mine;
    CHECK_TEXT(message(&mine, &theirs, NULL), "");
    theirs.fingerprint = 6;
    CHECK_TEXT(message(&mine, &theirs, NULL),
               "rank 0 and rank 1 differ on the sizes of the parts in all_gather (operation 9, "
               "elements of int8): a part must be as large as its receiver expects");
}

TEST(a_stage_of_the_same_kind_is_compared_by_its_counts)
{
    tddp_buffer parts[2] = {numbers(3, TDDP_INT8), numbers(0, TDDP_INT8)};
    tddp_op operation = {.kind = TDDP_OP_GATHER, .sequence = 9, .input = parts[0], .root = 5};
    tddp_op sender = {
        .kind = TDDP_OP_GATHER, .sequence = 1, .input = parts[0], .root = 1, .part_of = &operation};
    tddp_op receiver = sender;
    receiver.output_parts = parts;
    CHECK_TEXT(message(&sender, &receiver, NULL), "");
    parts[0].count = 2;
    CHECK_CONTAINS(message(&sender, &receiver, NULL),
                   "rank 0 sends 3 elements of int8, rank 1 expects 2");
}
