/* Further groups of ranks that have shared memory: views of the first group's segments. */
#include <dirent.h>
#include <sys/stat.h>

#include "backend/shm/control.h"
#include "ranks.h"

enum { MOST_GROUPS = 20 };

/* Numbers of a rank's first group that are in a further group, in its order. */
typedef struct members {
    int count;
    int ranks[SHM_MAX_RANKS];
} members;

static int place_of(const members *all, int rank)
{
    for (int i = 0; i < all->count; i++) {
        if (all->ranks[i] == rank) {
            return i;
        }
    }
    return -1;
}

/* A rank with its first context and the fabric. */
typedef struct host {
    shm_rank *it;
    tddp_shm_fabric *fabric;
    tddp_shm *first;
} host;

/* The `nth` allocation fails; 0: none does. */
static tddp_status join_failing(const host *self, const char *name, const members *all, int nth,
                                tddp_shm **out)
{
    tddp_store *store;
    CHECK_OK(tddp_prefix_store_create(name, self->it->store, &store));
    tddp_backend_opts opts = shm_opts(place_of(all, self->it->rank), all->count, store);
    opts.fabric = self->fabric;
    tddp_fail_allocation(nth);
    tddp_status status = tddp_shm_join(&opts, NULL, NULL, out);
    tddp_store_release(store);
    return status;
}

static tddp_status join(const host *self, const char *name, const members *all, tddp_shm **out)
{
    return join_failing(self, name, all, 0, out);
}

static members everyone(const shm_rank *it)
{
    members all = {.count = it->size};
    for (int rank = 0; rank < it->size; rank++) {
        all.ranks[rank] = rank;
    }
    return all;
}

static host open_host(shm_rank *it)
{
    host self = {.it = it};
    members all = everyone(it);
    CHECK_OK(tddp_shm_fabric_create(&self.fabric));
    CHECK_OK(join(&self, "first", &all, &self.first));
    CHECK(!self.first->view);
    return self;
}

static void close_host(host *self)
{
    tddp_shm_destroy(self->first);
    tddp_shm_fabric_release(self->fabric);
}

/* An all_reduce of this many numbers, anywhere or in place of a shared buffer. */
static void reduce(shm_rank *it, tddp_shm *shm, const members *all, float *data, size_t count)
{
    tddp_op op = shm_op(it, TDDP_OP_ALL_REDUCE);
    double sum = 0;
    for (int i = 0; i < all->count; i++) {
        sum += all->ranks[i] + 1;
    }
    for (size_t i = 0; i < count; i++) {
        data[i] = (float)((it->rank + 1) * (double)(i % 7));
    }
    op.input = op.output = shm_buffer(data, count, TDDP_FLOAT32);
    op.reduce = TDDP_REDUCE_SUM;
    CHECK_OK(tddp_shm_all_reduce(shm, &op));
    for (size_t i = 0; i < count; i++) {
        CHECK_DOUBLE(data[i], sum * (double)(i % 7), 0);
    }
}

/* Sizes below and above those of inline payload and staging, odd ones among them. */
static void reduce_sizes(shm_rank *it, tddp_shm *shm, const members *all)
{
    static const size_t counts[] = {1, 1023, 5000, 300001};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        float *data = malloc(counts[i] * sizeof *data);
        CHECK(data != NULL);
        reduce(it, shm, all, data, counts[i]);
        free(data);
    }
}

static void barrier(shm_rank *it, tddp_shm *shm)
{
    tddp_op op = shm_op(it, TDDP_OP_BARRIER);
    CHECK_OK(tddp_shm_barrier(shm, &op));
}

/* --- results --------------------------------------------------------------------------------- */

