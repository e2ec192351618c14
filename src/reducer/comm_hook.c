/*
 * Reference-counted communication hooks. Every owner that may call the hook, or that has a pending
 * work of it, holds a reference; the last release frees the hook's state. Any thread. The built-in
 * hooks are in src/hooks.
 */
#include <stdatomic.h>
#include <stdlib.h>

#include <tddp/comm_hook.h>

#include "base/base.h"
#include "base/options.h"

struct tddp_comm_hook {
    atomic_long references;
    tddp_comm_hook_ops ops;
    void *state;
    char *settings;
};

tddp_status tddp_comm_hook_make(const tddp_comm_hook_ops *ops, void *state, tddp_comm_hook **out)
{
    tddp_comm_hook_ops all = {0};
    tddp_status status =
        tddp_opts_read("sizeof(tddp_comm_hook_ops)", ops,
                       TDDP_OPTS_UNTIL(tddp_comm_hook_ops, device_types), &all, sizeof all);
    if (status != TDDP_OK) {
        return status;
    }
    if (!all.name || !all.run) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "a communication hook without name or run: expected both");
    }
    tddp_comm_hook *hook = tddp_alloc(sizeof *hook);
    if (!hook) {
        return TDDP_OUT_OF_MEMORY;
    }
    atomic_init(&hook->references, 1);
    hook->settings = tddp_copy_string(all.settings ? all.settings : "");
    if (!hook->settings) {
        free(hook);
        return TDDP_OUT_OF_MEMORY;
    }
    hook->ops = all;
    hook->ops.settings = hook->settings;
    hook->state = state;
    *out = hook;
    return TDDP_OK;
}

tddp_comm_hook *tddp_comm_hook_retain(tddp_comm_hook *hook)
{
    atomic_fetch_add_explicit(&hook->references, 1, memory_order_relaxed);
    return hook;
}

void tddp_comm_hook_release(tddp_comm_hook *hook)
{
    if (hook && atomic_fetch_sub_explicit(&hook->references, 1, memory_order_acq_rel) == 1) {
        if (hook->ops.free) {
            hook->ops.free(hook->state);
        }
        free(hook->settings);
        free(hook);
    }
}

const char *tddp_comm_hook_name(const tddp_comm_hook *hook)
{
    return hook->ops.name;
}

const char *tddp_comm_hook_settings(const tddp_comm_hook *hook)
{
    return hook->settings;
}

int tddp_comm_hook_on_caller(const tddp_comm_hook *hook)
{
    return hook->ops.on_caller;
}

int tddp_comm_hook_takes(const tddp_comm_hook *hook, tddp_device_type type)
{
    const uint32_t types = hook->ops.device_types;
    return type == TDDP_CPU && types == 0 ? 1 : (types >> (unsigned)type & 1u) != 0;
}

tddp_status tddp_comm_hook_run(tddp_comm_hook *hook, tddp_group *group, const tddp_bucket *bucket,
                               int stage, tddp_work **work, int *again)
{
    *work = NULL;
    *again = 0;
    return hook->ops.run(hook->state, group, bucket, stage, work, again);
}
