// Tensors as the collectives see them: an address, elements, a dtype, a device. Any thread; only
// looks, never copies: a tensor that is not one plain piece of memory is refused with the cure.
#include <sstream>

#include <ATen/core/grad_mode.h>
#include <torch/version.h>

#include "torch/shim.h"

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
    default:
        break;
    }
    throw Failure(tddp_fail(TDDP_UNSUPPORTED, "tensor of dtype %s: collectives do not know it",
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
    }
    throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT, "dtype number %d: expected one of buffer.h",
                            static_cast<int>(dtype)));
}

void device_of(const at::Tensor &tensor, tddp_device_type *type, int32_t *index)
{
    const c10::Device device = tensor.device();
    if (device.is_cpu()) {
        *type = TDDP_CPU;
        *index = 0;
    } else if (device.is_cuda()) {
        *type = TDDP_CUDA;
        *index = device.index();
    } else {
        throw Failure(tddp_fail(TDDP_UNSUPPORTED,
                                "tensor on device %s: collectives know cpu and cuda",
                                device.str().c_str()));
    }
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
