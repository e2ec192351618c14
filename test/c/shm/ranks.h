/*
 * Ranks of one host for tests of shared memory, as threads of this process or as processes, each
 * with a context or with a group:
 *
 *     static void body(shm_rank *it) { CHECK_OK(tddp_shm_sync(it->shm)); }
 *
 *     run_shm(SHM_THREADS, 3, body, NULL);          // it->shm: tddp_shm_join()
 *     run_shm_groups(SHM_PROCESSES, 3, body, NULL); // it->group: tddp_group_create("shm")
 *
 * Threads share the owner's mapping, so that the thread sanitizer sees their accesses; processes
 * map each other's segments, as in production. The test fails if a process fails, or is killed
 * without job.may_die. Each of these calls resets the events (events.h); a rank has ended when its
 * process has, or its part of the group.
 */
#ifndef TDDP_TEST_SHM_RANKS_H
#define TDDP_TEST_SHM_RANKS_H

#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <tddp.h>

#include "backend/shm/shm.h"
#include "events.h"
#include "store_process.h"

/* The timeout is longer than a test may take. */
enum { SHM_MAX_RANKS = 16, SHM_TIMEOUT_MS = 300000 };

typedef enum shm_mode { SHM_THREADS, SHM_PROCESSES } shm_mode;

typedef struct shm_rank shm_rank;
typedef void (*shm_body)(shm_rank *it);

typedef struct shm_job {
    shm_mode mode;
    int size;
    shm_body body;
    void *data;          /* with processes: a copy for each, unless it is from shm_common() */
    const char *backend; /* of the groups; NULL: "shm" */
    bool grouped;
    bool bare; /* only a store: the body joins itself */
    bool may_die;
    int64_t timeout_ms;
    tddp_store *store;
    int port;
} shm_job;

struct shm_rank {
    int rank;
    int size;
    shm_mode mode;
    tddp_store *store;
    tddp_shm *shm;     /* or */
    tddp_group *group; /* with the requested backend */
    void *data;
    uint64_t sequence; /* for shm_op() */
    const shm_job *job;
    tddp_observation seen[SHM_MAX_RANKS]; /* by its context, of each rank the last */
    char texts[SHM_MAX_RANKS][128];
};

/* The observer of a rank's context. */
static inline void shm_observe(void *data, const tddp_observation *seen)
{
    shm_rank *it = data;
    char *text = it->texts[seen->rank];
    snprintf(text, sizeof it->texts[0], "%s", seen->text ? seen->text : "");
    it->seen[seen->rank] = *seen;
    it->seen[seen->rank].text = text;
}

#define CHECK_SEEN(it, of, expected_kind, expected_sequence, expected_status, expected_text) \
    do {                                                                                     \
        CHECK_INT((it)->seen[of].kind, expected_kind);                                       \
        CHECK_INT((it)->seen[of].sequence, expected_sequence);                               \
        CHECK_INT((it)->seen[of].status, expected_status);                                   \
        CHECK_TEXT((it)->texts[of], expected_text);                                          \
    } while (0)

/* Memory shared by all processes of a test; zero-filled. */
static inline void *shm_common(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    return memory;
}

static inline double shm_now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static inline tddp_buffer shm_buffer(void *data, size_t count, tddp_dtype dtype)
{
    return (tddp_buffer){data, count, dtype, TDDP_CPU, 0, NULL};
}

static inline tddp_backend_opts shm_opts(int rank, int size, tddp_store *store)
{
    return (tddp_backend_opts){
        .size = sizeof(tddp_backend_opts),
        .rank = rank,
        .world_size = size,
        .store = store,
        .timeout_ms = SHM_TIMEOUT_MS,
        .device_index = -1,
        .same_host = 1,
        .group = "test",
        .address = "127.0.0.1",
    };
}

/* The next operation, with the fields that all kinds need. */
static inline tddp_op shm_op(shm_rank *it, tddp_op_kind kind)
{
    tddp_op op = {.kind = kind,
                  .sequence = ++it->sequence,
                  .peer = TDDP_ANY_SOURCE,
                  .premul = 1,
                  .timeout_ms = it->job->timeout_ms,
                  .awaited = 1};
    op.input = op.output = shm_buffer(NULL, 0, TDDP_FLOAT32);
    return op;
}

/* An operation in which all ranks only sync. */
static inline void barrier_once(shm_rank *it)
{
    tddp_op op = shm_op(it, TDDP_OP_BARRIER);
    tddp_shm_enter(it->shm, &op, NULL, 0);
    CHECK_OK(tddp_shm_sync(it->shm));
}

/* A group of some of the ranks, made from the rank's group if it has one; `name` NULL: the default.
 */
static inline tddp_group *shm_make_group(const shm_rank *it, const char *name, int rank, int size)
{
    tddp_group *group;
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    opts.backend = it->job->backend ? it->job->backend : "shm";
    opts.store = it->store;
    opts.name = name ? name : opts.name;
    opts.rank = rank;
    opts.world_size = size;
    opts.timeout_ms = SHM_TIMEOUT_MS;
    opts.parent = it->group;
    CHECK_OK(tddp_group_create(&opts, NULL, &group));
    return group;
}

static inline void shm_open_rank(shm_rank *it)
{
    const shm_job *job = it->job;
    if (job->grouped) {
        it->group = shm_make_group(it, NULL, it->rank, it->size);
    } else if (!job->bare) {
        tddp_backend_opts opts = shm_opts(it->rank, it->size, it->store);
        opts.observer = (tddp_observer){shm_observe, it};
        CHECK_OK(tddp_shm_join(&opts, NULL, NULL, &it->shm));
    }
}

