/*
 * Calls Ruby code within libtorch's backward, whose C++ frames no longjmp may cross: communication
 * hooks, checkpointed segments and functions. An exception becomes a status, and stays in
 * rb_errinfo() as the cause of the exception that backward raises; an exception that is neither a
 * StandardError nor a ScriptError is raised again after backward. Called by the Ruby thread that
 * runs backward and holds the GVL.
 */
#include "torch_ddp.h"

/* Exported by Ruby, but not declared in a public header by all versions. */
int ruby_thread_has_gvl_p(void);
int ruby_native_thread_p(void);

int tddp_rb_may_run(void)
{
    return ruby_native_thread_p() && ruby_thread_has_gvl_p();
}

static VALUE describe(VALUE error)
{
    return rb_sprintf("%" PRIsVALUE ": %" PRIsVALUE, rb_obj_class(error), rb_obj_as_string(error));
}

/* Converts the raised exception to a status. */
static tddp_status status_of_exception(const char *what)
{
    VALUE error = rb_errinfo();
    if (!tddp_rb_is_exception(error)) {
        rb_set_errinfo(Qnil);
        return tddp_fail(TDDP_INTERNAL, "%s was left by throw, break or Thread#kill", what);
    }
    int state = 0;
    VALUE text = rb_protect(describe, error, &state);
    if (state != 0)
        text = rb_obj_class(error);
    tddp_status status =
        tddp_fail(TDDP_INTERNAL, "%s raised %s", what, RSTRING_PTR(rb_obj_as_string(text)));
    if (rb_obj_is_kind_of(error, rb_eStandardError) || rb_obj_is_kind_of(error, rb_eScriptError)) {
        rb_set_errinfo(error); /* the cause of the exception that backward raises */
    } else {
        rb_set_errinfo(Qnil);
        tddp_rb_raise_later(error);
    }
    return status;
}

tddp_status tddp_rb_call_in_backward(VALUE (*body)(VALUE data), void *data, const char *what)
{
    if (!tddp_rb_may_run())
        return tddp_fail(
            TDDP_UNSUPPORTED,
            "%s is Ruby code, but libtorch called it on a thread of its own: it runs "
            "only on the thread that called backward (other threads compute checkpoint "
            "segments nested more than 60 deep, and tensors on a GPU)",
            what);
    int state = 0;
    rb_protect(body, (VALUE)data, &state);
    return state == 0 ? TDDP_OK : status_of_exception(what);
}
