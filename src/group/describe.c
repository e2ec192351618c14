/*
 * The caller's description of an operation, shapes or names as text, and its fingerprint, which the
 * ranks compare. Any thread.
 */
#include <string.h>

#include <tddp/call.h>

#include "group/group.h"

uint32_t tddp_group_fingerprint(const char *text)
{
    return tddp_digest_fold(tddp_digest(TDDP_DIGEST_START, text, strlen(text)));
}

tddp_status tddp_group_describe_work(tddp_work *work, const char *text)
{
    if (!text || !text[0]) {
        return TDDP_OK;
    }
    work->description = tddp_format("%.*s", TDDP_DESCRIPTION_BYTES - 1, text);
    if (!work->description) {
        return TDDP_OUT_OF_MEMORY;
    }
    work->op.fingerprint = tddp_group_fingerprint(work->description);
    return TDDP_OK;
}
