/*
 * Calls over Gloo that differ between ranks: each rank that sees the mismatch reports both sides,
 * and none waits for its timeout.
 */
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "events.h"
#include "world.h"

/* The timeout is longer than a test may take. */
enum { SMALL = 12, LARGE = 500000, MOST = 4, TIMEOUT_MS = 300000 };
enum { ENTERING, NOTIFIED }; /* events */

static float memory[MOST][LARGE + 8];
static float more[MOST][LARGE + 8];

/* The call of one rank. */
typedef struct call {
    tddp_op_kind kind;
    size_t count;
    tddp_dtype dtype;
    tddp_reduce_op op;
    double premul;
    int root;
    const char *description;
    size_t counts[MOST]; /* of the parts, if it has its own */
    bool uneven;
} call;

static call call_of(tddp_op_kind kind, size_t count)
{
    return (call){.kind = kind, .count = count, .dtype = TDDP_FLOAT32, .premul = 0.5};
}

static void make_parts(tddp_buffer *parts, float (*data)[LARGE + 8], const call *c)
{
    for (int r = 0; r < MOST; r++) {
        parts[r] = buffer_of(data[r], c->uneven ? c->counts[r] : c->count, c->dtype);
    }
}

/* Parts aren't contiguous; the local part has this rank's index. */
static tddp_status run(tddp_group *group, const call *c)
{
    int rank = tddp_group_rank(group);
    size_t world = (size_t)tddp_group_world_size(group);
    bool root = rank == c->root;
    tddp_buffer inputs[MOST];
    tddp_buffer outputs[MOST];
    make_parts(inputs, memory, c);
    make_parts(outputs, more, c);
    tddp_op_args args = {.size = sizeof args,
                         .kind = c->kind,
                         .reduce = c->op,
                         .premul = c->premul,
                         .root = c->root,
                         .description = c->description};
    switch (c->kind) {
    case TDDP_OP_ALL_REDUCE:
    case TDDP_OP_REDUCE:
    case TDDP_OP_BROADCAST:
        args.output = inputs[0];
        break;
    case TDDP_OP_ALL_GATHER:
    case TDDP_OP_GATHER:
        args.input = inputs[rank];
        break;
    case TDDP_OP_SCATTER:
    case TDDP_OP_REDUCE_SCATTER:
        args.output = outputs[rank];
        break;
    default:
        break;
    }
    if (c->kind == TDDP_OP_ALL_GATHER || c->kind == TDDP_OP_ALL_TO_ALL ||
        (c->kind == TDDP_OP_GATHER && root)) {
        args.outputs = outputs;
        args.output_count = world;
    }
    if (c->kind == TDDP_OP_REDUCE_SCATTER || c->kind == TDDP_OP_ALL_TO_ALL ||
        (c->kind == TDDP_OP_SCATTER && root)) {
        args.inputs = inputs;
        args.input_count = world;
    }
    return tddp_submit(group, &args, NULL);
}

typedef struct world {
    tddp_store *store;
    tddp_group *group;
    int rank;
    int world_size;
} world;

/* Each case has its own group, since a mismatch ends it. */
static void open_case(world *w, int number)
{
    char name[16] = {(char)('a' + number / 26), (char)('a' + number % 26), 0};
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    opts.backend = WORLD_BACKEND;
    opts.store = w->store;
    opts.name = name;
    opts.rank = w->rank;
    opts.world_size = w->world_size;
    opts.timeout_ms = TIMEOUT_MS;
    CHECK_OK(tddp_group_create(&opts, NULL, &w->group));
    CHECK_OK(tddp_barrier(w->group, NULL));
    /* No rank continues before all have finished: a failure ends operations elsewhere. */
    CHECK_OK(tddp_monitored_barrier(w->group, 0, 1, NULL));
}

static void end_world(world *w)
{
    w->group = open_group(w->store, w->rank, w->world_size, TIMEOUT_MS);
    leave(w->group, w->store);
}

/* All ranks make the call `all`, except the last one, which makes `last`; all must report the
 * mismatch, with both texts. */
