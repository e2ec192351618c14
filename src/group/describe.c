/*
 * What a caller says of its next operation, shapes or names, and that it will wait for it at once:
 * kept with the thread that said it until its next operation begins. Each thread sees its own.
 */
#include <string.h>

#include "group/group.h"

enum { DESCRIPTION_BYTES = 256 };

typedef struct saying {
    bool any;
    bool awaited;
    char text[DESCRIPTION_BYTES];
} saying;

/* Said, but not yet taken; and of the operation that this thread is about to queue. */
static _Thread_local struct {
    saying said;
    saying taken;
} own;

void tddp_describe_next(const char *text)
{
    size_t length = text ? strnlen(text, DESCRIPTION_BYTES - 1) : 0;
    if (length > 0) {
        memcpy(own.said.text, text, length);
    }
    own.said.text[length] = '\0';
    own.said.any = own.said.awaited || length > 0;
}

void tddp_await_next(void)
{
    own.said.any = own.said.awaited = true;
}

void tddp_group_take_description(void)
{
    if (own.said.any) {
        own.taken.any = true;
        own.taken.awaited = own.said.awaited;
        memcpy(own.taken.text, own.said.text, strlen(own.said.text) + 1);
        own.said.any = own.said.awaited = false;
        own.said.text[0] = '\0';
    } else if (own.taken.any) {
        own.taken.any = own.taken.awaited = false;
        own.taken.text[0] = '\0';
    }
}

bool tddp_group_is_awaited(void)
{
    return own.taken.awaited;
}

/* FNV-1a, which every rank computes alike. 0 means that there is nothing to compare. */
uint32_t tddp_group_fingerprint(const char *text)
{
    uint32_t hash = 2166136261u;
    for (; *text; text++) {
        hash = (hash ^ (unsigned char)*text) * 16777619u;
    }
    return hash ? hash : 1;
}

tddp_status tddp_group_describe_work(tddp_work *work)
{
    if (!own.taken.text[0]) {
        return TDDP_OK;
    }
    work->description = tddp_copy_string(own.taken.text);
    if (!work->description) {
        return TDDP_OUT_OF_MEMORY;
    }
    work->op.fingerprint = tddp_group_fingerprint(own.taken.text);
    return TDDP_OK;
}
