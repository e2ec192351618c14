/*
 * Backends by name: registered ones, built-in ones, and modules loaded on first request. Any
 * thread. One lock guards the list and the loading, so that a module is loaded once. Tables and
 * modules stay for the life of the process: a module can't be unloaded while threads that it
 * started may run.
 */
#include <ctype.h>
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "backend/fake/fake.h"
#include "backend/shm/shm.h"
#include "base/base.h"

enum { MAX_NAME = 32 };

typedef struct entry {
    const tddp_backend_v1 *backend;
    struct entry *next;
} entry;

/* Process-wide, like the dynamic loader's list of modules. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static entry *entries;

static const tddp_backend_v1 *find_known(const char *name)
{
    if (strcmp(name, "fake") == 0) {
        return tddp_fake_backend();
    }
    if (strcmp(name, "shm") == 0) {
        return tddp_shm_backend();
    }
    for (entry *each = entries; each; each = each->next) {
        if (strcmp(each->backend->name, name) == 0) {
            return each->backend;
        }
    }
    return NULL;
}

/* The name becomes part of a file name: it must not contain a path. */
static bool name_is_valid(const char *name)
{
    size_t length = 0;
    for (; name[length]; length++) {
        char c = name[length];
        if (length == MAX_NAME || !(isalnum((unsigned char)c) || c == '_' || c == '-')) {
            return false;
        }
    }
    return length > 0;
}

/* `origin` is where the table comes from, for the text. */
static tddp_status check_table(const tddp_backend_v1 *backend, const char *origin)
{
    if (backend->abi != TDDP_BACKEND_ABI) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "%s: backend ABI %u, expected %u: build it for this libtddp", origin,
                         backend->abi, TDDP_BACKEND_ABI);
    }
    if (backend->size < offsetof(tddp_backend_v1, run) || !backend->name ||
        !name_is_valid(backend->name) || !backend->create || !backend->destroy || !backend->abort ||
        !backend->post != !backend->finish || (backend->copied_types && !backend->check) ||
        backend->op_count >
            (backend->size - offsetof(tddp_backend_v1, run)) / sizeof(tddp_backend_run)) {
        return tddp_fail(
            TDDP_INVALID_ARGUMENT,
            "%s: incomplete backend table: expected a name of letters, digits, _ or "
            "-, create, abort, destroy, post and finish or neither, check with copied_types, "
            "and op_count slots within its size",
            origin);
    }
    return TDDP_OK;
}

/* With the lock held. */
static tddp_status add(const tddp_backend_v1 *backend)
{
    entry *added = tddp_alloc(sizeof *added);
    if (!added) {
        return TDDP_OUT_OF_MEMORY;
    }
    *added = (entry){backend, entries};
    entries = added;
    return TDDP_OK;
}

tddp_status tddp_backend_register(const tddp_backend_v1 *backend)
{
    if (!backend) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "backend is NULL: expected a table");
    }
    tddp_status status = check_table(backend, backend->name ? backend->name : "backend");
    if (status) {
        return status;
    }
    pthread_mutex_lock(&lock);
    if (find_known(backend->name)) {
        status = tddp_fail(TDDP_INVALID_ARGUMENT, "a backend named \"%s\" is registered already",
                           backend->name);
    } else {
        status = add(backend);
    }
    pthread_mutex_unlock(&lock);
    return status;
}

/* --- modules --------------------------------------------------------------------------------- */

/* Appends a line about an attempt. If memory is short, the list is lost but not the failure. */
static void note(tddp_bytes *tried, const char *path, const char *reason)
{
    if (tddp_bytes_append(tried, "\n  ", 3) || tddp_bytes_append(tried, path, strlen(path)) ||
        tddp_bytes_append(tried, ": ", 2) || tddp_bytes_append(tried, reason, strlen(reason))) {
        tried->size = 0;
    }
}

/* Asks a loaded module for its table. */
static tddp_status query(void *module, const char *path, const char *name,
                         const tddp_backend_v1 **out)
{
    tddp_backend_query_fn ask;
    /* ISO C has no conversion from an object pointer to a function; POSIX says this one works. */
    *(void **)&ask = dlsym(module, "tddp_backend_query");
    if (!ask) {
        return tddp_fail(TDDP_UNAVAILABLE, "%s: no tddp_backend_query in this module", path);
    }
    /* A module's own text replaces this one. */
    tddp_status status =
        tddp_fail(TDDP_UNAVAILABLE, "%s: does not speak backend ABI %u", path, TDDP_BACKEND_ABI);
    const tddp_backend_v1 *backend = ask(TDDP_BACKEND_ABI);
    if (!backend) {
        return tddp_fail(status, "backend %s: %s", name, tddp_error_message());
    }
    if (check_table(backend, path)) {
        return tddp_fail(TDDP_UNAVAILABLE, "%s", tddp_error_message());
    }
    if (strcmp(backend->name, name) != 0) {
        return tddp_fail(TDDP_UNAVAILABLE, "%s: calls itself \"%s\", expected \"%s\"", path,
                         backend->name, name);
    }
    *out = backend;
    return TDDP_OK;
}

