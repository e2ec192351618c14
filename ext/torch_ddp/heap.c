/*
 * The C library's heap over <tddp/heap.h>. Called by Ruby threads that hold the GVL, and never
 * blocks. lib/torch decides when to collect garbage.
 */
#include "torch_ddp.h"

#include <tddp/heap.h>

static VALUE heap_keep(VALUE self)
{
    return tddp_heap_keep() ? Qtrue : Qfalse;
}

/* _heap_in_use → bytes, or nil if unknown */
static VALUE heap_in_use(VALUE self)
{
    int64_t bytes = tddp_heap_in_use();
    return bytes < 0 ? Qnil : LL2NUM(bytes);
}

void tddp_rb_init_heap(void)
{
    TDDP_RB_PRIVATE("_keep_heap", heap_keep, 0);
    TDDP_RB_PRIVATE("_heap_in_use", heap_in_use, 0);
}
