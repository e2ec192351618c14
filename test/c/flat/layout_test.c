/* The slices of flat buffers, and the lifetime of their memory. */
#include <string.h>

#include <tddp.h>

#include "check.h"
#include "flat/flat.h"

enum { COUNT = 5 };

static const int64_t sizes[COUNT] = {5, 3, 4, 17, 0};

/* Two of one dtype, a complex one, a sparse one, and one without elements. */
static const tddp_param params[COUNT] = {
    {"a", 5, TDDP_FLOAT32, TDDP_CPU, 0, &sizes[0], 1, 0},
    {"b", 3, TDDP_COMPLEX64, TDDP_CPU, 0, &sizes[1], 1, 0},
    {"c", 4, TDDP_FLOAT32, TDDP_CPU, 0, &sizes[2], 1, 1},
    {"d", 17, TDDP_FLOAT32, TDDP_CPU, 0, &sizes[3], 1, 0},
    {"e", 0, TDDP_FLOAT32, TDDP_CPU, 0, &sizes[4], 1, 0},
};

static const int64_t backwards[COUNT] = {4, 3, 2, 1, 0};
static const tddp_device_memory_ops no_device;

static tddp_group *lone_group(void)
{
    tddp_store *store = NULL;
    tddp_group *group = NULL;
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    CHECK_OK(tddp_hash_store_create(5000, &store));
    opts.backend = "fake";
    opts.store = store;
    opts.world_size = 1;
    CHECK_OK(tddp_group_create(&opts, NULL, &group));
    tddp_store_release(store);
    return group;
}

/* One buffer for each dtype, with slices in reverse order; allocation number `fails` fails. */
static tddp_status lay_out(tddp_group *group, long fails, tddp_flat_layout *out)
{
    const size_t unlimited = SIZE_MAX;
    size_t *buffer_of = tddp_alloc_array(COUNT, sizeof *buffer_of);
    size_t buffers = 0;
    CHECK(buffer_of != NULL);
    CHECK_OK(tddp_flat_plan(params, COUNT, &unlimited, 1, buffer_of, &buffers));
    CHECK_INT(buffers, 2);
    if (fails > 0) {
        tddp_fail_allocation(fails);
    }
    return tddp_flat_layout_make(group, &no_device, params, backwards, COUNT, buffer_of, buffers,
                                 out);
}

static void check_slice(const tddp_flat_layout *layout, size_t b, size_t k, size_t param,
                        size_t offset, size_t count)
{
    const tddp_flat_buffer *buffer = &layout->buffers[b];
    const tddp_flat_slice *slice = &buffer->slices[k];
    CHECK_INT(slice->param, param);
    CHECK_INT(slice->offset, offset);
    CHECK_INT(slice->count, count);
    CHECK(slice->dims == &sizes[param] && slice->ndim == 1);
    CHECK_INT(layout->buffer_of[param], b);
    CHECK(layout->addresses[param] == (char *)buffer->buffer.data + offset * sizeof(float));
    CHECK_INT((uintptr_t)layout->addresses[param] % TDDP_FLAT_ALIGNMENT, 0);
}

TEST(slices_are_in_order_and_aligned)
{
    tddp_group *group = lone_group();
    tddp_flat_layout layout = {0};
    CHECK_OK(lay_out(group, 0, &layout));
    CHECK_INT(layout.buffer_count, 2);
    CHECK_INT(layout.buffers[0].slice_count, 3);
    CHECK_INT(layout.buffers[0].bytes, 22 * sizeof(float));
    CHECK_INT(layout.buffers[0].buffer.count, 48); /* 17 of 32, and 5 of 16 */
    check_slice(&layout, 0, 0, 4, 0, 0);
    check_slice(&layout, 0, 1, 3, 0, 17);
    check_slice(&layout, 0, 2, 0, 32, 5);
    const float *data = layout.buffers[0].buffer.data;
    for (size_t k = 0; k < layout.buffers[0].buffer.count; k++) {
        CHECK_DOUBLE(data[k], 0, 0);
    }
    tddp_flat_layout_free(&layout);
    tddp_group_release(group);
}

TEST(complex_slices_are_real_and_sparse_parameters_have_none)
{
    tddp_group *group = lone_group();
    tddp_flat_layout layout = {0};
    CHECK_OK(lay_out(group, 0, &layout));
    CHECK_INT(layout.buffers[1].buffer.dtype, TDDP_FLOAT32);
    CHECK_INT(layout.buffers[1].buffer.count, 16);
    CHECK_INT(layout.buffers[1].bytes, 6 * sizeof(float));
    CHECK_INT(layout.buffers[1].slice_count, 1);
    check_slice(&layout, 1, 0, 1, 0, 6);
    CHECK(layout.buffer_of[2] == TDDP_FLAT_NO_BUFFER);
    CHECK(layout.addresses[2] == NULL);
    tddp_flat_layout_free(&layout);
    tddp_flat_layout_free(&layout); /* all zero now */
    tddp_group_release(group);
}

TEST(memory_outlives_layout_and_group)
{
    tddp_group *group = lone_group();
    tddp_flat_layout layout = {0};
    const float values[5] = {1, 2, 3, 4, 5};
    CHECK_OK(lay_out(group, 0, &layout));
    tddp_flat_memory *memory = tddp_flat_memory_retain(layout.memory);
    CHECK(memory == layout.memory);
    const tddp_buffer buffer = layout.buffers[0].buffer;
    float *slice = (float *)layout.addresses[0];
    tddp_flat_layout_free(&layout);
    tddp_group_release(group);
    CHECK_OK(tddp_flat_memory_copy(memory, &params[0], slice, values));
    CHECK(memcmp(slice, values, sizeof values) == 0);
    CHECK_OK(tddp_flat_memory_copy(memory, &params[4], slice, values)); /* nothing */
    CHECK_OK(tddp_flat_memory_zero(memory, &buffer));
    CHECK_DOUBLE(slice[4], 0, 0);
    tddp_flat_memory_release(memory);
    tddp_flat_memory_release(NULL);
}

TEST(failed_allocations_of_a_layout_leak_nothing)
{
    enum { ALLOCATIONS = 5 };
    tddp_group *group = lone_group();
    tddp_flat_layout layout = {0};
    for (long n = 1; n <= ALLOCATIONS; n++) {
        CHECK_STATUS(lay_out(group, n, &layout), TDDP_OUT_OF_MEMORY);
        CHECK(layout.buffers == NULL);
    }
    tddp_group_release(group);
}
