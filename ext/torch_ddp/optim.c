/*
 * Fused optimizer steps over <tddp/torch_optim.h>. Each call reads torch-rb's param_groups and
 * state again, so changes since the last step take effect. Called by Ruby threads that hold the
 * GVL, which a step keeps. As in torch-rb, a parameter's state is created in the first step with a
 * gradient. torch-rb's constructors check the settings.
 */
#include "torch_ddp.h"

#include <tddp/torch_optim.h>

static ID id_zeros_like, id_to_i;
static VALUE sym_params, sym_step, sym_lr, sym_weight_decay;
static VALUE sym_momentum, sym_dampening, sym_nesterov, sym_betas, sym_eps, sym_amsgrad;
static VALUE sym_states[TDDP_OPTIM_STATES + 1]; /* SGD's buffer, then Adam's three */

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
    VALUE params = hash_fetch(group, sym_params);
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
        tensor = rb_funcall(torch, id_zeros_like, 1, param);
        rb_hash_aset(state, key, tensor);
        *created = true;
    }
    return tddp_rb_tensor(tensor);
}

/* The number of steps: an Integer, or a tensor in a state that PyTorch saved. */
static int64_t steps_of(VALUE state)
{
    VALUE steps = rb_hash_lookup2(state, sym_step, INT2FIX(0));
    if (!RB_INTEGER_TYPE_P(steps))
        steps = rb_funcall(steps, id_to_i, 0);
    return NUM2LL(steps);
}

/* Allocates a step over `count` parameters. */
static fused_step allocate_step(VALUE state, long count, volatile VALUE *slots,
                                volatile VALUE *hashes)
{
    fused_step step = {.state = state};
    step.slots = tddp_rb_scratch(slots, count, sizeof(*step.slots));
    step.hashes = tddp_rb_scratch(hashes, count, sizeof(*step.hashes));
    return step;
}

static void add_slot(fused_step *step, tddp_optim_slot slot, VALUE hash)
{
    step->hashes[step->count] = hash;
    step->slots[step->count++] = slot;
}

/* --- SGD ------------------------------------------------------------------------------------- */

static tddp_sgd_settings sgd_settings(VALUE group)
{
    return (tddp_sgd_settings){.lr = number_of(group, sym_lr),
                               .momentum = number_of(group, sym_momentum),
                               .dampening = number_of(group, sym_dampening),
                               .weight_decay = number_of(group, sym_weight_decay),
                               .nesterov = RTEST(hash_fetch(group, sym_nesterov))};
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
        slot.state[0] = state_tensor(state, sym_states[0], param, &created);
        slot.step = created ? 1 : 2;
    }
    add_slot(step, slot, state);
}

/* Removes the buffers that a failed step created. */
static void remove_new_buffers(const fused_step *step)
{
    for (size_t i = 0; i < step->count; i++) {
        if (step->slots[i].step == 1)
            rb_hash_delete(step->hashes[i], sym_states[0]);
    }
}

/* _sgd_step(param_groups, state) */
static VALUE sgd_step(VALUE self, VALUE groups, VALUE state)
{
    VALUE slots_memory, hashes_memory, settings_memory;
    Check_Type(state, T_HASH);
    long count = params_in(groups), group_count = RARRAY_LEN(groups);
    fused_step step = allocate_step(state, count, &slots_memory, &hashes_memory);
    tddp_sgd_settings *settings = tddp_rb_scratch(&settings_memory, group_count, sizeof(*settings));
    for (long i = 0; i < group_count; i++)
        settings[i] = sgd_settings(group_at(groups, i));
    for (long i = 0; i < group_count; i++) {
        VALUE params = params_of(group_at(groups, i));
        for (long j = 0; j < RARRAY_LEN(params) && step.count < (size_t)count; j++)
            add_sgd(&step, rb_ary_entry(params, j), (size_t)i, settings[i].momentum != 0);
    }
    tddp_status status = tddp_sgd_step(settings, (size_t)group_count, step.slots, step.count);
    if (status != TDDP_OK)
        remove_new_buffers(&step);
    ALLOCV_END(slots_memory);
    ALLOCV_END(hashes_memory);
    ALLOCV_END(settings_memory);
    tddp_rb_check(status);
    return self;
}

/* --- Adam and AdamW -------------------------------------------------------------------------- */

static tddp_adam_settings adam_settings(VALUE group, bool decoupled)
{
    VALUE betas = hash_fetch(group, sym_betas);
    Check_Type(betas, T_ARRAY);
    return (tddp_adam_settings){.lr = number_of(group, sym_lr),
                                .beta1 = NUM2DBL(rb_ary_entry(betas, 0)),
                                .beta2 = NUM2DBL(rb_ary_entry(betas, 1)),
                                .eps = number_of(group, sym_eps),
                                .weight_decay = number_of(group, sym_weight_decay),
                                .amsgrad = RTEST(hash_fetch(group, sym_amsgrad)),
                                .decoupled = decoupled};
}

