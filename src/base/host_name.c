/*
 * The machine's name. No state.
 */
#include <stdio.h>
#include <unistd.h>

#include "base/host_name.h"

const char *tddp_host_name(char text[TDDP_HOST_NAME_BYTES])
{
    text[TDDP_HOST_NAME_BYTES - 1] = '\0'; /* a longer name is cut without one */
    if (gethostname(text, TDDP_HOST_NAME_BYTES - 1) != 0) {
        (void)snprintf(text, TDDP_HOST_NAME_BYTES, "?");
    }
    return text;
}
