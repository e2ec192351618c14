/*
 * A job whose ranks run operations over shared memory until one of them is killed at a random
 * moment. Every surviving rank gets an error, and correct results before it; no socket or file is
 * left.
 */
#ifndef TDDP_TEST_SHM_KILLS_H
#define TDDP_TEST_SHM_KILLS_H

#include <dirent.h>

#include "ranks.h"

enum {
    KILLS_MANY = 150000,
    KILLS_CREATE_MS = 3000,
    KILLS_SPAN_US = 80000 /* of the moment at which a rank is killed */
};

/* Shared by the processes and the test. */
typedef struct kills_state {
    _Atomic int64_t killed_at; /* nanoseconds; 0: not yet */
    _Atomic uint32_t ready;
    bool grouped;
    _Atomic uint32_t operations; /* completed, by all ranks in all rounds */
    _Atomic uint32_t joins_cut;
    _Atomic int64_t longest_ns; /* from a kill to an error */
} kills_state;

static inline int64_t kills_now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static inline int kills_count_fds(void)
{
    int count = 0;
    DIR *folder = opendir("/proc/self/fd");
    CHECK(folder != NULL);
    while (readdir(folder)) {
        count++;
    }
    closedir(folder);
    return count;
}

static inline tddp_status kills_run_in_group(shm_rank *it, unsigned number, bool reduces,
                                             tddp_buffer buffer, int root)
{
    tddp_work *work = NULL;
    tddp_work **later = number % 2 ? &work : NULL;
    tddp_status status = reduces ? tddp_all_reduce(it->group, buffer, TDDP_REDUCE_SUM, 0, later)
                                 : tddp_broadcast(it->group, buffer, root, later);
    if (status == TDDP_OK && work) {
        status = tddp_work_wait(work, NULL);
    }
    tddp_work_release(work);
    return status;
}

static inline tddp_status kills_run(shm_rank *it, unsigned number, bool reduces, tddp_buffer buffer,
                                    int root)
{
    if (it->group) {
        return kills_run_in_group(it, number, reduces, buffer, root);
    }
    tddp_op op = shm_op(it, reduces ? TDDP_OP_ALL_REDUCE : TDDP_OP_BROADCAST);
    op.input = op.output = buffer;
    op.root = root;
    op.awaited = number % 2;
    return tddp_shm_backend()->run[op.kind](it->shm, &op);
}

/* Two kinds of operations on two kinds of memory, the same on all ranks. */
static inline tddp_status kills_operate(shm_rank *it, unsigned number, float *private_data,
                                        float *shared)
{
    static const size_t counts[5] = {1, 60, 3000, 50000, KILLS_MANY};
    size_t count = counts[number % 5];
    float *data = number % 3 == 0 ? shared : private_data;
    bool reduces = number % 4 != 3;
    int root = (int)number % it->size;
    for (size_t i = 0; i < count; i++) {
        data[i] = (float)((unsigned)it->rank * 7 + number % 100 + (unsigned)(i % 13));
    }
    tddp_buffer buffer = shm_buffer(data, count, TDDP_FLOAT32);
    tddp_status status = kills_run(it, number, reduces, buffer, root);
    for (size_t i = 0; i < count && status == TDDP_OK; i++) {
        unsigned all = (unsigned)it->size;
        unsigned plain = number % 100 + (unsigned)(i % 13);
        unsigned right =
            reduces ? all * (all - 1) / 2 * 7 + all * plain : (unsigned)root * 7 + plain;
        if (data[i] != (float)right) {
            check_failed(__FILE__, __LINE__, "operation %u: element %zu is %g, expected %u", number,
                         i, (double)data[i], right);
        }
    }
    return status;
}

static inline void kills_note_error(kills_state *state, tddp_status status)
{
    CHECK(status == TDDP_PEER_LOST || status == TDDP_GROUP_FAILED);
    int64_t since = kills_now() - atomic_load(&state->killed_at);
    int64_t longest = atomic_load(&state->longest_ns);
    CHECK(atomic_load(&state->killed_at) != 0);
    while (since > longest && !atomic_compare_exchange_weak(&state->longest_ns, &longest, since)) {
    }
}

static inline tddp_status kills_open(shm_rank *it, bool grouped)
{
    tddp_wait wait = {KILLS_CREATE_MS, NULL};
    if (grouped) {
        tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
        opts.backend = "shm";
        opts.store = it->store;
        opts.rank = it->rank;
        opts.world_size = it->size;
        opts.timeout_ms = SHM_TIMEOUT_MS;
        return tddp_group_create(&opts, &wait, &it->group);
    }
    tddp_backend_opts opts = shm_opts(it->rank, it->size, it->store);
    return tddp_shm_join(&opts, NULL, &wait, &it->shm);
}

