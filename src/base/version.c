/*
 * Which version this library is, for callers that were compiled against another. Any thread.
 */
#include <tddp/version.h>

const char *tddp_version(void)
{
    return TDDP_VERSION;
}
