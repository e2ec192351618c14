/*
 * From a status to a Ruby exception. The classes are made from libtddp's own table, so a status
 * that is added there has its class here without another line. Entered by Ruby threads that hold
 * the GVL. Leaves the wording to whoever detected the failure: the text is passed on as it is.
 */
#include "torch_ddp.h"

#include <ruby/encoding.h>

static VALUE error_base;

static VALUE class_for(tddp_status status)
{
    return rb_const_get(tddp_rb_distributed, rb_intern(tddp_status_ruby_class(status)));
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
    /* What throw and break leave has no class to ask. */
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
#define TDDP_RB_DEFINE(name, code, text, ruby_class) define(ruby_class);
    TDDP_STATUS_MAP(TDDP_RB_DEFINE)
#undef TDDP_RB_DEFINE
}
