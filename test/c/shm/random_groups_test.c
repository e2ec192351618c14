/*
 * Random groups on random subsets of the ranks of a host, or of several made-up ones
 * (test/c/CMakeLists.txt, hosts/layout.c), with random operations of all kinds on
 * random ones of them, in the same order on all ranks, waited for at once, later, or not at all;
 * results are those of a formula. With one rank killed, the operations of its groups name it, and
 * all others succeed.
 */
#include <inttypes.h>

#include "backend/shm/control.h"
#include "ranks.h"

enum { KILLED = 1, MOST_GROUPS = 6, STEPS = 150, MOST_COUNT = 60000, MOST_LATER = 8 };

/* The same numbers on all ranks: splitmix64. */
static uint64_t draw(uint64_t *state, uint64_t below)
{
    uint64_t z = (*state += UINT64_C(0x9e3779b97f4a7c15));
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return (z ^ (z >> 31)) % below;
}

typedef struct subset {
    int count;
    int ranks[SHM_MAX_RANKS];
    int mine; /* this rank's place; -1: it is not a member */
    tddp_group *group;
    bool failed; /* an operation has: no other one is begun */
} subset;

/* An operation under way. */
typedef struct operation {
    subset *group;
    tddp_op_kind kind; /* TDDP_OP_RECV: a message to the next rank and one from that before */
    tddp_reduce_op reduce;
    size_t count; /* of a part */
    int root;
    tddp_work *work;
    tddp_work *sent;
    float *in;
    float *out;
} operation;

typedef struct world {
    shm_rank *it;
    uint64_t random;
    int made; /* groups so far, for their names */
    subset groups[MOST_GROUPS];
    operation later[MOST_LATER];
    int under_way;
} world;

/* In a group of a rank that was killed an operation may fail, and names that rank. */
static void note(const world *self, subset *group, tddp_status status)
{
    if (status == TDDP_OK) {
        return;
    }
    int killed = -1;
    for (int i = 0; i < group->count && self->it->data; i++) {
        killed = group->ranks[i] == KILLED ? i : killed;
    }
    if (killed < 0) {
        CHECK_OK(status);
    }
    char text[32];
    snprintf(text, sizeof text, "rank %d", killed);
    CHECK(status == TDDP_PEER_LOST || status == TDDP_GROUP_FAILED);
    CHECK_CONTAINS(tddp_error_message(), text);
    group->failed = true;
}

static void choose(world *self, subset *out)
{
    int size = self->it->size;
    int order[SHM_MAX_RANKS];
    for (int i = 0; i < size; i++) {
        order[i] = i;
    }
    for (int i = size - 1; i > 0; i--) {
        int j = (int)draw(&self->random, (uint64_t)i + 1);
        int other = order[i];
        order[i] = order[j];
        order[j] = other;
    }
    *out = (subset){.count = 1 + (int)draw(&self->random, (uint64_t)size), .mine = -1};
    for (int i = 0; i < out->count; i++) {
        out->ranks[i] = order[i];
        out->mine = order[i] == self->it->rank ? i : out->mine;
    }
}

static void make_group(world *self, subset *into)
{
    char name[32];
    choose(self, into);
    snprintf(name, sizeof name, "random %d", self->made++);
    if (into->mine >= 0) {
        into->group = shm_make_group(self->it, name, into->mine, into->count);
    }
}

/* --- operations ------------------------------------------------------------------------------ */

/* Element i of part p of what a rank gives; small, so that all results are exact. */
static double value_of(const operation *op, int member, int p, size_t i)
{
    const int most = op->reduce == TDDP_REDUCE_PRODUCT ? 2 : 5;
    return 1 + (op->group->ranks[member] * 3 + p * 5 + (int)(i % 101)) % most;
}

/* The combination of all ranks' parts p. */
static double combined(const operation *op, int p, size_t i)
{
    double result = value_of(op, 0, p, i); /* with the factor 1 */
    for (int member = 1; member < op->group->count; member++) {
        const double next = value_of(op, member, p, i);
        switch (op->reduce) {
        case TDDP_REDUCE_PRODUCT:
            result *= next;
            break;
        case TDDP_REDUCE_MIN:
            result = next < result ? next : result;
            break;
        case TDDP_REDUCE_MAX:
            result = next > result ? next : result;
            break;
        case TDDP_REDUCE_PREMUL_SUM:
            result += next * (member + 1);
            break;
        default:
            result += next;
            break;
        }
    }
    return op->reduce == TDDP_REDUCE_AVG ? result / op->group->count : result;
}

static bool is_root(const operation *op)
{
    return op->group->mine == op->root;
}