/* Groups of all ranks, of some, in another order, each with operations between the others'. */
static void of_some_ranks(shm_rank *it)
{
    host self = open_host(it);
    members groups[3] = {everyone(it), {2, {it->size - 1, 0}}, {1, {it->size / 2}}};
    tddp_shm *views[3] = {NULL};
    uint64_t sequences[3] = {0};
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 3; i++) {
            if ((i == 1 && it->size == 1) || place_of(&groups[i], it->rank) < 0) {
                continue;
            }
            char name[16];
            snprintf(name, sizeof name, "group %d", i);
            if (round == 0) {
                CHECK_OK(join(&self, name, &groups[i], &views[i]));
                CHECK(views[i]->view != NULL);
                CHECK_INT(tddp_shm_size(views[i]), groups[i].count);
            }
            shm_rank other = *it;
            other.sequence = sequences[i];
            reduce_sizes(&other, views[i], &groups[i]);
            sequences[i] = other.sequence;
        }
        reduce_sizes(it, self.first, &groups[0]);
    }
    for (int i = 0; i < 3; i++) {
        tddp_shm_destroy(views[i]);
    }
    close_host(&self);
}

SHM_TEST(groups_of_some_ranks, of_some_ranks)

/* Memory that was made for one group is reduced where it lies in another. */
static void in_place(shm_rank *it)
{
    host self = open_host(it);
    members all = everyone(it);
    enum { COUNT = 100003 };
    tddp_shm *view;
    void *handles[2];
    void *data[2];
    CHECK_OK(join(&self, "view", &all, &view));
    CHECK_OK(tddp_shm_allocate(self.first, COUNT * sizeof(float), &handles[0], &data[0]));
    CHECK_OK(tddp_shm_allocate(view, COUNT * sizeof(float), &handles[1], &data[1]));
    for (int i = 0; i < 2; i++) {
        shm_rank other = *it;
        other.sequence = (uint64_t)i;
        reduce(&other, view, &all, data[i], COUNT);
        CHECK(tddp_shm_all_inputs(view));
        reduce(it, self.first, &all, data[i], COUNT);
        CHECK(tddp_shm_all_inputs(self.first));
    }
    tddp_shm_destroy(view);
    tddp_shm_deallocate(handles[0]);
    close_host(&self);
    tddp_shm_deallocate(handles[1]);
}

SHM_TEST(memory_of_one_group_is_memory_of_all, in_place)

/* The first group may end before the others. */
static void without_the_first(shm_rank *it)
{
    host self = open_host(it);
    members all = everyone(it);
    tddp_shm *view;
    CHECK_OK(join(&self, "view", &all, &view));
    close_host(&self);
    reduce_sizes(it, view, &all);
    tddp_shm_destroy(view);
}

SHM_TEST(a_view_outlives_the_first_group, without_the_first)

/* --- what a group costs ---------------------------------------------------------------------- */

static int count_entries(const char *folder)
{
    int count = 0;
    DIR *entries = opendir(folder);
    CHECK(entries != NULL);
    while (readdir(entries)) {
        count++;
    }
    (void)closedir(entries);
    return count;
}

/* Memory that the own segment takes. */
static int64_t bytes_taken(const tddp_shm *shm)
{
    struct stat file;
    CHECK_INT(fstat(tddp_shm_self(shm)->segment->fd, &file), 0);
    return (int64_t)file.st_blocks * 512;
}

static void costs(shm_rank *it)
{
    host self = open_host(it);
    members all = everyone(it);
    tddp_shm *views[MOST_GROUPS];
    const int descriptors = count_entries("/proc/self/fd");
    const int threads = count_entries("/proc/self/task");
    const int64_t bytes = bytes_taken(self.first);
    for (int i = 0; i < MOST_GROUPS; i++) {
        char name[16];
        snprintf(name, sizeof name, "group %d", i);
        CHECK_OK(join(&self, name, &all, &views[i]));
        shm_rank other = *it;
        other.sequence = 0;
        float few[100];
        reduce(&other, views[i], &all, few, 100);
    }
    CHECK_INT(count_entries("/proc/self/fd"), descriptors);
    CHECK_INT(count_entries("/proc/self/task"), threads);
    CHECK((bytes_taken(self.first) - bytes) / MOST_GROUPS <= 64 * 1024);
    for (int i = 0; i < MOST_GROUPS; i++) {
        tddp_shm_destroy(views[i]);
    }
    close_host(&self);
}

