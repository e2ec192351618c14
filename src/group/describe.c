/*
 * What a caller says of its next operation, shapes or names: kept with the thread that said it
 * until its next operation begins. Each thread sees its own.
 */
#include <string.h>

#include "group/group.h"

enum { DESCRIPTION_BYTES = 256 };

/* Said, but not yet taken; and of the operation that this thread is about to queue. */
static _Thread_local char said[DESCRIPTION_BYTES];
static _Thread_local char taken[DESCRIPTION_BYTES];

void tddp_describe_next(const char *text)
{
    size_t length = text ? strnlen(text, DESCRIPTION_BYTES - 1) : 0;
    if (length > 0) {
        memcpy(said, text, length);
    }
    said[length] = '\0';
}

void tddp_group_take_description(void)
{
    if (said[0]) {
        memcpy(taken, said, sizeof taken);
        said[0] = '\0';
    } else {
        taken[0] = '\0';
    }
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
    if (!taken[0]) {
        return TDDP_OK;
    }
    work->description = tddp_copy_string(taken);
    if (!work->description) {
        return TDDP_OUT_OF_MEMORY;
    }
    work->op.fingerprint = tddp_group_fingerprint(taken);
    return TDDP_OK;
}
