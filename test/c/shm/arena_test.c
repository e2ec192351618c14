/*
 * The memory that ranks share: its contents, its visibility, its lifetime, and its return to the
 * system.
 */
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "backend/shm/control.h"
#include "ranks.h"

enum { MIB = 1024 * 1024 };

static bool is_zero(const unsigned char *data, size_t bytes)
{
    size_t i = 0;
    while (i < bytes && data[i] == 0) {
        i++;
    }
    return i == bytes;
}

/* Every rank sees every other rank's memory, at the same offset. */
static void visible_to_all(shm_rank *it)
{
    void *handle;
    void *data;
    CHECK_OK(tddp_shm_allocate(it->shm, 3 * sizeof(int32_t), &handle, &data));
    CHECK_INT((uintptr_t)data % 4096, 0);
    CHECK(is_zero(data, 3 * sizeof(int32_t)));
    int32_t *mine = data;
    mine[2] = 100 + it->rank;
    tddp_op op = shm_op(it, TDDP_OP_ALL_REDUCE);
    op.input = op.output = shm_buffer(data, 3, TDDP_INT32);
    tddp_shm_enter(it->shm, &op, NULL, 0);
    CHECK_OK(tddp_shm_sync(it->shm));
    CHECK(tddp_shm_all_inputs(it->shm));
    CHECK(tddp_shm_all_outputs(it->shm));
    for (int rank = 0; rank < it->size; rank++) {
        const int32_t *theirs = tddp_shm_input(it->shm, rank);
        CHECK_INT(theirs[2], 100 + rank);
        CHECK(tddp_shm_output(it->shm, rank) == (const void *)theirs);
    }
    tddp_shm_publish_step(it->shm, 1);
    CHECK_OK(tddp_shm_wait_step_all(it->shm, 1));
    tddp_shm_deallocate(handle);
}

SHM_TEST(memory_is_visible_to_all_ranks, visible_to_all)

/* One rank's buffer isn't shared: all ranks know that, and can still access the others'. */
static void partly(shm_rank *it)
{
    int32_t elsewhere[4] = {0};
    void *handle;
    void *data;
    CHECK_OK(tddp_shm_allocate(it->shm, sizeof elsewhere, &handle, &data));
    tddp_op op = shm_op(it, TDDP_OP_ALL_REDUCE);
    op.input = shm_buffer(data, 4, TDDP_INT32);
    op.output = it->rank == 1 ? shm_buffer(elsewhere, 4, TDDP_INT32) : op.input;
    tddp_shm_enter(it->shm, &op, NULL, 0);
    CHECK_OK(tddp_shm_sync(it->shm));
    CHECK(tddp_shm_all_inputs(it->shm));
    CHECK_INT(tddp_shm_all_outputs(it->shm), it->size == 1);
    for (int rank = 0; rank < it->size; rank++) {
        CHECK_INT(tddp_shm_output(it->shm, rank) == NULL, rank == 1);
    }
    tddp_shm_publish_step(it->shm, 1);
    CHECK_OK(tddp_shm_wait_step_all(it->shm, 1));
    tddp_shm_deallocate(handle);
}

SHM_TEST(memory_of_some_ranks_only, partly)

static void edges(shm_rank *it)
{
    void *handle;
    char *data;
    void *place;
    CHECK_OK(tddp_shm_allocate(it->shm, 8192, &handle, &place));
    data = place;
    uint64_t at = tddp_shm_offset_of(it->shm, data, 8192);
    CHECK(at != TDDP_SHM_NOT_SHARED);
    CHECK(tddp_shm_address(it->shm, it->rank, at) == place);
    CHECK_INT(tddp_shm_offset_of(it->shm, data + 5, 10), at + 5);
    CHECK(tddp_shm_offset_of(it->shm, &handle, 8) == TDDP_SHM_NOT_SHARED);
    CHECK(tddp_shm_offset_of(it->shm, data, SIZE_MAX / 2) == TDDP_SHM_NOT_SHARED);
    CHECK(tddp_shm_offset_of(it->shm, NULL, 8) == TDDP_SHM_NOT_SHARED);
    CHECK(tddp_shm_address(it->shm, it->rank, TDDP_SHM_NOT_SHARED) == NULL);
    tddp_shm_deallocate(handle);
    tddp_shm_deallocate(NULL);
    CHECK_STATUS(tddp_shm_allocate(it->shm, 0, &handle, &place), TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_shm_allocate(it->shm, SIZE_MAX, &handle, &place), TDDP_UNAVAILABLE);
}

