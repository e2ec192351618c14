/*
 * The real NCCL and CUDA runtime on a machine without a GPU: the backend is there, and a group of
 * it is refused in words that tell why. TDDP_TEST_REAL=1 says that the libraries have to be there.
 */
#include <stdbool.h>
#include <stdio.h>

#include <tddp.h>
#include <tddp/backend.h>
#include <tddp/cuda.h>

#include "check.h"

static bool is_required(void)
{
    const char *value = getenv("TDDP_TEST_REAL");
    return value && *value;
}

static void skip(const char *reason)
{
    if (is_required()) {
        check_failed(__FILE__, __LINE__, "TDDP_TEST_REAL is set, but %s: %s", reason,
                     tddp_error_message());
    }
    check_skip(reason);
}

static const tddp_cuda *cuda_without_a_gpu(void)
{
    const tddp_cuda *cuda;
    int count = 0;
    if (tddp_cuda_get(&cuda)) {
        skip("the CUDA runtime is not here");
    }
    if (cuda->cudaGetDeviceCount(&count) == TDDP_CUDA_SUCCESS && count > 0) {
        check_skip("there is a GPU here: test/gpu/run tests with it");
    }
    return cuda;
}

TEST(the_runtime_tells_its_version)
{
    const tddp_cuda *cuda = cuda_without_a_gpu();
    CHECK(cuda->version >= 11000 && cuda->version < 20000);
}

TEST(a_group_says_that_there_is_no_gpu)
{
    const tddp_backend_v1 *backend;
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    tddp_group *group;
    char expected[200];
    int count = 0;
    const tddp_cuda *cuda = cuda_without_a_gpu();
    if (tddp_backend_find("nccl", &backend)) {
        skip("NCCL is not here");
    }
    CHECK_TEXT(backend->name, "nccl");
    tddp_cuda_error error = cuda->cudaGetDeviceCount(&count);
    CHECK(error != TDDP_CUDA_SUCCESS);
    (void)snprintf(expected, sizeof expected, "cudaGetDeviceCount: %s (CUDA error %d)",
                   cuda->cudaGetErrorString(error), error);
    CHECK_OK(tddp_hash_store_create(1000, &opts.store));
    opts.backend = "nccl";
    opts.device_index = 0;
    opts.device_bound = 1;
    CHECK_STATUS(tddp_group_create(&opts, NULL, &group), TDDP_SYSTEM);
    CHECK_CONTAINS(tddp_error_message(), expected);
    /* In CUDA's words, which differ: there is no driver, or one that finds no GPU. */
    CHECK(error == 35 || error == 100);
    CHECK_CONTAINS(tddp_error_message(), error == 35 ? "CUDA driver version is insufficient"
                                                     : "no CUDA-capable device is detected");
    tddp_store_release(opts.store);
}
