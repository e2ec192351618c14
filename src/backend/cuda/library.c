/* See library.h. */
#include "backend/cuda/library.h"

#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PATH_BYTES = TDDP_LIBRARY_PATH_BYTES, TRIED_BYTES = 4096 };

/* A library on the way to being found. */
typedef struct search {
    const tddp_library_quest *quest;
    tddp_library *out;
    char tried[TRIED_BYTES]; /* what was not it */
    char loaded[PATH_BYTES]; /* a file of this name that the process has */
    char torch[PATH_BYTES];  /* libtorch's folder */
} search;

static void note(search *self, const char *path, const char *why)
{
    size_t used = strlen(self->tried);
    (void)snprintf(self->tried + used, sizeof self->tried - used, "\n  %s: %s", path, why);
}

static void *try_path(search *self, const char *path, int flags)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE | flags);
    if (library) {
        (void)snprintf(self->out->path, sizeof self->out->path, "%s", path);
    } else {
        const char *why = dlerror();
        note(self, path, why ? why : "cannot be loaded");
    }
    return library;
}

/* Of one of the objects of this process; dl_iterate_phdr()'s callback. */
static int look_at(struct dl_phdr_info *info, size_t size, void *data)
{
    (void)size;
    search *self = data;
    const char *path = info->dlpi_name;
    const char *slash = path ? strrchr(path, '/') : NULL;
    if (!slash) {
        return 0;
    }
    if (strncmp(slash + 1, self->quest->prefix, strlen(self->quest->prefix)) == 0) {
        (void)snprintf(self->loaded, sizeof self->loaded, "%s", path);
    } else if (strncmp(slash + 1, "libtorch", 8) == 0) {
        (void)snprintf(self->torch, sizeof self->torch, "%.*s", (int)(slash - path), path);
    }
    return 0;
}

static void *look_beside_torch(search *self)
{
    char path[2 * PATH_BYTES];
    void *library = NULL;
    for (const char *const *each = self->quest->folders; self->torch[0] && *each && !library;
         each++) {
        (void)snprintf(path, sizeof path, "%s/%s", self->torch, *each);
        library = try_path(self, path, 0);
    }
    return library;
}

static void *look(search *self)
{
    const char *named = getenv(self->quest->variable);
    if (named && *named) {
        return try_path(self, named, 0);
    }
    (void)dl_iterate_phdr(look_at, self);
    void *library = self->loaded[0] ? try_path(self, self->loaded, RTLD_NOLOAD) : NULL;
    for (const char *const *each = self->quest->names; *each && !library; each++) {
        library = try_path(self, *each, 0);
    }
    return library ? library : look_beside_torch(self);
}

tddp_status tddp_library_find(const tddp_library_quest *quest, tddp_library *out)
{
    search self = {.quest = quest, .out = out};
    out->handle = look(&self);
    if (out->handle) {
        return TDDP_OK;
    }
    return tddp_fail(TDDP_UNAVAILABLE, "%s was not found: %s; tried:%s", quest->title, quest->cure,
                     self.tried);
}

/* POSIX says that what dlsym() returns may be taken for a function. */
bool tddp_library_symbol(const tddp_library *library, const char *name, void *into)
{
    void *symbol = dlsym(library->handle, name);
    memcpy(into, &symbol, sizeof symbol);
    return symbol != NULL;
}

tddp_status tddp_library_lacks(const tddp_library *library, const char *name, const char *expected)
{
    return tddp_fail(TDDP_UNAVAILABLE, "%s has no %s: expected %s", library->path, name, expected);
}
