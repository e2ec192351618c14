/* What a process holds: to see that a failure half way lets go of everything. */
#ifndef TDDP_TEST_LEAKS_H
#define TDDP_TEST_LEAKS_H

#include <dirent.h>

#include "events.h"

static inline int leaks_count(const char *folder)
{
    DIR *all = opendir(folder);
    CHECK(all);
    int count = 0;
    while (readdir(all)) {
        count++;
    }
    closedir(all);
    return count;
}

static inline int leaks_descriptors(void)
{
    return leaks_count("/proc/self/fd");
}

/* Threads that were joined may stay in the list for a moment. */
static inline void leaks_check_threads(int before)
{
    CHECK_UNTIL(leaks_count("/proc/self/task") <= before);
    CHECK_INT(leaks_count("/proc/self/task"), before);
}

#endif