static bool has_parts_in(const operation *op)
{
    return op->kind == TDDP_OP_REDUCE_SCATTER || op->kind == TDDP_OP_ALL_TO_ALL ||
           (op->kind == TDDP_OP_SCATTER && is_root(op));
}

static bool has_parts_out(const operation *op)
{
    return op->kind == TDDP_OP_ALL_GATHER || op->kind == TDDP_OP_ALL_TO_ALL ||
           (op->kind == TDDP_OP_GATHER && is_root(op));
}

static bool is_in_place(const operation *op)
{
    return op->kind == TDDP_OP_ALL_REDUCE || op->kind == TDDP_OP_REDUCE ||
           op->kind == TDDP_OP_BROADCAST;
}

static int next_of(const operation *op)
{
    return (op->group->mine + 1) % op->group->count;
}

static int before(const operation *op)
{
    return (op->group->mine + op->group->count - 1) % op->group->count;
}

/* What element i of part p of the output becomes. */
static double expected(const operation *op, int p, size_t i)
{
    const int mine = op->group->mine;
    switch (op->kind) {
    case TDDP_OP_ALL_REDUCE:
        return combined(op, 0, i);
    case TDDP_OP_REDUCE:
        return is_root(op) ? combined(op, 0, i) : value_of(op, mine, 0, i);
    case TDDP_OP_BROADCAST:
        return value_of(op, op->root, 0, i);
    case TDDP_OP_REDUCE_SCATTER:
        return combined(op, mine, i);
    case TDDP_OP_SCATTER:
        return value_of(op, op->root, mine, i);
    case TDDP_OP_ALL_TO_ALL:
        return value_of(op, p, mine, i);
    case TDDP_OP_RECV:
        return value_of(op, before(op), 0, i);
    default:
        return value_of(op, p, 0, i);
    }
}

static void check_result(const operation *op)
{
    const bool received =
        op->kind != TDDP_OP_BARRIER && (op->kind != TDDP_OP_GATHER || is_root(op));
    const int parts = !received ? 0 : has_parts_out(op) ? op->group->count : 1;
    const double inexact = op->reduce == TDDP_REDUCE_AVG ? 1e-6 : 0;
    for (int p = 0; p < parts; p++) {
        for (size_t i = 0; i < op->count; i++) {
            CHECK_DOUBLE(op->out[(size_t)p * op->count + i], expected(op, p, i), inexact);
        }
    }
}

static void fill(operation *op)
{
    const int parts = has_parts_in(op) ? op->group->count : 1;
    op->in = malloc((size_t)op->group->count * op->count * sizeof *op->in);
    op->out = calloc((size_t)op->group->count * op->count, sizeof *op->out);
    CHECK(op->in && op->out);
    float *data = is_in_place(op) ? op->out : op->in;
    for (int p = 0; p < parts; p++) {
        for (size_t i = 0; i < op->count; i++) {
            data[(size_t)p * op->count + i] = (float)value_of(op, op->group->mine, p, i);
        }
    }
}

static tddp_status submit(operation *op, bool waits)
{
    tddp_buffer in[SHM_MAX_RANKS];
    tddp_buffer out[SHM_MAX_RANKS];
    tddp_op_args args = TDDP_OP_ARGS_INIT;
    for (int p = 0; p < op->group->count; p++) {
        in[p] = shm_buffer(op->in + (size_t)p * op->count, op->count, TDDP_FLOAT32);
        out[p] = shm_buffer(op->out + (size_t)p * op->count, op->count, TDDP_FLOAT32);
    }
    args.kind = op->kind;
    args.reduce = op->reduce;
    args.premul = op->group->mine + 1;
    args.root = op->root;
    args.input = is_in_place(op) ? out[0] : in[0];
    args.output = out[0];
    args.inputs = has_parts_in(op) ? in : NULL;
    args.input_count = has_parts_in(op) ? (size_t)op->group->count : 0;
    args.outputs = has_parts_out(op) ? out : NULL;
    args.output_count = has_parts_out(op) ? (size_t)op->group->count : 0;
    if (op->kind == TDDP_OP_RECV) {
        /* A message around the ring of the group's ranks. */
        args.kind = TDDP_OP_SEND;
        args.peer = next_of(op);
        tddp_status status = tddp_submit(op->group->group, &args, &op->sent);
        if (status) {
            return status;
        }
        args.kind = TDDP_OP_RECV;
        args.peer = before(op);
    }
    return tddp_submit(op->group->group, &args, waits ? NULL : &op->work);
}

static tddp_status end_work(tddp_work *work, bool waits)
{
    if (!work) {
        return TDDP_OK;
    }
    if (!waits) {
        CHECK_UNTIL(tddp_work_completed(work));
    }
    tddp_status status = tddp_work_wait(work, NULL);
    tddp_work_release(work);
    return status;
}