static inline void kills_work(shm_rank *it, kills_state *state)
{
    void *handle = NULL;
    tddp_group_memory *memory = NULL;
    void *shared = NULL;
    float *private_data = calloc(KILLS_MANY, sizeof *private_data);
    CHECK(private_data != NULL);
    if (it->group) {
        CHECK_OK(tddp_group_memory_create(it->group, KILLS_MANY * sizeof *private_data, &memory));
        shared = tddp_group_memory_data(memory);
    } else {
        CHECK_OK(tddp_shm_allocate(it->shm, KILLS_MANY * sizeof *private_data, &handle, &shared));
    }
    tddp_status status = TDDP_OK;
    for (unsigned i = 0; status == TDDP_OK; i++) {
        status = kills_operate(it, i, private_data, shared);
        atomic_fetch_add(&state->operations, status == TDDP_OK);
    }
    kills_note_error(state, status);
    tddp_group_release(it->group);
    tddp_shm_destroy(it->shm);
    it->group = NULL;
    it->shm = NULL;
    tddp_group_memory_release(memory);
    tddp_shm_deallocate(handle);
    free(private_data);
}

static inline void kills_rank(shm_rank *it)
{
    kills_state *state = it->data;
    int before = kills_count_fds();
    atomic_fetch_add(&state->ready, 1);
    if (kills_open(it, state->grouped)) {
        if (atomic_load(&state->killed_at) == 0) {
            check_failed(__FILE__, __LINE__, "nobody was killed: %s", tddp_error_message());
        }
        atomic_fetch_add(&state->joins_cut, 1);
    } else {
        kills_work(it, state);
    }
    CHECK_INT(kills_count_fds(), before);
}

/* Kills at a random moment: during the join, or, with `joined`, after the first successful
 * operation. */
static inline void kills_one_round(shm_job *job, unsigned *seed, bool joined)
{
    pid_t pids[SHM_MAX_RANKS];
    kills_state *state = job->data;
    uint32_t before = atomic_load(&state->operations);
    atomic_store(&state->killed_at, 0);
    atomic_store(&state->ready, 0);
    for (int rank = 0; rank < job->size; rank++) {
        pids[rank] = shm_start_process(job, rank);
    }
    CHECK_UNTIL(atomic_load(&state->ready) == (uint32_t)job->size);
    CHECK_UNTIL(!joined || atomic_load(&state->operations) != before);
    usleep((unsigned)rand_r(seed) % KILLS_SPAN_US);
    int victim = rand_r(seed) % job->size;
    atomic_store(&state->killed_at, kills_now());
    CHECK_INT(kill(pids[victim], SIGKILL), 0);
    for (int rank = 0; rank < job->size; rank++) {
        int status;
        CHECK_INT(waitpid(pids[rank], &status, 0), pids[rank]);
        if (rank != victim && status != 0) {
            check_failed(__FILE__, __LINE__, "rank %d of %d ended with %d (rank %d was killed)",
                         rank, job->size, status, victim);
        }
    }
}

/* Lists the names of the sockets that exist; with `among` only those listed there. */
static inline bool kills_sockets(char *names, size_t bytes, const char *among)
{
    char line[512];
    bool any = false;
    FILE *file = fopen("/proc/net/unix", "re");
    CHECK(file != NULL);
    names[0] = 0;
    while (fgets(line, sizeof line, file)) {
        char *name = strstr(line, "@tddp-shm-");
        if (name && (!among || strstr(among, name)) && strlen(names) + strlen(name) < bytes) {
            strcat(names, name);
            any = true;
        }
    }
    fclose(file);
    return any;
}

/* Tests that run at the same time may have sockets for a moment. */
static inline void kills_check_remains(void)
{
    char first[16384];
    char now[16384];
    if (kills_sockets(first, sizeof first, NULL)) {
        CHECK_UNTIL(!kills_sockets(now, sizeof now, first));
    }
    DIR *folder = opendir("/dev/shm");
    const struct dirent *each;
    while (folder && (each = readdir(folder))) {
        CHECK(!strstr(each->d_name, "tddp"));
    }
    if (folder) {
        closedir(folder);
    }
}

static inline void run_kills(int rounds, unsigned seed)
{
    shm_job job = {.mode = SHM_PROCESSES, .body = kills_rank, .bare = true, .may_die = true};
    kills_state *state = shm_common(sizeof *state);
    job.data = state;
    job.timeout_ms = SHM_TIMEOUT_MS;
    for (int round = 0; round < rounds; round++) {
        /* So that the server keeps nothing of an earlier round. */
        pid_t host = start_store_process(&job.port);
        job.size = 2 + round % 3;
        state->grouped = round % 2;
        kills_one_round(&job, &seed, round / 2 % 2);
        end_store_process(host);
    }
    kills_check_remains();
    printf("%d kills: %u cut into joins, %u operations went well, noticed within %.1f ms\n", rounds,
           atomic_load(&state->joins_cut), atomic_load(&state->operations),
           (double)atomic_load(&state->longest_ns) / 1e6);
    CHECK(atomic_load(&state->operations) > 0);
}

#endif
