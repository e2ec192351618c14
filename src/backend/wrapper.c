/* Contexts of backends within a group, or within another backend. Threads: as <tddp/backend.h>
 * says. */
#include "backend/wrapper.h"

#include <stdio.h>

#include "base/base.h"

enum { TEXT_BYTES = 4096 };

void tddp_inner_close(tddp_inner *self)
{
    char text[TEXT_BYTES];
    (void)snprintf(text, sizeof text, "%s", tddp_error_message());
    if (self->backend) {
        self->backend->destroy(self->context);
    }
    tddp_store_release(self->store);
    *self = (tddp_inner){0};
    (void)tddp_fail(TDDP_OK, "%s", text);
}

void tddp_inner_abort(const tddp_inner *self)
{
    if (self->backend) {
        self->backend->abort(self->context);
    }
}

void tddp_inner_report_failure(const tddp_inner *self, tddp_status status, const char *text)
{
    if (self->backend && self->backend->report_failure) {
        self->backend->report_failure(self->context, status, text);
    }
}

tddp_status tddp_inner_decline(const tddp_inner *self, const tddp_wait *wait)
{
    bool declines = self->backend && self->backend->decline;
    return declines ? self->backend->decline(self->context, wait) : TDDP_OK;
}
