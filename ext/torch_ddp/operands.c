/*
 * What operations work on: from a Torch::Tensor, or an Array of them, to the buffers that libtddp
 * takes, with the argument's name in every refusal; and their description, which ranks compare when
 * TORCH_DISTRIBUTED_DEBUG is DETAIL. Entered by Ruby threads that hold the GVL. An Array given here
 * is nobody else's, so it stays as it is while its operation runs. Leaves shapes and lengths that
 * have to fit to lib/torch and to libtddp.
 */
#include "torch_ddp.h"

#include <tddp/call.h>

/* Whether operations are described. The GVL guards it. */
static bool detail;

bool tddp_rb_detail(void)
{
    return detail;
}

/* Raises a refusal of libtddp's, which names no argument. */
static void refuse(tddp_status status, const char *name, long index)
{
    if (index < 0)
        (void)tddp_fail(status, "%s: %s", name, tddp_error_message());
    else
        (void)tddp_fail(status, "%s[%ld]: %s", name, index, tddp_error_message());
    tddp_rb_check(status);
}

static tddp_buffer buffer_at(VALUE object, const char *name, long index)
{
    tddp_buffer buffer;
    tddp_tensor *tensor = tddp_rb_named_tensor(object, name, index);
    tddp_status status = tddp_tensor_buffer(tensor, &buffer);
    if (status != TDDP_OK)
        refuse(status, name, index);
    return buffer;
}

tddp_buffer tddp_rb_buffer(VALUE object, const char *name)
{
    return buffer_at(object, name, -1);
}

tddp_tensor *tddp_rb_contiguous(VALUE object, const char *name, tddp_buffer *buffer)
{
    tddp_tensor *tensor = tddp_rb_named_tensor(object, name, -1);
    tddp_status status = tddp_tensor_buffer(tensor, buffer);
    if (status != TDDP_OK && tddp_rb_tensor_form(tensor) != TDDP_RB_FORM_PLAIN)
        return NULL;
    if (status != TDDP_OK)
        refuse(status, name, -1);
    return tensor;
}

tddp_buffer *tddp_rb_buffers(VALUE list, const char *name, volatile VALUE *holder, size_t *count)
{
    *count = 0;
    if (NIL_P(list))
        return NULL;
    tddp_buffer *buffers = tddp_rb_scratch_for(list, sizeof(*buffers), holder, count);
    for (size_t i = 0; i < *count; i++)
        buffers[i] = buffer_at(rb_ary_entry(list, (long)i), name, (long)i);
    return buffers;
}

tddp_buffer *tddp_rb_pieces(VALUE tensor, const char *name, VALUE counts, volatile VALUE *holder,
                            size_t *count)
{
    tddp_buffer whole = tddp_rb_buffer(tensor, name);
    size_t bytes = tddp_dtype_size(whole.dtype);
    size_t begin = 0;
    tddp_buffer *pieces = tddp_rb_scratch_for(counts, sizeof(*pieces), holder, count);
    for (size_t i = 0; i < *count; i++) {
        size_t each = NUM2SIZET(rb_ary_entry(counts, (long)i));
        if (each > whole.count - begin)
            rb_raise(rb_eArgError, "%s: its %zu elements are fewer than its pieces have", name,
                     whole.count);
        pieces[i] = whole;
        pieces[i].count = each;
        if (whole.data != NULL)
            pieces[i].data = (char *)whole.data + begin * bytes;
        begin += each;
    }
    return pieces;
}

void tddp_rb_written(VALUE tensors)
{
    if (NIL_P(tensors))
        return;
    if (!RB_TYPE_P(tensors, T_ARRAY)) {
        tddp_rb_check(tddp_tensor_written(tddp_rb_tensor(tensors)));
        return;
    }
    for (long i = 0; i < RARRAY_LEN(tensors); i++)
        tddp_rb_check(tddp_tensor_written(tddp_rb_tensor(rb_ary_entry(tensors, i))));
}

/* --- descriptions ---------------------------------------------------------------------------- */

/* "float32 [2, 3]" */
static void describe_tensor(VALUE text, VALUE object)
{
    tddp_tensor *tensor = tddp_rb_tensor(object);
    const int64_t *dims;
    size_t ndim = tddp_rb_shape(tensor, &dims);
    tddp_buffer buffer;
    tddp_rb_check(tddp_tensor_buffer(tensor, &buffer));
    rb_str_catf(text, "%s [", tddp_dtype_name(buffer.dtype));
    for (size_t i = 0; i < ndim; i++)
        rb_str_catf(text, "%s%" PRId64, i > 0 ? ", " : "", dims[i]);
    rb_str_cat_cstr(text, "]");
}

