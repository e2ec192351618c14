/*
 * Tensors in a process group's memory, over <tddp/torch.h>. Called by Ruby threads that hold the
 * GVL. A tensor owns its memory.
 */
#include "torch_ddp.h"

tddp_dtype tddp_rb_dtype(VALUE symbol)
{
    VALUE name = rb_sym2str(symbol);
#define TDDP_RB_COMPARE(number, code, bytes, text) \
    if (strcmp(StringValueCStr(name), text) == 0)  \
        return TDDP_##number;
    TDDP_DTYPE_MAP(TDDP_RB_COMPARE)
#undef TDDP_RB_COMPARE
    rb_raise(rb_eArgError,
             "dtype: collectives don't support %" PRIsVALUE ": expected one like float32, bfloat16 "
             "or int64",
             rb_inspect(symbol));
}

/* _empty_shared(sizes, dtype): an Array of Integers and a Symbol. */
static VALUE empty_shared(VALUE self, VALUE sizes, VALUE dtype)
{
    Check_Type(dtype, T_SYMBOL);
    tddp_dtype kind = tddp_rb_dtype(dtype);
    tddp_group *group = tddp_rb_group(self);
    VALUE object = tddp_rb_fresh_tensor();
    TDDP_RB_SCRATCH memory = 0;
    size_t ndim;
    int64_t *dims = tddp_rb_scratch_for(sizes, sizeof(*dims), &memory, &ndim);
    for (size_t i = 0; i < ndim; i++)
        dims[i] = NUM2LL(rb_ary_entry(sizes, (long)i));
    tddp_rb_check(tddp_tensor_empty_shared(group, dims, ndim, kind, tddp_rb_tensor(object)));
    return object;
}

/* _copy_in_forks(enable): whether forks from now on have copies of such memory; calls add up. */
static VALUE copy_in_forks(VALUE self, VALUE enable)
{
    if (RTEST(enable))
        tddp_fork_copies_enable();
    else
        tddp_fork_copies_disable();
    return Qnil;
}

void tddp_rb_init_shared(void)
{
    VALUE group = rb_define_class_under(tddp_rb_distributed, "ProcessGroup", rb_cObject);
    rb_define_singleton_method(group, "_copy_in_forks", copy_in_forks, 1);
    rb_define_method(group, "_empty_shared", empty_shared, 2);
}
