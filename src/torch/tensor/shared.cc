// Tensors in a group's memory, on which its operations work in place. A tensor keeps its memory
// alive, also after the group's destruction. Any thread.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "torch/tensor/shim.h"

namespace tddp_torch
{

namespace
{

// The bytes of a tensor of these sizes.
size_t bytes_of(const int64_t *dims, size_t ndim, size_t each)
{
    size_t bytes = each;
    bool none = false;
    bool over = false;
    for (size_t i = 0; i < ndim; i++) {
        if (dims[i] < 0) {
            throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT,
                                    "size[%zu] is %lld: expected 0 or more elements", i,
                                    static_cast<long long>(dims[i])));
        }
        none = none || dims[i] == 0;
        over = over || __builtin_mul_overflow(bytes, static_cast<size_t>(dims[i]), &bytes) ||
               bytes > static_cast<size_t>(PTRDIFF_MAX);
    }
    if (none) {
        return 0;
    }
    if (over) {
        throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT,
                                "a tensor of these %zu dimensions has more than 2^63 bytes", ndim));
    }
    return bytes;
}

at::Tensor empty_shared(tddp_group *group, const int64_t *dims, size_t ndim, tddp_dtype dtype)
{
    if (!group) {
        throw Failure(tddp_fail(TDDP_INVALID_ARGUMENT, "no process group: expected the one whose "
                                                       "operations use the tensor"));
    }
    const at::TensorOptions options = at::TensorOptions().dtype(scalar_type_of(dtype));
    const at::IntArrayRef sizes(dims, ndim);
    const size_t bytes = bytes_of(dims, ndim, tddp_dtype_size(dtype));
    if (bytes == 0) {
        return at::empty(sizes, options);
    }
    tddp_group_memory *memory = nullptr;
    check(tddp_group_memory_create(group, bytes, &memory));
    const std::shared_ptr<tddp_group_memory> held(memory, tddp_group_memory_release);
    return at::from_blob(
        tddp_group_memory_data(memory), sizes, [held](void *) {}, options);
}

} // namespace

} // namespace tddp_torch

tddp_status tddp_tensor_empty_shared(tddp_group *group, const int64_t *dims, size_t ndim,
                                     tddp_dtype dtype, tddp_tensor *into)
{
    using namespace tddp_torch;
    return guard(
        [&] { *reinterpret_cast<at::Tensor *>(into) = empty_shared(group, dims, ndim, dtype); });
}
