/*
 * Entries and documents of the rendezvous from arbitrary bytes: they are read or refused, and what
 * was read is written and read again as the same.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "launch/rendezvous/state.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool holds)
{
    if (!holds) {
        abort();
    }
}

static void try_entry(const char *data, size_t size)
{
    static tddp_launch_entry entry;
    static tddp_launch_entry again;
    tddp_bytes text = {0};
    tddp_bytes second = {0};
    if (tddp_launch_entry_read(data, size, &entry) != TDDP_OK) {
        return;
    }
    require(tddp_launch_entry_write(&entry, &text) == TDDP_OK);
    require(tddp_launch_entry_read(text.data, text.size, &again) == TDDP_OK);
    require(tddp_launch_entry_write(&again, &second) == TDDP_OK);
    require(second.size == text.size && memcmp(second.data, text.data, text.size) == 0);
    tddp_bytes_free(&text);
    tddp_bytes_free(&second);
}

static void try_state(const char *data, size_t size)
{
    static tddp_launch_state state;
    static tddp_launch_state again;
    tddp_bytes text = {0};
    tddp_bytes second = {0};
    if (tddp_launch_state_read(data, size, &state) != TDDP_OK) {
        return;
    }
    require(tddp_launch_state_write(&state, &text) == TDDP_OK);
    require(tddp_launch_state_read(text.data, text.size, &again) == TDDP_OK);
    require(tddp_launch_state_write(&again, &second) == TDDP_OK);
    require(second.size == text.size && memcmp(second.data, text.data, text.size) == 0);
    tddp_launch_state_free(&state);
    tddp_launch_state_free(&again);
    tddp_bytes_free(&text);
    tddp_bytes_free(&second);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    try_entry((const char *)data, size);
    try_state((const char *)data, size);
    return 0;
}
