/*
 * Torch::Tensor objects and the handles in them. Entered by Ruby threads that hold the GVL. A
 * handle is borrowed from its object. tensor_bridge.cc looks into the objects.
 */
#include "torch_ddp.h"

static VALUE tensor_class = Qnil;
static VALUE torch_module = Qnil;

bool tddp_rb_is_tensor(VALUE object)
{
    return RTEST(rb_obj_is_kind_of(object, tensor_class));
}

tddp_tensor *tddp_rb_named_tensor(VALUE object, const char *name, long index)
{
    const bool is_tensor = tddp_rb_is_tensor(object);
    tddp_tensor *tensor = is_tensor ? tddp_rb_wrapped_tensor(object) : NULL;
    if (tensor != NULL)
        return tensor;
    VALUE argument = name == NULL ? rb_str_new_cstr("")
                     : index < 0  ? rb_sprintf("%s: ", name)
                                  : rb_sprintf("%s[%ld]: ", name, index);
    if (is_tensor)
        rb_raise(rb_eTypeError,
                 "%" PRIsVALUE "this %s contains no tensor: was it made with allocate?", argument,
                 rb_obj_classname(object));
    rb_raise(rb_eTypeError, "%" PRIsVALUE "expected a Torch::Tensor, got %" PRIsVALUE " (%s)",
             argument, rb_inspect(object), rb_obj_classname(object));
}

tddp_tensor *tddp_rb_tensor(VALUE object)
{
    return tddp_rb_named_tensor(object, NULL, -1);
}

tddp_tensor *tddp_rb_tensor_or_null(VALUE object)
{
    return NIL_P(object) ? NULL : tddp_rb_tensor(object);
}

tddp_tensor **tddp_rb_tensors(VALUE list, volatile VALUE *holder, size_t *count)
{
    tddp_tensor **tensors = tddp_rb_scratch_for(list, sizeof(*tensors), holder, count);
    for (size_t i = 0; i < *count; i++)
        tensors[i] = tddp_rb_tensor(rb_ary_entry(list, (long)i));
    return tensors;
}

tddp_tensor **tddp_rb_tensors_or_null(VALUE list, volatile VALUE *holder, size_t *count)
{
    tddp_tensor **tensors = tddp_rb_scratch_for(list, sizeof(*tensors), holder, count);
    for (size_t i = 0; i < *count; i++)
        tensors[i] = tddp_rb_tensor_or_null(rb_ary_entry(list, (long)i));
    return tensors;
}

/* --- new objects ----------------------------------------------------------------------------- */

VALUE tddp_rb_fresh_tensor(void)
{
    return rb_funcall(torch_module, rb_intern("empty"), 1, INT2FIX(0));
}

VALUE tddp_rb_tensor_object(const tddp_tensor *from)
{
    if (from == NULL)
        return Qnil;
    VALUE object = tddp_rb_fresh_tensor();
    tddp_rb_check(tddp_tensor_assign(tddp_rb_tensor(object), from));
    return object;
}

VALUE tddp_rb_tensor_objects(tddp_tensor *const *from, size_t count)
{
    VALUE objects = rb_ary_new_capa((long)count);
    for (size_t i = 0; i < count; i++)
        rb_ary_push(objects, tddp_rb_tensor_object(from[i]));
    return objects;
}

VALUE tddp_rb_fresh_tensors(VALUE array)
{
    TDDP_RB_SCRATCH memory = 0;
    size_t count;
    tddp_tensor **tensors = tddp_rb_tensors_or_null(array, &memory, &count);
    return tddp_rb_tensor_objects(tensors, count);
}

void tddp_rb_init_tensors(void)
{
    tensor_class = rb_path2class("Torch::Tensor");
    rb_global_variable(&tensor_class);
    torch_module = rb_path2class("Torch");
    rb_global_variable(&torch_module);
}