static void add_adam(fused_step *step, VALUE param, size_t group, bool amsgrad)
{
    tddp_optim_slot slot = {.param = tddp_rb_tensor(param), .group = group};
    if (!tddp_has_gradient(slot.param))
        return;
    VALUE state = Qnil;
    if (!tddp_has_sparse_gradient(slot.param)) { /* a sparse gradient is an error of the step */
        bool created = false;
        state = state_of(step->state, param);
        /* first, so that the state's keys have the same order as torch-rb's */
        slot.step = steps_of(state) + 1;
        rb_hash_aset(state, sym_step, LL2NUM(slot.step));
        for (int i = 0; i < (amsgrad ? 3 : 2); i++)
            slot.state[i] = state_tensor(state, sym_states[1 + i], param, &created);
    }
    add_slot(step, slot, state);
}

static void undo_step_counts(const fused_step *step)
{
    for (size_t i = 0; i < step->count; i++) {
        if (!NIL_P(step->hashes[i]))
            rb_hash_aset(step->hashes[i], sym_step, LL2NUM(steps_of(step->hashes[i]) - 1));
    }
}

/* _adam_step(param_groups, state, decoupled) */
static VALUE adam_step(VALUE self, VALUE groups, VALUE state, VALUE decoupled)
{
    VALUE slots_memory, hashes_memory, settings_memory;
    Check_Type(state, T_HASH);
    long count = params_in(groups), group_count = RARRAY_LEN(groups);
    fused_step step = allocate_step(state, count, &slots_memory, &hashes_memory);
    tddp_adam_settings *settings =
        tddp_rb_scratch(&settings_memory, group_count, sizeof(*settings));
    for (long i = 0; i < group_count; i++)
        settings[i] = adam_settings(group_at(groups, i), RTEST(decoupled));
    for (long i = 0; i < group_count; i++) {
        VALUE params = params_of(group_at(groups, i));
        for (long j = 0; j < RARRAY_LEN(params) && step.count < (size_t)count; j++)
            add_adam(&step, rb_ary_entry(params, j), (size_t)i, settings[i].amsgrad);
    }
    tddp_status status = tddp_adam_step(settings, (size_t)group_count, step.slots, step.count);
    if (status != TDDP_OK)
        undo_step_counts(&step);
    ALLOCV_END(slots_memory);
    ALLOCV_END(hashes_memory);
    ALLOCV_END(settings_memory);
    tddp_rb_check(status);
    return self;
}

/* --- gradients ------------------------------------------------------------------------------- */

/* _zero_grad(param_groups, set_to_none) */
static VALUE zero_grad(VALUE self, VALUE groups, VALUE set_to_none)
{
    VALUE memory;
    long count = params_in(groups);
    const tddp_tensor **params = tddp_rb_scratch(&memory, count, sizeof(*params));
    size_t found = 0;
    for (long i = 0; i < RARRAY_LEN(groups); i++) {
        VALUE tensors = params_of(group_at(groups, i));
        for (long j = 0; j < RARRAY_LEN(tensors) && found < (size_t)count; j++)
            params[found++] = tddp_rb_tensor(rb_ary_entry(tensors, j));
    }
    tddp_status status = tddp_zero_gradients(params, found, RTEST(set_to_none));
    ALLOCV_END(memory);
    tddp_rb_check(status);
    return self;
}

static VALUE symbol(const char *name)
{
    return ID2SYM(rb_intern(name));
}

static void init_symbols(void)
{
    id_zeros_like = rb_intern("zeros_like");
    id_to_i = rb_intern("to_i");
    sym_params = symbol("params");
    sym_step = symbol("step");
    sym_lr = symbol("lr");
    sym_weight_decay = symbol("weight_decay");
    sym_momentum = symbol("momentum");
    sym_dampening = symbol("dampening");
    sym_nesterov = symbol("nesterov");
    sym_betas = symbol("betas");
    sym_eps = symbol("eps");
    sym_amsgrad = symbol("amsgrad");
    sym_states[0] = symbol("momentum_buffer");
    sym_states[1] = symbol("exp_avg");
    sym_states[2] = symbol("exp_avg_sq");
    sym_states[3] = symbol("max_exp_avg_sq");
}

void tddp_rb_init_optim(void)
{
    VALUE optim = rb_define_module_under(tddp_rb_distributed, "Optim");
    VALUE fused = rb_define_module_under(optim, "Fused");
    init_symbols();
    rb_define_private_method(fused, "_sgd_step", sgd_step, 2);
    rb_define_private_method(fused, "_adam_step", adam_step, 3);
    rb_define_private_method(fused, "_zero_grad", zero_grad, 2);
}
