/*
 * How the C library's malloc treats large blocks, and how much of it is in use. The settings are
 * the process's, and malloc's own locks guard them. The language above decides how
 * to use these, since its collector frees the tensors.
 */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include <tddp/heap.h>

#include "base/base.h"

#if defined(__GLIBC__)

#include <limits.h>
#include <malloc.h>

static bool decided_elsewhere(void)
{
    static const char *const names[] = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_",
                                        "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (getenv(names[i])) {
            return true;
        }
    }
    const char *tunables = getenv("GLIBC_TUNABLES");
    const char *ours = getenv("TDDP_KEEP_MEMORY");
    return (tunables && strstr(tunables, "glibc.malloc.")) || (ours && strcmp(ours, "0") == 0);
}

int tddp_heap_keep(void)
{
    if (decided_elsewhere()) {
        return 0;
    }
    /* Older versions refuse a threshold beyond 32 MiB. */
    bool unmapped =
        mallopt(M_MMAP_THRESHOLD, INT_MAX) == 1 || mallopt(M_MMAP_THRESHOLD, 32 << 20) == 1;
    return unmapped && mallopt(M_TRIM_THRESHOLD, -1) == 1;
}

#if __GLIBC__ > 2 || (__GLIBC__ == 2 && __GLIBC_MINOR__ >= 33)
int64_t tddp_heap_in_use(void)
{
    struct mallinfo2 info = mallinfo2();
    return (int64_t)(info.uordblks + info.hblkhd);
}
#else
int64_t tddp_heap_in_use(void)
{
    return -1; /* mallinfo() counts in int, which wraps */
}
#endif

#else

int tddp_heap_keep(void)
{
    return 0;
}

int64_t tddp_heap_in_use(void)
{
    return -1;
}

#endif
