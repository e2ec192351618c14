/*
 * The operations of Torch::Distributed::ProcessGroup over <tddp/group.h>: one method an operation.
 * Entered by Ruby threads that hold the GVL; queueing does not block, waiting is work.c's. Leaves
 * the choice of a group, ranks, kinds of reduction by name, lists that must fit and memory that is
 * not in one piece to lib/torch. Lists are Arrays that nobody else has, nil where this rank has no
 * pieces.
 */
#include "torch_ddp.h"

static tddp_reduce_op op_of(VALUE number)
{
    return (tddp_reduce_op)NUM2INT(number);
}

static VALUE group_all_reduce(VALUE self, VALUE tensor, VALUE op, VALUE premul, VALUE async)
{
    tddp_work *work;
    tddp_buffer buffer = tddp_rb_buffer(tensor, "tensor");
    tddp_group *group = tddp_rb_group(self);
    tddp_reduce_op kind = op_of(op);
    double factor = NUM2DBL(premul);
    tddp_rb_describe(tensor, async);
    tddp_rb_check(tddp_all_reduce(group, buffer, kind, factor, &work));
    return tddp_rb_take_work(work, tensor, Qnil, RTEST(async));
}

static VALUE group_all_reduce_coalesced(VALUE self, VALUE tensors, VALUE op, VALUE premul,
                                        VALUE async)
{
    tddp_work *work;
    size_t count;
    VALUE memory;
    tddp_buffer *buffers = tddp_rb_buffers(tensors, "tensors", &memory, &count);
    tddp_group *group = tddp_rb_group(self);
    tddp_reduce_op kind = op_of(op);
    double factor = NUM2DBL(premul);
    tddp_rb_describe(tensors, async);
    tddp_rb_check(tddp_all_reduce_coalesced(group, buffers, count, kind, factor, &work));
    ALLOCV_END(memory);
    return tddp_rb_take_work(work, tensors, Qnil, RTEST(async));
}

static VALUE group_reduce(VALUE self, VALUE tensor, VALUE root, VALUE op, VALUE premul, VALUE async)
{
    tddp_work *work;
    tddp_buffer buffer = tddp_rb_buffer(tensor, "tensor");
    tddp_group *group = tddp_rb_group(self);
    tddp_reduce_op kind = op_of(op);
    double factor = NUM2DBL(premul);
    int rank = NUM2INT(root);
    tddp_rb_describe(tensor, async);
    tddp_rb_check(tddp_reduce(group, buffer, kind, factor, rank, &work));
    return tddp_rb_take_work(work, tensor, Qnil, RTEST(async));
}

static VALUE group_broadcast(VALUE self, VALUE tensor, VALUE root, VALUE async)
{
    tddp_work *work;
    tddp_buffer buffer = tddp_rb_buffer(tensor, "tensor");
    tddp_group *group = tddp_rb_group(self);
    int rank = NUM2INT(root);
    tddp_rb_describe(tensor, async);
    tddp_rb_check(tddp_broadcast(group, buffer, rank, &work));
    return tddp_rb_take_work(work, tensor, Qnil, RTEST(async));
}

/* --- barriers -------------------------------------------------------------------------------- */

static VALUE group_barrier(VALUE self, VALUE timeout, VALUE async)
{
    tddp_work *work;
    tddp_group *group = tddp_rb_group(self);
    int64_t timeout_ms = tddp_rb_milliseconds(timeout);
    tddp_rb_describe(Qnil, async);
    tddp_rb_check(tddp_barrier_within(group, timeout_ms, &work));
    return tddp_rb_take_work(work, Qnil, Qnil, RTEST(async));
}

typedef struct monitored_call {
    tddp_group *group;
    int64_t timeout_ms;
    int wait_all_ranks;
} monitored_call;

static tddp_status body_monitored_barrier(void *data, const tddp_wait *wait)
{
    const monitored_call *call = data;
    return tddp_monitored_barrier(call->group, call->timeout_ms, call->wait_all_ranks, wait);
}

static VALUE group_monitored_barrier(VALUE self, VALUE timeout, VALUE wait_all_ranks)
{
    monitored_call call = {tddp_rb_group(self), tddp_rb_milliseconds(timeout),
                           RTEST(wait_all_ranks)};
    tddp_group_retain(call.group); /* Another thread may destroy it meanwhile. */
    tddp_rb_outcome outcome = tddp_rb_blocking(body_monitored_barrier, &call, -1, true);
    tddp_group_release(call.group);
    tddp_rb_settle(outcome);
    return Qnil;
}

/* --- pieces by rank -------------------------------------------------------------------------- */

