/*
 * Status names and the calling thread's error text. The text lives in thread-local storage: a
 * failure on one thread never overwrites another's. No lock, no allocation: it must work when
 * memory is short.
 */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <tddp/status.h>

#include "base/base.h"

enum { MESSAGE_BYTES = 4096 };

static _Thread_local char message[MESSAGE_BYTES];

const char *tddp_status_name(tddp_status status)
{
    switch (status) {
#define NAME(name, code, text) \
    case TDDP_##name:          \
        return "TDDP_" #name;
        TDDP_STATUS_MAP(NAME)
#undef NAME
    }
    return "TDDP_UNKNOWN";
}

const char *tddp_status_text(tddp_status status)
{
    switch (status) {
#define TEXT(name, code, text) \
    case TDDP_##name:          \
        return text;
        TDDP_STATUS_MAP(TEXT)
#undef TEXT
    }
    return "unknown status";
}

const char *tddp_error_message(void)
{
    return message;
}

tddp_status tddp_fail(tddp_status status, const char *format, ...)
{
    /* The arguments may point into `message`, so the new text is made beside it. */
    char text[MESSAGE_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    (void)tddp_mask_controls(text); /* parts of it may come from other processes */
    memcpy(message, text, strlen(text) + 1);
    return status;
}
