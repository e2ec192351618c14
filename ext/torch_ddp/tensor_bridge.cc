/*
 * Converts between Torch::Tensor and libtorch's tensor. The only file that includes Rice and
 * libtorch, in the versions that torch-rb was built with. Called by Ruby threads that hold the GVL.
 * Invariant: when a Ruby exception is raised here, no C++ object with a destructor is alive.
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

VALUE tensor_class = Qnil;
VALUE torch_module = Qnil;

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

/* The address of the wrapped C++ object, or NULL. */
void *wrapped(VALUE object) noexcept
{
    try {
        auto *wrapper = Rice::detail::getWrapper(object);
        auto *type = const_cast<rb_data_type_t *>(RTYPEDDATA_TYPE(object));
        return wrapper ? address(wrapper, type, 0) : nullptr;
    } catch (...) {
        return nullptr;
    }
}

} // namespace

tddp_tensor *tddp_rb_tensor(VALUE object)
{
    if (!RTEST(rb_obj_is_kind_of(object, tensor_class)))
        rb_raise(rb_eTypeError, "expected a Torch::Tensor, got %" PRIsVALUE " (%s)",
                 rb_inspect(object), rb_obj_classname(object));
    void *tensor = nullptr;
    if (RB_TYPE_P(object, T_DATA) && RTYPEDDATA_P(object) && RTYPEDDATA_DATA(object) != nullptr)
        tensor = wrapped(object);
    if (tensor == nullptr)
        rb_raise(rb_eTypeError, "this %s contains no tensor: was it made with allocate?",
                 rb_obj_classname(object));
    /* torch-rb's Parameter is derived from at::Tensor alone, so its address is the tensor's. */
    return static_cast<tddp_tensor *>(tensor);
}

VALUE tddp_rb_fresh_tensor(void)
{
    return rb_funcall(torch_module, rb_intern("empty"), 1, INT2FIX(0));
}

VALUE tddp_rb_fresh_tensors(VALUE array)
{
    Check_Type(array, T_ARRAY);
    VALUE fresh = rb_ary_new_capa(RARRAY_LEN(array));
    for (long i = 0; i < RARRAY_LEN(array); i++) {
        const tddp_tensor *from = tddp_rb_tensor(rb_ary_entry(array, i));
        VALUE object = tddp_rb_fresh_tensor();
        tddp_rb_check(tddp_tensor_assign(tddp_rb_tensor(object), from));
        rb_ary_push(fresh, object);
    }
    return fresh;
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

void tddp_rb_init_tensor(void)
{
    tensor_class = rb_path2class("Torch::Tensor");
    rb_global_variable(&tensor_class);
    torch_module = rb_path2class("Torch");
    rb_global_variable(&torch_module);
}