static VALUE group_all_gather(VALUE self, VALUE output, VALUE input, VALUE async)
{
    tddp_work *work;
    tddp_buffer to = tddp_rb_buffer(output, "output");
    tddp_buffer from = tddp_rb_buffer(input, "input");
    tddp_group *group = tddp_rb_group(self);
    tddp_rb_describe(input, async);
    tddp_rb_check(tddp_all_gather(group, from, to, &work));
    return tddp_rb_take_work(work, output, input, RTEST(async));
}

static VALUE group_all_gather_list(VALUE self, VALUE outputs, VALUE input, VALUE async)
{
    tddp_work *work;
    size_t count;
    VALUE memory;
    tddp_buffer *to = tddp_rb_buffers(outputs, "tensor_list", &memory, &count);
    tddp_buffer from = tddp_rb_buffer(input, "tensor");
    tddp_group *group = tddp_rb_group(self);
    tddp_rb_describe(outputs, async);
    tddp_rb_check(tddp_all_gather_list(group, from, to, count, &work));
    ALLOCV_END(memory);
    return tddp_rb_take_work(work, outputs, input, RTEST(async));
}

static VALUE group_gather(VALUE self, VALUE outputs, VALUE input, VALUE root, VALUE async)
{
    tddp_work *work;
    size_t count;
    VALUE memory;
    tddp_buffer *to = tddp_rb_buffers(outputs, "gather_list", &memory, &count);
    tddp_buffer from = tddp_rb_buffer(input, "tensor");
    tddp_group *group = tddp_rb_group(self);
    int rank = NUM2INT(root);
    tddp_rb_describe(Qnil, async);
    tddp_rb_check(tddp_gather(group, from, to, count, rank, &work));
    ALLOCV_END(memory);
    return tddp_rb_take_work(work, outputs, input, RTEST(async));
}

/* The counts are those of the pieces of `output`, at the root. */
static VALUE group_gather_pieces(VALUE self, VALUE output, VALUE counts, VALUE input, VALUE root,
                                 VALUE async)
{
    tddp_work *work;
    VALUE memory;
    tddp_buffer *to = tddp_rb_pieces(output, "output", counts, &memory);
    tddp_buffer from = tddp_rb_buffer(input, "input");
    tddp_group *group = tddp_rb_group(self);
    int rank = NUM2INT(root);
    tddp_rb_describe(Qnil, async);
    tddp_rb_check(tddp_gather(group, from, to, (size_t)RARRAY_LEN(counts), rank, &work));
    ALLOCV_END(memory);
    return tddp_rb_take_work(work, output, input, RTEST(async));
}

static VALUE group_scatter(VALUE self, VALUE output, VALUE inputs, VALUE root, VALUE async)
{
    tddp_work *work;
    size_t count;
    VALUE memory;
    tddp_buffer *from = tddp_rb_buffers(inputs, "scatter_list", &memory, &count);
    tddp_buffer to = tddp_rb_buffer(output, "tensor");
    tddp_group *group = tddp_rb_group(self);
    int rank = NUM2INT(root);
    tddp_rb_describe(Qnil, async);
    tddp_rb_check(tddp_scatter(group, to, from, count, rank, &work));
    ALLOCV_END(memory);
    return tddp_rb_take_work(work, output, inputs, RTEST(async));
}

static VALUE group_reduce_scatter(VALUE self, VALUE output, VALUE input, VALUE op, VALUE premul,
                                  VALUE async)
{
    tddp_work *work;
    tddp_buffer to = tddp_rb_buffer(output, "output");
    tddp_buffer from = tddp_rb_buffer(input, "input");
    tddp_group *group = tddp_rb_group(self);
    tddp_reduce_op kind = op_of(op);
    double factor = NUM2DBL(premul);
    tddp_rb_describe(output, async);
    tddp_rb_check(tddp_reduce_scatter(group, from, to, kind, factor, &work));
    return tddp_rb_take_work(work, output, input, RTEST(async));
}

static VALUE group_reduce_scatter_list(VALUE self, VALUE output, VALUE inputs, VALUE op,
                                       VALUE premul, VALUE async)
{
    tddp_work *work;
    size_t count;
    VALUE memory;
    tddp_buffer to = tddp_rb_buffer(output, "output");
    tddp_buffer *from = tddp_rb_buffers(inputs, "input_list", &memory, &count);
    tddp_group *group = tddp_rb_group(self);
    tddp_reduce_op kind = op_of(op);
    double factor = NUM2DBL(premul);
    tddp_rb_describe(inputs, async);
    tddp_rb_check(tddp_reduce_scatter_list(group, from, count, to, kind, factor, &work));
    ALLOCV_END(memory);
    return tddp_rb_take_work(work, output, inputs, RTEST(async));
}

