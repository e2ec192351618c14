/*
 * The getters of DistributedDataParallel's core: its buckets and its last iteration, over
 * <tddp/reducer.h>. Called by Ruby threads that hold the GVL, between iterations.
 */
#include "torch_ddp.h"

/* The bytes of each bucket. */
static VALUE bucket_sizes(VALUE self)
{
    const tddp_reducer *reducer = tddp_rb_reducer(self);
    size_t count = tddp_reducer_bucket_count(reducer);
    VALUE sizes = rb_ary_new_capa((long)count);
    for (size_t i = 0; i < count; i++)
        rb_ary_push(sizes, SIZET2NUM(tddp_reducer_bucket_bytes(reducer, i)));
    return sizes;
}

/* The number of a parameter's bucket; nil for sparse parameters, which are in no bucket. */
static VALUE bucket_of(VALUE self, VALUE index)
{
    size_t bucket = tddp_reducer_bucket_of(tddp_rb_reducer(self), NUM2SIZET(index));
    return bucket == (size_t)-1 ? Qnil : SIZET2NUM(bucket);
}

static VALUE numbers(const size_t *values, size_t count)
{
    VALUE array = rb_ary_new_capa((long)count);
    for (size_t i = 0; i < count; i++)
        rb_ary_push(array, SIZET2NUM(values[i]));
    return array;
}

/* The numbers of each bucket's parameters, in the order of their slices. */
static VALUE bucket_params(VALUE self)
{
    const tddp_reducer *reducer = tddp_rb_reducer(self);
    size_t buckets = tddp_reducer_bucket_count(reducer);
    VALUE all = rb_ary_new_capa((long)buckets);
    for (size_t b = 0; b < buckets; b++) {
        TDDP_RB_SCRATCH memory = 0;
        size_t count = tddp_reducer_bucket_params(reducer, b, NULL, 0);
        size_t *params = tddp_rb_scratch(&memory, (long)count, sizeof(*params));
        tddp_reducer_bucket_params(reducer, b, params, count);
        rb_ary_push(all, numbers(params, count));
    }
    return all;
}

/* The parameters in the order in which they became ready in the last iteration; empty before it. */
static VALUE order(VALUE self)
{
    const tddp_reducer *reducer = tddp_rb_reducer(self);
    TDDP_RB_SCRATCH memory = 0;
    size_t count = tddp_reducer_order(reducer, NULL, 0);
    size_t *params = tddp_rb_scratch(&memory, (long)count, sizeof(*params));
    tddp_reducer_order(reducer, params, count);
    return numbers(params, count);
}

static VALUE rebuilt(VALUE self)
{
    return tddp_reducer_rebuilt(tddp_rb_reducer(self)) ? Qtrue : Qfalse;
}

static VALUE rounds(VALUE self)
{
    return ULL2NUM(tddp_reducer_rounds(tddp_rb_reducer(self)));
}

static void set_time(VALUE hash, const char *name, int64_t ns)
{
    rb_hash_aset(hash, ID2SYM(rb_intern(name)), ns == 0 ? Qnil : LL2NUM(ns));
}

/* Times of the last iteration, in nanoseconds of the monotonic clock; nil: didn't occur. */
static VALUE times(VALUE self)
{
    tddp_reducer_times last = {0};
    tddp_reducer_times_of(tddp_rb_reducer(self), &last);
    VALUE hash = rb_hash_new();
    set_time(hash, "prepared", last.prepared_ns);
    set_time(hash, "first_ready", last.first_ready_ns);
    set_time(hash, "last_ready", last.last_ready_ns);
    set_time(hash, "first_launch", last.first_launch_ns);
    set_time(hash, "finished", last.finished_ns);
    rb_hash_aset(hash, ID2SYM(rb_intern("rounds")), ULL2NUM(last.iterations));
    return hash;
}

void tddp_rb_init_ddp_queries(void)
{
    VALUE class = rb_define_class_under(tddp_rb_distributed, "GradientSync", rb_cObject);
    rb_define_method(class, "bucket_sizes", bucket_sizes, 0);
    rb_define_method(class, "bucket_of", bucket_of, 1);
    rb_define_method(class, "bucket_params", bucket_params, 0);
    rb_define_method(class, "order", order, 0);
    rb_define_method(class, "rebuilt?", rebuilt, 0);
    rb_define_method(class, "rounds", rounds, 0);
    rb_define_method(class, "times", times, 0);
}
