/* Contexts of backends within a group, or within another backend. Threads: as <tddp/backend.h>
 * says. */
#include "backend/wrapper.h"

#include <stdio.h>
#include <stdlib.h>

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

/* --- requests -------------------------------------------------------------------------------- */

tddp_status tddp_inner_post(const tddp_inner *self, const tddp_op *op, void *data, void **out)
{
    tddp_inner_request *posted = tddp_alloc(sizeof *posted);
    if (!posted) {
        return TDDP_OUT_OF_MEMORY;
    }
    *posted = (tddp_inner_request){.inner = self, .data = data};
    tddp_status status = self->backend->post(self->context, op, &posted->request);
    if (status) {
        free(posted);
        return status;
    }
    *out = posted;
    return TDDP_OK;
}

tddp_status tddp_inner_finish(void *context, void *request, int *source)
{
    (void)context;
    const tddp_inner_request *posted = request;
    const tddp_inner *inner = posted->inner;
    tddp_status status = inner->backend->finish(inner->context, posted->request, source);
    if (!tddp_inner_is_interrupted(inner, status)) {
        free(request);
    }
    return status;
}

tddp_status tddp_inner_launch(void *context, void *const *requests, size_t count)
{
    (void)context;
    const tddp_inner *inner = ((const tddp_inner_request *)requests[0])->inner;
    void **theirs = tddp_alloc_array(count, sizeof *theirs);
    if (!theirs) {
        return TDDP_OUT_OF_MEMORY;
    }
    for (size_t i = 0; i < count; i++) {
        theirs[i] = ((const tddp_inner_request *)requests[i])->request;
    }
    tddp_status status = inner->backend->launch(inner->context, theirs, count);
    free(theirs);
    return status;
}

tddp_status tddp_inner_order(void *context, void *request, void *stream)
{
    (void)context;
    const tddp_inner_request *posted = request;
    return posted->inner->backend->order(posted->inner->context, posted->request, stream);
}

tddp_status tddp_inner_test(void *context, void *request, int *complete)
{
    (void)context;
    const tddp_inner_request *posted = request;
    return posted->inner->backend->test(posted->inner->context, posted->request, complete);
}
