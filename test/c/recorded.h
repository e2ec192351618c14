/* What a group's flight recorder shows of its operations, by what tddp_group_dump() writes. */
#ifndef TDDP_TEST_RECORDED_H
#define TDDP_TEST_RECORDED_H

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <tddp.h>

#include "events.h"

/* How often a text occurs in the dump. */
static inline int recorded(tddp_group *group, const char *text)
{
    enum { MOST = 1 << 16 };
    static char dump[MOST];
    char path[64];
    (void)snprintf(path, sizeof path, "/tmp/tddp-recorded-%d", (int)getpid());
    CHECK_OK(tddp_group_dump(group, path));
    FILE *file = fopen(path, "re");
    CHECK(file != NULL);
    size_t size = fread(dump, 1, MOST - 1, file);
    CHECK(size < MOST - 1);
    (void)fclose(file);
    CHECK_INT(unlink(path), 0);
    dump[size] = 0;
    int times = 0;
    for (const char *at = dump; (at = strstr(at, text)) != NULL; at++) {
        times++;
    }
    return times;
}

/* Waits until a collective with this number has started (or more have). */
static inline void await_started(tddp_group *group, int number)
{
    char text[64];
    (void)snprintf(text, sizeof text, "\"last_started_collective\": %d", number);
    CHECK_UNTIL(recorded(group, text) > 0);
}

#endif
