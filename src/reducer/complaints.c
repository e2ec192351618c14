/*
 * What is said of rounds that went wrong: which parameter, on which rank, and what to do about it.
 * Called with the reducer's lock held; sets the calling thread's text and keeps nothing.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "reducer/reducer.h"

tddp_status tddp_reducer_broken(const tddp_reducer *reducer)
{
    return tddp_fail(reducer->failure,
                     "the gradients of an earlier step were not averaged (%s): end this process "
                     "group, and make it and the model anew from a checkpoint",
                     reducer->failure_text);
}

tddp_status tddp_reducer_fail_index(const tddp_reducer *reducer, size_t index)
{
    return tddp_fail(TDDP_INVALID_ARGUMENT, "parameter number %zu: expected 0 to %zu", index,
                     reducer->count - 1);
}

static const char *cure_of_unready(const tddp_reducer *reducer)
{
    if (reducer->find_unused) {
        return "What forward returned reaches them, so the loss must depend on them: use all "
               "outputs of forward in it, or return only those that it needs";
    }
    return "The loss must depend on every parameter in each backward that is synchronised: pass "
           "find_unused_parameters: true, freeze those that it does not (requires_grad = false "
           "before wrapping), use all outputs of forward, or run that part under no_sync";
}

static tddp_status fail_missing(const tddp_reducer *reducer)
{
    enum { NAMED = 10 };
    tddp_bytes names = {0};
    size_t missing = 0;
    for (size_t i = 0; i < reducer->count; i++) {
        if (reducer->ready[i] || missing++ >= NAMED) {
            continue;
        }
        const char *name = reducer->params[i].name;
        if (tddp_bytes_append(&names, missing > 1 ? ", \"" : "\"", missing > 1 ? 3 : 1) ||
            tddp_bytes_append(&names, name, strlen(name)) || tddp_bytes_append(&names, "\"", 1)) {
            tddp_bytes_free(&names);
            return TDDP_OUT_OF_MEMORY;
        }
    }
    char more[48] = "";
    if (missing > NAMED) {
        (void)snprintf(more, sizeof more, " and %zu more", missing - NAMED);
    }
    (void)tddp_fail(TDDP_INVALID_ARGUMENT,
                    "rank %d: %zu of %zu parameters got no gradient in the backward before: "
                    "%.*s%s. %s",
                    reducer->rank, missing, reducer->count, (int)names.size, names.data, more,
                    cure_of_unready(reducer));
    tddp_bytes_free(&names);
    return TDDP_INVALID_ARGUMENT;
}

/* With static_graph: the first parameter that got fewer gradients than it should. */
static tddp_status fail_fewer(const tddp_reducer *reducer)
{
    const tddp_reducer_calls *calls = &reducer->calls;
    size_t first = reducer->count;
    size_t missing = 0;
    for (size_t i = 0; i < reducer->count; i++) {
        if (calls->made[i] < calls->expected[i]) {
            first = missing++ ? first : i;
        }
    }
    if (missing == 0) {
        return TDDP_OK;
    }
    return tddp_fail(TDDP_INVALID_ARGUMENT,
                     "rank %d: static_graph was promised, but the graph has changed: %zu of %zu "
                     "parameters got fewer gradients in the backward before than in the first one, "
                     "\"%s\" %" PRIu32 " in place of %" PRIu32 ". Leave static_graph out (and pass "
                     "find_unused_parameters: true if some steps leave parameters out)",
                     reducer->rank, missing, reducer->count, reducer->params[first].name,
                     calls->made[first], calls->expected[first]);
}

tddp_status tddp_reducer_fail_unready(const tddp_reducer *reducer)
{
    if (!reducer->static_graph) {
        return fail_missing(reducer);
    }
    if (!tddp_reducer_counting(reducer)) {
        tddp_status status = fail_fewer(reducer);
        return status != TDDP_OK ? status : fail_missing(reducer);
    }
    return tddp_fail(TDDP_INVALID_ARGUMENT,
                     "rank %d: the first backward with static_graph did not come to its end: "
                     "compute the loss from what forward returned, and run backward over it once "
                     "before the next forward",
                     reducer->rank);
}

tddp_status tddp_reducer_fail_twice(const tddp_reducer *reducer, size_t index)
{
    const char *name = reducer->params[index].name;
    if (reducer->ready[index] == TDDP_REDUCER_UNUSED) {
        return tddp_fail(
            TDDP_INVALID_ARGUMENT,
            "rank %d: \"%s\" got a gradient, but was taken for unused, for what forward "
            "returned does not reach it: return all that the loss depends on, or, if "
            "every step has the same graph (as with checkpointed segments), pass "
            "static_graph: true in place of find_unused_parameters: true",
            reducer->rank, name);
    }
    return tddp_fail(TDDP_INVALID_ARGUMENT,
                     "rank %d: the gradient of \"%s\" became ready twice since forward: run "
                     "backward once over each part of the graph (a retained graph, or a "
                     "checkpoint inside a checkpoint, runs it again), or add the losses up "
                     "first, or all but the last backward under no_sync; if every step does the "
                     "same, as with a layer that two checkpointed segments share, "
                     "static_graph: true allows it",
                     reducer->rank, name);
}

tddp_status tddp_reducer_fail_calls(const tddp_reducer *reducer, size_t index)
{
    const tddp_reducer_calls *calls = &reducer->calls;
    return tddp_fail(
        TDDP_INVALID_ARGUMENT,
        "rank %d: static_graph was promised, but the graph has changed: \"%s\" got %" PRIu32
        " gradients in this backward, and %" PRIu32 " in the first one. Leave "
        "static_graph out (find_unused_parameters: true allows graphs that vary)",
        reducer->rank, reducer->params[index].name, calls->made[index], calls->expected[index]);
}
