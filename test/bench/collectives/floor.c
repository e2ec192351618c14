/*
 * The floor as a partner of the collectives benchmark: the least that two processes can do to add
 * their vectors (floor.h), with plain stores and with stores past the cache, whichever is faster.
 *
 * One process, which forks the second rank, so that the two share memory without further ado.
 */
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../floor.h"
#include "measure.h"

#define MOST_BYTES ((size_t)1 << 30)

static floor_rank self;

static const char *obstacle(const bench_call *call)
{
    if (call->operation != BENCH_ALL_REDUCE || call->dtype != BENCH_FLOAT32) {
        return "all_reduce of float32 only";
    }
    return call->count * call->element > MOST_BYTES ? "at most 1 GiB" : NULL;
}

static void allocate(bench_memory *memory, bool registered, int which)
{
    if (which == 0) {
        memory->data = self.vectors[self.rank];
    } else {
        bench_allocate_plain(memory, registered, which);
    }
}

/* The vectors stay as they are, and grow. */
static void release(bench_memory *memory, bool registered)
{
    if (memory->data != self.vectors[self.rank]) {
        bench_release_plain(memory, registered);
    }
}

static void run(const bench_call *call)
{
    floor_all_reduce(&self, call->count * call->element, call->variant == 1);
}

/* Address space only: pages come as they are written. */
static float *reserve(void)
{
    void *memory = mmap(NULL, MOST_BYTES, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

int main(void)
{
    self.area = floor_map(sizeof(floor_area));
    self.vectors[0] = reserve();
    self.vectors[1] = reserve();
    if (!self.area || !self.vectors[0] || !self.vectors[1]) {
        bench_fail("no shared memory");
    }
    pid_t child = fork();
    if (child < 0) {
        bench_fail("cannot fork");
    }
    self.rank = child == 0;
    if (child == 0 && prctl(PR_SET_PDEATHSIG, SIGKILL)) {
        bench_fail("prctl failed");
    }
    bench_partner partner = {.version = "two processes that add in shared memory",
                             .rank = self.rank,
                             .ranks = 2,
                             .variants = 2,
                             .obstacle = obstacle,
                             .allocate = allocate,
                             .release = release,
                             .run = run};
    int result = bench_serve(&partner);
    if (child > 0) {
        int status = 0;
        result |= waitpid(child, &status, 0) < 0 || status != 0;
    }
    return result;
}
