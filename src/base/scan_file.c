/*
 * Reads what the kernel tells in small text files. No state.
 */
#include <stdarg.h>
#include <stdio.h>

#include "base/scan_file.h"

enum { LINE_BYTES = 8192 };

bool tddp_scan_file(const char *path, const char *format, ...)
{
    char line[LINE_BYTES];
    FILE *file = path ? fopen(path, "re") : NULL;
    bool found = false;
    while (file && !found && fgets(line, sizeof line, file)) {
        va_list values;
        va_start(values, format);
        found = vsscanf(line, format, values) > 0;
        va_end(values);
    }
    if (file) {
        (void)fclose(file);
    }
    return found;
}
