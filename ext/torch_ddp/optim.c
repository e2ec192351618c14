/*
 * Fused optimizer steps over <tddp/torch_optim.h>. Each call reads torch-rb's param_groups and
 * state again, so changes since the last step take effect. Called by Ruby threads that hold the
 * GVL, which a step keeps. As in torch-rb, a parameter's state is created in the first step with a
 * gradient. torch-rb's constructors check the settings.
 */
#include "torch_ddp.h"

#include <tddp/torch_optim.h>

/* The key of a setting or a state; looked up once at each place. */
#define KEY(name) ID2SYM(rb_intern(name))

/* A step; the garbage collector owns the memory of its slots. */
typedef struct fused_step {
    VALUE state; /* torch-rb's Hash from parameters to theirs */
    tddp_optim_slot *slots;
    VALUE *hashes; /* each slot's state, or Qnil */
    size_t count;
} fused_step;

static VALUE hash_fetch(VALUE hash, VALUE key)
{
    VALUE value = rb_hash_lookup2(hash, key, Qundef);
    if (value == Qundef)
        rb_raise(rb_eKeyError, "param_groups: a group has no %" PRIsVALUE, rb_inspect(key));
    return value;
}

static double number_of(VALUE group, VALUE key)
{
    return NUM2DBL(hash_fetch(group, key));
}

static VALUE group_at(VALUE groups, long index)
{
    VALUE group = rb_ary_entry(groups, index);
    Check_Type(group, T_HASH);
    return group;
}

static VALUE params_of(VALUE group)
{
    VALUE params = hash_fetch(group, KEY("params"));
    Check_Type(params, T_ARRAY);
    return params;
}

static long params_in(VALUE groups)
{
    long count = 0;
    Check_Type(groups, T_ARRAY);
    for (long i = 0; i < RARRAY_LEN(groups); i++)
        count += RARRAY_LEN(params_of(group_at(groups, i)));
    return count;
}

/* --- state ----------------------------------------------------------------------------------- */

/* A parameter's state, created if there is none. */
static VALUE state_of(VALUE all, VALUE param)
{
    VALUE state = rb_hash_lookup2(all, param, Qnil);
    if (NIL_P(state)) {
        state = rb_hash_new();
        rb_hash_aset(all, param, state);
    }
    Check_Type(state, T_HASH);
    return state;
}

/* A tensor of a state. Sets `*created` if there was none. */
static tddp_tensor *state_tensor(VALUE state, VALUE key, VALUE param, bool *created)
{
    VALUE tensor = rb_hash_lookup2(state, key, Qnil);
    if (NIL_P(tensor)) {
        VALUE torch = rb_const_get(rb_cObject, rb_intern("Torch"));
        tensor = rb_funcall(torch, rb_intern("zeros_like"), 1, param);
        rb_hash_aset(state, key, tensor);
        *created = true;
    }
    return tddp_rb_tensor(tensor);
}

/* The number of steps: an Integer, or a tensor in a state that PyTorch saved. */
static int64_t steps_of(VALUE state)
{
    VALUE steps = rb_hash_lookup2(state, KEY("step"), INT2FIX(0));
    if (!RB_INTEGER_TYPE_P(steps))
        steps = rb_funcall(steps, rb_intern("to_i"), 0);
    return NUM2LL(steps);
}

static void add_slot(fused_step *step, tddp_optim_slot slot, VALUE hash)
{
    step->hashes[step->count] = hash;
    step->slots[step->count++] = slot;
}

/* --- SGD ------------------------------------------------------------------------------------- */

static tddp_sgd_settings sgd_settings(VALUE group)
{
    return (tddp_sgd_settings){.lr = number_of(group, KEY("lr")),
                               .momentum = number_of(group, KEY("momentum")),
                               .dampening = number_of(group, KEY("dampening")),
                               .weight_decay = number_of(group, KEY("weight_decay")),
                               .nesterov = RTEST(hash_fetch(group, KEY("nesterov")))};
}

static void add_sgd(fused_step *step, VALUE param, size_t group, bool momentum)
{
    VALUE state = Qnil;
    tddp_optim_slot slot = {.param = tddp_rb_tensor(param), .step = 2, .group = group};
    if (!tddp_has_gradient(slot.param))
        return;
    if (momentum) {
        bool created = false;
        state = state_of(step->state, param);
        slot.state[0] = state_tensor(state, KEY("momentum_buffer"), param, &created);
        slot.step = created ? 1 : 2;
    }
    add_slot(step, slot, state);
}

/* --- Adam and AdamW -------------------------------------------------------------------------- */

static tddp_adam_settings adam_settings(VALUE group, bool decoupled)
{
    VALUE betas = hash_fetch(group, KEY("betas"));
    Check_Type(betas, T_ARRAY);
    return (tddp_adam_settings){.lr = number_of(group, KEY("lr")),
                                .beta1 = NUM2DBL(rb_ary_entry(betas, 0)),
                                .beta2 = NUM2DBL(rb_ary_entry(betas, 1)),
                                .eps = number_of(group, KEY("eps")),
                                .weight_decay = number_of(group, KEY("weight_decay")),
                                .amsgrad = RTEST(hash_fetch(group, KEY("amsgrad"))),
                                .decoupled = decoupled};
}

