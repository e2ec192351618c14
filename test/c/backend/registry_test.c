/* Backends by name: built in, registered, loaded, missing, invalid. */
#include <stdlib.h>
#include <string.h>

#include <tddp/backend.h>

#include "check.h"

static tddp_status create(const tddp_backend_opts *opts, const tddp_wait *wait, void **context)
{
    (void)opts;
    (void)wait;
    *context = NULL;
    return TDDP_OK;
}

static void ignore(void *context)
{
    (void)context;
}

static tddp_status post(void *context, const tddp_op *op, void **request)
{
    (void)context;
    (void)op;
    (void)request;
    return TDDP_OK;
}

static tddp_status run(void *context, const tddp_op *op)
{
    (void)context;
    (void)op;
    return TDDP_OK;
}

static tddp_backend_v1 table(const char *name)
{
    return (tddp_backend_v1){.abi = TDDP_BACKEND_ABI,
                             .size = sizeof(tddp_backend_v1),
                             .name = name,
                             .device_types = 1,
                             .create = create,
                             .abort = ignore,
                             .destroy = ignore,
                             .op_count = TDDP_OP_COUNT};
}

TEST(fake_is_built_in)
{
    const tddp_backend_v1 *backend = NULL;
    CHECK_OK(tddp_backend_find("fake", &backend));
    CHECK_TEXT(backend->name, "fake");
    CHECK_TEXT(tddp_op_name(TDDP_OP_REDUCE_SCATTER), "reduce_scatter");
    CHECK_TEXT(tddp_op_name(TDDP_OP_COUNT), "unknown");
}

TEST(a_registered_backend_is_found_and_its_name_is_taken)
{
    static tddp_backend_v1 mine;
    mine = table("mine");
    const tddp_backend_v1 *found = NULL;
    CHECK_OK(tddp_backend_register(&mine));
    CHECK_OK(tddp_backend_find("mine", &found));
    CHECK(found == &mine);
    CHECK_STATUS(tddp_backend_register(&mine), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "\"mine\" is registered already");
    tddp_backend_v1 fake = table("fake");
    CHECK_STATUS(tddp_backend_register(&fake), TDDP_INVALID_ARGUMENT);
}

TEST(invalid_tables_are_refused)
{
    tddp_backend_v1 other = table("other");
    other.abi = 7;
    CHECK_STATUS(tddp_backend_register(&other), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "ABI 7, expected 1");
    other = table("../other");
    CHECK_STATUS(tddp_backend_register(&other), TDDP_INVALID_ARGUMENT);
    other = table(NULL);
    CHECK_STATUS(tddp_backend_register(&other), TDDP_INVALID_ARGUMENT);
    other = table("other");
    other.abort = NULL;
    CHECK_STATUS(tddp_backend_register(&other), TDDP_INVALID_ARGUMENT);
    other = table("other");
    other.op_count = TDDP_OP_COUNT + 1;
    CHECK_STATUS(tddp_backend_register(&other), TDDP_INVALID_ARGUMENT);
    other = table("other");
    other.post = post;
    CHECK_STATUS(tddp_backend_register(&other), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "post and finish or neither");
    other = table("other");
    other.launches = 1u << TDDP_OP_ALL_REDUCE;
    other.op_count = TDDP_OP_COUNT;
    other.run[TDDP_OP_BARRIER] = run;
    CHECK_STATUS(tddp_backend_register(&other), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "expected events");
    CHECK_STATUS(tddp_backend_register(NULL), TDDP_INVALID_ARGUMENT);
}

TEST(a_missing_backend_lists_where_it_was_looked_for)
{
    const tddp_backend_v1 *found = NULL;
    setenv("TDDP_BACKEND_PATH", "/nowhere:/neither", 1);
    CHECK_STATUS(tddp_backend_find("absent", &found), TDDP_UNAVAILABLE);
    CHECK_CONTAINS(tddp_error_message(), "no backend \"absent\"");
    CHECK_CONTAINS(tddp_error_message(), "/nowhere/tddp_backend_absent.so: No such file");
    CHECK_CONTAINS(tddp_error_message(), "/neither/tddp_backend_absent.so: No such file");
    CHECK(found == NULL);
}

TEST(what_a_backend_for_mpi_needs_is_said_where_there_is_none)
{
    const tddp_backend_v1 *found = NULL;
    tddp_status status = tddp_backend_find("mpi", &found);
    if (status) {
        CHECK_STATUS(status, TDDP_UNAVAILABLE);
        CHECK_CONTAINS(tddp_error_message(), "libopenmpi-dev or libmpich-dev");
    }
}

TEST(a_name_cannot_be_a_path)
{
    const tddp_backend_v1 *found = NULL;
    CHECK_STATUS(tddp_backend_find("../gloo", &found), TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_backend_find("", &found), TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_backend_find("a-name-that-is-longer-than-any-backend's", &found),
                 TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_backend_find(NULL, &found), TDDP_INVALID_ARGUMENT);
}
