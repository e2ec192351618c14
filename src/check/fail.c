/*
 * Ends the process where a call has failed. Main thread.
 */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "check/check.h"

void tddp_check_write_reason(const char *text)
{
    const char *path = getenv("TORCHELASTIC_ERROR_FILE");
    FILE *file = path && *path != '\0' ? fopen(path, "we") : NULL;
    if (!file) {
        return; /* the report has the exit status alone */
    }
    fprintf(file, "{\"timestamp\": \"%lld\", \"message\": \"", (long long)time(NULL));
    for (; *text != '\0'; text++) {
        unsigned char byte = (unsigned char)*text;
        fprintf(file, byte < ' ' ? "\\u%04x" : strchr("\"\\", byte) ? "\\%c" : "%c", byte);
    }
    fputs("\"}\n", file);
    (void)fclose(file);
}

void tddp_check_must(tddp_group *group, tddp_status status)
{
    if (status != TDDP_OK) {
        const char *reason = tddp_error_message();
        fprintf(stderr, "torchrun-check: rank %s: %s\n", getenv("RANK"), reason);
        tddp_check_write_reason(reason);
        tddp_group_shutdown(group, TDDP_CHECK_SHUTDOWN_MS);
        exit(EXIT_FAILURE);
    }
}

void *tddp_check_allocate(size_t count, size_t size)
{
    void *memory = calloc(count, size);
    tddp_check_must(NULL, memory ? TDDP_OK : tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory"));
    return memory;
}
