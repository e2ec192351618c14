/*
 * Torch::Distributed::Work over <tddp/work.h>, and the way every operation waits. Entered by Ruby
 * threads that hold the GVL, and by the garbage collector. Invariant: the memory of an operation
 * lives until the operation is done: a work keeps its tensors, and a work under way is itself kept
 * from the collector, where nobody waits. At the process's end, which spares none, the references
 * to libtorch's tensors go to the progress thread.
 */
#include "torch_ddp.h"

#include <stdlib.h>
#include <string.h>

/* References to an operation's tensors, ended together on whatever thread is last. */
typedef struct operands {
    size_t count;
    tddp_tensor *tensor[];
} operands;

typedef struct work_handle {
    tddp_work *work; /* NULL: this object stands for several others */
    operands *held;  /* NULL once the operation is done and the memory was let go */
    VALUE self;
    /* Ruby's tensors, or Arrays of them: one made by from_numo lies in a String that only they
     * hold. */
    VALUE output, input;
    struct work_handle *next;
    struct work_handle **back; /* what points here; NULL: not among `under_way` */
} work_handle;

/* Works that may be running. The GVL guards it. */
static work_handle *under_way;

static void enlist(work_handle *handle)
{
    handle->next = under_way;
    if (under_way != NULL)
        under_way->back = &handle->next;
    handle->back = &under_way;
    under_way = handle;
}

static void delist(work_handle *handle)
{
    if (handle->back == NULL)
        return;
    *handle->back = handle->next;
    if (handle->next != NULL)
        handle->next->back = handle->back;
    handle->back = NULL;
}

/* Of a root of the collector's. */
static void mark_under_way(void *nothing)
{
    (void)nothing;
    for (work_handle *handle = under_way, *next; handle != NULL; handle = next) {
        next = handle->next;
        if (tddp_work_completed(handle->work))
            delist(handle);
        else
            rb_gc_mark(handle->self);
    }
}

/* Without a write barrier, so that every collection looks. */
static const rb_data_type_t keeper_type = {
    .wrap_struct_name = "works under way",
    .function = {.dmark = mark_under_way},
};

static void operands_free(void *data)
{
    operands *held = data;
    if (held == NULL)
        return;
    for (size_t i = 0; i < held->count; i++)
        tddp_tensor_release(held->tensor[i]);
    free(held);
}

static size_t tensor_count(VALUE operand)
{
    if (NIL_P(operand))
        return 0;
    return RB_TYPE_P(operand, T_ARRAY) ? (size_t)RARRAY_LEN(operand) : 1;
}

/* False if memory is short. */
static bool add_operand(operands *held, VALUE operand)
{
    bool list = RB_TYPE_P(operand, T_ARRAY);
    for (size_t i = 0; i < tensor_count(operand); i++) {
        VALUE object = list ? rb_ary_entry(operand, (long)i) : operand;
        tddp_tensor *tensor = tddp_tensor_retain(tddp_rb_tensor(object));
        if (tensor == NULL)
            return false;
        held->tensor[held->count++] = tensor;
    }
    return true;
}

static operands *operands_retain(VALUE output, VALUE input)
{
    size_t count = tensor_count(output) + tensor_count(input);
    operands *held = calloc(1, sizeof(*held) + count * sizeof(tddp_tensor *));
    if (held == NULL)
        return NULL;
    if (add_operand(held, output) && add_operand(held, input))
        return held;
    operands_free(held);
    return NULL;
}

/* Ends a work whose operation may still run. */
static void part_with(tddp_work *work, operands *held)
{
    /* Only this file sets a callback, and once a work, so there is none yet. In a forked child the
     * operation never ends, and its memory with the process. */
    tddp_status status = held == NULL ? TDDP_OK : tddp_work_on_done(work, operands_free, held);
    if (status != TDDP_OK && status != TDDP_FORKED)
        tddp_log(TDDP_LOG_ERROR, "ruby", "an operation's memory is kept for ever: %s",
                 tddp_error_message());
    tddp_work_release(work);
}

