/*
 * Torch::Distributed::GradBucket: the argument of communication hooks in Ruby, with tensors over
 * the bucket's memory. Made while a hook is called; the tensors keep the memory alive, but the next
 * iteration overwrites it. Called by the Ruby thread that runs backward.
 */
#include "torch_ddp.h"

static VALUE bucket_class = Qnil;

/* A tensor over the bucket, or over one of its gradients. */
static VALUE new_tensor(const tddp_bucket *bucket, size_t gradient, bool flat)
{
    VALUE object = tddp_rb_fresh_tensor();
    tddp_tensor *tensor = tddp_rb_tensor(object);
    tddp_rb_check(flat ? tddp_ddp_bucket_tensor(bucket, tensor)
                       : tddp_ddp_gradient_tensor(bucket, gradient, tensor));
    return object;
}

VALUE tddp_rb_grad_bucket(const tddp_bucket *bucket)
{
    VALUE self = rb_obj_alloc(bucket_class);
    VALUE gradients = rb_ary_new_capa((long)bucket->gradient_count);
    VALUE params = rb_ary_new_capa((long)bucket->gradient_count);
    for (size_t i = 0; i < bucket->gradient_count; i++) {
        rb_ary_push(gradients, new_tensor(bucket, i, false));
        rb_ary_push(params, SIZET2NUM(bucket->gradients[i].param));
    }
    rb_ivar_set(self, rb_intern("@index"), SIZET2NUM(bucket->index));
    rb_ivar_set(self, rb_intern("@last"), bucket->index + 1 == bucket->count ? Qtrue : Qfalse);
    rb_ivar_set(self, rb_intern("@iteration"), ULL2NUM(bucket->iteration));
    rb_ivar_set(self, rb_intern("@buffer"), new_tensor(bucket, 0, true));
    rb_ivar_set(self, rb_intern("@gradients"), gradients);
    rb_ivar_set(self, rb_intern("@parameter_indices"), params);
    return self;
}

void tddp_rb_grad_bucket_fill(VALUE self, VALUE tensor)
{
    tddp_tensor *into = tddp_rb_tensor(rb_ivar_get(self, rb_intern("@buffer")));
    tddp_rb_check(tddp_tensor_copy(into, tddp_rb_tensor(tensor)));
}

/* bucket.buffer = tensor: copies the tensor's elements to the bucket. */
static VALUE set_buffer(VALUE self, VALUE tensor)
{
    tddp_rb_grad_bucket_fill(self, tensor);
    return tensor;
}

static VALUE is_last(VALUE self)
{
    return rb_ivar_get(self, rb_intern("@last"));
}

void tddp_rb_init_grad_bucket(void)
{
    bucket_class = rb_define_class_under(tddp_rb_distributed, "GradBucket", rb_cObject);
    rb_global_variable(&bucket_class);
    rb_undef_method(rb_singleton_class(bucket_class), "new");
    rb_define_attr(bucket_class, "index", 1, 0);
    rb_define_attr(bucket_class, "iteration", 1, 0);
    rb_define_attr(bucket_class, "buffer", 1, 0);
    rb_define_attr(bucket_class, "gradients", 1, 0);
    rb_define_attr(bucket_class, "parameter_indices", 1, 0);
    rb_define_method(bucket_class, "buffer=", set_buffer, 1);
    rb_define_method(bucket_class, "last?", is_last, 0);
}
