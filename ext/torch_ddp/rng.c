/*
 * The state of libtorch's random number generator over <tddp/torch_rng.h>, as a String of bytes.
 * Called by Ruby threads that hold the GVL; never blocks.
 */
#include "torch_ddp.h"

#include <tddp/torch_rng.h>

static VALUE rng_state(VALUE self)
{
    size_t size = 0;
    tddp_rb_check(tddp_rng_state(NULL, 0, &size));
    VALUE bytes = rb_str_new(NULL, (long)size);
    tddp_rb_check(tddp_rng_state(RSTRING_PTR(bytes), (size_t)RSTRING_LEN(bytes), &size));
    return bytes;
}

static VALUE set_rng_state(VALUE self, VALUE bytes)
{
    StringValue(bytes);
    tddp_rb_check(tddp_set_rng_state(RSTRING_PTR(bytes), (size_t)RSTRING_LEN(bytes)));
    return Qnil;
}

void tddp_rb_init_rng(void)
{
    rb_define_singleton_method(tddp_rb_distributed, "_rng_state", rng_state, 0);
    rb_define_singleton_method(tddp_rb_distributed, "_set_rng_state", set_rng_state, 1);
}
