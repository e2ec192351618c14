/*
 * Made-up machines for tests: a folder with what the kernel would show below /sys, /proc and /dev.
 */
#ifndef TDDP_TEST_MACHINE_H
#define TDDP_TEST_MACHINE_H

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"

/* A new empty machine; removed by machine_remove(). */
static inline char *machine_make(void)
{
    char *root = strdup("/tmp/machine-XXXXXX");
    CHECK(root && mkdtemp(root));
    return root;
}

static inline void machine_remove(char *root)
{
    char command[128];
    (void)snprintf(command, sizeof command, "rm -rf '%s'", root);
    CHECK_INT(system(command), 0);
    free(root);
}

/* Writes a file of the machine, with the folders above it. */
__attribute__((format(printf, 3, 4))) static inline void
machine_file(const char *root, const char *text, const char *format, ...)
{
    char path[512];
    va_list arguments;
    int head = snprintf(path, sizeof path, "%s/", root);
    va_start(arguments, format);
    (void)vsnprintf(path + head, sizeof path - (size_t)head, format, arguments);
    va_end(arguments);
    for (char *slash = path + head; (slash = strchr(slash, '/')); slash++) {
        *slash = '\0';
        CHECK(mkdir(path, 0755) == 0 || errno == EEXIST);
        *slash = '/';
    }
    FILE *file = fopen(path, "w");
    CHECK(file != NULL);
    CHECK(fputs(text, file) >= 0);
    fclose(file);
}

/* Makes a device file of the machine, which no other user than root could: a link to another. */
static inline void machine_device(const char *root, const char *name)
{
    char path[512];
    (void)snprintf(path, sizeof path, "%s/dev", root);
    CHECK(mkdir(path, 0755) == 0 || errno == EEXIST);
    (void)snprintf(path, sizeof path, "%s/dev/%s", root, name);
    CHECK_INT(symlink("/dev/null", path), 0);
}

/* The GPUs' device files of that number. */
static inline void machine_gpu(const char *root, int minor)
{
    char name[32];
    (void)snprintf(name, sizeof name, "nvidia%d", minor);
    machine_device(root, name);
}

#endif
