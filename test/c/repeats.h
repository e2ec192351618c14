/* Memory in which a pattern comes again and again, made and looked at faster than by element. */
#ifndef TDDP_TEST_REPEATS_H
#define TDDP_TEST_REPEATS_H

#include <stdbool.h>
#include <string.h>

/* Fills `bytes` bytes with what their first `period` are. */
static inline void repeat_bytes(void *data, size_t period, size_t bytes)
{
    char *start = data;
    for (size_t done = period; done < bytes; done *= 2) {
        memcpy(start + done, start, bytes - done < done ? bytes - done : done);
    }
}

/* How many of `count` elements are to be looked at: the first `period` where all others equal these
 * bit by bit, else all. */
static inline size_t elements_to_check(const void *data, size_t size, size_t period, size_t count)
{
    const char *start = data;
    size_t once = period * size;
    bool repeats = count > period && memcmp(start + once, start, count * size - once) == 0;
    return repeats ? period : count;
}

#endif
