/*
 * Entries and documents of the rendezvous from arbitrary bytes: they are read or refused, and what
 * was read is written and read again as the same (once bytes that are no UTF-8 have become U+FFFD).
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

/* From the second on they are equal: the first is what bytes that are no UTF-8 were written as. */
static void check_and_free(tddp_bytes texts[3])
{
    require(texts[1].size == texts[2].size &&
            memcmp(texts[1].data, texts[2].data, texts[1].size) == 0);
    for (int i = 0; i < 3; i++) {
        tddp_bytes_free(&texts[i]);
    }
}

static void try_entry(const char *data, size_t size)
{
    static tddp_launch_entry entry;
    tddp_bytes texts[3] = {{0}};
    if (tddp_launch_entry_read(data, size, &entry) != TDDP_OK) {
        return;
    }
    for (int i = 0; i < 3; i++) {
        require(tddp_launch_entry_write(&entry, &texts[i]) == TDDP_OK);
        require(tddp_launch_entry_read(texts[i].data, texts[i].size, &entry) == TDDP_OK);
    }
    check_and_free(texts);
}

static void try_state(const char *data, size_t size)
{
    tddp_launch_state state;
    tddp_bytes texts[3] = {{0}};
    if (tddp_launch_state_read(data, size, &state) != TDDP_OK) {
        return;
    }
    for (int i = 0; i < 3; i++) {
        require(tddp_launch_state_write(&state, &texts[i]) == TDDP_OK);
        tddp_launch_state_free(&state);
        require(tddp_launch_state_read(texts[i].data, texts[i].size, &state) == TDDP_OK);
    }
    tddp_launch_state_free(&state);
    check_and_free(texts);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    try_entry((const char *)data, size);
    try_state((const char *)data, size);
    return 0;
}
