/* The assignment of PyTorch's compute_bucket_assignment_by_size. */
#include "check.h"
#include "flat/flat.h"

enum { MIB = 1024 * 1024, MOST = 8 };

static tddp_param sized(size_t bytes, tddp_dtype dtype)
{
    return (tddp_param){"p", bytes / tddp_dtype_size(dtype), dtype, TDDP_CPU, 0, NULL, 0, 0};
}

static void check_plan(const tddp_param *params, size_t count, const size_t *limits,
                       size_t limit_count, const size_t *expected, size_t expected_count)
{
    size_t buffer_of[MOST] = {0};
    size_t buffers = 0;
    CHECK_OK(tddp_flat_plan(params, count, limits, limit_count, buffer_of, &buffers));
    CHECK_INT(buffers, expected_count);
    for (size_t i = 0; i < count; i++) {
        CHECK_INT(buffer_of[i], expected[i]);
    }
}

TEST(a_buffer_closes_once_it_reaches_its_limit)
{
    const size_t tenths[] = {6, 6, 6, 300, 10, 10};
    const size_t limits[] = {1 * MIB, 25 * MIB};
    tddp_param params[6];
    for (size_t i = 0; i < 6; i++) {
        params[i] = sized(tenths[i] * MIB / 10, TDDP_FLOAT32);
    }
    check_plan(params, 6, limits, 2, (const size_t[]){0, 0, 1, 1, 2, 2}, 3);
}

TEST(a_buffer_that_fits_exactly_is_closed)
{
    const size_t limits[] = {8};
    tddp_param params[3] = {sized(8, TDDP_FLOAT32), sized(4, TDDP_FLOAT32), sized(4, TDDP_FLOAT32)};
    check_plan(params, 3, limits, 1, (const size_t[]){0, 1, 1}, 2);
}

TEST(the_last_limit_repeats)
{
    const size_t limits[] = {4, 8};
    tddp_param params[6];
    for (size_t i = 0; i < 6; i++) {
        params[i] = sized(4, TDDP_FLOAT32);
    }
    check_plan(params, 6, limits, 2, (const size_t[]){0, 1, 1, 2, 2, 3}, 4);
}

TEST(each_dtype_and_device_has_separate_buffers_and_limits)
{
    const size_t limits[] = {8, 16};
    tddp_param params[7] = {sized(4, TDDP_FLOAT32), sized(8, TDDP_FLOAT64), sized(4, TDDP_FLOAT32),
                            sized(8, TDDP_FLOAT64), sized(4, TDDP_FLOAT32), sized(8, TDDP_FLOAT64),
                            sized(4, TDDP_FLOAT32)};
    params[6].device_type = TDDP_CUDA;
    params[6].device_index = 1;
    /* By smallest parameter: float32 [0 2], float64 [1], float64 [3 5], float32 [4], cuda [6]. */
    check_plan(params, 7, limits, 2, (const size_t[]){0, 1, 0, 2, 3, 2, 4}, 5);
}

TEST(without_a_limit_there_is_one_buffer_for_each_dtype)
{
    const size_t limits[] = {SIZE_MAX};
    tddp_param params[4] = {sized(64 * MIB, TDDP_FLOAT32), sized(8, TDDP_FLOAT16),
                            sized(64 * MIB, TDDP_FLOAT32), sized(2, TDDP_FLOAT16)};
    check_plan(params, 4, limits, 1, (const size_t[]){0, 1, 0, 1}, 2);
}

TEST(a_plan_in_order_numbers_buffers_by_when_they_are_complete)
{
    const size_t limits[] = {8};
    const int64_t order[] = {4, 3, 2, 1, 0};
    size_t buffer_of[5];
    size_t buffers = 0;
    /* The float32 buffer opens first (4), but is complete (0) after the float64 buffer (3). */
    tddp_param params[5] = {sized(4, TDDP_FLOAT32), sized(8, TDDP_FLOAT64), sized(4, TDDP_FLOAT16),
                            sized(8, TDDP_FLOAT64), sized(4, TDDP_FLOAT32)};
    CHECK_OK(tddp_flat_plan_in_order(params, order, 5, limits, 1, buffer_of, &buffers));
    CHECK_INT(buffers, 4);
    CHECK_INT(buffer_of[3], 0);
    CHECK_INT(buffer_of[2], 1);
    CHECK_INT(buffer_of[1], 2);
    CHECK_INT(buffer_of[4], 3);
    CHECK_INT(buffer_of[0], 3);
}

TEST(invalid_arguments_and_failed_allocations)
{
    const size_t limits[] = {8};
    size_t buffer_of[1] = {77};
    size_t buffers = 99;
    tddp_param param = sized(4, TDDP_FLOAT32);
    CHECK_STATUS(tddp_flat_plan(&param, 0, limits, 1, buffer_of, &buffers), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "no parameters");
    CHECK_STATUS(tddp_flat_plan(&param, 1, limits, 0, buffer_of, &buffers), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "no buffer limits");
    param.dtype = (tddp_dtype)55;
    CHECK_STATUS(tddp_flat_plan(&param, 1, limits, 1, buffer_of, &buffers), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "55");
    param.dtype = TDDP_FLOAT32;
    tddp_fail_allocation(1);
    CHECK_STATUS(tddp_flat_plan(&param, 1, limits, 1, buffer_of, &buffers), TDDP_OUT_OF_MEMORY);
    CHECK_INT(buffers, 99);
}
