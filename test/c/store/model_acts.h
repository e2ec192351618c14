/*
 * What is done to a store and its model: operations by chance.
 */
#ifndef TDDP_STORE_MODEL_ACTS_H
#define TDDP_STORE_MODEL_ACTS_H

#include "model.h"

enum {
    CLIENTS = MODEL_CLIENTS,
    KEYS = 5,
    SIZES = 4,
    LIST = 3,
    LENGTH = 120,
    ROUNDS = 6,
    VALUE_BYTES = 700
};

static uint64_t dice;

static inline int any(int below)
{
    dice = dice * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (int)((dice >> 33) % (uint64_t)below);
}

/* --- what is done ---------------------------------------------------------------------------- */

typedef enum kind_of_step {
    SET,
    GET,
    ADD,
    APPEND,
    COMPARE_SET,
    DELETE,
    CHECK_KEYS,
    WAIT,
    NUM_KEYS,
    MULTI_GET,
    MULTI_SET,
    LIST_KEYS,
    PUSH,
    POP,
    LENGTH_OF,
    SET_EPHEMERAL,
    WATCH,
    END_CONNECTION,
    STEP_KINDS,
} kind_of_step;

static const char *const step_names[STEP_KINDS] = {
    "set",        "get",       "add",       "append",        "compare_set", "delete_key",
    "check",      "wait",      "num_keys",  "multi_get",     "multi_set",   "list_keys",
    "queue_push", "queue_pop", "queue_len", "set_ephemeral", "watch",       "end of the connection",
};

/* One operation with all that it needs, so that a sequence can be cut anywhere. */
typedef struct act {
    kind_of_step kind;
    int client;
    int keys[LIST];
    int values[LIST];
    int count; /* of the keys, where there may be several */
    int number;
} act;

static inline const char *key_name(int key)
{
    static const char *const names[KEYS] = {"a", "b", "p/a", "p/q/b", "a longer one"};
    return names[key];
}

/* Counters, texts, nothing, binary, long. */
static inline tddp_slice value_of(int slot, int value)
{
    static char bytes[LIST][VALUE_BYTES];
    static const size_t sizes[SIZES] = {0, 1, 30, VALUE_BYTES};
    char *text = bytes[slot];
    size_t size = sizes[value % SIZES];
    if (value % 3 == 0) {
        return (tddp_slice){text, (size_t)snprintf(text, 24, "%d", value - 50)};
    }
    for (size_t i = 0; i < size; i++) {
        text[i] = (char)(value + (int)i * 7);
    }
    return (tddp_slice){text, size};
}

static inline act any_act(void)
{
    act it = {.kind = (kind_of_step)any(STEP_KINDS),
              .client = any(CLIENTS),
              .count = 1 + any(LIST),
              .number = any(2001) - 1000};
    for (int i = 0; i < LIST; i++) {
        it.keys[i] = any(KEYS);
        it.values[i] = any(100);
    }
    return it;
}

static inline void show(const act *it)
{
    printf("    client %d: %s", it->client, step_names[it->kind]);
    for (int i = 0; i < it->count; i++) {
        printf(" \"%s\" <%d>", key_name(it->keys[i]), it->values[i]);
    }
    printf(" %d\n", it->number);
}

#endif
