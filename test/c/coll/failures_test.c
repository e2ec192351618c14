/*
 * What ends a collective: calls that differ, ranks that go at each step, time, memory. Whatever it
 * is, each rank has a result that is right, or an error.
 */
#include <stdlib.h>
#include <string.h>

#include "mailbox.h"

/* Numbers enough for a header's payload, for direct data, and for several chunks each. */
static const size_t COUNTS[] = {1, 30000, 700000};
enum { COUNT_COUNT = 3, MOST_FLOATS = 700000, CUTS = 40 };

static const tddp_op_kind KINDS[] = {
    TDDP_OP_ALL_REDUCE, TDDP_OP_BROADCAST,      TDDP_OP_BARRIER,
    TDDP_OP_ALL_GATHER, TDDP_OP_REDUCE_SCATTER, TDDP_OP_REDUCE,
    TDDP_OP_GATHER,     TDDP_OP_SCATTER,        TDDP_OP_ALL_TO_ALL,
};
enum { KIND_COUNT = sizeof KINDS / sizeof *KINDS };

/* --- operations of all kinds on equal parts -------------------------------------------------- */

typedef struct call {
    tddp_op op;
    tddp_buffer in[MOST_RANKS];
    tddp_buffer out[MOST_RANKS];
    float *memory;
} call;

/* Rank r's elements are r + 1, and `count` for each part. */
static void make_call(coll_rank *it, call *self, tddp_op_kind kind, size_t count)
{
    const tddp_op_row *row = tddp_op_row_of(kind);
    const size_t size = (size_t)it->size;
    *self = (call){.op = coll_op(it, kind)};
    self->memory = malloc(2 * size * count * sizeof *self->memory);
    CHECK(self->memory);
    float *in = self->memory;
    float *out = in + size * count;
    for (size_t i = 0; i < size * count; i++) {
        in[i] = (float)(it->rank + 1);
        out[i] = row->input == TDDP_SIDE_WHOLE ? in[i] : -1;
    }
    for (size_t rank = 0; rank < size; rank++) {
        self->in[rank] = coll_buffer(in + rank * count, count, TDDP_FLOAT32);
        self->out[rank] = coll_buffer(out + rank * count, count, TDDP_FLOAT32);
    }
    const bool is_root = it->rank == self->op.root;
    const bool in_parts = row->input == TDDP_SIDE_PARTS && (!row->roots_input || is_root);
    const bool out_parts = row->output == TDDP_SIDE_PARTS && (!row->roots_output || is_root);
    self->op.input_parts = in_parts ? self->in : NULL;
    self->op.output_parts = out_parts ? self->out : NULL;
    const bool no_input = row->input == TDDP_SIDE_PARTS && !in_parts;
    const bool no_output = row->output == TDDP_SIDE_PARTS && !out_parts;
    if (kind != TDDP_OP_BARRIER) {
        self->op.output = coll_buffer(out,
                                      no_output   ? 0
                                      : out_parts ? size * count
                                                  : count,
                                      TDDP_FLOAT32);
        self->op.input = row->input == TDDP_SIDE_WHOLE ? self->op.output
                                                       : coll_buffer(in,
                                                                     no_input   ? 0
                                                                     : in_parts ? size * count
                                                                                : count,
                                                                     TDDP_FLOAT32);
    }
}

/* What element of part `from` of the output is afterwards. */
static float result_of(const coll_rank *it, const tddp_op *op, size_t from)
{
    const float sum = (float)(it->size * (it->size + 1) / 2);
    switch (op->kind) {
    case TDDP_OP_ALL_REDUCE:
    case TDDP_OP_REDUCE_SCATTER:
        return sum;
    case TDDP_OP_REDUCE:
        return it->rank == op->root ? sum : (float)(it->rank + 1);
    case TDDP_OP_BROADCAST:
    case TDDP_OP_SCATTER:
        return (float)(op->root + 1);
    default:
        return (float)(from + 1);
    }
}

static void check_result(const coll_rank *it, const call *self, size_t count)
{
    const float *out = self->op.output.data;
    for (size_t i = 0; i < self->op.output.count; i++) {
        CHECK_DOUBLE(out[i], result_of(it, &self->op, i / count), 0);
    }
}

