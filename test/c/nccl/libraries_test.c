/* What is said where NCCL or CUDA are missing, or too old. */
#include <unistd.h>

#include "nccl/world.h"
#include "standin/standin.h"

static void check_without(const char *variable, const char *value, const char *expected)
{
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    tddp_group *group;
    CHECK_INT(setenv(variable, value, 1), 0);
    CHECK_OK(tddp_hash_store_create(1000, &opts.store));
    opts.backend = "nccl";
    opts.device_index = 0;
    CHECK_STATUS(tddp_group_create(&opts, NULL, &group), TDDP_UNAVAILABLE);
    CHECK_CONTAINS(tddp_error_message(), expected);
    tddp_store_release(opts.store);
}

TEST(no_nccl)
{
    check_without("TDDP_NCCL_LIBRARY", "/dev/null/libnccl.so.2", "NCCL was not found: install");
    CHECK_CONTAINS(tddp_error_message(), "/dev/null/libnccl.so.2");
}

TEST(no_cuda)
{
    check_without("TDDP_CUDART_LIBRARY", "/dev/null/libcudart.so",
                  "the CUDA runtime was not found: install");
}

TEST(an_old_nccl)
{
    check_without("STANDIN_NCCL_VERSION", "2708", "is NCCL 2.7.8: expected 2.18 or newer");
    check_without("STANDIN_NCCL_VERSION", "21605", "is NCCL 2.16.5: expected 2.18 or newer");
}

TEST(another_library)
{
    check_without("TDDP_NCCL_LIBRARY", getenv("TDDP_CUDART_LIBRARY"), "expected NCCL");
}

TEST(a_device_that_is_not_there)
{
    check_no_device(8, "device 8: expected a GPU's number, 0 to 7");
}