static void differ(world *w, int number, call all, call last, const char *all_text,
                   const char *last_text)
{
    open_case(w, number);
    tddp_status status = run(w->group, w->rank == w->world_size - 1 ? &last : &all);
    CHECK_STATUS(status, TDDP_MISMATCH);
    CHECK_CONTAINS(tddp_error_message(), all_text);
    CHECK_CONTAINS(tddp_error_message(), last_text);
    CHECK_STATUS(tddp_barrier(w->group, NULL), TDDP_GROUP_FAILED);
    tddp_group_release(w->group);
}

static const tddp_op_kind kinds[] = {
    TDDP_OP_ALL_REDUCE, TDDP_OP_BROADCAST,      TDDP_OP_BARRIER,
    TDDP_OP_ALL_GATHER, TDDP_OP_REDUCE_SCATTER, TDDP_OP_REDUCE,
    TDDP_OP_GATHER,     TDDP_OP_SCATTER,        TDDP_OP_ALL_TO_ALL};
enum { KINDS = sizeof kinds / sizeof *kinds };

static void different_kinds(int rank, int world_size, int port)
{
    world w = {open_store(rank, world_size, port), NULL, rank, world_size};
    int number = 0;
    for (int a = 0; a < KINDS; a++) {
        for (int b = 0; b < KINDS; b++) {
            if (a != b && (a + b) % 2) {
                char all[64];
                char last[64];
                snprintf(all, sizeof all, "runs %s (operation 2", tddp_op_name(kinds[a]));
                snprintf(last, sizeof last, "runs %s (operation 2", tddp_op_name(kinds[b]));
                size_t count = (a * KINDS + b) % 4 < 2 ? SMALL : LARGE;
                differ(&w, number++, call_of(kinds[a], count), call_of(kinds[b], count), all, last);
            }
        }
    }
    end_world(&w);
}

MULTI_TEST(different_kinds_on_two_ranks, 2, 60)
{
    different_kinds(rank, world_size, port);
}

MULTI_TEST(different_kinds_on_three_ranks, 3, 100)
{
    different_kinds(rank, world_size, port);
}

static void different_details(int rank, int world_size, int port)
{
    world w = {open_store(rank, world_size, port), NULL, rank, world_size};
    int number = 0;
    for (int k = 0; k < KINDS; k++) {
        const tddp_op_kind kind = kinds[k];
        const size_t count = k % 2 ? LARGE : SMALL;
        const call all = call_of(kind, count);
        call last = all;
        if (kind == TDDP_OP_BARRIER) {
            continue;
        }
        last.dtype = TDDP_INT32;
        differ(&w, number++, all, last, "of float32", "of int32");
        last = all;
        last.description = "another shape";
        call described = all;
        described.description = "a shape";
        differ(&w, number++, described, last, "shapes or names differ between rank",
               tddp_op_name(kind));
        bool reduces =
            kind == TDDP_OP_ALL_REDUCE || kind == TDDP_OP_REDUCE || kind == TDDP_OP_REDUCE_SCATTER;
        if (reduces) {
            last = all;
            last.op = TDDP_REDUCE_MAX;
            differ(&w, number++, all, last, "elements of float32, sum", ", max");
        }
        if (kind == TDDP_OP_BROADCAST || kind == TDDP_OP_REDUCE || kind == TDDP_OP_GATHER ||
            kind == TDDP_OP_SCATTER) {
            last = all;
            last.root = 1;
            differ(&w, number++, all, last, "root 0", "root 1");
        }
        if (kind == TDDP_OP_ALL_REDUCE || kind == TDDP_OP_REDUCE || kind == TDDP_OP_BROADCAST) {
            last = all;
            last.count = LARGE + 1;
            char before[32];
            snprintf(before, sizeof before, "%zu elements", count);
            differ(&w, number++, all, last, before, "500001 elements");
        }
    }
    end_world(&w);
}

MULTI_TEST(different_details_on_two_ranks, 2, 60)
{
    different_details(rank, world_size, port);
}

MULTI_TEST(different_details_on_four_ranks, 4, 100)
{
    different_details(rank, world_size, port);
}

