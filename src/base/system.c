/*
 * Small helpers round system calls and numbers in text.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/base.h"

tddp_status tddp_fail_errno(const char *what)
{
    return tddp_fail(TDDP_SYSTEM, "%s: %s", what, strerror(errno));
}

void tddp_close(int fd)
{
    if (fd >= 0) {
        int saved = errno;
        /* Linux releases the descriptor also when close is interrupted: never try again. */
        (void)close(fd);
        errno = saved;
    }
}

bool tddp_parse_int(const char *text, int64_t min, int64_t max, int64_t *out)
{
    if (!text || !(*text == '-' || (*text >= '0' && *text <= '9'))) {
        return false;
    }
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (errno || *end != '\0' || value < min || value > max) {
        return false;
    }
    *out = value;
    return true;
}