static inline void shm_run_rank(const shm_job *job, int rank, tddp_store *store)
{
    shm_rank it = {.rank = rank,
                   .size = job->size,
                   .mode = job->mode,
                   .store = store,
                   .data = job->data,
                   .job = job};
    shm_open_rank(&it);
    job->body(&it);
    tddp_group_release(it.group);
    tddp_shm_destroy(it.shm);
    if (job->mode == SHM_THREADS) {
        check_rank_ended(rank);
    }
}

typedef struct shm_thread {
    const shm_job *job;
    int rank;
} shm_thread;

static inline void *shm_run_thread(void *argument)
{
    shm_thread *self = argument;
    shm_run_rank(self->job, self->rank, self->job->store);
    return NULL;
}

static inline void shm_run_threads(shm_job *job)
{
    pthread_t threads[SHM_MAX_RANKS];
    shm_thread selves[SHM_MAX_RANKS];
    CHECK_OK(tddp_hash_store_create(SHM_TIMEOUT_MS, &job->store));
    for (int rank = 0; rank < job->size; rank++) {
        selves[rank] = (shm_thread){job, rank};
        CHECK_INT(pthread_create(&threads[rank], NULL, shm_run_thread, &selves[rank]), 0);
    }
    for (int rank = 0; rank < job->size; rank++) {
        CHECK_INT(pthread_join(threads[rank], NULL), 0);
    }
    tddp_store_release(job->store);
}

static inline tddp_store *shm_connect(int port)
{
    tddp_tcp_store_opts at = TDDP_TCP_STORE_OPTS_INIT;
    tddp_store *store;
    at.host = "127.0.0.1";
    at.port = port;
    at.wait_for_workers = 0;
    at.timeout_ms = SHM_TIMEOUT_MS;
    CHECK_OK(tddp_tcp_store_open(&at, NULL, &store));
    return store;
}

static inline pid_t shm_start_process(const shm_job *job, int rank)
{
    fflush(NULL);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        tddp_store *store = shm_connect(job->port);
        shm_run_rank(job, rank, store);
        tddp_store_release(store);
        exit(0);
    }
    check_rank_started(rank, pid);
    return pid;
}

/* Returns how many failed. */
static inline int shm_await_processes(const shm_job *job, const pid_t *pids)
{
    int failed = 0;
    for (int left = job->size; left > 0;) {
        int status;
        pid_t pid = waitpid(-1, &status, 0);
        CHECK(pid > 0);
        for (int rank = 0; rank < job->size; rank++) {
            if (pids[rank] == pid) {
                bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
                check_rank_ended(rank);
                failed += status != 0 && !(killed && job->may_die);
                left--;
            }
        }
    }
    return failed;
}

static inline void shm_run_processes(shm_job *job)
{
    pid_t pids[SHM_MAX_RANKS];
    pid_t host = start_store_process(&job->port);
    for (int rank = 0; rank < job->size; rank++) {
        pids[rank] = shm_start_process(job, rank);
    }
    int failed = shm_await_processes(job, pids);
    end_store_process(host);
    if (failed > 0) {
        check_failed(__FILE__, __LINE__, "%d of %d processes failed, as said above", failed,
                     job->size);
    }
}

static inline void shm_run(shm_job job)
{
    check_events_clear();
    job.timeout_ms = job.timeout_ms ? job.timeout_ms : SHM_TIMEOUT_MS;
    if (job.mode == SHM_THREADS) {
        shm_run_threads(&job);
    } else {
        shm_run_processes(&job);
    }
}

static inline void run_shm(shm_mode mode, int size, shm_body body, void *data)
{
    shm_run((shm_job){.mode = mode, .size = size, .body = body, .data = data});
}

static inline void run_shm_groups(shm_mode mode, int size, shm_body body, void *data)
{
    shm_run((shm_job){.mode = mode, .size = size, .body = body, .data = data, .grouped = true});
}

/* With a store alone. */
static inline void run_shm_bare(shm_mode mode, int size, shm_body body)
{
    shm_run((shm_job){.mode = mode, .size = size, .body = body, .bare = true});
}

/* Defines TEST(name_1_processes) and others, on one to four ranks, with a context. */
#define SHM_TEST_WITH(name, body, size, mode, suffix) \
    TEST(name##_##size##_##suffix)                    \
    {                                                 \
        run_shm(mode, size, body, NULL);              \
    }
/* ThreadSanitizer sees races of threads only; without it threads do the same as processes. */
#ifdef __SANITIZE_THREAD__
#define SHM_TEST(name, body)                           \
    SHM_TEST_WITH(name, body, 1, SHM_THREADS, threads) \
    SHM_TEST_WITH(name, body, 2, SHM_THREADS, threads) \
    SHM_TEST_WITH(name, body, 3, SHM_THREADS, threads) \
    SHM_TEST_WITH(name, body, 4, SHM_THREADS, threads) \
    SHM_TEST_WITH(name, body, 3, SHM_PROCESSES, processes)
#else
#define SHM_TEST(name, body)                               \
    SHM_TEST_WITH(name, body, 3, SHM_THREADS, threads)     \
    SHM_TEST_WITH(name, body, 1, SHM_PROCESSES, processes) \
    SHM_TEST_WITH(name, body, 2, SHM_PROCESSES, processes) \
    SHM_TEST_WITH(name, body, 3, SHM_PROCESSES, processes) \
    SHM_TEST_WITH(name, body, 4, SHM_PROCESSES, processes)
#endif

#endif
