// Tensors as buffers for the collectives.
#include <ATen/ATen.h>

#include <tddp/torch.h>

#undef CHECK // libtorch has one too
#include "check.h"

static tddp_status buffer_of(const at::Tensor &tensor, tddp_buffer *out)
{
    return tddp_tensor_buffer(reinterpret_cast<const tddp_tensor *>(&tensor), out);
}

TEST(the_version_is_that_of_libtorch)
{
    CHECK_CONTAINS(tddp_torch_version(), ".");
}

TEST(every_dtype_has_its_size_and_name)
{
    const std::pair<at::ScalarType, tddp_dtype> pairs[] = {
        {at::kByte, TDDP_UINT8},
        {at::kChar, TDDP_INT8},
        {at::kShort, TDDP_INT16},
        {at::kInt, TDDP_INT32},
        {at::kLong, TDDP_INT64},
        {at::kHalf, TDDP_FLOAT16},
        {at::kBFloat16, TDDP_BFLOAT16},
        {at::kFloat, TDDP_FLOAT32},
        {at::kDouble, TDDP_FLOAT64},
        {at::kComplexFloat, TDDP_COMPLEX64},
        {at::kComplexDouble, TDDP_COMPLEX128},
        {at::kBool, TDDP_BOOL},
    };
    for (const auto &pair : pairs) {
        const at::Tensor tensor = at::zeros({3, 5}, pair.first);
        tddp_buffer buffer{};
        CHECK_OK(buffer_of(tensor, &buffer));
        CHECK_INT(buffer.dtype, pair.second);
        CHECK_INT(buffer.count, 15);
        CHECK(buffer.data == tensor.data_ptr());
        CHECK_INT(buffer.device_type, TDDP_CPU);
        CHECK_INT(tddp_dtype_size(buffer.dtype), tensor.element_size());
    }
}

TEST(a_slice_has_its_own_address)
{
    const at::Tensor reference = at::arange(12, at::kFloat).view({4, 3});
    tddp_buffer buffer{};
    CHECK_OK(buffer_of(reference.narrow(0, 2, 2), &buffer));
    CHECK_INT(buffer.count, 6);
    CHECK_DOUBLE(static_cast<float *>(buffer.data)[0], 6.0, 0);
    CHECK_OK(buffer_of(at::zeros({0, 3}), &buffer));
    CHECK_INT(buffer.count, 0);
    CHECK(buffer.data == nullptr);
    CHECK_OK(buffer_of(at::zeros({}), &buffer));
    CHECK_INT(buffer.count, 1);
}

TEST(noncontiguous_tensors_are_refused_with_advice)
{
    tddp_buffer buffer{};
    CHECK_STATUS(buffer_of(at::zeros({2, 3}).t(), &buffer), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "[3, 2]");
    CHECK_CONTAINS(tddp_error_message(), "tensor.contiguous");
    CHECK_STATUS(buffer_of(at::Tensor(), &buffer), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "undefined");
    CHECK_STATUS(buffer_of(at::eye(3).to_sparse(), &buffer), TDDP_UNSUPPORTED);
    CHECK_CONTAINS(tddp_error_message(), "to_dense");
    CHECK_STATUS(buffer_of(at::zeros({2}, at::kComplexFloat).conj(), &buffer),
                 TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "conjugate");
    CHECK_STATUS(buffer_of(at::quantize_per_tensor(at::zeros({2}), 0.1, 0, at::kQInt8), &buffer),
                 TDDP_UNSUPPORTED);
    CHECK_STATUS(buffer_of(at::empty({2}, at::TensorOptions().device(at::kMeta)), &buffer),
                 TDDP_UNSUPPORTED);
    CHECK_CONTAINS(tddp_error_message(), "meta");
}

TEST(a_retained_tensor_keeps_its_memory)
{
    tddp_tensor *kept = nullptr;
    {
        const at::Tensor tensor = at::full({4}, 7.0);
        kept = tddp_tensor_retain(reinterpret_cast<const tddp_tensor *>(&tensor));
        CHECK_INT(tensor.use_count(), 2);
    }
    tddp_buffer buffer{};
    CHECK_OK(tddp_tensor_buffer(kept, &buffer));
    CHECK_DOUBLE(static_cast<float *>(buffer.data)[3], 7.0, 0);
    tddp_tensor_release(kept);
    tddp_tensor_release(nullptr);
}