static void work_mark(void *data)
{
    const work_handle *handle = data;
    rb_gc_mark(handle->output);
    rb_gc_mark(handle->input);
}

static void work_free(void *data)
{
    work_handle *handle = data;
    delist(handle);
    if (handle->work != NULL)
        part_with(handle->work, handle->held);
    xfree(handle);
}

static size_t work_size(const void *data)
{
    (void)data;
    return sizeof(work_handle);
}

static const rb_data_type_t work_type = {
    .wrap_struct_name = "Torch::Distributed::Work",
    .function = {.dmark = work_mark, .dfree = work_free, .dsize = work_size},
    .flags = RUBY_TYPED_FREE_IMMEDIATELY | RUBY_TYPED_WB_PROTECTED,
};

static VALUE work_class = Qnil;

static work_handle *handle_of(VALUE self)
{
    work_handle *handle = rb_check_typeddata(self, &work_type);
    if (handle->work == NULL)
        rb_raise(rb_eTypeError, "a %s is no operation of its own", rb_obj_classname(self));
    return handle;
}

/* For those that stand for several others. */
static VALUE work_allocate(VALUE class)
{
    work_handle *handle;
    VALUE self = TypedData_Make_Struct(class, work_handle, &work_type, handle);
    handle->output = handle->input = Qnil;
    return self;
}

/* A wait, and the stream that waits in place of the host if a device carries the operation out. */
typedef struct wait_call {
    tddp_work *work;
    bool orders;
    void *stream;
} wait_call;

static tddp_status body_wait(void *data, const tddp_wait *wait)
{
    const wait_call *call = data;
    const tddp_wait *wanted = wait->timeout_ms < 0 && wait->cancel == NULL ? NULL : wait;
    return call->orders ? tddp_work_order(call->work, call->stream, wanted)
                        : tddp_work_wait(call->work, wanted);
}

static bool host_waits(void)
{
    const char *text = getenv("TORCH_NCCL_BLOCKING_WAIT");
    return text != NULL && strcmp(text, "1") == 0;
}

/* As in PyTorch: an operation of a device's is put before what this thread's stream does next, and
 * only a time that the caller sets has the host wait. */
static tddp_rb_outcome wait_for(tddp_work *work, int64_t timeout_ms)
{
    wait_call call = {.work = work};
    int32_t index;
    tddp_device_type device = tddp_work_device(work, &index);
    if (device != TDDP_CPU && timeout_ms < 0 && !host_waits()) {
        tddp_rb_check(tddp_torch_stream(device, index, &call.stream));
        call.orders = true;
    }
    return tddp_rb_blocking(body_wait, &call, timeout_ms, false);
}

/* The object of a work that may be running. Without memory for references to the tensors only
 * waiting keeps theirs. */
static VALUE work_object(tddp_work *work, VALUE output, VALUE input)
{
    operands *held = operands_retain(output, input);
    if (held == NULL) {
        (void)!tddp_work_wait(work, NULL);
        tddp_work_release(work);
        rb_memerror();
    }
    work_handle *handle;
    VALUE self = TypedData_Make_Struct(work_class, work_handle, &work_type, handle);
    handle->work = work;
    handle->held = held;
    handle->self = self;
    RB_OBJ_WRITE(self, &handle->output, output);
    RB_OBJ_WRITE(self, &handle->input, input);
    enlist(handle);
    return self;
}

/* Nobody has a handle on it any more. A device's memory needs no object of Ruby's; host memory may
 * lie in a String. */
static void leave_under_way(tddp_work *work, VALUE output, VALUE input)
{
    int32_t index;
    operands *held = NULL;
    if (tddp_work_device(work, &index) != TDDP_CPU)
        held = operands_retain(output, input);
    if (held == NULL)
        work_object(work, output, input);
    else
        part_with(work, held);
}

static VALUE source_of(const tddp_work *work)
{
    int source = tddp_work_source(work);
    return source == TDDP_ANY_SOURCE ? Qnil : INT2NUM(source);
}

