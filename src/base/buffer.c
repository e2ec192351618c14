/*
 * Facts about dtypes and devices. Pure tables.
 */
#include <tddp/buffer.h>

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