SHM_TEST(memory_offsets, edges)

static void outlives(shm_rank *it)
{
    void *handle;
    void *place;
    CHECK_OK(tddp_shm_allocate(it->shm, 3 * MIB, &handle, &place));
    unsigned char *data = place;
    data[3 * MIB - 1] = 7;
    tddp_shm_destroy(it->shm);
    it->shm = NULL;
    data[0] = 9;
    CHECK_INT(data[3 * MIB - 1], 7);
    CHECK_INT(data[0], 9);
    tddp_shm_deallocate(handle);
}

SHM_TEST(memory_outlives_its_context, outlives)

static size_t backed(const shm_rank *it)
{
    struct stat file;
    CHECK_INT(fstat(tddp_shm_self(it->shm)->segment->fd, &file), 0);
    return (size_t)file.st_blocks * 512;
}

/* Freed memory is returned to the system, and is zero when it is allocated again. */
static void freed(shm_rank *it)
{
    size_t before = backed(it);
    for (int i = 0; i < 3; i++) {
        void *handle;
        void *place;
        CHECK_OK(tddp_shm_allocate(it->shm, 5 * MIB + 1, &handle, &place));
        CHECK(is_zero(place, 5 * MIB + 1));
        memset(place, 0xa5, 5 * MIB + 1);
        CHECK(backed(it) >= before + 5 * MIB);
        tddp_shm_deallocate(handle);
        CHECK_INT(backed(it), before);
    }
}

TEST(freed_memory_is_returned)
{
    run_shm(SHM_PROCESSES, 2, freed, NULL);
}

typedef struct block {
    void *handle;
    unsigned char *data;
    size_t bytes;
    unsigned char mark;
} block;

static void check_block(const block *it)
{
    CHECK_INT(it->data[0], it->mark);
    CHECK_INT(it->data[it->bytes / 2], it->mark);
    CHECK_INT(it->data[it->bytes - 1], it->mark);
}

/* Allocations of all sizes, freed in random order; none overlaps another, and at the end the
 * whole arena is free. */
static void random_allocations_body(shm_rank *it)
{
    enum { BLOCKS = 40, ROUNDS = 2000 };
    block blocks[BLOCKS] = {{0}};
    unsigned seed = 17u + (unsigned)it->rank;
    for (int i = 0; i < ROUNDS; i++) {
        block *each = &blocks[(unsigned)rand_r(&seed) % BLOCKS];
        if (each->handle) {
            check_block(each);
            tddp_shm_deallocate(each->handle);
            each->handle = NULL;
            continue;
        }
        each->bytes = 1 + (unsigned)rand_r(&seed) % (i % 50 == 0 ? 3 * MIB : 40000);
        each->mark = (unsigned char)(1 + i % 255);
        void *place;
        CHECK_OK(tddp_shm_allocate(it->shm, each->bytes, &each->handle, &place));
        each->data = place;
        CHECK_INT(each->data[0] | each->data[each->bytes - 1], 0);
        memset(place, each->mark, each->bytes);
    }
    for (int i = 0; i < BLOCKS; i++) {
        if (blocks[i].handle) {
            check_block(&blocks[i]);
            tddp_shm_deallocate(blocks[i].handle);
        }
    }
    tddp_shm_segment *segment = tddp_shm_self(it->shm)->segment;
    tddp_shm_span all;
    CHECK_INT(segment->allocations, 0);
    CHECK_OK(tddp_shm_arena_reserve(segment, segment->bytes - segment->arena, &all));
    tddp_shm_arena_release(&all);
}

TEST(random_allocations)
{
    run_shm(SHM_THREADS, 2, random_allocations_body, NULL);
}

