/*
 * Torch::Distributed::Backend's requests over <tddp/delegate.h>: the operations of backends in
 * Ruby. Entered by Ruby threads that hold the GVL; nothing here blocks. What a request asks for is
 * done in lib/torch/distributed/backend.rb.
 */
#include "torch_ddp.h"

#include <string.h>
#include <tddp/delegate.h>

/* A thread that is killed completes nothing. */
static void request_free(void *request)
{
    if (request != NULL)
        tddp_delegate_complete(request, TDDP_INTERNAL,
                               "the thread that executed the operation has ended", NULL);
}

static const rb_data_type_t request_type = {
    .wrap_struct_name = "Torch::Distributed::Backend::Request",
    .function = {.dfree = request_free},
    .flags = RUBY_TYPED_FREE_IMMEDIATELY | RUBY_TYPED_WB_PROTECTED,
};

static VALUE request_class = Qnil;

static tddp_delegate_request *request_of(VALUE self)
{
    tddp_delegate_request *request = rb_check_typeddata(self, &request_type);
    if (request == NULL)
        rb_raise(rb_eRuntimeError, "this request is completed");
    return request;
}

static VALUE backend_register(VALUE class, VALUE name)
{
    tddp_rb_check(tddp_delegate_register(StringValueCStr(name)));
    return Qnil;
}

/* The descriptor that is readable while there are requests. */
static VALUE backend_start(VALUE class)
{
    int fd;
    tddp_rb_check(tddp_delegate_start(&fd));
    return INT2NUM(fd);
}

/* The next request, or nil. */
static VALUE backend_next(VALUE class)
{
    VALUE self = TypedData_Wrap_Struct(request_class, &request_type, NULL);
    tddp_delegate_request *request = tddp_delegate_next();
    if (request == NULL)
        return Qnil;
    RTYPEDDATA_DATA(self) = request;
    return self;
}

static VALUE request_kind(VALUE self)
{
    static const char *const names[] = {"create", "run", "abort", "destroy"};
    return ID2SYM(rb_intern(names[request_of(self)->kind]));
}

static VALUE request_context(VALUE self)
{
    return ULL2NUM(request_of(self)->context);
}

static VALUE request_backend(VALUE self)
{
    return rb_utf8_str_new_cstr(request_of(self)->backend);
}

/* [store, rank, world size, timeout in seconds] */
static VALUE request_place(VALUE self)
{
    const tddp_delegate_request *request = request_of(self);
    return rb_ary_new_from_args(4, tddp_rb_wrap_store(request->store), INT2NUM(request->rank),
                                INT2NUM(request->world_size),
                                DBL2NUM((double)request->timeout_ms / 1000));
}

/* [name, reduction, factor of PREMUL_SUM, root] */
static VALUE request_operation(VALUE self)
{
    const tddp_delegate_request *request = request_of(self);
    return rb_ary_new_from_args(4, ID2SYM(rb_intern(tddp_op_name(request->op))),
                                INT2NUM(request->reduce), DBL2NUM(request->premul),
                                INT2NUM(request->root));
}

/* [dtype, elements] of each */
static VALUE sizes(const tddp_buffer *buffers, size_t count)
{
    VALUE list = rb_ary_new();
    for (size_t i = 0; i < count; i++)
        rb_ary_push(list, rb_assoc_new(ID2SYM(rb_intern(tddp_dtype_name(buffers[i].dtype))),
                                       SIZET2NUM(buffers[i].count)));
    return list;
}

static VALUE request_inputs(VALUE self)
{
    const tddp_delegate_request *request = request_of(self);
    return sizes(request->inputs, request->input_count);
}

static VALUE request_outputs(VALUE self)
{
    const tddp_delegate_request *request = request_of(self);
    return sizes(request->outputs, request->output_count);
}

