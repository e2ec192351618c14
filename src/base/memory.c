/*
 * Allocation with a status text, a counter that makes the nth one fail so that tests reach every
 * cleanup path, and byte buffers that grow. Any thread.
 */
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"

/* Allocations left until one fails; 0: never. A global because it stands in for the system's. */
static atomic_long until_failure;

bool tddp_fail_allocation(long nth)
{
    return atomic_exchange(&until_failure, nth) <= 0;
}

static bool must_fail(void)
{
    return atomic_load_explicit(&until_failure, memory_order_relaxed) > 0 &&
           atomic_fetch_sub(&until_failure, 1) == 1;
}

static void *checked(void *memory, size_t bytes)
{
    if (!memory) {
        (void)tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory: %zu bytes", bytes);
    }
    return memory;
}

void *tddp_alloc(size_t bytes)
{
    return tddp_alloc_array(1, bytes);
}

void *tddp_alloc_array(size_t count, size_t bytes_each)
{
    if (count == 0 || bytes_each == 0) {
        count = bytes_each = 1;
    }
    return checked(must_fail() ? NULL : calloc(count, bytes_each), count * bytes_each);
}

void *tddp_resize(void *memory, size_t bytes)
{
    if (bytes == 0) {
        bytes = 1;
    }
    return checked(must_fail() ? NULL : realloc(memory, bytes), bytes);
}

void *tddp_grow(void *array, size_t count, size_t bytes_each)
{
    bool full = (count & (count - 1)) == 0;
    size_t room = count == 0 ? 1 : count * 2;
    char *grown = full ? tddp_resize(array, room * bytes_each) : array;
    if (grown) {
        memset(grown + count * bytes_each, 0, bytes_each);
    }
    return grown;
}

char *tddp_copy_string(const char *text)
{
    size_t bytes = strlen(text) + 1;
    char *copy = tddp_alloc(bytes);
    return copy ? memcpy(copy, text, bytes) : NULL;
}

char *tddp_format(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    char *text = length < 0 ? NULL : tddp_alloc((size_t)length + 1);
    if (text) {
        va_start(arguments, format);
        vsnprintf(text, (size_t)length + 1, format, arguments);
        va_end(arguments);
    }
    return text;
}

void tddp_add_text(char *text, size_t bytes, const char *format, ...)
{
    size_t used = strlen(text);
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(text + used, bytes - used, format, arguments);
    va_end(arguments);
}

tddp_status tddp_bytes_reserve(tddp_bytes *bytes, size_t more)
{
    if (bytes->capacity - bytes->size >= more) {
        return TDDP_OK;
    }
    size_t capacity = bytes->capacity < 256 ? 256 : bytes->capacity;
    while (capacity - bytes->size < more) {
        if (capacity > SIZE_MAX / 2) {
            return tddp_fail(TDDP_OUT_OF_MEMORY, "out of memory: %zu bytes more", more);
        }
        capacity *= 2;
    }
    char *data = tddp_resize(bytes->data, capacity);
    if (!data) {
        return TDDP_OUT_OF_MEMORY;
    }
    bytes->data = data;
    bytes->capacity = capacity;
    return TDDP_OK;
}

tddp_status tddp_bytes_append(tddp_bytes *bytes, const void *data, size_t size)
{
    tddp_status status = tddp_bytes_reserve(bytes, size);
    if (status == TDDP_OK && size > 0) {
        memcpy(bytes->data + bytes->size, data, size);
        bytes->size += size;
    }
    return status;
}

tddp_status tddp_bytes_format(tddp_bytes *bytes, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    tddp_status status = tddp_bytes_reserve(bytes, (size_t)length + 1);
    if (status == TDDP_OK) {
        va_start(arguments, format);
        vsnprintf(bytes->data + bytes->size, (size_t)length + 1, format, arguments);
        va_end(arguments);
        bytes->size += (size_t)length;
    }
    return status;
}

void tddp_bytes_consume(tddp_bytes *bytes, size_t size)
{
    bytes->size -= size;
    if (bytes->size > 0) {
        memmove(bytes->data, bytes->data + size, bytes->size);
    }
}

void tddp_bytes_free(tddp_bytes *bytes)
{
    free(bytes->data);
    *bytes = (tddp_bytes){0};
}
