/* Whether large blocks that were freed stay with the process. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <tddp/heap.h>

#include "check.h"

/* Larger than what glibc keeps of itself. */
#define BLOCK_BYTES ((size_t)64 << 20)

static size_t resident_bytes(void)
{
    size_t pages;
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file && fscanf(file, "%*u %zu", &pages) == 1);
    fclose(file);
    return pages * (size_t)sysconf(_SC_PAGESIZE);
}

/* How much of a block that was used and freed is still this process's. */
static size_t kept_bytes(void)
{
    size_t before = resident_bytes();
    volatile char *block = malloc(BLOCK_BYTES);
    CHECK(block != NULL);
    for (size_t at = 0; at < BLOCK_BYTES; at += 4096) {
        block[at] = 1;
    }
    CHECK(resident_bytes() >= before + BLOCK_BYTES / 2);
    free((void *)block);
    size_t after = resident_bytes();
    return after > before ? after - before : 0;
}

static void needs_glibc(void)
{
#if !defined(__GLIBC__)
    check_skip("this malloc has no such settings");
#elif defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    check_skip("malloc is the sanitizer's");
#endif
}

TEST(blocks_stay_for_the_next_step)
{
    needs_glibc();
    CHECK_INT(tddp_heap_keep(), 1);
    CHECK(kept_bytes() >= BLOCK_BYTES / 2);
}

TEST(blocks_go_where_they_are_not_to_be_kept)
{
    needs_glibc();
    CHECK_INT(setenv("TDDP_KEEP_MEMORY", "0", 1), 0);
    CHECK_INT(tddp_heap_keep(), 0);
    CHECK(kept_bytes() < BLOCK_BYTES / 2);
}
