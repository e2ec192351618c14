/*
 * Error messages of failed iterations: which parameter, on which rank, and what to do about it.
 * Called under the reducer's lock. Each function sets the calling thread's error text.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "reducer/reducer.h"

tddp_status tddp_reducer_fail_again(const tddp_reducer *reducer)
{
    return tddp_fail(
        reducer->failure,
        "the gradients of an earlier step were not averaged (%s): destroy this process "
        "group, then create it again and load the model from a checkpoint",
        reducer->failure_text);
}

tddp_status tddp_reducer_fail_index(const tddp_reducer *reducer, size_t index)
{
    return tddp_fail(TDDP_INVALID_ARGUMENT, "parameter number %zu: expected 0 to %zu", index,
                     reducer->count - 1);
}

static const char *advice_for_missing(const tddp_reducer *reducer)
{
    if (reducer->find_unused) {
        return "The outputs of forward depend on them, so the loss must too: use all outputs of "
               "forward in the loss, or return only those that it needs";
    }
    return "The loss must depend on every parameter in each synchronized backward: pass "
           "find_unused_parameters: true, freeze the unused parameters (requires_grad = false "
           "before wrapping), use all outputs of forward, or run that part under no_sync";
}

static tddp_status fail_missing_gradients(const tddp_reducer *reducer)
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
                    "rank %d: %zu of %zu parameters got no gradient in the previous backward: "
                    "%.*s%s. %s",
                    reducer->rank, missing, reducer->count, (int)names.size, names.data, more,
                    advice_for_missing(reducer));
    tddp_bytes_free(&names);
    return TDDP_INVALID_ARGUMENT;
}

/* static_graph: names the first parameter with fewer calls than in the first iteration. TDDP_OK if
 * there is none. */
static tddp_status fail_missing_calls(const tddp_reducer *reducer)
{
    const tddp_reducer_calls *calls = &reducer->calls;
    size_t first = reducer->count;
    size_t missing = 0;
    for (size_t i = 0; i < reducer->count; i++) {
        if (calls->counts[i] < calls->expected[i]) {
            first = missing++ ? first : i;
        }
    }
    if (missing == 0) {
        return TDDP_OK;
    }
    return tddp_fail(TDDP_INVALID_ARGUMENT,
                     "rank %d: static_graph is set, but the graph has changed: %zu of %zu "
                     "parameters got fewer gradients in the previous backward than in the first "
                     "one, \"%s\" got %" PRIu32 " instead of %" PRIu32 ". Remove static_graph (and "
                     "pass find_unused_parameters: true if some steps don't use all parameters)",
                     reducer->rank, missing, reducer->count, reducer->params[first].name,
                     calls->counts[first], calls->expected[first]);
}

tddp_status tddp_reducer_fail_unfinished(const tddp_reducer *reducer)
{
    if (!reducer->static_graph) {
        return fail_missing_gradients(reducer);
    }
    if (!tddp_reducer_recording(reducer)) {
        tddp_status status = fail_missing_calls(reducer);
        return status != TDDP_OK ? status : fail_missing_gradients(reducer);
    }
    return tddp_fail(TDDP_INVALID_ARGUMENT,
                     "rank %d: the first backward with static_graph was not completed: compute the "
                     "loss from the outputs of forward, and run backward once before the next "
                     "forward",
                     reducer->rank);
}

tddp_status tddp_reducer_fail_marked_twice(const tddp_reducer *reducer, size_t index)
{
    const char *name = reducer->params[index].name;
    if (reducer->ready[index] == TDDP_REDUCER_UNUSED) {
        return tddp_fail(
            TDDP_INVALID_ARGUMENT,
            "rank %d: \"%s\" got a gradient, but was marked unused, because the outputs of "
            "forward don't depend on it: return everything that the loss depends on, or, if "
            "every step has the same graph (as with checkpointed segments), pass "
            "static_graph: true instead of find_unused_parameters: true",
            reducer->rank, name);
    }
    return tddp_fail(TDDP_INVALID_ARGUMENT,
                     "rank %d: the gradient of \"%s\" was marked ready twice since forward: run "
                     "backward once over each part of the graph (a retained graph, or a "
                     "checkpoint inside a checkpoint, runs it again), or add the losses up "
                     "first, or run all but the last backward under no_sync; if every step does "
                     "the same, as with a layer that two checkpointed segments share, "
                     "static_graph: true allows it",
                     reducer->rank, name);
}

tddp_status tddp_reducer_fail_extra_call(const tddp_reducer *reducer, size_t index)
{
    const tddp_reducer_calls *calls = &reducer->calls;
    return tddp_fail(TDDP_INVALID_ARGUMENT,
                     "rank %d: static_graph is set, but the graph has changed: \"%s\" got %" PRIu32
                     " gradients in this backward, and %" PRIu32 " in the first one. Remove "
                     "static_graph (find_unused_parameters: true allows graphs that vary)",
                     reducer->rank, reducer->params[index].name, calls->counts[index],
                     calls->expected[index]);
}
