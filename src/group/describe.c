/*
 * What a caller says of its next operation, shapes or names, and how long it executes that itself:
 * kept with the thread that said it until its next operation begins. Each thread sees its own.
 */
#include <string.h>

#include <tddp/call.h>

#include "group/group.h"

enum { DESCRIPTION_BYTES = 256 };

typedef struct saying {
    bool any;
    tddp_group_moment moment;
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
    own.said.any = own.said.moment.microseconds != 0 || length > 0;
}

void tddp_inline_next(int64_t microseconds, tddp_cancel *cancel)
{
    own.said.moment = (tddp_group_moment){microseconds, cancel};
    own.said.any = microseconds != 0 || own.said.text[0];
}

void tddp_group_take_description(void)
{
    if (own.said.any) {
        own.taken.any = true;
        own.taken.moment = own.said.moment;
        memcpy(own.taken.text, own.said.text, strlen(own.said.text) + 1);
        own.said.any = false;
        own.said.moment = (tddp_group_moment){0};
        own.said.text[0] = '\0';
    } else if (own.taken.any) {
        own.taken.any = false;
        own.taken.moment = (tddp_group_moment){0};
        own.taken.text[0] = '\0';
    }
}

tddp_group_moment tddp_group_taken_moment(void)
{
    return own.taken.moment;
}

uint32_t tddp_group_fingerprint(const char *text)
{
    return tddp_digest_fold(tddp_digest(TDDP_DIGEST_START, text, strlen(text)));
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
