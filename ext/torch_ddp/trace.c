/*
 * Traces over <tddp/trace.h>. Called by Ruby threads that hold the GVL; closing a trace, which
 * waits for the disk, releases it. lib/torch names the spans.
 */
#include <tddp/trace.h>

#include "torch_ddp.h"

/* _trace_open(folder, rank) */
static VALUE trace_open(VALUE self, VALUE folder, VALUE rank)
{
    tddp_status status = tddp_trace_open(StringValueCStr(folder), NUM2INT(rank));
    tddp_rb_check(status);
    return self;
}

static tddp_status body_close(void *data, const tddp_wait *wait)
{
    (void)data;
    (void)wait;
    tddp_trace_close();
    return TDDP_OK;
}

static VALUE trace_close(VALUE self)
{
    tddp_rb_raise_outcome(tddp_rb_blocking(body_close, NULL, -1, true));
    return self;
}

/* _trace_pause(whether spans are left out) */
static VALUE trace_pause(VALUE self, VALUE paused)
{
    tddp_trace_pause(RTEST(paused));
    return self;
}

static VALUE trace_enabled(VALUE self)
{
    return tddp_trace_enabled() ? Qtrue : Qfalse;
}

static VALUE trace_now(VALUE self)
{
    return LL2NUM(tddp_trace_now());
}

/* _trace_span(lane, name, start, end, args as a JSON object or nil) */
static VALUE trace_span(VALUE self, VALUE lane, VALUE name, VALUE start, VALUE end, VALUE args)
{
    const char *json = NIL_P(args) ? NULL : StringValueCStr(args);
    tddp_trace_span(StringValueCStr(lane), StringValueCStr(name), NUM2LL(start), NUM2LL(end), json);
    return self;
}

void tddp_rb_init_trace(void)
{
    TDDP_RB_PRIVATE("_trace_open", trace_open, 2);
    TDDP_RB_PRIVATE("_trace_close", trace_close, 0);
    TDDP_RB_PRIVATE("_trace_pause", trace_pause, 1);
    TDDP_RB_PRIVATE("_trace_enabled?", trace_enabled, 0);
    TDDP_RB_PRIVATE("_trace_now", trace_now, 0);
    TDDP_RB_PRIVATE("_trace_span", trace_span, 5);
}
