/*
 * Backward from several tensors, over <tddp/torch_backward.h>. Called by Ruby threads; they keep
 * the GVL, as in torch-rb's backward, because hooks may run Ruby code: waits for other ranks
 * release it.
 */
#include "torch_ddp.h"

#include <tddp/torch_backward.h>

/* _backward(tensors, grads): Arrays of the same length. */
static VALUE backward(VALUE self, VALUE tensors, VALUE grads)
{
    TDDP_RB_SCRATCH root_memory = 0, grad_memory = 0;
    size_t count, grad_count;
    tddp_tensor **roots = tddp_rb_tensors(tensors, &root_memory, &count);
    tddp_tensor **with = tddp_rb_tensors(grads, &grad_memory, &grad_count);
    if (count != grad_count)
        rb_raise(rb_eArgError, "expected %zu gradients, one for each tensor, got %zu", count,
                 grad_count);
    tddp_rb_check(
        tddp_backward((const tddp_tensor *const *)roots, (const tddp_tensor *const *)with, count));
    return Qnil;
}

/* _failure(text): the exception for what ended libtorch's backward with this text, or nil if that
 * is none of this library's, or what Ruby code raised within backward, which is its cause. */
static VALUE failure(VALUE self, VALUE text)
{
    const char *message = StringValueCStr(text);
    tddp_status status = tddp_failure_status(message);
    if (status == TDDP_OK || status == TDDP_INTERNAL)
        return Qnil;
    return tddp_rb_error(tddp_fail(status, "%s", message));
}

/* _same_tensors(tensors): other objects with the same tensors, graph included. */
static VALUE same_tensors(VALUE self, VALUE tensors)
{
    return tddp_rb_fresh_tensors(tensors);
}

/* _release_tensors(tensors): frees their memory now, if only these objects have them, which can't
 * be used any more. */
static VALUE release_tensors(VALUE self, VALUE tensors)
{
    TDDP_RB_SCRATCH memory = 0;
    size_t count;
    tddp_tensor **handles = tddp_rb_tensors(tensors, &memory, &count);
    for (size_t i = 0; i < count; i++)
        tddp_tensor_reset(handles[i]);
    return Qnil;
}

void tddp_rb_init_backward(void)
{
    TDDP_RB_PRIVATE("_backward", backward, 2);
    TDDP_RB_PRIVATE("_failure", failure, 1);
    TDDP_RB_PRIVATE("_same_tensors", same_tensors, 1);
    TDDP_RB_PRIVATE("_release_tensors", release_tensors, 1);
}
