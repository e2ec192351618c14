/*
 * Ruby code that C++ calls in the midst of libtorch's backward, whose frames no jump may cross:
 * communication hooks and checkpointed segments. An exception becomes a status, and stays where
 * Ruby looks for the cause of the one that backward then raises; one that is to end the program is
 * raised again later. Entered by the Ruby thread that runs backward and holds the GVL; roots are
 * let go of by any thread.
 */
#include "torch_ddp.h"

#include <stdatomic.h>
#include <stdlib.h>

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

/* What was raised, as a status. */
static tddp_status failed(const char *what)
{
    VALUE error = rb_errinfo();
    if (!tddp_rb_is_exception(error)) {
        rb_set_errinfo(Qnil);
        return tddp_fail(TDDP_INTERNAL, "%s was left by a jump (throw, break or Thread#kill)",
                         what);
    }
    int state = 0;
    VALUE text = rb_protect(describe, error, &state);
    if (state != 0)
        text = rb_obj_class(error);
    tddp_status status =
        tddp_fail(TDDP_INTERNAL, "%s raised %s", what, RSTRING_PTR(rb_obj_as_string(text)));
    if (rb_obj_is_kind_of(error, rb_eStandardError) || rb_obj_is_kind_of(error, rb_eScriptError)) {
        rb_set_errinfo(error); /* the cause of what backward raises now */
    } else {
        rb_set_errinfo(Qnil);
        tddp_rb_raise_later(error);
    }
    return status;
}

tddp_status tddp_rb_inside(VALUE (*body)(VALUE data), void *data, const char *what)
{
    if (!tddp_rb_may_run())
        return tddp_fail(TDDP_UNSUPPORTED,
                         "%s is Ruby code, but a thread of libtorch's came to it: it runs only on "
                         "the thread that called backward (checkpoint segments nested more than 60 "
                         "deep, or tensors on a GPU, are computed by others)",
                         what);
    int state = 0;
    rb_protect(body, (VALUE)data, &state);
    return state == 0 ? TDDP_OK : failed(what);
}

/* --- roots ------------------------------------------------------------------------------------ */

struct tddp_rb_root {
    VALUE value;
    atomic_bool gone;
    struct tddp_rb_root *next;
};

/* The GVL guards the list; what is gone is taken out by the next collection. */
static tddp_rb_root *roots;

static void mark_roots(void *nothing)
{
    (void)nothing;
    for (tddp_rb_root **at = &roots; *at != NULL;) {
        tddp_rb_root *root = *at;
        if (atomic_load(&root->gone)) {
            *at = root->next;
            free(root);
        } else {
            rb_gc_mark(root->value);
            at = &root->next;
        }
    }
}

/* Without a write barrier, so that every collection looks. */
static const rb_data_type_t keeper_type = {
    .wrap_struct_name = "Ruby objects that libtorch's graphs keep",
    .function = {.dmark = mark_roots},
};

tddp_rb_root *tddp_rb_root_new(VALUE value)
{
    tddp_rb_root *root = malloc(sizeof(*root));
    if (root == NULL)
        rb_memerror();
    root->value = value;
    atomic_init(&root->gone, false);
    root->next = roots;
    roots = root;
    return root;
}

VALUE tddp_rb_root_value(const tddp_rb_root *root)
{
    return root->value;
}

void tddp_rb_root_release(tddp_rb_root *root)
{
    atomic_store(&root->gone, true);
}

void tddp_rb_init_inside(void)
{
    rb_gc_register_mark_object(TypedData_Wrap_Struct(rb_cObject, &keeper_type, &roots));
}
