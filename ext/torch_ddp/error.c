/*
 * Converts a status to a Ruby exception, with the thread's error text. Called by Ruby threads that
 * hold the GVL.
 */
#include "torch_ddp.h"

#include <ruby/encoding.h>

static VALUE error_base;

/* Each status's class under Torch::Distributed; the compiler reports a status without one. */
#define CLASS_OK "Error"
#define CLASS_INVALID_ARGUMENT "InvalidArgumentError"
#define CLASS_UNSUPPORTED "UnsupportedError"
#define CLASS_TIMEOUT "TimeoutError"
#define CLASS_CANCELED "CanceledError"
#define CLASS_NOT_FOUND "NotFoundError"
#define CLASS_MISMATCH "MismatchError"
#define CLASS_PEER_LOST "PeerLostError"
#define CLASS_GROUP_FAILED "GroupError"
#define CLASS_GROUP_CLOSED "GroupError"
#define CLASS_FORKED "GroupError"
#define CLASS_NETWORK "NetworkError"
#define CLASS_ADDRESS_IN_USE "NetworkError"
#define CLASS_STORE "StoreError"
#define CLASS_PROTOCOL "StoreError"
#define CLASS_SYSTEM "SystemError"
#define CLASS_OUT_OF_MEMORY "OutOfMemoryError"
#define CLASS_UNAVAILABLE "UnavailableError"
#define CLASS_INTERNAL "InternalError"

static const char *class_name(tddp_status status)
{
    switch (status) {
#define TDDP_RB_CLASS(name, code, text) \
    case TDDP_##name:                   \
        return CLASS_##name;
        TDDP_STATUS_MAP(TDDP_RB_CLASS)
#undef TDDP_RB_CLASS
    }
    return CLASS_INTERNAL;
}

static VALUE class_for(tddp_status status)
{
    return rb_const_get(tddp_rb_distributed, rb_intern(class_name(status)));
}

VALUE tddp_rb_error(tddp_status status)
{
    const char *text = tddp_error_message();
    VALUE message = rb_utf8_str_new_cstr(text[0] ? text : tddp_status_text(status));
    VALUE error = rb_exc_new_str(class_for(status), message);
    rb_ivar_set(error, rb_intern("@status"), ID2SYM(rb_intern(tddp_status_name(status))));
    return error;
}

bool tddp_rb_is_exception(VALUE left)
{
    /* throw and break leave an internal object without a class */
    bool is_object = !RB_SPECIAL_CONST_P(left) && RB_BUILTIN_TYPE(left) != T_IMEMO;
    return is_object && RTEST(rb_obj_is_kind_of(left, rb_eException));
}

void tddp_rb_check(tddp_status status)
{
    if (status != TDDP_OK)
        rb_exc_raise(tddp_rb_error(status));
}

static void define(const char *name)
{
    if (!rb_const_defined_at(tddp_rb_distributed, rb_intern(name)))
        rb_define_class_under(tddp_rb_distributed, name, error_base);
}

void tddp_rb_init_error(void)
{
    VALUE torch_error = rb_path2class("Torch::Error");
    error_base = rb_define_class_under(tddp_rb_distributed, "Error", torch_error);
    rb_global_variable(&error_base);
    rb_define_attr(error_base, "status", 1, 0);
#define TDDP_RB_DEFINE(name, code, text) define(CLASS_##name);
    TDDP_STATUS_MAP(TDDP_RB_DEFINE)
#undef TDDP_RB_DEFINE
}