/* --- ranks that go --------------------------------------------------------------------------- */

typedef struct cut {
    tddp_op_kind kind;
    size_t count;
    int calls;            /* of the last rank before it goes */
    _Atomic int finished; /* it has */
} cut;

static void go_at_a_step(coll_rank *it)
{
    cut *self = it->data;
    call one;
    for (int i = 0; i < 2; i++) {
        make_call(it, &one, i == 0 ? TDDP_OP_ALL_REDUCE : self->kind, i == 0 ? 1 : self->count);
        if (i == 0) {
            coll_run(it, &one.op);
        } else if (it->rank == it->size - 1) {
            const tddp_status status = coll_try_times(it, &one.op, self->calls);
            CHECK(status == TDDP_OK || status == TDDP_CANCELED);
            atomic_store(&self->finished, status == TDDP_OK);
            if (status == TDDP_CANCELED) {
                coll_leave(it);
                tddp_coll_destroy(it->coll); /* and its memory is not used any more */
                it->coll = NULL;
            }
        } else {
            const tddp_status status = coll_try(it, &one.op);
            if (status == TDDP_OK) {
                check_result(it, &one, self->count);
            } else {
                CHECK_STATUS(status, TDDP_PEER_LOST);
                CHECK_CONTAINS(tddp_error_message(), "lost rank");
            }
        }
        free(one.memory);
    }
}

/* Until the rank that goes has done all of its part. */
MULTI_TEST(a_rank_goes_at_each_step, 1, 120)
{
    for (int i = 0; i < KIND_COUNT; i++) {
        for (int j = 0; j < (KINDS[i] == TDDP_OP_BARRIER ? 1 : COUNT_COUNT); j++) {
            cut self = {.kind = KINDS[i], .count = COUNTS[j]};
            for (self.calls = 0; self.calls < CUTS && !atomic_load(&self.finished); self.calls++) {
                run_ranks(2 + self.calls % 3, (unsigned)(i * CUTS + self.calls), go_at_a_step,
                          &self);
            }
        }
    }
}

/* --- calls that differ ----------------------------------------------------------------------- */

typedef struct variant {
    const char *what;
    void (*change)(call *self);
    size_t count;
} variant;

static void other_dtype(call *self)
{
    self->op.input.dtype = self->op.output.dtype = TDDP_INT32;
}

static void other_count(call *self)
{
    self->op.input.count = self->op.output.count = self->op.input.count - 1;
}

static void other_kind(call *self)
{
    self->op.kind = TDDP_OP_BROADCAST;
}

static void other_reduction(call *self)
{
    self->op.reduce = TDDP_REDUCE_MAX;
}

static void other_fingerprint(call *self)
{
    self->op.fingerprint = 5;
}

static void other_position(call *self)
{
    self->op.sequence++;
}

static const variant VARIANTS[] = {
    {"elements of int32", other_dtype, 10},
    {"rank 1 runs all_reduce (operation 1, 9 elements", other_count, 10},
    {"rank 1 runs broadcast", other_kind, 10},
    {"max", other_reduction, 10},
    {"shapes or names differ between rank", other_fingerprint, 10},
    {"rank 1 is at operation 2", other_position, 10},
    {"elements of int32", other_dtype, 100000},
    {"99999 elements", other_count, 100000},
    {"rank 1 runs broadcast", other_kind, 100000},
    {"max", other_reduction, 100000},
    {"rank 1 is at operation 2", other_position, 100000},
};

/* A rank that goes over a difference with one may be missed by another, which agrees with it,
 * before the difference has arrived there: then it is the reason. */
static void differ(coll_rank *it)
{
    const variant *what = it->data;
    call one;
    make_call(it, &one, TDDP_OP_ALL_REDUCE, what->count);
    one.op.fingerprint = 3;
    if (it->rank == 1) {
        what->change(&one);
    }
    const tddp_status status = coll_try(it, &one.op);
    CHECK(status == TDDP_MISMATCH || (status == TDDP_PEER_LOST && it->size > 2));
    if (status == TDDP_PEER_LOST) {
        CHECK_CONTAINS(tddp_error_message(), ", which gave up: ");
    }
    if (it->rank == 0 || status == TDDP_PEER_LOST) {
        CHECK_CONTAINS(tddp_error_message(), what->what);
    }
    CHECK_CONTAINS(tddp_error_message(), "rank 1");
    free(one.memory);
}