static VALUE group_all_to_all(VALUE self, VALUE outputs, VALUE inputs, VALUE async)
{
    tddp_work *work;
    size_t to_count, from_count;
    VALUE to_memory, from_memory;
    tddp_buffer *to = tddp_rb_buffers(outputs, "output_tensor_list", &to_memory, &to_count);
    tddp_buffer *from = tddp_rb_buffers(inputs, "input_tensor_list", &from_memory, &from_count);
    if (to_count != from_count)
        rb_raise(rb_eArgError, "%zu outputs, but %zu inputs", to_count, from_count);
    tddp_group *group = tddp_rb_group(self);
    tddp_rb_describe(Qnil, async);
    tddp_rb_check(tddp_all_to_all(group, from, to, to_count, &work));
    ALLOCV_END(to_memory);
    ALLOCV_END(from_memory);
    return tddp_rb_take_work(work, outputs, inputs, RTEST(async));
}

static VALUE group_all_to_all_pieces(VALUE self, VALUE output, VALUE to_counts, VALUE input,
                                     VALUE from_counts, VALUE async)
{
    tddp_work *work;
    VALUE to_memory, from_memory;
    tddp_buffer *to = tddp_rb_pieces(output, "output", to_counts, &to_memory);
    tddp_buffer *from = tddp_rb_pieces(input, "input", from_counts, &from_memory);
    if (RARRAY_LEN(to_counts) != RARRAY_LEN(from_counts))
        rb_raise(rb_eArgError, "%ld pieces of output, but %ld of input", RARRAY_LEN(to_counts),
                 RARRAY_LEN(from_counts));
    tddp_group *group = tddp_rb_group(self);
    tddp_rb_describe(Qnil, async);
    tddp_rb_check(tddp_all_to_all(group, from, to, (size_t)RARRAY_LEN(to_counts), &work));
    ALLOCV_END(to_memory);
    ALLOCV_END(from_memory);
    return tddp_rb_take_work(work, output, input, RTEST(async));
}

/* --- point to point -------------------------------------------------------------------------- */

static VALUE group_send(VALUE self, VALUE tensor, VALUE peer, VALUE tag, VALUE async)
{
    tddp_work *work;
    tddp_buffer buffer = tddp_rb_buffer(tensor, "tensor");
    tddp_group *group = tddp_rb_group(self);
    int to = NUM2INT(peer);
    uint32_t number = NUM2UINT(tag);
    tddp_rb_describe(Qnil, async);
    tddp_rb_check(tddp_send(group, buffer, to, number, &work));
    return tddp_rb_take_work(work, Qnil, tensor, RTEST(async));
}

/* The peer is nil for any. Returns the sender's rank, or a work. */
static VALUE group_recv(VALUE self, VALUE tensor, VALUE peer, VALUE tag, VALUE async)
{
    tddp_work *work;
    tddp_buffer buffer = tddp_rb_buffer(tensor, "tensor");
    int from = NIL_P(peer) ? TDDP_ANY_SOURCE : NUM2INT(peer);
    tddp_group *group = tddp_rb_group(self);
    uint32_t number = NUM2UINT(tag);
    tddp_rb_describe(Qnil, async);
    tddp_rb_check(tddp_recv(group, buffer, from, number, &work));
    return tddp_rb_take_work(work, tensor, Qnil, RTEST(async));
}

void tddp_rb_init_collectives(VALUE group)
{
    rb_define_method(group, "_all_reduce", group_all_reduce, 4);
    rb_define_method(group, "_all_reduce_coalesced", group_all_reduce_coalesced, 4);
    rb_define_method(group, "_reduce", group_reduce, 5);
    rb_define_method(group, "_broadcast", group_broadcast, 3);
    rb_define_method(group, "_barrier", group_barrier, 2);
    rb_define_method(group, "_monitored_barrier", group_monitored_barrier, 2);
    rb_define_method(group, "_all_gather", group_all_gather, 3);
    rb_define_method(group, "_all_gather_list", group_all_gather_list, 3);
    rb_define_method(group, "_gather", group_gather, 4);
    rb_define_method(group, "_gather_pieces", group_gather_pieces, 5);
    rb_define_method(group, "_scatter", group_scatter, 4);
    rb_define_method(group, "_reduce_scatter", group_reduce_scatter, 5);
    rb_define_method(group, "_reduce_scatter_list", group_reduce_scatter_list, 5);
    rb_define_method(group, "_all_to_all", group_all_to_all, 3);
    rb_define_method(group, "_all_to_all_pieces", group_all_to_all_pieces, 5);
    rb_define_method(group, "_send", group_send, 4);
    rb_define_method(group, "_recv", group_recv, 4);
}
