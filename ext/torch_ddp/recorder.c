/*
 * The flight recorder over <tddp/recorder.h>. Called by Ruby threads that hold the GVL, also in a
 * signal's trap; writing the files releases it.
 */
#include "torch_ddp.h"

typedef struct dump_call {
    const char *prefix;
    int files;
} dump_call;

static tddp_status body_dump(void *data, const tddp_wait *wait)
{
    dump_call *call = data;
    (void)wait;
    return tddp_recorder_dump_all(call->prefix, &call->files);
}

/* _dump_flight_recorder(prefix or nil) → number of files */
static VALUE dump_all(VALUE self, VALUE prefix)
{
    dump_call call = {NULL, 0};
    if (!NIL_P(prefix)) {
        prefix = rb_str_new_frozen(StringValue(prefix));
        call.prefix = StringValueCStr(prefix);
    }
    tddp_rb_raise_outcome(tddp_rb_blocking(body_dump, &call, -1, true));
    RB_GC_GUARD(prefix);
    return INT2NUM(call.files);
}

void tddp_rb_init_recorder(void)
{
    TDDP_RB_PRIVATE("_dump_flight_recorder", dump_all, 1);
}