TEST(calls_that_differ_end_on_all_ranks)
{
    for (size_t i = 0; i < sizeof VARIANTS / sizeof *VARIANTS; i++) {
        for (unsigned seed = 0; seed < 6; seed++) {
            run_ranks(2 + (int)seed % 3, seed, differ, (void *)(uintptr_t)&VARIANTS[i]);
        }
    }
}

/* By recursive doubling some ranks learn of it from others. */
static void differ_among_many(coll_rank *it)
{
    call one;
    make_call(it, &one, TDDP_OP_ALL_REDUCE, 10);
    if (it->rank == 5) {
        other_count(&one);
    }
    const tddp_status status = coll_try(it, &one.op);
    CHECK(status == TDDP_MISMATCH || status == TDDP_PEER_LOST);
    free(one.memory);
}

TEST(calls_that_differ_among_many_ranks)
{
    for (unsigned seed = 0; seed < 6; seed++) {
        run_ranks(9 + (int)seed, seed, differ_among_many, NULL);
    }
}

/* A part of another operation, which is the one that ranks compare. */
static void differ_in_part(coll_rank *it)
{
    call whole;
    call part;
    make_call(it, &whole, TDDP_OP_REDUCE, 10);
    whole.op.sequence = 70;
    whole.op.root = it->rank;
    make_call(it, &part, TDDP_OP_ALL_REDUCE, 100000);
    part.op.part_of = &whole.op;
    CHECK_STATUS(coll_try(it, &part.op), TDDP_MISMATCH);
    CHECK_CONTAINS(tddp_error_message(), "reduce (operation 70, 10 elements");
    free(whole.memory);
    free(part.memory);
}

TEST(parts_are_compared_as_the_whole)
{
    run_ranks(2, 3, differ_in_part, NULL);
}

/* --- arguments ------------------------------------------------------------------------------- */

static void refuse(coll_rank *it)
{
    call one;
    make_call(it, &one, TDDP_OP_ALL_REDUCE, 5);
    one.op.bundled = 1;
    CHECK_STATUS(coll_try(it, &one.op), TDDP_UNSUPPORTED);
    free(one.memory);
    make_call(it, &one, TDDP_OP_ALL_TO_ALL, 5);
    one.in[it->rank].count--;
    CHECK_STATUS(coll_try(it, &one.op), TDDP_MISMATCH);
    CHECK_CONTAINS(tddp_error_message(), "sends itself 4 elements and expects 5");
    free(one.memory);
    make_call(it, &one, TDDP_OP_ALL_REDUCE, 5);
    CHECK_STATUS(coll_try(it, &one.op), TDDP_GROUP_FAILED);
    free(one.memory);
}

TEST(what_no_rank_can_do_is_refused)
{
    run_ranks(1, 0, refuse, NULL);
}

/* An operation that was interrupted has to be resumed: what comes next would not match. */
static void begin_another(coll_rank *it)
{
    call one;
    call other;
    make_call(it, &one, TDDP_OP_ALL_REDUCE, 100000);
    make_call(it, &other, TDDP_OP_ALL_REDUCE, 100000);
    if (it->rank == 0) {
        CHECK_STATUS(coll_try_times(it, &one.op, 1), TDDP_CANCELED);
        CHECK_STATUS(coll_try(it, &other.op), TDDP_GROUP_FAILED);
        CHECK_TEXT(tddp_error_message(), "an earlier operation of this group is unfinished");
    }
    free(one.memory);
    free(other.memory);
}

TEST(an_unfinished_operation_is_resumed_first)
{
    run_ranks(2, 0, begin_another, NULL);
}

TEST(a_transport_needs_its_functions)
{
    tddp_transport_ops ops = mailbox_ops;
    ops.recv = NULL;
    CHECK(!tddp_transport_backend(&ops));
    CHECK_CONTAINS(tddp_error_message(), "expected a name, and all functions");
}