static void full(shm_rank *it)
{
    void *handles[3];
    void *place;
    CHECK_OK(tddp_shm_allocate(it->shm, 2 * MIB, &handles[0], &place));
    CHECK_OK(tddp_shm_allocate(it->shm, 2 * MIB, &handles[1], &place));
    CHECK_STATUS(tddp_shm_allocate(it->shm, 1, &handles[2], &place), TDDP_UNAVAILABLE);
    CHECK_CONTAINS(tddp_error_message(), "TDDP_SHM_ARENA");
    tddp_shm_deallocate(handles[0]);
    CHECK_OK(tddp_shm_allocate(it->shm, 1, &handles[2], &place));
    tddp_shm_deallocate(handles[2]);
    tddp_shm_deallocate(handles[1]);
}

TEST(an_arena_may_be_full)
{
    setenv("TDDP_SHM_ARENA", "4194304", 1);
    run_shm(SHM_THREADS, 2, full, NULL);
    run_shm(SHM_PROCESSES, 2, full, NULL);
}

static void none(shm_rank *it)
{
    void *handle;
    void *place;
    CHECK_STATUS(tddp_shm_allocate(it->shm, 1, &handle, &place), TDDP_UNAVAILABLE);
    barrier_once(it);
}

TEST(there_may_be_no_arena)
{
    setenv("TDDP_SHM_ARENA", "0", 1);
    run_shm(SHM_PROCESSES, 3, none, NULL);
}

/* All ranks use the smallest of their arena sizes. */
static void unequal(shm_rank *it)
{
    setenv("TDDP_SHM_ARENA", it->rank == 1 ? "2097152" : "8388608", 1);
    tddp_backend_opts opts = shm_opts(it->rank, it->size, it->store);
    CHECK_OK(tddp_shm_join(&opts, NULL, NULL, &it->shm));
    CHECK_INT(tddp_shm_self(it->shm)->segment->bytes - tddp_shm_self(it->shm)->segment->arena,
              2 * MIB);
    barrier_once(it);
}

TEST(arenas_are_equal)
{
    shm_run((shm_job){.mode = SHM_PROCESSES, .size = 3, .body = unequal, .bare = true});
}

static bool all_are(const unsigned char *data, size_t bytes, unsigned char value)
{
    size_t i = 0;
    while (i < bytes && data[i] == value) {
        i++;
    }
    return i == bytes;
}

enum { FORKED_BYTES = 3 * MIB }; /* on huge pages and others */

/* A child of the child. */
static void check_grandchild(unsigned char *data)
{
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        _exit(all_are(data, FORKED_BYTES, 7) ? 0 : 1);
    }
    int status;
    CHECK_INT(waitpid(pid, &status, 0), pid);
    CHECK_INT(status, 0);
}

/* A child has the memory as of the fork: it does not see what the parent writes later, and what it
 * writes, frees and ends changes nothing for the parent, nor for the rank that maps the memory. */
static void forked(shm_rank *it)
{
    void *handle;
    void *place;
    void *freed;
    int written[2];
    char byte = 0;
    CHECK_OK(tddp_shm_allocate(it->shm, 4096, &freed, &place));
    CHECK_OK(tddp_shm_allocate(it->shm, FORKED_BYTES, &handle, &place));
    tddp_shm_deallocate(freed);
    unsigned char *data = place;
    memset(data, 1, FORKED_BYTES);
    CHECK_INT(pipe(written), 0);
    fflush(NULL);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        CHECK_INT(read(written[0], &byte, 1), 1); /* the parent has written */
        CHECK(all_are(data, FORKED_BYTES, 1));
        memset(data, 7, FORKED_BYTES);
        check_grandchild(data);
        tddp_shm_deallocate(handle);
        tddp_shm_destroy(it->shm);
        _exit(0);
    }
    memset(data, 2, FORKED_BYTES);
    CHECK_INT(write(written[1], &byte, 1), 1);
    int status;
    CHECK_INT(waitpid(pid, &status, 0), pid);
    CHECK_INT(status, 0);
    CHECK(all_are(data, FORKED_BYTES, 2));
    barrier_once(it); /* the exit of the child has not published that this rank left */
    const unsigned char *theirs =
        tddp_shm_address(it->shm, 1 - it->rank, tddp_shm_offset_of(it->shm, data, FORKED_BYTES));
    CHECK(all_are(theirs, FORKED_BYTES, 2));
    barrier_once(it);
    tddp_shm_deallocate(handle);
    CHECK_INT(close(written[0]) + close(written[1]), 0);
    barrier_once(it);
}

