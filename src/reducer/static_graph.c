/*
 * Static graph: a graph that is the same in every iteration. A parameter may be marked ready
 * several times in an iteration (checkpointed segments, modules used twice) or never. The first
 * iteration counts the calls and launches nothing before finish, which marks all parameters ready.
 * Later iterations expect the same counts: a parameter is ready at its last expected call. Called
 * under the reducer's lock.
 */
#include <stdlib.h>
#include <string.h>

#include "reducer/reducer.h"

tddp_status tddp_reducer_calls_init(tddp_reducer *reducer)
{
    tddp_reducer_calls *calls = &reducer->calls;
    if (!reducer->static_graph) {
        return TDDP_OK;
    }
    calls->expected = tddp_alloc_array(reducer->count, sizeof *calls->expected);
    calls->counts = tddp_alloc_array(reducer->count, sizeof *calls->counts);
    calls->last_call = tddp_alloc_array(reducer->count, sizeof *calls->last_call);
    return calls->expected && calls->counts && calls->last_call ? TDDP_OK : TDDP_OUT_OF_MEMORY;
}

bool tddp_reducer_recording(const tddp_reducer *reducer)
{
    return reducer->static_graph && !reducer->calls.recorded;
}

void tddp_reducer_calls_prepare(tddp_reducer *reducer)
{
    tddp_reducer_calls *calls = &reducer->calls;
    if (!reducer->static_graph) {
        return;
    }
    memset(calls->counts, 0, reducer->count * sizeof *calls->counts);
    if (!calls->recorded) {
        memset(calls->last_call, 0, reducer->count * sizeof *calls->last_call);
        calls->total = 0;
    }
}

tddp_status tddp_reducer_count_call(tddp_reducer *reducer, size_t index, bool *ready)
{
    tddp_reducer_calls *calls = &reducer->calls;
    calls->counts[index]++;
    if (!calls->recorded) {
        calls->last_call[index] = ++calls->total;
        *ready = false;
        return TDDP_OK;
    }
    if (calls->counts[index] > calls->expected[index]) {
        return tddp_reducer_fail_extra_call(reducer, index);
    }
    *ready = calls->counts[index] == calls->expected[index];
    return TDDP_OK;
}

/* Sorts by the last call. Parameters without one follow, the last parameter first. */
static int by_last_call(const void *a, const void *b, void *data)
{
    const uint64_t *last_call = data;
    int64_t left = *(const int64_t *)a;
    int64_t right = *(const int64_t *)b;
    uint64_t left_call = last_call[left] - 1; /* never called: the largest number */
    uint64_t right_call = last_call[right] - 1;
    if (left_call != right_call) {
        return left_call < right_call ? -1 : 1;
    }
    return left > right ? -1 : left < right;
}

void tddp_reducer_end_recording(tddp_reducer *reducer)
{
    tddp_reducer_calls *calls = &reducer->calls;
    for (size_t i = 0; i < reducer->count; i++) {
        calls->expected[i] = calls->counts[i];
        reducer->order[i] = (int64_t)i;
    }
    qsort_r(reducer->order, reducer->count, sizeof *reducer->order, by_last_call, calls->last_call);
    calls->recorded = true;
    tddp_reducer_unused *state = &reducer->unused;
    for (size_t k = 0; k < reducer->count; k++) {
        size_t i = (size_t)reducer->order[k];
        bool called = calls->counts[i] > 0;
        tddp_reducer_count_ready(reducer, i, called ? TDDP_REDUCER_READY : TDDP_REDUCER_UNUSED);
        if (!called) {
            state->indices[state->count++] = i;
        }
    }
    state->marked_ready = true;
}