/* --- time ------------------------------------------------------------------------------------ */

static void time_out(coll_rank *it)
{
    call one;
    make_call(it, &one, TDDP_OP_BARRIER, 1);
    coll_run(it, &one.op);
    free(one.memory);
    if (it->rank == 1) {
        return; /* the others miss it */
    }
    make_call(it, &one, TDDP_OP_ALL_REDUCE, *(size_t *)it->data);
    one.op.timeout_ms = it->rank == 0 ? 50 : COLL_TIMEOUT_MS;
    it->mode = it->rank == 0 ? COLL_BLOCKING : it->mode;
    const tddp_status status = coll_try(it, &one.op);
    if (it->rank == 0) {
        CHECK_STATUS(status, TDDP_TIMEOUT);
        CHECK_CONTAINS(tddp_error_message(), "not done after 50 ms; rank ");
    } else {
        CHECK_STATUS(status, TDDP_PEER_LOST);
        CHECK_CONTAINS(tddp_error_message(), "lost rank 0, which gave up: not done after 50 ms");
    }
    if (it->rank == 0 && it->size < 9) {
        CHECK_INT(it->seen[1].kind, TDDP_OBSERVED_NOT_ENTERED);
        CHECK_INT(it->seen[1].sequence, 1);
        CHECK_TEXT(it->seen[1].text, "barrier"); /* an operation's name is constant */
    }
    free(one.memory);
}

TEST(timeouts_name_the_ranks_that_are_missing)
{
    for (size_t i = 0; i < COUNT_COUNT; i++) {
        run_ranks(4, (unsigned)i, time_out, (void *)(uintptr_t)&COUNTS[i]);
    }
}

/* Polled, too, where no call waits until then. */
static void time_out_polled(coll_rank *it)
{
    if (it->rank == 1) {
        return;
    }
    call one;
    make_call(it, &one, TDDP_OP_ALL_REDUCE, 1);
    one.op.timeout_ms = 20;
    tddp_status status = TDDP_CANCELED;
    while (status == TDDP_CANCELED) {
        const uint32_t seen = tddp_eventcount_read(it->end->events);
        status = coll_try_times(it, &one.op, 1);
        tddp_eventcount_wait(it->end->events, seen, 0, 5 * TDDP_NS_PER_MS);
    }
    CHECK_STATUS(status, TDDP_TIMEOUT);
    CHECK_CONTAINS(tddp_error_message(), "not done after 20 ms; rank 1 has not done its part");
    free(one.memory);
}

TEST(polled_operations_time_out)
{
    run_ranks(2, 0, time_out_polled, NULL);
}

/* --- memory ---------------------------------------------------------------------------------- */

typedef struct shortage {
    tddp_op_kind kind;
    size_t count;
    long nth;
    _Atomic int refused; /* ranks */
} shortage;

/* One allocation fails, of whichever rank: that one says so, and the other learns of it. */
static void run_short(coll_rank *it)
{
    shortage *self = it->data;
    call one;
    make_call(it, &one, TDDP_OP_BARRIER, 1);
    coll_run(it, &one.op); /* both have been made */
    free(one.memory);
    if (it->rank == 0) {
        (void)tddp_fail_allocation(self->nth);
    }
    make_call(it, &one, self->kind, self->count);
    const tddp_status status = coll_try(it, &one.op);
    if (status == TDDP_OK) {
        check_result(it, &one, self->count);
    } else if (status == TDDP_OUT_OF_MEMORY) {
        atomic_fetch_add(&self->refused, 1);
    } else {
        CHECK_STATUS(status, TDDP_PEER_LOST);
        CHECK_CONTAINS(tddp_error_message(), "out of memory");
    }
    free(one.memory);
}

TEST(too_little_memory)
{
    for (int i = 0; i < KIND_COUNT; i++) {
        bool failed = true;
        for (long nth = 1; failed; nth++) {
            shortage self = {.kind = KINDS[i], .count = MOST_FLOATS, .nth = nth};
            run_ranks(2, (unsigned)i, run_short, &self);
            failed = tddp_fail_allocation(0);
            CHECK_INT(atomic_load(&self.refused), failed);
        }
    }
}