TEST(a_forked_child_has_copies)
{
    run_shm(SHM_PROCESSES, 2, forked, NULL);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) /* map more than any limit */
/* Without memory for copies a fork works, and the child can't read what would be wrong. */
static void forked_without_memory(shm_rank *it)
{
    enum { BYTES = 64 * MIB };
    void *handle;
    void *place;
    struct rlimit before;
    CHECK_OK(tddp_shm_allocate(it->shm, BYTES, &handle, &place));
    volatile unsigned char *data = place;
    data[0] = 1;
    CHECK_INT(getrlimit(RLIMIT_AS, &before), 0);
    const struct rlimit none = {BYTES, before.rlim_max}; /* all of it is in use */
    CHECK_INT(setrlimit(RLIMIT_AS, &none), 0);
    fflush(NULL);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        (void)signal(SIGSEGV, SIG_DFL);
        _exit(data[0]);
    }
    CHECK_INT(setrlimit(RLIMIT_AS, &before), 0);
    int status;
    CHECK_INT(waitpid(pid, &status, 0), pid);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
    CHECK_INT(data[0], 1);
    tddp_shm_deallocate(handle);
    barrier_once(it);
}

TEST(a_forked_child_without_memory_for_copies)
{
    run_shm(SHM_PROCESSES, 2, forked_without_memory, NULL);
}
#endif

/* How a child ends that reads the memory: by a signal, or with the byte that it finds. */
static int child_that_reads(const volatile unsigned char *data)
{
    fflush(NULL);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        (void)signal(SIGSEGV, SIG_DFL);
        _exit(data[0]);
    }
    int status;
    CHECK_INT(waitpid(pid, &status, 0), pid);
    return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

/* Calls add up, as those of two threads do. */
static void forked_without_copies(shm_rank *it)
{
    void *handle;
    void *place;
    CHECK_OK(tddp_shm_allocate(it->shm, MIB, &handle, &place));
    volatile unsigned char *data = place;
    data[0] = 3;
    tddp_fork_copies_disable();
    CHECK_INT(child_that_reads(data), -SIGSEGV);
    tddp_fork_copies_enable();
    tddp_fork_copies_enable();
    tddp_fork_copies_disable();
    CHECK_INT(child_that_reads(data), 3);
    tddp_shm_deallocate(handle);
    barrier_once(it);
}

TEST(copies_of_forked_children_can_be_disabled)
{
    run_shm(SHM_PROCESSES, 2, forked_without_copies, NULL);
}

/* A limit of file size makes the arena smaller; with too low a limit ranks can't share memory. */
static void limited(shm_rank *it)
{
    const rlim_t *bytes = it->data;
    struct rlimit limit = {*bytes, RLIM_INFINITY};
    CHECK_INT(setrlimit(RLIMIT_FSIZE, &limit), 0);
    tddp_backend_opts opts = shm_opts(it->rank, it->size, it->store);
    tddp_status status = tddp_shm_join(&opts, NULL, NULL, &it->shm);
    if (*bytes < MIB) {
        CHECK_STATUS(status, TDDP_UNAVAILABLE);
        CHECK_CONTAINS(tddp_error_message(),
                       "rank 0 cannot share memory: files are limited to 1000 bytes");
    } else {
        void *handle;
        void *place;
        CHECK_OK(status);
        CHECK_OK(tddp_shm_allocate(it->shm, 1000, &handle, &place));
        barrier_once(it);
        tddp_shm_deallocate(handle);
    }
}

TEST(files_may_be_limited)
{
    rlim_t bytes = 100 * MIB;
    shm_job job = {.mode = SHM_PROCESSES, .size = 2, .body = limited, .data = &bytes, .bare = true};
    shm_run(job);
    bytes = 1000;
    shm_run(job);
}