static void add_adam(fused_step *step, VALUE param, size_t group, bool amsgrad)
{
    tddp_optim_slot slot = {.param = tddp_rb_tensor(param), .group = group};
    if (!tddp_has_gradient(slot.param))
        return;
    VALUE state = Qnil;
    VALUE keys[] = {KEY("exp_avg"), KEY("exp_avg_sq"), KEY("max_exp_avg_sq")};
    if (!tddp_has_sparse_gradient(slot.param)) { /* a sparse gradient is an error of the step */
        bool created = false;
        state = state_of(step->state, param);
        /* first, so that the state's keys have the same order as torch-rb's */
        slot.step = steps_of(state) + 1;
        rb_hash_aset(state, KEY("step"), LL2NUM(slot.step));
        for (int i = 0; i < (amsgrad ? 3 : 2); i++)
            slot.state[i] = state_tensor(state, keys[i], param, &created);
    }
    add_slot(step, slot, state);
}

/* --- a step ---------------------------------------------------------------------------------- */

/* Adam counts its steps; SGD's buffers are removed where a failed step created them. */
static void undo(const fused_step *step, bool adam)
{
    for (size_t i = 0; i < step->count; i++) {
        VALUE state = step->hashes[i];
        if (adam && !NIL_P(state))
            rb_hash_aset(state, KEY("step"), LL2NUM(steps_of(state) - 1));
        else if (!adam && step->slots[i].step == 1)
            rb_hash_delete(state, KEY("momentum_buffer"));
    }
}

static VALUE take_step(VALUE groups, VALUE state, bool is_adam, bool decoupled)
{
    TDDP_RB_SCRATCH slots_memory = 0, hashes_memory = 0, sgd_memory = 0, adam_memory = 0;
    Check_Type(state, T_HASH);
    const long count = params_in(groups), group_count = RARRAY_LEN(groups);
    fused_step step = {.state = state};
    step.slots = tddp_rb_scratch(&slots_memory, count, sizeof(*step.slots));
    step.hashes = tddp_rb_scratch(&hashes_memory, count, sizeof(*step.hashes));
    tddp_sgd_settings *sgd = tddp_rb_scratch(&sgd_memory, group_count, sizeof(*sgd));
    tddp_adam_settings *adam = tddp_rb_scratch(&adam_memory, group_count, sizeof(*adam));
    for (long i = 0; i < group_count; i++) {
        if (is_adam)
            adam[i] = adam_settings(group_at(groups, i), decoupled);
        else
            sgd[i] = sgd_settings(group_at(groups, i));
    }
    for (long i = 0; i < group_count; i++) {
        VALUE params = params_of(group_at(groups, i));
        for (long j = 0; j < RARRAY_LEN(params) && step.count < (size_t)count; j++) {
            if (is_adam)
                add_adam(&step, rb_ary_entry(params, j), (size_t)i, adam[i].amsgrad);
            else
                add_sgd(&step, rb_ary_entry(params, j), (size_t)i, sgd[i].momentum != 0);
        }
    }
    tddp_status status = is_adam ? tddp_adam_step(adam, (size_t)group_count, step.slots, step.count)
                                 : tddp_sgd_step(sgd, (size_t)group_count, step.slots, step.count);
    if (status != TDDP_OK)
        undo(&step, is_adam);
    tddp_rb_check(status);
    return Qnil;
}

/* _sgd_step(param_groups, state) */
static VALUE sgd_step(VALUE self, VALUE groups, VALUE state)
{
    return take_step(groups, state, false, false);
}

/* _adam_step(param_groups, state, decoupled) */
static VALUE adam_step(VALUE self, VALUE groups, VALUE state, VALUE decoupled)
{
    return take_step(groups, state, true, RTEST(decoupled));
}

/* --- gradients ------------------------------------------------------------------------------- */

/* _zero_grad(param_groups, set_to_none) */
static VALUE zero_grad(VALUE self, VALUE groups, VALUE set_to_none)
{
    TDDP_RB_SCRATCH memory = 0;
    long count = params_in(groups);
    const tddp_tensor **params = tddp_rb_scratch(&memory, count, sizeof(*params));
    size_t found = 0;
    for (long i = 0; i < RARRAY_LEN(groups); i++) {
        VALUE tensors = params_of(group_at(groups, i));
        for (long j = 0; j < RARRAY_LEN(tensors) && found < (size_t)count; j++)
            params[found++] = tddp_rb_tensor(rb_ary_entry(tensors, j));
    }
    tddp_rb_check(tddp_zero_gradients(params, found, RTEST(set_to_none)));
    return self;
}

void tddp_rb_init_optim(void)
{
    VALUE optim = rb_define_module_under(tddp_rb_distributed, "Optim");
    VALUE fused = rb_define_module_under(optim, "Fused");
    rb_define_private_method(fused, "_sgd_step", sgd_step, 2);
    rb_define_private_method(fused, "_adam_step", adam_step, 3);
    rb_define_private_method(fused, "_zero_grad", zero_grad, 2);
}