TEST(a_group_costs_no_descriptor_and_little_memory)
{
    run_shm_bare(SHM_PROCESSES, 4, costs);
    run_shm_bare(SHM_PROCESSES, 16, costs);
}

/* What a view took is used again, once no rank uses it. */
static void again(shm_rank *it)
{
    host self = open_host(it);
    members all = everyone(it);
    const tddp_shm_segment *segment = tddp_shm_self(self.first)->segment;
    const int64_t bytes = bytes_taken(self.first);
    for (int i = 0; i < 40; i++) {
        char name[16];
        tddp_shm *view;
        snprintf(name, sizeof name, "group %d", i);
        CHECK_OK(join(&self, name, &all, &view));
        CHECK(view->view != NULL);
        shm_rank other = *it;
        other.sequence = 0;
        reduce_sizes(&other, view, &all);
        tddp_shm_destroy(view);
        barrier(it, self.first);
        CHECK(segment->allocations <= 1);
    }
    tddp_shm *last;
    CHECK_OK(join(&self, "last", &all, &last)); /* which gives back what others used */
    CHECK_INT(segment->allocations, 1);
    tddp_shm_destroy(last);
    CHECK(bytes_taken(self.first) <= bytes + 64 * 1024);
    close_host(&self);
}

TEST(views_are_given_back)
{
    run_shm_bare(SHM_PROCESSES, 3, again);
}

/* --- segments of their own ------------------------------------------------------------------- */

/* Without space in one rank's arena all ranks of the group have segments of their own. */
static void without_space(shm_rank *it)
{
    host self = open_host(it);
    members all = everyone(it);
    void *handle = NULL;
    void *data;
    tddp_shm *other;
    if (it->rank == 1) {
        CHECK_OK(tddp_shm_allocate(self.first, 60 << 20, &handle, &data));
    }
    CHECK_OK(join(&self, "other", &all, &other));
    CHECK(!other->view && !other->fabric);
    CHECK(tddp_shm_self(other)->segment != tddp_shm_self(self.first)->segment);
    reduce_sizes(it, other, &all);
    tddp_shm_deallocate(handle);
    tddp_shm_destroy(other);
    CHECK_INT(tddp_shm_self(self.first)->segment->allocations, 0);
    close_host(&self);
}

TEST(without_space_a_group_has_segments_of_its_own)
{
    CHECK_INT(setenv("TDDP_SHM_ARENA", "67108864", 1), 0); /* before there are threads */
    run_shm_bare(SHM_PROCESSES, 3, without_space);
    run_shm_bare(SHM_THREADS, 3, without_space);
}

/* A rank that does not know the others' fabric, and one that refuses. */
static void unknown(shm_rank *it)
{
    host self = open_host(it);
    members all = everyone(it);
    tddp_shm *other;
    host alone = self;
    alone.fabric = it->rank == 2 ? NULL : self.fabric;
    CHECK_OK(join(&alone, "other", &all, &other));
    CHECK(!other->view);
    reduce_sizes(it, other, &all);
    tddp_shm_destroy(other);
    tddp_store *store;
    CHECK_OK(tddp_prefix_store_create("refused", it->store, &store));
    tddp_backend_opts opts = shm_opts(it->rank, it->size, store);
    opts.fabric = self.fabric;
    CHECK_STATUS(tddp_shm_join(&opts, it->rank == 1 ? "it must not" : NULL, NULL, &other),
                 TDDP_UNAVAILABLE);
    CHECK_CONTAINS(tddp_error_message(), "rank 1 cannot share memory: it must not");
    tddp_store_release(store);
    CHECK_INT(tddp_shm_self(self.first)->segment->allocations, 0);
    close_host(&self);
}

TEST(a_rank_that_has_no_part_in_the_fabric)
{
    run_shm_bare(SHM_PROCESSES, 3, unknown);
    run_shm_bare(SHM_THREADS, 3, unknown);
}

/* --- ends ------------------------------------------------------------------------------------ */

