/*
 * Converts between Torch::Tensor and libtorch's tensor. The only file that includes Rice and
 * libtorch, in the versions that torch-rb was built with. Called by Ruby threads that hold the GVL.
 * Raises nothing.
 */
#include <rice/rice.hpp>

/* Macros of Ruby's headers that collide with names in libtorch's. */
#undef _
#undef isfinite
#undef isnan
#undef isinf

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include "torch_ddp.h"

namespace
{

/* Rice's get() takes no argument up to 4.5, and the expected type in later versions. */
template <typename Wrapper>
auto address(Wrapper *wrapper, rb_data_type_t *, int) -> decltype(wrapper->get())
{
    return wrapper->get();
}

template <typename Wrapper>
auto address(Wrapper *wrapper, rb_data_type_t *type, long) -> decltype(wrapper->get(type))
{
    return wrapper->get(type);
}

} // namespace

tddp_tensor *tddp_rb_wrapped_tensor(VALUE object)
{
    if (!RB_TYPE_P(object, T_DATA) || !RTYPEDDATA_P(object) || RTYPEDDATA_DATA(object) == nullptr)
        return nullptr;
    try {
        auto *wrapper = Rice::detail::getWrapper(object);
        auto *type = const_cast<rb_data_type_t *>(RTYPEDDATA_TYPE(object));
        /* torch-rb's Parameter is derived from at::Tensor alone, so its address is the tensor's. */
        return static_cast<tddp_tensor *>(wrapper ? address(wrapper, type, 0) : nullptr);
    } catch (...) {
        return nullptr;
    }
}

bool tddp_rb_same_tensor(const tddp_tensor *a, const tddp_tensor *b)
{
    return reinterpret_cast<const at::Tensor *>(a)->is_same(
        *reinterpret_cast<const at::Tensor *>(b));
}

tddp_rb_form tddp_rb_tensor_form(const tddp_tensor *tensor)
{
    const auto &self = *reinterpret_cast<const at::Tensor *>(tensor);
    if (!self.defined() || self.layout() != at::kStrided || self.is_contiguous())
        return TDDP_RB_FORM_PLAIN;
    const auto sizes = self.sizes();
    const auto strides = self.strides();
    for (size_t i = 0; i < sizes.size(); i++) {
        if (strides[i] == 0 && sizes[i] > 1)
            return TDDP_RB_FORM_FOLDED;
    }
    return TDDP_RB_FORM_APART;
}

size_t tddp_rb_shape(const tddp_tensor *tensor, const int64_t **dims)
{
    const auto sizes = reinterpret_cast<const at::Tensor *>(tensor)->sizes();
    *dims = sizes.data();
    return sizes.size();
}

void tddp_rb_set_num_threads(int count)
{
    // Setting it starts another pool of libtorch's, whose threads spin for a while.
    if (at::get_num_threads() != count)
        at::set_num_threads(count);
}

int tddp_rb_num_threads(void)
{
    return at::get_num_threads();
}
