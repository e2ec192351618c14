/* Programs from seeds. */
#include <stdio.h>
#include <string.h>

#include "sequences/sequence.h"

seq_random seq_random_of(uint64_t seed, uint64_t what, uint64_t which)
{
    seq_random random = {seed * UINT64_C(0x9e3779b97f4a7c15) + what};
    random.state = seq_next(&random) + which;
    random.state = seq_next(&random);
    return random;
}

uint64_t seq_next(seq_random *random)
{
    /* splitmix64 */
    uint64_t z = (random->state += UINT64_C(0x9e3779b97f4a7c15));
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

uint32_t seq_below(seq_random *random, uint32_t limit)
{
    return (uint32_t)((seq_next(random) >> 32) * limit >> 32);
}

bool seq_once_in(seq_random *random, uint32_t times)
{
    return seq_below(random, times) == 0;
}

const char *seq_kind_name(seq_kind kind)
{
    static const char *const names[] = {
        "all_reduce",          "all_reduce_coalesced", "reduce",  "broadcast", "barrier",
        "all_gather",          "all_gather_list",      "gather",  "scatter",   "reduce_scatter",
        "reduce_scatter_list", "all_to_all",           "messages"};
    return names[kind];
}

bool seq_kind_reduces(seq_kind kind)
{
    return kind == SEQ_ALL_REDUCE || kind == SEQ_COALESCED || kind == SEQ_REDUCE ||
           kind == SEQ_REDUCE_SCATTER || kind == SEQ_REDUCE_SCATTER_LIST;
}

int seq_group_size(const seq_program *program, int group)
{
    return __builtin_popcount(program->members[group]);
}

int seq_rank_in(const seq_program *program, int group, int rank)
{
    unsigned members = program->members[group];
    return members >> rank & 1 ? __builtin_popcount(members & ((1u << rank) - 1)) : -1;
}

/* --- operations ------------------------------------------------------------------------------ */

static bool nccl_reduces(tddp_dtype dtype, tddp_reduce_op op)
{
    if (dtype == TDDP_INT16) {
        return false;
    }
    if (dtype == TDDP_BOOL) {
        return op != TDDP_REDUCE_BXOR;
    }
    bool is_complex = dtype == TDDP_COMPLEX64 || dtype == TDDP_COMPLEX128;
    bool of_bits = op == TDDP_REDUCE_BAND || op == TDDP_REDUCE_BOR || op == TDDP_REDUCE_BXOR;
    return !of_bits && !(is_complex && op == TDDP_REDUCE_PRODUCT);
}

static bool is_supported(const seq_program *program, const seq_op *op)
{
    const bool by_nccl = program->carrier->nccl && op->device == TDDP_CUDA;
    return !by_nccl || nccl_reduces(op->dtype, op->reduce);
}

/* The `pair`th reduction that there is of a dtype; false: there are not so many. */
static bool sweep_reductions(int pair, seq_op *op)
{
    for (int dtype = 0; dtype <= TDDP_BOOL; dtype++) {
        for (int reduce = 0; reduce <= TDDP_REDUCE_PREMUL_SUM; reduce++) {
            op->dtype = (tddp_dtype)dtype;
            op->reduce = (tddp_reduce_op)reduce;
            if (tddp_reduce_check(op->reduce, op->dtype) == TDDP_OK && pair-- == 0) {
                return true;
            }
        }
    }
    return false;
}

/* The `number`th of all kinds with each dtype, and each reduction that there is of it. */
static bool sweep(int number, seq_op *op)
{
    static const seq_kind reducing[] = {SEQ_ALL_REDUCE, SEQ_COALESCED, SEQ_REDUCE,
                                        SEQ_REDUCE_SCATTER, SEQ_REDUCE_SCATTER_LIST};
    static const seq_kind moving[] = {SEQ_BROADCAST, SEQ_ALL_GATHER, SEQ_ALL_GATHER_LIST,
                                      SEQ_GATHER,    SEQ_SCATTER,    SEQ_ALL_TO_ALL,
                                      SEQ_MESSAGES};
    enum { REDUCING = sizeof reducing / sizeof *reducing };
    enum { MOVING = sizeof moving / sizeof *moving, MOVES = MOVING * (TDDP_FLOAT8_E5M2 + 1) };
    if (number < MOVES) {
        op->kind = moving[number % MOVING];
        op->dtype = (tddp_dtype)(number / MOVING);
        return true;
    }
    op->kind = reducing[(number - MOVES) % REDUCING];
    return sweep_reductions((number - MOVES) / REDUCING, op);
}

int seq_sweep_size(void)
{
    seq_op op = {0};
    int size = 0;
    while (sweep(size, &op)) {
        size++;
    }
    return size;
}

static void draw_reduction(seq_random *random, seq_op *op)
{
    static const tddp_dtype floats[] = {TDDP_FLOAT16, TDDP_BFLOAT16, TDDP_FLOAT32, TDDP_FLOAT64};
    static const tddp_reduce_op sums[] = {TDDP_REDUCE_SUM, TDDP_REDUCE_AVG, TDDP_REDUCE_PREMUL_SUM};
    /* What is scaled on the way has the most ways to go wrong. */
    const bool scaled = seq_once_in(random, 2);
    do {
        op->dtype =
            scaled ? floats[seq_below(random, 4)] : (tddp_dtype)seq_below(random, TDDP_BOOL + 1);
        op->reduce = scaled ? sums[seq_below(random, 3)]
                            : (tddp_reduce_op)seq_below(random, TDDP_REDUCE_PREMUL_SUM + 1);
    } while (tddp_reduce_check(op->reduce, op->dtype) != TDDP_OK);
}

/* Sizes at which something else is done with an operand. */
static size_t draw_edge(seq_random *random, tddp_dtype dtype)
{
    static const size_t edges[] = {256, 512, 4096, 8192, 16384, 32768, 65536};
    size_t count = edges[seq_below(random, sizeof edges / sizeof *edges)] / tddp_dtype_size(dtype);
    return count - 1 + seq_below(random, 3);
}

static size_t draw_count(const seq_program *program, seq_random *random, tddp_dtype dtype)
{
    static const uint32_t limits[] = {2, 8, 64, 64, 300, 300, 2100, 5000};
    const size_t most = program->carrier->most;
    uint32_t limit = limits[seq_below(random, sizeof limits / sizeof *limits)];
    if (seq_once_in(random, program->carrier->sweep ? 12 : 8)) {
        size_t count = draw_edge(random, dtype);
        return count < most ? count : most;
    }
    if (seq_once_in(random, 30) && !program->carrier->sweep) {
        limit = seq_once_in(random, 4) ? 300000 : 70000;
    }
    return seq_below(random, limit < most ? limit : (uint32_t)most);
}

static void draw_counts(const seq_program *program, seq_random *random, seq_op *op)
{
    const bool alike =
        op->kind == SEQ_ALL_GATHER || op->kind == SEQ_REDUCE_SCATTER || seq_once_in(random, 2);
    const size_t same = draw_count(program, random, op->dtype);
    for (int from = 0; from < SEQ_RANKS; from++) {
        for (int to = 0; to < SEQ_PARTS; to++) {
            op->counts[from][to] = alike ? same : draw_count(program, random, op->dtype) / 2;
        }
    }
    op->parts = 1 + (int)seq_below(random, SEQ_PARTS);
}

static void draw_messages(const seq_program *program, seq_random *random, seq_op *op)
{
    const uint32_t size = (uint32_t)seq_group_size(program, op->group);
    op->messages = 1 + (int)seq_below(random, SEQ_PARTS);
    for (int i = 0; i < op->messages; i++) {
        seq_message *message = &op->message[i];
        message->from = (int)seq_below(random, size);
        message->to = (message->from + 1 + (int)seq_below(random, size - 1)) % (int)size;
        message->count = draw_count(program, random, op->dtype);
        message->tag = program->carrier->any_source ? seq_below(random, 3) : 0;
        message->from_any = program->carrier->any_source && seq_once_in(random, 4);
        if (message->from_any) {
            /* A tag that no other has: which message it gets is certain. */
            message->tag = (uint32_t)(100 + op->number * SEQ_PARTS + i);
        }
    }
}

void seq_draw_op(const seq_program *program, int number, seq_op *op)
{
    seq_random random = seq_random_of(program->seed, 1, (uint64_t)number);
    *op = (seq_op){.number = number};
    op->kind = (seq_kind)seq_below(&random, SEQ_KINDS);
    op->group = (int)seq_below(&random, (uint32_t)program->groups);
    op->device = !program->carrier->cuda || (program->carrier->cpu && seq_once_in(&random, 2))
                     ? TDDP_CPU
                     : TDDP_CUDA;
    op->dtype = (tddp_dtype)seq_below(&random, TDDP_FLOAT8_E5M2 + 1);
    if (program->carrier->sweep) {
        (void)sweep(number, op);
    } else if (seq_kind_reduces(op->kind)) {
        draw_reduction(&random, op);
    }
    if (op->kind == SEQ_MESSAGES && seq_group_size(program, op->group) < 2) {
        op->kind = SEQ_BARRIER;
    }
    op->unsupported = seq_kind_reduces(op->kind) && !is_supported(program, op);
    op->root = (int)seq_below(&random, (uint32_t)seq_group_size(program, op->group));
    op->described = seq_once_in(&random, 8);
    draw_counts(program, &random, op);
    if (op->kind == SEQ_MESSAGES) {
        draw_messages(program, &random, op);
    }
}

void seq_describe_op(const seq_program *program, const seq_op *op, char *text, size_t bytes)
{
    int used = snprintf(text, bytes, "%d: %s on group %d of %d", op->number,
                        seq_kind_name(op->kind), op->group, seq_group_size(program, op->group));
    if (op->kind == SEQ_BARRIER || used < 0 || (size_t)used >= bytes) {
        return;
    }
    (void)snprintf(
        text + used, bytes - (size_t)used, ", %s%s%s on %s, root %d, parts of %zu, %zu, %zu, %zu%s",
        tddp_dtype_name(op->dtype), seq_kind_reduces(op->kind) ? ", " : "",
        seq_kind_reduces(op->kind) ? tddp_reduce_op_name(op->reduce) : "",
        tddp_device_type_name(op->device), op->root, op->counts[0][0], op->counts[0][1],
        op->counts[0][2], op->counts[0][3], op->unsupported ? ", which is not supported" : "");
}

/* --- programs -------------------------------------------------------------------------------- */

static void draw_groups(seq_program *program, seq_random *random)
{
    program->groups = 1 + (int)seq_below(random, SEQ_GROUPS);
    program->members[0] = (1u << program->ranks) - 1;
    for (int group = 1; group < program->groups; group++) {
        program->members[group] = 1 + seq_below(random, program->members[0]);
        program->child[group] = seq_once_in(random, 2);
        program->split[group] = program->child[group] && seq_once_in(random, 2);
    }
}

static void draw_algorithms(seq_program *program, seq_random *random)
{
    static const char *const kinds[] = {"all_reduce", "reduce", "reduce_scatter", "broadcast",
                                        "all_gather", "gather", "scatter",        "all_to_all"};
    static const char *const ways[] = {"inline", "staged", "direct", "sliced"};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        /* Where only some bear a way, it is one of all that do. */
        uint32_t known = i < 2 || i == 3 ? 4 : 3;
        size_t used = strlen(program->algorithms);
        if (seq_once_in(random, 2)) {
            (void)snprintf(program->algorithms + used, sizeof program->algorithms - used, "%s%s=%s",
                           used > 0 ? "," : "", kinds[i], ways[seq_below(random, known)]);
        }
    }
}

