/*
 * Options structs across versions: their first member is their size, and new fields come last. Any
 * thread.
 */
#include <stdbool.h>
#include <string.h>

#include "base/options.h"

static bool all_zero(const unsigned char *bytes, size_t count)
{
    size_t i = 0;
    while (i < count && bytes[i] == 0) {
        i++;
    }
    return i == count;
}

tddp_status tddp_opts_read(const char *what, const void *opts, size_t least, void *out,
                           size_t known)
{
    size_t size;
    if (!opts) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "options are NULL: expected a struct that begins with %s", what);
    }
    memcpy(&size, opts, sizeof size);
    if (size < least) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "options whose size is %zu bytes: expected a struct that begins with %s, "
                         "of %zu bytes or more",
                         size, what, least);
    }
    if (size > known && !all_zero((const unsigned char *)opts + known, size - known)) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "options of %zu bytes from %s: this libtddp knows %zu of them, and the "
                         "others are set; the program was compiled for a newer libtddp",
                         size, what, known);
    }
    memcpy(out, opts, size < known ? size : known);
    memcpy(out, &known, sizeof known);
    return TDDP_OK;
}

void tddp_opts_fill(const void *defaults, size_t known, void *opts, size_t size)
{
    if (size >= sizeof size) {
        memset(opts, 0, size);
        memcpy(opts, defaults, size < known ? size : known);
        memcpy(opts, &size, sizeof size);
    }
}
