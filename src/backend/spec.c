/*
 * The backends of a group by its name: one, or one for each kind of memory in PyTorch's notation,
 * "cpu:gloo,cuda:nccl". Any thread; keeps no state.
 */
#include <string.h>

#include <tddp/backend.h>

#include "base/base.h"

#define EXPECTED "expected one for cpu, for cuda or for each, as in \"cpu:gloo,cuda:nccl\""

enum { MAX_BYTES = 128 };

/* The names of the parts point into `copy`. */
typedef struct parser {
    const char *text;
    char copy[MAX_BYTES];
    const char *names[TDDP_DEVICE_TYPES];
} parser;

/* Parses one "device:backend", terminated by NUL. */
static tddp_status parse_item(parser *self, char *item)
{
    char *colon = strchr(item, ':');
    if (!colon) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "backend \"%s\": \"%s\" does not say for which device: " EXPECTED,
                         self->text, item);
    }
    *colon = '\0';
    int type = 0;
    while (type < TDDP_DEVICE_TYPES &&
           strcmp(item, tddp_device_type_name((tddp_device_type)type)) != 0) {
        type++;
    }
    if (type == TDDP_DEVICE_TYPES) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "backend \"%s\": device \"%s\": " EXPECTED,
                         self->text, item);
    }
    if (!colon[1]) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "backend \"%s\": none is named for %s: " EXPECTED,
                         self->text, item);
    }
    if (self->names[type]) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "backend \"%s\": %s and %s are both named for %s: " EXPECTED, self->text,
                         self->names[type], colon + 1, item);
    }
    self->names[type] = colon + 1;
    return TDDP_OK;
}

static tddp_status parse_spec(parser *self)
{
    size_t length = strlen(self->text);
    if (length >= sizeof self->copy) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "backend \"%.64s...\" (%zu characters): " EXPECTED,
                         self->text, length);
    }
    memcpy(self->copy, self->text, length + 1);
    tddp_status status = TDDP_OK;
    for (char *item = self->copy; item && status == TDDP_OK;) {
        char *comma = strchr(item, ',');
        if (comma) {
            *comma = '\0';
        }
        status = parse_item(self, item);
        item = comma ? comma + 1 : NULL;
    }
    return status;
}

static bool supports(const tddp_backend_v1 *backend, tddp_device_type type)
{
    return (backend->device_types >> type & 1u) != 0;
}

/* CUDA memory that a backend doesn't support is copied, and one context is enough. */
static tddp_status check_memory(const char *text, const tddp_backend_v1 *found[TDDP_DEVICE_TYPES])
{
    const tddp_backend_v1 *for_cpu = found[TDDP_CPU];
    const tddp_backend_v1 *for_cuda = found[TDDP_CUDA];
    const tddp_backend_v1 *wrong = for_cpu && !supports(for_cpu, TDDP_CPU) ? for_cpu : NULL;
    if (!wrong && for_cuda && !supports(for_cuda, TDDP_CUDA) && !supports(for_cuda, TDDP_CPU)) {
        wrong = for_cuda;
    }
    if (wrong) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "backend \"%s\": %s takes no %s memory: name another one for it, as in "
                         "\"cpu:gloo,cuda:nccl\"",
                         text, wrong->name, wrong == for_cpu ? "cpu" : "cuda");
    }
    const bool copied = for_cuda && !supports(for_cuda, TDDP_CUDA);
    found[TDDP_CPU] = !for_cpu && copied ? for_cuda : for_cpu;
    found[TDDP_CUDA] = copied || for_cuda == for_cpu ? NULL : for_cuda;
    return TDDP_OK;
}

static tddp_status find_one(const char *name, const tddp_backend_v1 *out[TDDP_DEVICE_TYPES])
{
    const tddp_backend_v1 *found;
    tddp_status status = tddp_backend_find(name, &found);
    if (status == TDDP_OK) {
        out[supports(found, TDDP_CPU) ? TDDP_CPU : TDDP_CUDA] = found;
    }
    return status;
}

tddp_status tddp_backends_find(const char *name, const tddp_backend_v1 *out[TDDP_DEVICE_TYPES])
{
    parser names = {.text = name};
    memset(out, 0, TDDP_DEVICE_TYPES * sizeof *out);
    if (!name || !strpbrk(name, ":,")) {
        return find_one(name, out);
    }
    tddp_status status = parse_spec(&names);
    for (int type = 0; type < TDDP_DEVICE_TYPES && status == TDDP_OK; type++) {
        if (names.names[type]) {
            status = tddp_backend_find(names.names[type], &out[type]);
        }
    }
    return status ? status : check_memory(name, out);
}
