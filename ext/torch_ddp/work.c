/*
 * Torch::Distributed::Work over <tddp/work.h>, and the wait of every operation. Called by Ruby
 * threads that hold the GVL, and by the garbage collector. Invariant: an operation's memory lives
 * until the operation completes: a work keeps its tensors, and a pending work without references is
 * a garbage collector root. At the process's exit, when Ruby frees all objects, the group's thread
 * takes the references to libtorch's tensors.
 */
#include "torch_ddp.h"

#include <stdlib.h>
#include <string.h>

/* References to an operation's tensors, which any thread may release. */
typedef struct operands {
    size_t count;
    tddp_tensor *tensor[];
} operands;

typedef struct work_handle {
    tddp_rb_root root;  /* first: while the work may be pending */
    tddp_work *work;    /* NULL: a CombinedWork */
    operands *operands; /* NULL after completion */
    /* the tensors' objects, or Arrays of them: only the object of a tensor that from_numo made
     * keeps the String with its memory */
    VALUE output, input;
} work_handle;

static tddp_rb_need work_need(const tddp_rb_root *root)
{
    const work_handle *handle = (const work_handle *)root;
    return tddp_work_completed(handle->work) ? TDDP_RB_DONE : TDDP_RB_NEEDED;
}

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

/* Returns false if out of memory. */
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

/* Releases a work that may be pending; the operands are freed when it completes. */
static void detach_work(tddp_work *work, operands *held)
{
    /* Only this file sets a callback, once per work, so there is none yet. In a forked child the
     * operation never completes, and its memory lives as long as the process. */
    tddp_status status = held == NULL ? TDDP_OK : tddp_work_on_done(work, operands_free, held);
    if (status != TDDP_OK && status != TDDP_FORKED)
        tddp_log(TDDP_LOG_ERROR, "ruby", "an operation's memory is leaked: %s",
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
    tddp_rb_root_remove(&handle->root);
    if (handle->work != NULL)
        detach_work(handle->work, handle->operands);
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
        rb_raise(rb_eTypeError, "a %s is not a single operation", rb_obj_classname(self));
    return handle;
}

/* The allocator of CombinedWork. */
static VALUE work_allocate(VALUE class)
{
    work_handle *handle;
    VALUE self = TypedData_Make_Struct(class, work_handle, &work_type, handle);
    handle->output = handle->input = Qnil;
    return self;
}

/* A wait; for an operation on a device the stream waits instead of the host. */
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

/* As in PyTorch: for an operation on a device this thread's current stream waits, and the host
 * waits only if the caller sets a timeout. */
static tddp_rb_outcome wait_for(tddp_work *work, int64_t timeout_ms, bool by_host)
{
    wait_call call = {.work = work};
    int32_t index;
    tddp_device_type device = tddp_work_device(work, &index);
    if (device != TDDP_CPU && timeout_ms < 0 && !by_host) {
        tddp_rb_check(tddp_torch_stream(device, index, &call.stream));
        call.orders = true;
    }
    return tddp_rb_blocking(body_wait, &call, timeout_ms, false);
}

/* The object of a work that may be pending. If the references to the tensors can't be allocated, it
 * waits for the operation instead. */
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
    handle->operands = held;
    handle->root = (tddp_rb_root){.object = self, .need = work_need};
    RB_OBJ_WRITE(self, &handle->output, output);
    RB_OBJ_WRITE(self, &handle->input, input);
    tddp_rb_root_add(&handle->root);
    return self;
}

/* Detaches a pending work that has no object. A device's memory doesn't depend on Ruby objects;
 * host memory may belong to a String. */
static void detach_pending(tddp_work *work, VALUE output, VALUE input)
{
    int32_t index;
    operands *held = NULL;
    if (tddp_work_device(work, &index) != TDDP_CPU)
        held = operands_retain(output, input);
    if (held == NULL)
        work_object(work, output, input);
    else
        detach_work(work, held);
}

static VALUE source_of(const tddp_work *work)
{
    int source = tddp_work_source(work);
    return source == TDDP_ANY_SOURCE ? Qnil : INT2NUM(source);
}

/* Waits, unless the operation was executed inline. After an interrupt it stays pending. */
static VALUE wait_now(tddp_work *work, VALUE output, VALUE input)
{
    tddp_rb_outcome outcome = {Qnil, 0};
    if (!tddp_work_completed(work) || tddp_work_status(work) != TDDP_OK)
        outcome = wait_for(work, -1, host_waits());
    VALUE source = source_of(work);
    if (tddp_work_completed(work) || (NIL_P(output) && NIL_P(input)))
        tddp_work_release(work);
    else
        detach_pending(work, output, input);
    tddp_rb_raise_outcome(outcome);
    return source;
}

static VALUE work_wait(VALUE self, VALUE timeout);

/* The same in a communication hook, which may be suspended here and never resumed: the work needs
 * an object that keeps its memory. */
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
    if (work == NULL)
        return result;
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

static void release_if_completed(work_handle *handle)
{
    if (handle->operands == NULL || !tddp_work_completed(handle->work))
        return;
    operands *held = handle->operands;
    handle->operands = NULL;
    operands_free(held);
    handle->output = handle->input = Qnil;
    tddp_rb_root_remove(&handle->root);
}

static VALUE wait_on(VALUE self, int64_t timeout_ms, bool by_host)
{
    work_handle *handle = handle_of(self);
    tddp_rb_outcome outcome = wait_for(handle->work, timeout_ms, by_host);
    release_if_completed(handle);
    tddp_rb_raise_outcome(outcome);
    RB_GC_GUARD(self); /* a hook's work is its alone */
    return Qtrue;
}

static VALUE work_wait(VALUE self, VALUE timeout)
{
    return wait_on(self, tddp_rb_milliseconds(timeout), host_waits());
}

static VALUE work_synchronize(VALUE self)
{
    return wait_on(self, -1, false);
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
    rb_define_alloc_func(rb_define_class_under(tddp_rb_distributed, "CombinedWork", work_class),
                         work_allocate);
    rb_define_private_method(work_class, "_wait", work_wait, 1);
    rb_define_private_method(work_class, "_synchronize", work_synchronize, 0);
    rb_define_private_method(work_class, "_source", work_source, 0);
    rb_define_method(work_class, "completed?", work_completed, 0);
    rb_define_method(work_class, "success?", work_success, 0);
    rb_define_method(work_class, "exception", work_exception, 0);
    rb_define_method(work_class, "operation", work_operation, 0);
    rb_define_method(work_class, "sequence", work_sequence, 0);
}