/* Rank 0 sends one size, rank 1 expects another. */
static void uneven(world *w, int number, tddp_op_kind kind, int root, size_t here, size_t there,
                   const char *text, const char *back)
{
    open_case(w, number);
    call c = call_of(kind, 4);
    c.root = root;
    c.uneven = true;
    for (int r = 0; r < MOST; r++) {
        c.counts[r] = 4;
    }
    /* Part 0 is what rank 0 sends in all_gather and gather, part 1 what rank 1 receives in
     * scatter. */
    size_t *changed = &c.counts[kind == TDDP_OP_SCATTER ? 1 : 0];
    *changed = w->rank == 0 ? here : there;
    CHECK_STATUS(run(w->group, &c), TDDP_MISMATCH);
    CHECK_CONTAINS(tddp_error_message(), text);
    CHECK_CONTAINS(tddp_error_message(), back);
    CHECK_CONTAINS(tddp_error_message(), "a part must be as large as its receiver expects");
    tddp_group_release(w->group);
}

MULTI_TEST(unequal_sizes_are_reported_by_both_sides, 2, 60)
{
    world w = {open_store(rank, world_size, port), NULL, rank, world_size};
    uneven(&w, 0, TDDP_OP_ALL_GATHER, 0, 3, 5,
           "all_gather (operation 2): ", "rank 0 sends 3 elements of float32, rank 1 expects 5");
    uneven(&w, 1, TDDP_OP_ALL_GATHER, 0, 3, LARGE, "all_gather (operation 2): ",
           "rank 0 sends 3 elements of float32, rank 1 expects 500000");
    uneven(&w, 2, TDDP_OP_ALL_GATHER, 0, LARGE, 0, "all_gather (operation 2): ",
           "rank 0 sends 500000 elements of float32, rank 1 expects 0");
    uneven(&w, 3, TDDP_OP_GATHER, 1, 0, 1,
           "gather (operation 2): ", "rank 0 sends 0 elements of float32, rank 1 expects 1");
    uneven(&w, 4, TDDP_OP_GATHER, 1, LARGE, LARGE + 1, "gather (operation 2): ",
           "rank 0 sends 500000 elements of float32, rank 1 expects 500001");
    uneven(&w, 5, TDDP_OP_SCATTER, 0, 7, 8,
           "scatter (operation 2): ", "rank 0 sends 7 elements of float32, rank 1 expects 8");
    uneven(&w, 6, TDDP_OP_SCATTER, 0, LARGE + 1, LARGE, "scatter (operation 2): ",
           "rank 0 sends 500001 elements of float32, rank 1 expects 500000");
    uneven(&w, 7, TDDP_OP_REDUCE_SCATTER, 0, 7, 8, "reduce_scatter (operation 2): ",
           "rank 1 sends 8 elements of float32, rank 0 expects 7");
    end_world(&w);
}

/* Both directions are reported: neither rank sends what the other expects. */
MULTI_TEST(all_to_all_reports_both_directions, 2, 30)
{
    world w = {open_store(rank, world_size, port), NULL, rank, world_size};
    for (int large = 0; large < 2; large++) {
        size_t base = large ? 100000 : 0;
        open_case(&w, large);
        tddp_buffer inputs[2];
        tddp_buffer outputs[2];
        for (int r = 0; r < 2; r++) {
            inputs[r] = buffer_of(memory[r], base + 3 + (size_t)rank, TDDP_FLOAT32);
            outputs[r] = buffer_of(more[r], base + 5 + (size_t)rank, TDDP_FLOAT32);
        }
        outputs[rank].count = inputs[rank].count;
        CHECK_STATUS(tddp_all_to_all(w.group, inputs, outputs, 2, NULL), TDDP_MISMATCH);
        CHECK_CONTAINS(tddp_error_message(), large ? "rank 0 sends 100003 elements of float32, "
                                                     "rank 1 expects 100006"
                                                   : "rank 0 sends 3 elements of float32, rank 1 "
                                                     "expects 6");
        CHECK_CONTAINS(tddp_error_message(), large ? "rank 1 sends 100004 elements of float32, "
                                                     "rank 0 expects 100005"
                                                   : "rank 1 sends 4 elements of float32, rank 0 "
                                                     "expects 5");
        tddp_group_release(w.group);
    }
    end_world(&w);
}

