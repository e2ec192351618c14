/*
 * Converts a status to a Ruby exception, with the thread's error text. Called by Ruby threads that
 * hold the GVL.
 */
#include "torch_ddp.h"

#include <ruby/encoding.h>

static VALUE error_base;

/* The class's name under Torch::Distributed. The compiler reports a missing status. */
static const char *class_name(tddp_status status)
{
    switch (status) {
    case TDDP_OK:
        return "Error";
    case TDDP_INVALID_ARGUMENT:
        return "InvalidArgumentError";
    case TDDP_UNSUPPORTED:
        return "UnsupportedError";
    case TDDP_TIMEOUT:
        return "TimeoutError";
    case TDDP_CANCELED:
        return "CanceledError";
    case TDDP_NOT_FOUND:
        return "NotFoundError";
    case TDDP_MISMATCH:
        return "MismatchError";
    case TDDP_PEER_LOST:
        return "PeerLostError";
    case TDDP_GROUP_FAILED:
    case TDDP_GROUP_CLOSED:
    case TDDP_FORKED:
        return "GroupError";
    case TDDP_NETWORK:
    case TDDP_ADDRESS_IN_USE:
        return "NetworkError";
    case TDDP_STORE:
    case TDDP_PROTOCOL:
        return "StoreError";
    case TDDP_SYSTEM:
        return "SystemError";
    case TDDP_OUT_OF_MEMORY:
        return "OutOfMemoryError";
    case TDDP_UNAVAILABLE:
        return "UnavailableError";
    case TDDP_INTERNAL:
        break;
    }
    return "InternalError";
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
    ID id = rb_intern(name);
    if (!rb_const_defined_at(tddp_rb_distributed, id))
        rb_define_class_under(tddp_rb_distributed, name, error_base);
}

void tddp_rb_init_error(void)
{
    VALUE torch_error = rb_path2class("Torch::Error");
    error_base = rb_define_class_under(tddp_rb_distributed, "Error", torch_error);
    rb_global_variable(&error_base);
    rb_define_attr(error_base, "status", 1, 0);
#define TDDP_RB_DEFINE(name, code, text) define(class_name(TDDP_##name));
    TDDP_STATUS_MAP(TDDP_RB_DEFINE)
#undef TDDP_RB_DEFINE
}