/* The others name the rank that was killed, in the view as in the first group. */
static void killed(shm_rank *it)
{
    host self = open_host(it);
    members all = everyone(it);
    tddp_shm *view;
    CHECK_OK(join(&self, "view", &all, &view));
    barrier(it, view);
    if (it->rank == 1) {
        (void)kill(getpid(), SIGKILL);
    }
    shm_rank other = *it;
    other.sequence = 0;
    tddp_op op = shm_op(it, TDDP_OP_BARRIER);
    CHECK_STATUS(tddp_shm_barrier(view, &op), TDDP_PEER_LOST);
    CHECK_CONTAINS(tddp_error_message(), "lost rank 1 (its process has ended)");
    op = shm_op(&other, TDDP_OP_BARRIER);
    CHECK_STATUS(tddp_shm_barrier(self.first, &op), TDDP_PEER_LOST);
    tddp_shm_destroy(view);
    close_host(&self);
}

TEST(a_rank_of_a_view_is_killed)
{
    shm_run(
        (shm_job){.mode = SHM_PROCESSES, .size = 3, .body = killed, .bare = true, .may_die = true});
}

/* A rank leaves one group and stays in the others. */
static void left(shm_rank *it)
{
    host self = open_host(it);
    members all = everyone(it);
    tddp_shm *view;
    CHECK_OK(join(&self, "view", &all, &view));
    barrier(it, view);
    shm_rank other = *it;
    if (it->rank == 1) {
        tddp_shm_destroy(view);
    } else {
        tddp_op op = shm_op(it, TDDP_OP_BARRIER);
        CHECK_STATUS(tddp_shm_barrier(view, &op), TDDP_PEER_LOST);
        CHECK_CONTAINS(tddp_error_message(), "rank 1 has left the group");
        tddp_shm_destroy(view);
    }
    reduce_sizes(&other, self.first, &all);
    close_host(&self);
}

TEST(a_rank_leaves_a_view)
{
    run_shm_bare(SHM_PROCESSES, 3, left);
    run_shm_bare(SHM_THREADS, 3, left);
}

/* A child gives only its copies back. */
static void forked(shm_rank *it)
{
    host self = open_host(it);
    members all = everyone(it);
    tddp_shm *view;
    CHECK_OK(join(&self, "view", &all, &view));
    barrier(it, view);
    fflush(NULL);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        tddp_shm_destroy(view);
        close_host(&self);
        _exit(0);
    }
    int status;
    CHECK_INT(waitpid(pid, &status, 0), pid);
    CHECK_INT(status, 0);
    barrier(it, view);
    CHECK_INT(tddp_shm_self(self.first)->segment->allocations, 1);
    tddp_shm_destroy(view);
    close_host(&self);
}

TEST(a_forked_child_leaves_views_alone)
{
    run_shm_bare(SHM_PROCESSES, 2, forked);
}

/* An allocation of one rank fails at any point of the second join. */
static void out_of_memory(shm_rank *it)
{
    int *round = it->data;
    host self = open_host(it);
    members all = everyone(it);
    tddp_shm *view = NULL;
    tddp_status status = join_failing(&self, "view", &all, it->rank == 1 ? *round : 0, &view);
    bool reached = tddp_fail_allocation(0);
    if (status == TDDP_OK) {
        tddp_op op = shm_op(it, TDDP_OP_BARRIER);
        status = tddp_shm_barrier(view, &op);
    }
    CHECK(status == TDDP_OK || status == TDDP_PEER_LOST || status == TDDP_UNAVAILABLE ||
          (it->rank == 1 && status == TDDP_OUT_OF_MEMORY));
    if (it->rank == 1) {
        round[1] = !reached;
    }
    tddp_shm_destroy(view);
    close_host(&self);
}

TEST(a_second_join_that_runs_out_of_memory)
{
    int *round = shm_common(2 * sizeof *round);
    do {
        (*round)++;
        shm_run((shm_job){
            .mode = SHM_PROCESSES, .size = 2, .body = out_of_memory, .data = round, .bare = true});
        CHECK(*round < 100);
    } while (!round[1]);
    CHECK(*round > 5);
}