/* Each rank runs another operation; no two of them would exchange data in it. */
MULTI_TEST(three_ranks_in_three_operations, 3, 30)
{
    world w = {open_store(rank, world_size, port), NULL, rank, world_size};
    for (int large = 0; large < 2; large++) {
        call calls[3];
        calls[0] = call_of(TDDP_OP_ALL_REDUCE, large ? LARGE : SMALL);
        calls[1] = call_of(TDDP_OP_GATHER, large ? LARGE : SMALL);
        calls[2] = calls[1];
        calls[2].root = 1;
        open_case(&w, large);
        CHECK_STATUS(run(w.group, &calls[rank]), TDDP_MISMATCH);
        tddp_group_release(w.group);
    }
    end_world(&w);
}

/* The two ranks that agree are the root and another one; the third waits for a root that doesn't
 * know of it. */
MULTI_TEST(a_root_that_differs, 3, 30)
{
    world w = {open_store(rank, world_size, port), NULL, rank, world_size};
    const tddp_op_kind rooted[] = {TDDP_OP_BROADCAST, TDDP_OP_SCATTER, TDDP_OP_GATHER,
                                   TDDP_OP_REDUCE};
    for (int k = 0; k < 4; k++) {
        call all = call_of(rooted[k], k % 2 ? LARGE : SMALL);
        call last = all;
        last.root = 1;
        differ(&w, k, all, last, "root 0", "root 1");
    }
    end_world(&w);
}

/* Rank 1 leaves out the second of two operations. */
MULTI_TEST(a_missing_call_is_reported_as_such, 2, 30)
{
    world w = {open_store(rank, world_size, port), NULL, rank, world_size};
    call first = call_of(TDDP_OP_ALL_REDUCE, SMALL);
    call second = call_of(TDDP_OP_BROADCAST, LARGE);
    open_case(&w, 0);
    CHECK_OK(run(w.group, &first));
    CHECK_STATUS(run(w.group, rank == 0 ? &second : &first), TDDP_MISMATCH);
    CHECK_CONTAINS(tddp_error_message(), "runs broadcast (operation 3, 500000 elements");
    CHECK_CONTAINS(tddp_error_message(), "runs all_reduce (operation 3, 12 elements");
    CHECK_CONTAINS(tddp_error_message(), "rank 1 calls what both called in operation 2: it has "
                                         "left out a call, or made that one twice");
    tddp_group_release(w.group);
    end_world(&w);
}

/* A fingerprint isn't compared with none. */
MULTI_TEST(a_fingerprint_is_compared_only_with_another, 2, 30)
{
    tddp_store *store = open_store(rank, world_size, port);
    tddp_group *group = open_group(store, rank, world_size, TIMEOUT_MS);
    for (int k = 0; k < KINDS; k++) {
        for (int large = 0; large < 2; large++) {
            call c = call_of(kinds[k], large ? LARGE : SMALL);
            c.description = rank ? "shape" : NULL;
            CHECK_OK(run(group, &c));
            c.description = "shape";
            CHECK_OK(run(group, &c));
        }
    }
    leave(group, store);
}

/* A rank that calls when the others have failed reports their call, not only that they are gone.
 * Where it shares a host with one of them, that one compares with the other host after it has
 * arrived. */
MULTI_TEST(a_late_rank_reports_the_mismatch, 3, 30)
{
    world w = {open_store(rank, world_size, port), NULL, rank, world_size};
    call calls[] = {call_of(TDDP_OP_ALL_REDUCE, SMALL), call_of(TDDP_OP_BARRIER, 0),
                    call_of(TDDP_OP_BARRIER, 0)};
    const char *layout = getenv("LAYOUT");
    int late_after = layout && strcmp(layout, "turns") == 0 ? ENTERING : NOTIFIED;
    open_case(&w, 0);
    CHECK_AWAIT(late_after, rank == 2 ? 2 : 0);
    check_signal(ENTERING);
    CHECK_STATUS(run(w.group, &calls[rank]), TDDP_MISMATCH);
    check_signal(NOTIFIED);
    CHECK_CONTAINS(tddp_error_message(), "runs all_reduce (operation 2, 12 elements of float32");
    CHECK_CONTAINS(tddp_error_message(), "runs barrier (operation 2)");
    tddp_group_release(w.group);
    end_world(&w);
}
