/* A group of the nccl backend: over stand-ins (standin/standin.h), or on a GPU. */
#ifndef TDDP_TEST_NCCL_WORLD_H
#define TDDP_TEST_NCCL_WORLD_H

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include <tddp/group.h>

#include "check.h"
#include "hosted_store.h"

enum { TIMEOUT_MS = 15000 };

static inline tddp_group *open_group(tddp_store *store, int rank, int world_size, int device,
                                     int64_t timeout_ms)
{
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    tddp_group *group;
    opts.backend = "nccl";
    opts.store = store;
    opts.rank = rank;
    opts.world_size = world_size;
    opts.timeout_ms = 60000; /* a rank may be late to this */
    opts.device_index = device;
    opts.device_bound = device >= 0;
    CHECK_OK(tddp_group_create(&opts, NULL, &group));
    CHECK_OK(tddp_group_set_timeout(group, timeout_ms));
    return group;
}

/* A group bound to a GPU that doesn't exist. */
static inline void check_no_device(int device, const char *expected)
{
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    tddp_group *group;
    CHECK_OK(tddp_hash_store_create(1000, &opts.store));
    opts.backend = "nccl";
    opts.device_index = device;
    opts.device_bound = 1;
    CHECK_STATUS(tddp_group_create(&opts, NULL, &group), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), expected);
    tddp_store_release(opts.store);
}

static inline tddp_buffer on_device(void *data, size_t count, tddp_dtype dtype)
{
    return (tddp_buffer){count > 0 ? data : NULL, count, dtype, TDDP_CUDA, 0, NULL};
}

/* Streams, events and allocations that exist; 0 with a GPU, which can't tell. */
static inline int alive(void)
{
    const char *path = getenv("TDDP_CUDART_LIBRARY");
    void *library = path ? dlopen(path, RTLD_NOW | RTLD_NOLOAD) : NULL;
    int (*ask)(void) = NULL;
    if (library) {
        *(void **)&ask = dlsym(library, "standin_alive");
        (void)dlclose(library);
    }
    return ask ? ask() : 0;
}

static inline void leave(tddp_group *group, tddp_store *store)
{
    tddp_group_shutdown(group, 1000);
    tddp_group_release(group);
    CHECK_INT(alive(), 0);
    tddp_store_release(store);
}

#endif