/* A backend may have resized a tensor that it was given. */
static void check_size(const tddp_buffer *tensor, const tddp_buffer *expected)
{
    if (tensor->count != expected->count || tensor->dtype != expected->dtype)
        rb_raise(rb_eArgError, "expected %zu elements of %s, got %zu of %s", expected->count,
                 tddp_dtype_name(expected->dtype), tensor->count, tddp_dtype_name(tensor->dtype));
}

/* Copies an input to a tensor. */
static VALUE request_read(VALUE self, VALUE index, VALUE tensor)
{
    const tddp_delegate_request *request = request_of(self);
    size_t at = NUM2SIZET(index);
    tddp_buffer to = tddp_rb_buffer(tensor, "tensor");
    if (at >= request->input_count)
        rb_raise(rb_eIndexError, "input %zu of %zu", at, request->input_count);
    check_size(&to, &request->inputs[at]);
    tddp_rb_check(tddp_delegate_read(request, at, to.data));
    return tensor;
}

/* complete(tensors): copies these to the outputs. */
static VALUE request_complete(VALUE self, VALUE tensors)
{
    tddp_delegate_request *request = request_of(self);
    TDDP_RB_SCRATCH memory = 0, addresses = 0;
    size_t count;
    tddp_buffer *buffers = tddp_rb_buffers(tensors, "outputs", &memory, &count);
    if (count != request->output_count)
        rb_raise(rb_eArgError, "expected %zu outputs, got %zu", request->output_count, count);
    const void **outputs = tddp_rb_scratch(&addresses, (long)count, sizeof(*outputs));
    for (size_t i = 0; i < count; i++) {
        check_size(&buffers[i], &request->outputs[i]);
        outputs[i] = buffers[i].data;
    }
    RTYPEDDATA_DATA(self) = NULL;
    tddp_delegate_complete(request, TDDP_OK, NULL, outputs);
    return Qnil;
}

static tddp_status status_named(const char *name)
{
#define TDDP_RB_STATUS(status, code, text)  \
    if (strcmp(name, "TDDP_" #status) == 0) \
        return TDDP_##status;
    TDDP_STATUS_MAP(TDDP_RB_STATUS)
#undef TDDP_RB_STATUS
    return TDDP_INTERNAL;
}

/* fail(status, text): a status that isn't known, nil for instance, fails the group. */
static VALUE request_fail(VALUE self, VALUE status, VALUE text)
{
    tddp_delegate_request *request = request_of(self);
    const char *reason = StringValueCStr(text);
    tddp_status code = NIL_P(status) ? TDDP_INTERNAL : status_named(rb_id2name(SYM2ID(status)));
    RTYPEDDATA_DATA(self) = NULL;
    tddp_delegate_complete(request, code == TDDP_OK ? TDDP_INTERNAL : code, reason, NULL);
    return Qnil;
}

void tddp_rb_init_delegate(void)
{
    VALUE backend = rb_define_class_under(tddp_rb_distributed, "Backend", rb_cObject);
    rb_define_private_method(rb_singleton_class(backend), "_register", backend_register, 1);
    rb_define_private_method(rb_singleton_class(backend), "_start", backend_start, 0);
    rb_define_private_method(rb_singleton_class(backend), "_next", backend_next, 0);
    request_class = rb_define_class_under(backend, "Request", rb_cObject);
    rb_funcall(backend, rb_intern("private_constant"), 1, ID2SYM(rb_intern("Request")));
    rb_global_variable(&request_class);
    rb_undef_alloc_func(request_class);
    rb_define_method(request_class, "kind", request_kind, 0);
    rb_define_method(request_class, "context", request_context, 0);
    rb_define_method(request_class, "backend", request_backend, 0);
    rb_define_method(request_class, "place", request_place, 0);
    rb_define_method(request_class, "operation", request_operation, 0);
    rb_define_method(request_class, "inputs", request_inputs, 0);
    rb_define_method(request_class, "outputs", request_outputs, 0);
    rb_define_method(request_class, "read", request_read, 2);
    rb_define_method(request_class, "complete", request_complete, 1);
    rb_define_method(request_class, "fail", request_fail, 2);
}
