/*
 * Operations with a backward that communicates: Torch::NN::SyncBatchNorm's, over
 * <tddp/torch_nn.h>, and the functions of Torch::Distributed::NN, over <tddp/torch_collectives.h>
 * and <tddp/torch_linear.h>.
 * Called by Ruby threads that hold the GVL; waits for other ranks release it, those of backward by
 * nogvl.c's rules for it.
 */
#include "torch_ddp.h"

#include <string.h>

#include <tddp/torch_collectives.h>
#include <tddp/torch_linear.h>
#include <tddp/torch_nn.h>

/* --- waiting in forward ---------------------------------------------------------------------- */

typedef struct wait_call {
    tddp_rb_body body;
    void *data;
    tddp_status status;
} wait_call;

/* The tag of a longjmp to continue after libtddp has returned to this thread's forward, or 0. */
static _Thread_local int pending_tag;

static tddp_status body_wait(void *data, const tddp_wait *wait)
{
    wait_call *call = data;
    call->status = call->body(call->data, wait);
    return call->status;
}

/* A tddp_blocking_region for forward: unlike for backward's, this file raises the interrupt. */
static tddp_status wait_in_forward(tddp_rb_body body, void *data)
{
    wait_call call = {body, data, TDDP_CANCELED};
    tddp_rb_outcome outcome = tddp_rb_blocking_brief(body_wait, &call);
    pending_tag = outcome.state;
    if (pending_tag != 0)
        return tddp_fail(TDDP_CANCELED, "interrupted");
    return NIL_P(outcome.error) ? TDDP_OK : call.status;
}

/* Another thread may destroy the group (NULL: none) meanwhile; end_forward() releases it. */
static void begin_forward(tddp_group *group)
{
    pending_tag = 0;
    if (group)
        tddp_group_retain(group);
}

/* After libtddp has returned: raises what ended a wait, or the failure. */
static void end_forward(tddp_group *group, tddp_status status)
{
    tddp_group_release(group);
    if (pending_tag != 0)
        tddp_rb_raise_outcome((tddp_rb_outcome){Qnil, pending_tag});
    tddp_rb_check(status);
}

/* --- batch normalization --------------------------------------------------------------------- */

/* _sync_batch_norm(output, input, group, [weight, bias, running_mean, running_var], momentum, eps);
 * the output is a new Torch::Tensor that is assigned the result. */
static VALUE sync_batch_norm(VALUE self, VALUE output, VALUE input, VALUE group, VALUE tensors,
                             VALUE momentum, VALUE eps)
{
    Check_Type(tensors, T_ARRAY);
    tddp_sync_batch_norm_opts opts = TDDP_SYNC_BATCH_NORM_OPTS_INIT;
    opts.weight = tddp_rb_tensor_or_null(rb_ary_entry(tensors, 0));
    opts.bias = tddp_rb_tensor_or_null(rb_ary_entry(tensors, 1));
    opts.running_mean = tddp_rb_tensor_or_null(rb_ary_entry(tensors, 2));
    opts.running_var = tddp_rb_tensor_or_null(rb_ary_entry(tensors, 3));
    opts.momentum = NUM2DBL(momentum);
    opts.eps = NUM2DBL(eps);
    opts.blocking_region = wait_in_forward;
    opts.backward_blocking_region = tddp_rb_blocking_in_backward;
    const tddp_tensor *batch = tddp_rb_tensor(input);
    tddp_tensor *result = tddp_rb_tensor(output);
    tddp_group *shared = tddp_rb_group(group);
    begin_forward(shared);
    end_forward(shared, tddp_sync_batch_norm(shared, batch, &opts, result));
    return output;
}

/* --- collectives ----------------------------------------------------------------------------- */

static tddp_map map_of(VALUE name)
{
    const char *text = rb_id2name(rb_sym2id(name));
    for (int map = 0; map < TDDP_MAP_COUNT; map++)
        if (strcmp(tddp_map_name((tddp_map)map), text) == 0)
            return (tddp_map)map;
    rb_raise(rb_eArgError, "no map is called %s", text);
}

/* A list of Integers, one for each rank, in tddp_rb_scratch() memory; nil: NULL. */
static int64_t *rows_of(VALUE list, int ranks, volatile VALUE *memory)
{
    if (NIL_P(list))
        return NULL;
    Check_Type(list, T_ARRAY);
    if (RARRAY_LEN(list) != ranks)
        rb_raise(rb_eArgError, "expected %d sizes, one for each rank, got %ld", ranks,
                 RARRAY_LEN(list));
    int64_t *rows = tddp_rb_scratch(memory, ranks, sizeof *rows);
    for (int rank = 0; rank < ranks; rank++)
        rows[rank] = NUM2LL(rb_ary_entry(list, rank));
    return rows;
}

