/*
 * Events and messages of the rendezvous from arbitrary bytes: they are read or refused, and what
 * was read is written and read again as the same.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "launch/rendezvous/text.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void try_event(const char *data, size_t size)
{
    static tddp_launch_event event;
    static tddp_launch_event again;
    tddp_bytes text = {0};
    tddp_bytes second = {0};
    if (tddp_launch_event_decode(data, size, &event) == TDDP_OK) {
        if (tddp_launch_event_encode(&event, &text) != TDDP_OK ||
            tddp_launch_event_decode(text.data, text.size, &again) != TDDP_OK ||
            tddp_launch_event_encode(&again, &second) != TDDP_OK || second.size != text.size ||
            memcmp(second.data, text.data, text.size) != 0) {
            abort();
        }
    }
    tddp_bytes_free(&text);
    tddp_bytes_free(&second);
}

static void try_message(const char *data, size_t size)
{
    static tddp_launch_message message;
    static tddp_launch_message again;
    tddp_bytes text = {0};
    tddp_bytes second = {0};
    if (tddp_launch_message_decode(data, size, &message) == TDDP_OK) {
        if (tddp_launch_message_encode(&message, &text) != TDDP_OK ||
            tddp_launch_message_decode(text.data, text.size, &again) != TDDP_OK ||
            tddp_launch_message_encode(&again, &second) != TDDP_OK || second.size != text.size ||
            memcmp(second.data, text.data, text.size) != 0) {
            abort();
        }
        tddp_launch_message_free(&again);
        tddp_launch_message_free(&message);
    }
    tddp_bytes_free(&text);
    tddp_bytes_free(&second);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    try_event((const char *)data, size);
    try_message((const char *)data, size);
    return 0;
}