static VALUE description(VALUE operand)
{
    VALUE text = rb_utf8_str_new_cstr("");
    if (!RB_TYPE_P(operand, T_ARRAY)) {
        describe_tensor(text, operand);
        return text;
    }
    for (long i = 0; i < RARRAY_LEN(operand); i++) {
        if (i > 0)
            rb_str_cat_cstr(text, ", ");
        describe_tensor(text, rb_ary_entry(operand, i));
    }
    if (RSTRING_LEN(text) < TDDP_DESCRIPTION_BYTES)
        return text;
    return rb_sprintf("%ld tensors (digest %016" PRIx64 "): %" PRIsVALUE, RARRAY_LEN(operand),
                      tddp_digest(TDDP_DIGEST_START, RSTRING_PTR(text), (size_t)RSTRING_LEN(text)),
                      text);
}

const char *tddp_rb_description(VALUE operand, VALUE *text)
{
    if (!detail)
        return tddp_rb_hook_description();
    if (NIL_P(operand))
        return NULL;
    *text = description(operand);
    return StringValueCStr(*text);
}

static VALUE set_detail(VALUE self, VALUE wanted)
{
    detail = RTEST(wanted);
    return wanted;
}

/* How a tensor lies in memory: nil: in one piece; :apart: with gaps or turned; :folded: some of its
 * elements share their memory. What is not strided is left to libtddp, which says why it does not
 * take it. */
static VALUE memory_form(VALUE self, VALUE tensor)
{
    switch (tddp_rb_tensor_form(tddp_rb_tensor(tensor))) {
    case TDDP_RB_FORM_APART:
        return ID2SYM(rb_intern("apart"));
    case TDDP_RB_FORM_FOLDED:
        return ID2SYM(rb_intern("folded"));
    default:
        return Qnil;
    }
}

/* Says at once what libtddp would say of this tensor's memory. */
static VALUE check_memory(VALUE self, VALUE name, VALUE tensor)
{
    tddp_rb_buffer(tensor, StringValueCStr(name));
    return Qnil;
}

/* --- bytes, for objects ---------------------------------------------------------------------- */

static VALUE bytes_of(VALUE self, VALUE tensor)
{
    tddp_buffer buffer = tddp_rb_buffer(tensor, "tensor");
    VALUE bytes = rb_str_new(NULL, (long)(buffer.count * tddp_dtype_size(buffer.dtype)));
    if (buffer.count > 0)
        memcpy(RSTRING_PTR(bytes), buffer.data, (size_t)RSTRING_LEN(bytes));
    return bytes;
}

static VALUE set_bytes(VALUE self, VALUE tensor, VALUE bytes)
{
    tddp_buffer buffer = tddp_rb_buffer(tensor, "tensor");
    StringValue(bytes);
    size_t size = buffer.count * tddp_dtype_size(buffer.dtype);
    if (size != (size_t)RSTRING_LEN(bytes))
        rb_raise(rb_eArgError, "%ld bytes for a tensor of %zu", RSTRING_LEN(bytes), size);
    if (size > 0)
        memcpy(buffer.data, RSTRING_PTR(bytes), size);
    tddp_rb_written(tensor);
    return tensor;
}

/* Of memory that is written through another tensor. */
static VALUE written(VALUE self, VALUE tensors)
{
    tddp_rb_written(tensors);
    return Qnil;
}

/* Where a tensor's elements lie: address and bytes; nil if they are not in one piece. */
static VALUE span(VALUE self, VALUE tensor)
{
    tddp_buffer buffer;
    if (tddp_tensor_buffer(tddp_rb_tensor(tensor), &buffer) != TDDP_OK)
        return Qnil;
    return rb_assoc_new(ULL2NUM((uintptr_t)buffer.data),
                        ULL2NUM(buffer.count * tddp_dtype_size(buffer.dtype)));
}

/* Whether an object consists of a C library's data, into which Ruby can't look. */
static VALUE is_native(VALUE self, VALUE object)
{
    const bool native =
        !RB_SPECIAL_CONST_P(object) && (RB_TYPE_P(object, T_DATA) || RB_TYPE_P(object, T_FILE));
    return native ? Qtrue : Qfalse;
}

void tddp_rb_init_operands(void)
{
    TDDP_RB_PRIVATE("_detail=", set_detail, 1);
    TDDP_RB_PRIVATE("_memory_form", memory_form, 1);
    TDDP_RB_PRIVATE("_check_memory", check_memory, 2);
    TDDP_RB_PRIVATE("_bytes", bytes_of, 1);
    TDDP_RB_PRIVATE("_set_bytes", set_bytes, 2);
    rb_define_singleton_method(tddp_rb_distributed, "_span", span, 1);
    rb_define_singleton_method(tddp_rb_distributed, "_native?", is_native, 1);
    rb_define_singleton_method(tddp_rb_distributed, "_written", written, 1);
}