/* _collective(input, group, map, gradient, root, scale, sends, receives) → the new tensor; maps are
 * Symbols, rows lists or nil. */
static VALUE collective(VALUE self, VALUE input, VALUE group, VALUE map, VALUE gradient, VALUE root,
                        VALUE scale, VALUE sends, VALUE receives)
{
    TDDP_RB_SCRATCH send_memory = 0, receive_memory = 0;
    tddp_collective_opts opts = TDDP_COLLECTIVE_OPTS_INIT;
    tddp_group *shared = tddp_rb_group(group);
    opts.map = map_of(map);
    opts.gradient = map_of(gradient);
    opts.root = NUM2INT(root);
    opts.scale = NUM2DBL(scale);
    opts.sends = rows_of(sends, tddp_group_world_size(shared), &send_memory);
    opts.receives = rows_of(receives, tddp_group_world_size(shared), &receive_memory);
    opts.blocking_region = wait_in_forward;
    opts.backward_blocking_region = tddp_rb_blocking_in_backward;
    VALUE output = tddp_rb_fresh_tensor();
    const tddp_tensor *tensor = tddp_rb_tensor(input);
    tddp_tensor *result = tddp_rb_tensor(output);
    begin_forward(shared);
    end_forward(shared, tddp_collective(shared, tensor, &opts, result));
    return output;
}

/* _average_gradient(tensor, group, divisor) → the hook's number */
static VALUE average_gradient(VALUE self, VALUE tensor, VALUE group, VALUE divisor)
{
    uint32_t number = 0;
    tddp_group *shared = tddp_rb_group(group);
    const tddp_tensor *leaf = tddp_rb_tensor(tensor);
    tddp_rb_check(tddp_average_gradient(shared, leaf, NUM2DBL(divisor),
                                        tddp_rb_blocking_in_backward, &number));
    return UINT2NUM(number);
}

/* --- cross entropy --------------------------------------------------------------------------- */

/* _cross_entropy_graph(losses, logits, group, shares, places, ones) → losses */
static VALUE cross_entropy_graph(VALUE self, VALUE losses, VALUE logits, VALUE group, VALUE shares,
                                 VALUE places, VALUE ones)
{
    tddp_rb_check(tddp_cross_entropy_graph(tddp_rb_group(group), tddp_rb_tensor(logits),
                                           tddp_rb_tensor(shares), tddp_rb_tensor(places),
                                           tddp_rb_tensor(ones), tddp_rb_blocking_in_backward,
                                           tddp_rb_tensor(losses)));
    return losses;
}

/* --- linear layers --------------------------------------------------------------------------- */

static tddp_linear_form form_of(VALUE name)
{
    if (name == ID2SYM(rb_intern("column")))
        return TDDP_LINEAR_COLUMN;
    if (name == ID2SYM(rb_intern("row")))
        return TDDP_LINEAR_ROW;
    return TDDP_LINEAR_PLAIN;
}

/* _linear(input, weight, bias, group, form, sequence_dim) → the new tensor; form is :column, :row,
 * or nil, then group is nil too; sequence_dim is not negative, or nil. */
static VALUE linear(VALUE self, VALUE input, VALUE weight, VALUE bias, VALUE group, VALUE form,
                    VALUE sequence_dim)
{
    tddp_linear_opts opts = TDDP_LINEAR_OPTS_INIT;
    opts.form = form_of(form);
    opts.group = tddp_rb_group_or_null(group);
    if (!NIL_P(sequence_dim))
        opts.sequence_dim = NUM2LL(sequence_dim);
    opts.blocking_region = wait_in_forward;
    opts.backward_blocking_region = tddp_rb_blocking_in_backward;
    VALUE output = tddp_rb_fresh_tensor();
    const tddp_tensor *x = tddp_rb_tensor(input);
    const tddp_tensor *w = tddp_rb_tensor(weight);
    const tddp_tensor *b = tddp_rb_tensor_or_null(bias);
    tddp_tensor *result = tddp_rb_tensor(output);
    begin_forward(opts.group);
    end_forward(opts.group, tddp_linear(x, w, b, &opts, result));
    return output;
}

void tddp_rb_init_autograd(void)
{
    TDDP_RB_PRIVATE("_sync_batch_norm", sync_batch_norm, 6);
    TDDP_RB_PRIVATE("_collective", collective, 8);
    TDDP_RB_PRIVATE("_average_gradient", average_gradient, 3);
    TDDP_RB_PRIVATE("_cross_entropy_graph", cross_entropy_graph, 6);
    TDDP_RB_PRIVATE("_linear", linear, 6);
}