/* libtorch as pytorch.org ships it contains a Gloo and exports its symbols, which would come before
 * those of the Gloo that the module was compiled with. A flag that puts the module's own libraries
 * first, only where it is needed: sanitizers refuse it. */
static int own_libraries_first(const char *name)
{
    static const char symbol[] = "_ZN4gloo9transport3tcp12CreateDeviceERKNS1_4attrE";
    Dl_info from;
    void *visible = dlsym(RTLD_DEFAULT, symbol);
    bool other = visible && dladdr(visible, &from) && !strstr(from.dli_fname, "/libgloo.so");
    return other && strcmp(name, "gloo") == 0 ? RTLD_DEEPBIND : 0;
}

/* Tries one file. TDDP_NOT_FOUND: continue; a module that exists but is invalid ends the search. */
static tddp_status try_path(const char *path, const char *name, tddp_bytes *tried,
                            const tddp_backend_v1 **out)
{
    bool is_file = strchr(path, '/') != NULL;
    if (is_file && access(path, F_OK) != 0) {
        note(tried, path, strerror(errno));
        return TDDP_NOT_FOUND;
    }
    void *module = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE | own_libraries_first(name));
    if (!module) {
        const char *reason = dlerror();
        note(tried, path, reason ? reason : "cannot be loaded");
        return TDDP_NOT_FOUND;
    }
    tddp_status status = query(module, path, name, out);
    return status ? status : add(*out);
}

static tddp_status try_folder(const char *folder, size_t length, const char *name,
                              tddp_bytes *tried, const tddp_backend_v1 **out)
{
    char *path = tddp_format("%.*s/tddp_backend_%s.so", (int)length, folder, name);
    if (!path) {
        return TDDP_OUT_OF_MEMORY;
    }
    tddp_status status = try_path(path, name, tried, out);
    free(path);
    return status;
}

/* TDDP_BACKEND_PATH, then libtddp's own folder, then the loader's search path. */
static tddp_status search(const char *name, tddp_bytes *tried, const tddp_backend_v1 **out)
{
    tddp_status status = TDDP_NOT_FOUND;
    const char *folders = getenv("TDDP_BACKEND_PATH");
    while (status == TDDP_NOT_FOUND && folders && *folders) {
        size_t length = strcspn(folders, ":");
        if (length > 0) {
            status = try_folder(folders, length, name, tried, out);
        }
        folders += length + (folders[length] == ':');
    }
    Dl_info self;
    if (status == TDDP_NOT_FOUND && dladdr((void *)&lock, &self) && self.dli_fname) {
        const char *slash = strrchr(self.dli_fname, '/');
        if (slash) {
            status = try_folder(self.dli_fname, (size_t)(slash - self.dli_fname), name, tried, out);
        }
    }
    if (status == TDDP_NOT_FOUND) {
        char file[MAX_NAME + sizeof "tddp_backend_.so"];
        strcpy(file, "tddp_backend_");
        strcat(file, name);
        strcat(file, ".so");
        status = try_path(file, name, tried, out);
    }
    return status;
}

/* How to get one: most are built with libtddp, those of an MPI and of UCX where there is one. */
static const char *cure_of(const char *name)
{
    if (strcmp(name, "mpi") == 0) {
        return "install an MPI (Debian: libopenmpi-dev or libmpich-dev), then build libtddp again "
               "(rake compile, or gem pristine torch-ddp)";
    }
    if (strcmp(name, "ucx") == 0) {
        return "install UCX (Debian: libucx-dev), then build libtddp again (rake compile, or gem "
               "pristine torch-ddp), or set TDDP_HOSTS=gloo";
    }
    return "build libtddp with it";
}

/* What moves data between hosts has the name "gloo", whichever TDDP_HOSTS chooses. A wrong choice
 * is an error of all ranks, once they meet (open.c). */
static const char *module_of(const char *name)
{
    const char *hosts = getenv("TDDP_HOSTS");
    return strcmp(name, "gloo") == 0 && hosts && strcmp(hosts, "ucx") == 0 ? hosts : name;
}

static tddp_status load(const char *name, const tddp_backend_v1 **out)
{
    tddp_bytes tried = {0};
    tddp_status status = search(name, &tried, out);
    if (status == TDDP_NOT_FOUND) {
        status =
            tddp_fail(TDDP_UNAVAILABLE,
                      "no backend \"%s\" in this installation: %s, or name "
                      "the folder of tddp_backend_%s.so in TDDP_BACKEND_PATH; tried:%.*s",
                      name, cure_of(name), name, (int)tried.size, tried.data ? tried.data : "");
    }
    tddp_bytes_free(&tried);
    return status;
}

tddp_status tddp_backend_find(const char *name, const tddp_backend_v1 **out)
{
    if (!name || !out) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "%s is NULL", name ? "out" : "backend name");
    }
    if (!name_is_valid(name)) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "backend \"%s\": expected 1 to %d letters, digits, _ or -", name,
                         MAX_NAME);
    }
    tddp_status status = TDDP_OK;
    name = module_of(name);
    pthread_mutex_lock(&lock);
    const tddp_backend_v1 *backend = find_known(name);
    if (!backend) {
        status = load(name, &backend);
    }
    pthread_mutex_unlock(&lock);
    if (status == TDDP_OK) {
        *out = backend;
    }
    return status;
}
