/* Finds and loads a shared library at run time; see library.h. */
#include "backend/cuda/library.h"

#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PATH_BYTES = TDDP_LIBRARY_PATH_BYTES, TRIED_BYTES = 4096 };

/* The state of a search. */
typedef struct search {
    const tddp_library_spec *spec;
    tddp_library *out;
    char tried[TRIED_BYTES]; /* failed attempts, for the text */
    char loaded[PATH_BYTES]; /* a file with this prefix that the process has loaded */
    char torch[PATH_BYTES];  /* libtorch's directory */
} search;

static void note_attempt(search *self, const char *path, const char *why)
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
        note_attempt(self, path, why ? why : "cannot be loaded");
    }
    return library;
}

/* Callback of dl_iterate_phdr() for a loaded object. */
static int inspect_object(struct dl_phdr_info *info, size_t size, void *data)
{
    (void)size;
    search *self = data;
    const char *path = info->dlpi_name;
    const char *slash = path ? strrchr(path, '/') : NULL;
    if (!slash) {
        return 0;
    }
    if (strncmp(slash + 1, self->spec->prefix, strlen(self->spec->prefix)) == 0) {
        (void)snprintf(self->loaded, sizeof self->loaded, "%s", path);
    } else if (strncmp(slash + 1, "libtorch", 8) == 0) {
        (void)snprintf(self->torch, sizeof self->torch, "%.*s", (int)(slash - path), path);
    }
    return 0;
}

static void *try_beside_torch(search *self)
{
    char path[2 * PATH_BYTES];
    void *library = NULL;
    for (const char *const *each = self->spec->folders; self->torch[0] && *each && !library;
         each++) {
        (void)snprintf(path, sizeof path, "%s/%s", self->torch, *each);
        library = try_path(self, path, 0);
    }
    return library;
}

static void *find_handle(search *self)
{
    const char *named = getenv(self->spec->variable);
    if (named && *named) {
        return try_path(self, named, 0);
    }
    (void)dl_iterate_phdr(inspect_object, self);
    void *library = self->loaded[0] ? try_path(self, self->loaded, RTLD_NOLOAD) : NULL;
    for (const char *const *each = self->spec->names; *each && !library; each++) {
        library = try_path(self, *each, 0);
    }
    return library ? library : try_beside_torch(self);
}

/* POSIX allows converting dlsym()'s result to a function pointer. */
bool tddp_library_symbol(const tddp_library *library, const char *name, void *into)
{
    void *symbol = dlsym(library->handle, name);
    memcpy(into, &symbol, sizeof symbol);
    return symbol != NULL;
}

tddp_status tddp_library_load(const tddp_library_spec *spec, tddp_library *out, void *table)
{
    search self = {.spec = spec, .out = out};
    char *at = table;
    out->handle = find_handle(&self);
    if (!out->handle) {
        return tddp_fail(TDDP_UNAVAILABLE, "%s was not found: %s; tried:%s", spec->title,
                         spec->hint, self.tried);
    }
    for (const char *const *each = spec->symbols; *each; each++, at += sizeof(void (*)(void))) {
        if (!tddp_library_symbol(out, *each, at)) {
            return tddp_fail(TDDP_UNAVAILABLE, "%s has no %s: expected %s", out->path, *each,
                             spec->expected);
        }
    }
    return TDDP_OK;
}
