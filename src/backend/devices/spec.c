/* Parses names such as "cpu:gloo,cuda:nccl". Any thread; keeps no state. */
#include <stdlib.h>
#include <string.h>

#include "backend/devices/devices.h"
#include "base/base.h"

#define EXPECTED "expected one for cpu, for cuda or for each, as in \"cpu:gloo,cuda:nccl\""

enum { MAX_BYTES = 128 };

bool tddp_devices_is_spec(const char *name)
{
    return strpbrk(name, ":,") != NULL;
}

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

/* Assigns backends to kinds of memory. CUDA memory that a backend doesn't support is
 * copied, and one context is enough. */
static tddp_status select_parts(const char *text, const tddp_backend_v1 *for_cpu,
                                const tddp_backend_v1 *for_cuda, tddp_devices *made)
{
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
    bool copied = for_cuda && !supports(for_cuda, TDDP_CUDA);
    made->inner[TDDP_CPU] = for_cpu ? for_cpu : copied ? for_cuda : NULL;
    made->inner[TDDP_CUDA] = copied || for_cuda == for_cpu ? NULL : for_cuda;
    return TDDP_OK;
}

tddp_status tddp_devices_create(const char *text, tddp_devices **out)
{
    parser names = {.text = text};
    const tddp_backend_v1 *found[TDDP_DEVICE_TYPES] = {NULL};
    tddp_status status = parse_spec(&names);
    for (int type = 0; type < TDDP_DEVICE_TYPES && status == TDDP_OK; type++) {
        if (names.names[type]) {
            status = tddp_backend_find(names.names[type], &found[type]);
        }
    }
    if (status) {
        return status;
    }
    tddp_devices *made = tddp_alloc(sizeof *made);
    char *name = made ? tddp_copy_string(text) : NULL;
    if (!name) {
        free(made);
        return TDDP_OUT_OF_MEMORY;
    }
    status = select_parts(text, found[TDDP_CPU], found[TDDP_CUDA], made);
    if (status) {
        free(name);
        free(made);
        return status;
    }
    tddp_devices_fill(made, name);
    *out = made;
    return TDDP_OK;
}

void tddp_devices_discard(tddp_devices *self)
{
    free((char *)self->table.name);
    free(self);
}
