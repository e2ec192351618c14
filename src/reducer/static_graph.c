/*
 * A graph that is the same in every round: a parameter may be reported several times (checkpointed
 * segments, parts used twice), and some never. In the first round nothing is handed over; calls
 * are counted, and finish takes all as ready. Later rounds expect the same counts, and a parameter
 * is ready at the last of its calls. Called with the reducer's lock held; after the first round
 * nothing here walks through the parameters but the start of a round.
 */
#include <stdlib.h>
#include <string.h>

#include "reducer/reducer.h"

tddp_status tddp_reducer_calls_make(tddp_reducer *reducer)
{
    tddp_reducer_calls *calls = &reducer->calls;
    if (!reducer->static_graph) {
        return TDDP_OK;
    }
    calls->expected = tddp_alloc_array(reducer->count, sizeof *calls->expected);
    calls->made = tddp_alloc_array(reducer->count, sizeof *calls->made);
    calls->turn = tddp_alloc_array(reducer->count, sizeof *calls->turn);
    return calls->expected && calls->made && calls->turn ? TDDP_OK : TDDP_OUT_OF_MEMORY;
}

bool tddp_reducer_counting(const tddp_reducer *reducer)
{
    return reducer->static_graph && !reducer->calls.known;
}

void tddp_reducer_calls_open(tddp_reducer *reducer)
{
    tddp_reducer_calls *calls = &reducer->calls;
    if (!reducer->static_graph) {
        return;
    }
    memset(calls->made, 0, reducer->count * sizeof *calls->made);
    if (!calls->known) {
        memset(calls->turn, 0, reducer->count * sizeof *calls->turn);
        calls->turns = 0;
    }
}

tddp_status tddp_reducer_count_call(tddp_reducer *reducer, size_t index, bool *ready)
{
    tddp_reducer_calls *calls = &reducer->calls;
    calls->made[index]++;
    if (!calls->known) {
        calls->turn[index] = ++calls->turns;
        *ready = false;
        return TDDP_OK;
    }
    if (calls->made[index] > calls->expected[index]) {
        return tddp_reducer_fail_calls(reducer, index);
    }
    *ready = calls->made[index] == calls->expected[index];
    return TDDP_OK;
}

/* By the turn of the last call; those without one at the end, as backward would come to them. */
static int by_turn(const void *a, const void *b, void *data)
{
    const uint64_t *turn = data;
    int64_t left = *(const int64_t *)a;
    int64_t right = *(const int64_t *)b;
    uint64_t left_turn = turn[left] - 1; /* never called: the largest number */
    uint64_t right_turn = turn[right] - 1;
    if (left_turn != right_turn) {
        return left_turn < right_turn ? -1 : 1;
    }
    return left > right ? -1 : left < right;
}

void tddp_reducer_close_counting(tddp_reducer *reducer)
{
    tddp_reducer_calls *calls = &reducer->calls;
    for (size_t i = 0; i < reducer->count; i++) {
        calls->expected[i] = calls->made[i];
        reducer->order[i] = (int64_t)i;
    }
    qsort_r(reducer->order, reducer->count, sizeof *reducer->order, by_turn, calls->turn);
    calls->known = true;
    tddp_reducer_usage *usage = &reducer->usage;
    for (size_t k = 0; k < reducer->count; k++) {
        size_t i = (size_t)reducer->order[k];
        bool called = calls->made[i] > 0;
        tddp_reducer_count_ready(reducer, i, called ? TDDP_REDUCER_READY : TDDP_REDUCER_UNUSED);
        if (!called) {
            usage->unused[usage->unused_count++] = i;
        }
    }
    usage->taken = true;
}