/* Waits here, unless it was executed inline; an interruption leaves the operation running. */
static VALUE wait_now(tddp_work *work, VALUE output, VALUE input)
{
    tddp_rb_outcome outcome = {Qnil, 0};
    if (!tddp_work_completed(work) || tddp_work_status(work) != TDDP_OK)
        outcome = wait_for(work, -1);
    VALUE source = source_of(work);
    if (tddp_work_completed(work) || (NIL_P(output) && NIL_P(input)))
        tddp_work_release(work);
    else
        leave_under_way(work, output, input);
    tddp_rb_settle(outcome);
    return source;
}

static VALUE work_wait(VALUE self, VALUE timeout);

/* The same in a communication hook, which may be left here for good: as an object of its own the
 * work keeps its memory. */
static VALUE wait_in_hook(tddp_work *work, VALUE output, VALUE input)
{
    VALUE self = work_object(work, output, input);
    work_wait(self, Qnil);
    RB_GC_GUARD(self);
    return source_of(work);
}

VALUE tddp_rb_take_work(tddp_work *work, VALUE output, VALUE input, bool async)
{
    VALUE result = Qnil;
    if (async)
        result = work_object(work, output, input);
    else if (tddp_rb_in_hook() && !tddp_work_completed(work))
        result = wait_in_hook(work, output, input);
    else
        result = wait_now(work, output, input);
    RB_GC_GUARD(output);
    RB_GC_GUARD(input);
    return result;
}

static void let_go_when_done(work_handle *handle)
{
    if (handle->held == NULL || !tddp_work_completed(handle->work))
        return;
    operands *held = handle->held;
    handle->held = NULL;
    operands_free(held);
    handle->output = handle->input = Qnil;
    delist(handle);
}

static VALUE work_wait(VALUE self, VALUE timeout)
{
    work_handle *handle = handle_of(self);
    int64_t timeout_ms = tddp_rb_milliseconds(timeout);
    tddp_rb_outcome outcome = wait_for(handle->work, timeout_ms);
    let_go_when_done(handle);
    tddp_rb_settle(outcome);
    RB_GC_GUARD(self);
    return Qtrue;
}

static VALUE work_completed(VALUE self)
{
    return tddp_work_completed(handle_of(self)->work) ? Qtrue : Qfalse;
}

static VALUE work_success(VALUE self)
{
    tddp_work *work = handle_of(self)->work;
    return tddp_work_completed(work) && tddp_work_status(work) == TDDP_OK ? Qtrue : Qfalse;
}

static VALUE work_exception(VALUE self)
{
    tddp_status status = tddp_work_status(handle_of(self)->work);
    return status == TDDP_OK ? Qnil : tddp_rb_error(status);
}

static VALUE work_operation(VALUE self)
{
    return ID2SYM(rb_intern(tddp_op_name(tddp_work_kind(handle_of(self)->work))));
}

static VALUE work_sequence(VALUE self)
{
    return ULL2NUM(tddp_work_sequence(handle_of(self)->work));
}

/* The sender's rank in the group. */
static VALUE work_source(VALUE self)
{
    return source_of(handle_of(self)->work);
}

void tddp_rb_init_work(void)
{
    work_class = rb_define_class_under(tddp_rb_distributed, "Work", rb_cObject);
    rb_global_variable(&work_class);
    rb_undef_alloc_func(work_class);
    rb_gc_register_mark_object(TypedData_Wrap_Struct(rb_cObject, &keeper_type, &under_way));
    rb_define_alloc_func(rb_define_class_under(tddp_rb_distributed, "CombinedWork", work_class),
                         work_allocate);
    rb_define_private_method(work_class, "_wait", work_wait, 1);
    rb_define_private_method(work_class, "_source", work_source, 0);
    rb_define_method(work_class, "completed?", work_completed, 0);
    rb_define_method(work_class, "success?", work_success, 0);
    rb_define_method(work_class, "exception", work_exception, 0);
    rb_define_method(work_class, "operation", work_operation, 0);
    rb_define_method(work_class, "sequence", work_sequence, 0);
}