static void draw_fault(seq_program *program, seq_random *random)
{
    uint32_t drawn = seq_below(random, 5);
    program->fault = !program->carrier->faults || drawn > 1 ? SEQ_NO_FAULT
                     : drawn == 0                           ? SEQ_DEATH
                                                            : SEQ_MISMATCH;
    program->fault_group = (int)seq_below(random, (uint32_t)program->groups);
    int size = seq_group_size(program, program->fault_group);
    program->culprit = (int)seq_below(random, (uint32_t)size);
    if (size < 2 || program->carrier->sweep) {
        program->fault = SEQ_NO_FAULT;
    } else if (program->fault == SEQ_DEATH && program->carrier->threads) {
        program->fault = SEQ_MISMATCH; /* a thread cannot die alone */
    }
}

void seq_draw_program(seq_program *program, const seq_carrier *carrier, uint64_t seed)
{
    static const char *const layouts[] = {"halves", "turns", "uneven", "middle", "one"};
    seq_random random = seq_random_of(seed, 0, 0);
    *program = (seq_program){.seed = seed, .carrier = carrier, .count = carrier->operations};
    program->ranks = seq_once_in(&random, 8) ? 1 : 2 + (int)seq_below(&random, SEQ_RANKS - 1);
    draw_groups(program, &random);
    program->layout = layouts[seq_below(&random, sizeof layouts / sizeof *layouts)];
    if (carrier->algorithms && seq_once_in(&random, 2)) {
        draw_algorithms(program, &random);
    }
    draw_fault(program, &random);
    if (carrier->sweep) {
        program->count = seq_sweep_size();
        program->ranks = SEQ_RANKS - (int)(seed - 1) % SEQ_RANKS;
        program->groups = 1;
        program->members[0] = (1u << program->ranks) - 1;
    }
}
