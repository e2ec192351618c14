/*
 * Random groups on random subsets of the ranks of a host, with random operations on random ones of
 * them, in the same order on all ranks, waited for at once or later; results are those of a
 * formula. With one rank killed, the operations of its groups name it, and all others succeed.
 */
#include <inttypes.h>

#include "backend/shm/control.h"
#include "ranks.h"

enum { KILLED = 1, MOST_GROUPS = 6, STEPS = 150, MOST_COUNT = 60000, MOST_WORKS = 8 };

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

typedef struct asynchronous {
    subset *group;
    tddp_work *work;
    float *data;
    size_t count;
    double factor;
} asynchronous;

typedef struct world {
    shm_rank *it;
    uint64_t random;
    int made; /* groups so far, for their names */
    subset groups[MOST_GROUPS];
    asynchronous works[MOST_WORKS];
    int under_way;
    float *memory;
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
    if (into->mine < 0) {
        return;
    }
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    opts.backend = "shm";
    opts.store = self->it->store;
    opts.name = name;
    opts.rank = into->mine;
    opts.world_size = into->count;
    opts.timeout_ms = SHM_TIMEOUT_MS;
    opts.parent = self->it->group;
    CHECK_OK(tddp_group_create(&opts, NULL, &into->group));
}

/* --- operations ------------------------------------------------------------------------------ */

static double sum_of(const subset *group)
{
    double sum = 0;
    for (int i = 0; i < group->count; i++) {
        sum += group->ranks[i] + 1;
    }
    return sum;
}

static void check_values(const float *data, size_t count, double factor)
{
    for (size_t i = 0; i < count; i++) {
        CHECK_DOUBLE(data[i], factor * (double)(i % 5), 0);
    }
}

static void fill_values(float *data, size_t count, double factor)
{
    for (size_t i = 0; i < count; i++) {
        data[i] = (float)(factor * (double)(i % 5));
    }
}

static void end_asynchronous(world *self)
{
    for (int i = 0; i < self->under_way; i++) {
        const asynchronous *each = &self->works[i];
        tddp_status status = tddp_work_wait(each->work, NULL);
        note(self, each->group, status);
        if (status == TDDP_OK) {
            check_values(each->data, each->count, each->factor);
        }
        tddp_work_release(each->work);
        free(each->data);
    }
    self->under_way = 0;
}

static void reduce_later(world *self, subset *group, size_t count)
{
    asynchronous *it = &self->works[self->under_way];
    *it = (asynchronous){.group = group, .count = count, .factor = sum_of(group)};
    it->data = malloc(count * sizeof *it->data);
    CHECK(it->data != NULL);
    fill_values(it->data, count, self->it->rank + 1);
    tddp_status status = tddp_all_reduce(group->group, shm_buffer(it->data, count, TDDP_FLOAT32),
                                         TDDP_REDUCE_SUM, 0, &it->work);
    note(self, group, status);
    if (status) {
        free(it->data);
    } else {
        self->under_way++;
    }
}

static void reduce_now(world *self, subset *group, size_t count)
{
    fill_values(self->memory, count, self->it->rank + 1);
    tddp_status status = tddp_all_reduce(
        group->group, shm_buffer(self->memory, count, TDDP_FLOAT32), TDDP_REDUCE_SUM, 0, NULL);
    note(self, group, status);
    if (status == TDDP_OK) {
        check_values(self->memory, count, sum_of(group));
    }
}

static void broadcast(world *self, subset *group, size_t count, int root)
{
    fill_values(self->memory, count, self->it->rank + 1);
    tddp_status status =
        tddp_broadcast(group->group, shm_buffer(self->memory, count, TDDP_FLOAT32), root, NULL);
    note(self, group, status);
    if (status == TDDP_OK) {
        check_values(self->memory, count, group->ranks[root] + 1);
    }
}

/* A message around the ring of the group's ranks. */
static void pass_around(world *self, subset *group, size_t count)
{
    if (group->count < 2) {
        return;
    }
    const int next = (group->mine + 1) % group->count;
    const int before = (group->mine + group->count - 1) % group->count;
    float *out = malloc(count * sizeof *out);
    CHECK(out != NULL);
    fill_values(out, count, self->it->rank + 1);
    tddp_work *sent = NULL;
    tddp_status status =
        tddp_send(group->group, shm_buffer(out, count, TDDP_FLOAT32), next, 3, &sent);
    note(self, group, status);
    if (status == TDDP_OK) {
        status =
            tddp_recv(group->group, shm_buffer(self->memory, count, TDDP_FLOAT32), before, 3, NULL);
        note(self, group, status);
        if (status == TDDP_OK) {
            check_values(self->memory, count, group->ranks[before] + 1);
        }
        note(self, group, tddp_work_wait(sent, NULL));
        tddp_work_release(sent);
    }
    free(out);
}

static void step(world *self)
{
    subset *group = &self->groups[draw(&self->random, MOST_GROUPS)];
    const uint64_t kind = draw(&self->random, 7);
    const size_t most = (size_t[]){10, 3000, MOST_COUNT}[draw(&self->random, 3)];
    const size_t count = 1 + (size_t)draw(&self->random, most);
    const int root = (int)draw(&self->random, (uint64_t)group->count);
    if (kind == 0 && !self->it->data) {
        end_asynchronous(self);
        tddp_group_release(group->group);
        group->group = NULL;
        make_group(self, group);
    } else if (group->group && !group->failed) {
        switch (kind) {
        case 1:
            broadcast(self, group, count, root);
            break;
        case 2:
            pass_around(self, group, count);
            break;
        case 3:
            note(self, group, tddp_barrier(group->group, NULL));
            break;
        case 4:
            reduce_now(self, group, count);
            break;
        default:
            reduce_later(self, group, count);
            break;
        }
    }
    if (self->under_way == MOST_WORKS) {
        end_asynchronous(self);
    }
}

/* `data`: the step at which rank 1 is killed. */
static void at_random(shm_rank *it)
{
    const int *killed_at = it->data;
    world self = {.it = it, .random = (uint64_t)it->size * 7 + (killed_at ? 1 : 0)};
    self.memory = malloc(MOST_COUNT * sizeof *self.memory);
    CHECK(self.memory != NULL);
    for (int i = 0; i < MOST_GROUPS; i++) {
        make_group(&self, &self.groups[i]);
    }
    for (int i = 0; i < STEPS; i++) {
        if (killed_at && it->rank == KILLED && i == *killed_at) {
            (void)kill(getpid(), SIGKILL);
        }
        step(&self);
    }
    end_asynchronous(&self);
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
    free(self.memory);
}

TEST(random_groups)
{
    run_shm_groups(SHM_PROCESSES, 2, at_random, NULL);
    run_shm_groups(SHM_PROCESSES, 5, at_random, NULL);
    run_shm_groups(SHM_PROCESSES, 16, at_random, NULL);
}

TEST(a_rank_of_random_groups_is_killed)
{
    static int steps[] = {0, 20, 75};
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        shm_run((shm_job){.mode = SHM_PROCESSES,
                          .size = 6,
                          .body = at_random,
                          .data = &steps[i],
                          .grouped = true,
                          .may_die = true});
    }
}
