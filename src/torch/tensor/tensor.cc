// Describes tensors as buffers for the collectives: address, count, dtype, device. Any thread;
// never copies. A tensor that isn't dense and contiguous is an error that says what to do.
#include <sstream>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <torch/version.h>

#include "torch/tensor/device.h"
#include "torch/tensor/shim.h"

#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 1)
#define TDDP_LIBTORCH_HAS_FLOAT8
#endif

namespace tddp_torch
{

tddp_dtype dtype_of(const at::Tensor &tensor)
{
    switch (tensor.scalar_type()) {
    case at::kByte:
        return TDDP_UINT8;
    case at::kChar:
        return TDDP_INT8;
    case at::kShort:
        return TDDP_INT16;
    case at::kInt:
        return TDDP_INT32;
    case at::kLong:
        return TDDP_INT64;
    case at::kHalf:
        return TDDP_FLOAT16;
    case at::kBFloat16:
        return TDDP_BFLOAT16;
    case at::kFloat:
        return TDDP_FLOAT32;
    case at::kDouble:
        return TDDP_FLOAT64;
    case at::kComplexFloat:
        return TDDP_COMPLEX64;
    case at::kComplexDouble:
        return TDDP_COMPLEX128;
    case at::kBool:
        return TDDP_BOOL;
#ifdef TDDP_LIBTORCH_HAS_FLOAT8
    case at::kFloat8_e4m3fn:
        return TDDP_FLOAT8_E4M3FN;
    case at::kFloat8_e5m2:
        return TDDP_FLOAT8_E5M2;
#endif
    default:
        break;
    }
    throw Failure(tddp_fail(TDDP_UNSUPPORTED, "tensor of dtype %s: collectives don't support it",
                            c10::toString(tensor.scalar_type())));
}

at::ScalarType scalar_type_of(tddp_dtype dtype)
{
    switch (dtype) {
    case TDDP_UINT8:
        return at::kByte;
    case TDDP_INT8:
        return at::kChar;
    case TDDP_INT16:
        return at::kShort;
    case TDDP_INT32:
        return at::kInt;
    case TDDP_INT64:
        return at::kLong;
    case TDDP_FLOAT16:
        return at::kHalf;
    case TDDP_BFLOAT16:
        return at::kBFloat16;
    case TDDP_FLOAT32:
        return at::kFloat;
    case TDDP_FLOAT64:
        return at::kDouble;
    case TDDP_COMPLEX64:
        return at::kComplexFloat;
    case TDDP_COMPLEX128:
        return at::kComplexDouble;
    case TDDP_BOOL:
        return at::kBool;
#ifdef TDDP_LIBTORCH_HAS_FLOAT8
    case TDDP_FLOAT8_E4M3FN:
        return at::kFloat8_e4m3fn;
    case TDDP_FLOAT8_E5M2:
        return at::kFloat8_e5m2;
#else
    case TDDP_FLOAT8_E4M3FN:
    case TDDP_FLOAT8_E5M2:
        throw Failure(tddp_fail(TDDP_UNSUPPORTED, "libtorch %s has no %s: expected 2.1 or newer",
                                TORCH_VERSION, tddp_dtype_name(dtype)));
#endif
    }
    throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT, "dtype number %d: expected one of buffer.h",
                            static_cast<int>(dtype)));
}

bool is_on_cpu(const at::Tensor &tensor)
{
    tddp_device_type type = TDDP_CUDA;
    int32_t index = 0;
    if (tensor.device().is_cpu()) {
        device_of(tensor, &type, &index);
    }
    return type == TDDP_CPU;
}

at::Tensor tensor_over(void *data, at::IntArrayRef sizes, const at::TensorOptions &options,
                       std::shared_ptr<void> kept)
{
    return at::for_blob(data, sizes)
        .deleter([kept](void *) {})
        .options(options)
        .target_device(options.device())
        .make_tensor();
}

bool same_device(const at::Tensor &one, const at::Tensor &other)
{
    tddp_device_type types[2] = {TDDP_CPU, TDDP_CPU};
    int32_t indices[2] = {0, 0};
    device_of(one, &types[0], &indices[0]);
    device_of(other, &types[1], &indices[1]);
    return types[0] == types[1] && indices[0] == indices[1];
}

static void check_plain(const at::Tensor &tensor)
{
    if (!tensor.defined()) {
        throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT, "the tensor is undefined"));
    }
    if (tensor.layout() != at::kStrided || tensor.is_quantized()) {
        throw Failure(tddp_fail(TDDP_UNSUPPORTED,
                                "a sparse or quantized tensor: collectives take dense ones, see "
                                "to_dense and dequantize"));
    }
    if (!tensor.is_contiguous()) {
        std::ostringstream shape;
        shape << tensor.sizes() << " with strides " << tensor.strides();
        throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT,
                                "the tensor of shape %s is not contiguous: pass "
                                "tensor.contiguous and copy the result back",
                                shape.str().c_str()));
    }
    if (tensor.is_conj() || tensor.is_neg()) {
        throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT,
                                "the tensor is a lazy conjugate or negative of its memory: pass a "
                                "clone of it"));
    }
}

static tddp_buffer buffer_of(const at::Tensor &tensor)
{
    check_plain(tensor);
    tddp_buffer buffer{};
    buffer.dtype = dtype_of(tensor);
    device_of(tensor, &buffer.device_type, &buffer.device_index);
    buffer.count = static_cast<size_t>(tensor.numel());
    buffer.data = buffer.count ? tensor.data_ptr() : nullptr;
    buffer.stream = current_stream(buffer.device_type, buffer.device_index);
    return buffer;
}

} // namespace tddp_torch

const char *tddp_torch_version(void)
{
    return TORCH_VERSION;
}

tddp_status tddp_tensor_buffer(const tddp_tensor *tensor, tddp_buffer *out)
{
    using namespace tddp_torch;
    return guard([&] { *out = buffer_of(tensor_of(tensor)); });
}

tddp_status tddp_tensor_written(const tddp_tensor *tensor)
{
    using namespace tddp_torch;
    return guard([&] {
        const at::Tensor &written = tensor_of(tensor);
        if (written.defined() && !written.is_inference()) {
            written.unsafeGetTensorImpl()->bump_version();
        }
    });
}

tddp_tensor *tddp_tensor_retain(const tddp_tensor *tensor)
{
    at::Tensor *copy = nullptr;
    if (tddp_torch::guard([&] { copy = new at::Tensor(tddp_torch::tensor_of(tensor)); })) {
        return nullptr;
    }
    return reinterpret_cast<tddp_tensor *>(copy);
}

void tddp_tensor_release(tddp_tensor *tensor)
{
    delete reinterpret_cast<at::Tensor *>(tensor);
}

tddp_status tddp_tensor_assign(tddp_tensor *into, const tddp_tensor *from)
{
    using namespace tddp_torch;
    return guard([&] { *reinterpret_cast<at::Tensor *>(into) = tensor_of(from); });
}

tddp_status tddp_tensor_copy(tddp_tensor *into, const tddp_tensor *from)
{
    using namespace tddp_torch;
    return guard([&] {
        const at::Tensor &to = tensor_of(into);
        const at::Tensor &source = tensor_of(from);
        if (!source.defined() || source.numel() != to.numel()) {
            throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT, "%lld elements: expected %lld",
                                    static_cast<long long>(source.defined() ? source.numel() : 0),
                                    static_cast<long long>(to.numel())));
        }
        const at::NoGradGuard no_grad;
        to.copy_(source.reshape(to.sizes()));
    });
}