static void end(const world *self, operation *op, tddp_status status, bool waits)
{
    note(self, op->group, status);
    tddp_status received = end_work(op->work, waits);
    note(self, op->group, received);
    note(self, op->group, end_work(op->sent, waits));
    if (status == TDDP_OK && received == TDDP_OK) {
        check_result(op);
    }
    free(op->in);
    free(op->out);
}

static void end_later(world *self)
{
    for (int i = 0; i < self->under_way; i++) {
        end(self, &self->later[i], TDDP_OK, (self->it->rank + i) % 2);
    }
    self->under_way = 0;
}

static operation choose_operation(world *self)
{
    static const tddp_op_kind kinds[] = {
        TDDP_OP_ALL_REDUCE, TDDP_OP_ALL_REDUCE, TDDP_OP_REDUCE,         TDDP_OP_BROADCAST,
        TDDP_OP_BARRIER,    TDDP_OP_ALL_GATHER, TDDP_OP_REDUCE_SCATTER, TDDP_OP_GATHER,
        TDDP_OP_SCATTER,    TDDP_OP_ALL_TO_ALL, TDDP_OP_RECV,           TDDP_OP_RECV};
    static const tddp_reduce_op reductions[] = {TDDP_REDUCE_SUM,     TDDP_REDUCE_AVG,
                                                TDDP_REDUCE_PRODUCT, TDDP_REDUCE_MIN,
                                                TDDP_REDUCE_MAX,     TDDP_REDUCE_PREMUL_SUM};
    operation op = {.group = &self->groups[draw(&self->random, MOST_GROUPS)]};
    op.kind = kinds[draw(&self->random, sizeof kinds / sizeof *kinds)];
    op.reduce = reductions[draw(&self->random, sizeof reductions / sizeof *reductions)];
    op.root = (int)draw(&self->random, (uint64_t)op.group->count);
    const size_t most = (size_t[]){10, 3000, MOST_COUNT}[draw(&self->random, 3)];
    op.count = 1 + (size_t)draw(&self->random, most) / (size_t)op.group->count;
    if (op.kind == TDDP_OP_RECV && op.group->count == 1) {
        op.kind = TDDP_OP_BARRIER;
    }
    return op;
}

static void step(world *self)
{
    const bool remakes = draw(&self->random, 8) == 0 && !self->it->data;
    const bool waits = draw(&self->random, 2) == 0;
    operation op = choose_operation(self);
    subset *group = op.group;
    if (remakes) {
        end_later(self);
        tddp_group_release(group->group);
        group->group = NULL;
        make_group(self, group);
    } else if (group->group && !group->failed) {
        fill(&op);
        tddp_status status = submit(&op, waits);
        if (waits || status) {
            end(self, &op, status, true);
        } else {
            self->later[self->under_way++] = op;
        }
    }
    if (self->under_way == MOST_LATER) {
        end_later(self);
    }
}

/* `data`: the step at which rank 1 is killed. */
static void at_random(shm_rank *it)
{
    const int *killed_at = it->data;
    world self = {.it = it, .random = (uint64_t)it->size * 7 + (killed_at ? 1 : 0)};
    for (int i = 0; i < MOST_GROUPS; i++) {
        make_group(&self, &self.groups[i]);
    }
    for (int i = 0; i < STEPS; i++) {
        if (killed_at && it->rank == KILLED && i == *killed_at) {
            (void)kill(getpid(), SIGKILL);
        }
        step(&self);
    }
    end_later(&self);
    tddp_status status = tddp_barrier(it->group, NULL);
    if (killed_at) {
        CHECK(status == TDDP_PEER_LOST || status == TDDP_GROUP_FAILED);
        CHECK_CONTAINS(tddp_error_message(), "rank 1");
    } else {
        CHECK_OK(status);
    }
    for (int i = 0; i < MOST_GROUPS; i++) {
        tddp_group_release(self.groups[i].group);
    }
}

static void run_groups(int size, int *killed_at)
{
    shm_run((shm_job){.mode = SHM_PROCESSES,
                      .size = size,
                      .body = at_random,
                      .data = killed_at,
                      .backend = getenv("LAYOUT") ? "gloo" : "shm",
                      .grouped = true,
                      .may_die = killed_at != NULL});
}

TEST(random_groups)
{
    run_groups(2, NULL);
    run_groups(5, NULL);
    run_groups(16, NULL);
}

TEST(a_rank_of_random_groups_is_killed)
{
    static int steps[] = {0, 20, 75};
    static const int sizes[] = {3, 6, 16};
    for (size_t i = 0; i < 9; i++) {
        run_groups(sizes[i / 3], &steps[i % 3]);
    }
}
