/*
 * Loads libhwloc. Main thread.
 */
#include <dlfcn.h>

#include "launch/workers/hwloc.h"

tddp_status tddp_hwloc_load(tddp_hwloc *out)
{
    void *library = dlopen("libhwloc.so.15", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (!library) {
        const char *why = dlerror();
        return tddp_fail(TDDP_UNAVAILABLE,
                         "--numa-binding needs hwloc 2 (Debian: apt install libhwloc15): %.300s",
                         why ? why : "it was not found");
    }
#define FIND(result, name, arguments)                                                       \
    *(void **)&out->name = dlsym(library, "hwloc_" #name);                                  \
    if (!out->name) {                                                                       \
        return tddp_fail(TDDP_UNAVAILABLE, "--numa-binding: libhwloc.so.15 lacks hwloc_%s", \
                         #name);                                                            \
    }
    TDDP_HWLOC_FUNCTIONS(FIND)
    return TDDP_OK;
}
