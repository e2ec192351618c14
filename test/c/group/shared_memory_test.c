/* Memory that groups give out: the backend's where it has some, else plain; it outlives the group,
 * and a forked child leaves the parent's alone. And what carries a group's operations. */
#include <stdint.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "events.h"
#include "ranks.h"

/* A backend with memory of its own; it counts what it has given out. */
static int given;
static tddp_status refuses;

static tddp_status lender_create(const tddp_backend_opts *opts, const tddp_wait *wait,
                                 void **context)
{
    (void)wait;
    CHECK_INT(opts->world_size, 1);
    CHECK_INT(opts->hosts[0], 0);
    *context = &given;
    return TDDP_OK;
}

static void lender_end(void *context)
{
    (void)context;
}

static tddp_status lender_allocate(void *context, size_t bytes, void **handle, void **data)
{
    CHECK(context == &given);
    if (refuses) {
        return tddp_fail(refuses, "nothing to lend");
    }
    given++;
    *data = *handle = aligned_alloc(64, (bytes + 63) / 64 * 64);
    memset(*data, 0, bytes);
    return TDDP_OK;
}

static void lender_deallocate(void *handle)
{
    given--;
    free(handle);
}

static const tddp_backend_v1 lender = {
    .abi = TDDP_BACKEND_ABI,
    .size = sizeof lender,
    .name = "lender",
    .device_types = 1u << TDDP_CPU,
    .create = lender_create,
    .abort = lender_end,
    .destroy = lender_end,
    .allocate = lender_allocate,
    .deallocate = lender_deallocate,
    .op_count = TDDP_OP_COUNT,
};

static tddp_group *lenders_group(tddp_store **store)
{
    CHECK_OK(tddp_backend_register(&lender));
    CHECK_OK(tddp_hash_store_create(5000, store));
    return make_group("lender", 0, 1, *store, 5000);
}

static void check_zero(const char *data, size_t bytes)
{
    CHECK_INT((uintptr_t)data % 64, 0);
    for (size_t i = 0; i < bytes; i++) {
        CHECK_INT(data[i], 0);
    }
}

TEST(plain_memory_where_the_backend_has_none)
{
    const tddp_backend_v1 *gloo;
    if (tddp_backend_find("gloo", &gloo)) {
        check_skip(tddp_error_message());
    }
    setenv("TDDP_FAKE", "over=gloo", 1);
    setenv("TDDP_SHM", "0", 1);
    tddp_store *store;
    tddp_group *group = lone_group(NULL, 5000, &store);
    tddp_group_memory *memory;
    CHECK_TEXT(tddp_group_carrier(group), "gloo");
    CHECK_TEXT(tddp_group_backend(group), "fake");
    for (size_t bytes = 1; bytes < 5000; bytes = bytes * 3 + 1) {
        CHECK_OK(tddp_group_memory_create(group, bytes, &memory));
        check_zero(tddp_group_memory_data(memory), bytes);
        CHECK_INT(tddp_group_memory_shared(memory), 0);
        memset(tddp_group_memory_data(memory), 7, bytes);
        tddp_group_memory_release(memory);
    }
    tddp_group_memory_release(NULL);
    drop(group, store);
}

TEST(the_backends_memory_outlives_the_group)
{
    tddp_store *store;
    tddp_group *group = lenders_group(&store);
    tddp_group_memory *memory;
    CHECK_OK(tddp_group_memory_create(group, 1000, &memory));
    CHECK_INT(given, 1);
    CHECK_INT(tddp_group_memory_shared(memory), 1);
    check_zero(tddp_group_memory_data(memory), 1000);
    drop(group, store);
    memset(tddp_group_memory_data(memory), 1, 1000);
    tddp_group_memory_release(memory);
    CHECK_INT(given, 0);
}

TEST(plain_memory_where_the_backend_has_no_more_or_is_gone)
{
    tddp_store *store;
    tddp_group *group = lenders_group(&store);
    tddp_group_memory *memory;
    refuses = TDDP_UNAVAILABLE;
    CHECK_OK(tddp_group_memory_create(group, 10, &memory));
    CHECK_INT(tddp_group_memory_shared(memory), 0);
    tddp_group_memory_release(memory);
    refuses = TDDP_OUT_OF_MEMORY;
    CHECK_STATUS(tddp_group_memory_create(group, 10, &memory), TDDP_OUT_OF_MEMORY);
    refuses = TDDP_OK;
    tddp_group_shutdown(group, 0);
    CHECK_OK(tddp_group_memory_create(group, 10, &memory));
    CHECK_INT(tddp_group_memory_shared(memory), 0);
    tddp_group_memory_release(memory);
    CHECK_INT(given, 0);
    drop(group, store);
}

TEST(mistakes_with_memory_are_told)
{
    tddp_store *store;
    tddp_group *group = lone_group(NULL, 5000, &store);
    tddp_group_memory *memory;
    CHECK_STATUS(tddp_group_memory_create(NULL, 10, &memory), TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_group_memory_create(group, 10, NULL), TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_group_memory_create(group, 0, &memory), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "at least 1");
    CHECK_STATUS(tddp_group_memory_create(group, SIZE_MAX, &memory), TDDP_OUT_OF_MEMORY);
    drop(group, store);
}

TEST(a_child_makes_none_and_gives_its_copy_back)
{
    tddp_store *store;
    tddp_group *group = lone_group(NULL, 5000, &store);
    tddp_group_memory *memory;
    tddp_group_memory *other;
    CHECK_OK(tddp_group_memory_create(group, 64, &memory));
    memset(tddp_group_memory_data(memory), 3, 64);
    pid_t child = CHECK_FORK();
    if (child == 0) {
        CHECK_STATUS(tddp_group_memory_create(group, 10, &other), TDDP_FORKED);
        memset(tddp_group_memory_data(memory), 4, 64);
        tddp_group_memory_release(memory);
        _exit(0);
    }
    int status;
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK_INT(status, 0);
    CHECK_INT(*(char *)tddp_group_memory_data(memory), 3);
    tddp_group_memory_release(memory);
    drop(group, store);
}
