/*
 * Facts about dtypes and devices, and buffers that lie end to end. Pure functions.
 */
#include "base/base.h"

size_t tddp_dtype_size(tddp_dtype dtype)
{
    switch (dtype) {
#define BYTES(name, code, bytes, text) \
    case TDDP_##name:                  \
        return bytes;
        TDDP_DTYPE_MAP(BYTES)
#undef BYTES
    }
    return 0;
}

const char *tddp_dtype_name(tddp_dtype dtype)
{
    switch (dtype) {
#define TEXT(name, code, bytes, text) \
    case TDDP_##name:                 \
        return text;
        TDDP_DTYPE_MAP(TEXT)
#undef TEXT
    }
    return "unknown";
}

const char *tddp_device_type_name(tddp_device_type type)
{
    switch (type) {
    case TDDP_CPU:
        return "cpu";
    case TDDP_CUDA:
        return "cuda";
    }
    return "unknown";
}

tddp_buffer tddp_buffers_joined(const tddp_buffer *parts, size_t count)
{
    tddp_buffer whole = parts[0];
    const char *end = NULL;
    bool contiguous = true;
    whole.data = NULL;
    whole.count = 0;
    for (size_t i = 0; i < count; i++) {
        if (parts[i].count == 0) {
            continue; /* may lie anywhere */
        }
        contiguous = contiguous && (!end || parts[i].data == end);
        whole.data = whole.data ? whole.data : parts[i].data;
        whole.count += parts[i].count;
        end = (const char *)parts[i].data + parts[i].count * tddp_dtype_size(parts[i].dtype);
    }
    if (!contiguous) {
        whole.data = NULL;
    }
    return whole;
}
