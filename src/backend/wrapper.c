/*
 * Contexts of other backends within a backend, and tables that wrap other tables.
 *
 * Invariant: there is one table for each wrapper and combination of wrapped tables. One lock guards
 * their list; tables never change once they are in it.
 */
#include "backend/wrapper.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

/* --- tables ---------------------------------------------------------------------------------- */

/* Process-wide, like the registry's list. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static tddp_wrapper *wrappers;

/* With the lock held. */
static const tddp_wrapper *find(tddp_wrapper_fill *fill,
                                const tddp_backend_v1 *const inner[TDDP_MAX_INNER])
{
    const tddp_wrapper *each = wrappers;
    while (each && (each->fill != fill || memcmp(each->inner, inner, sizeof each->inner) != 0)) {
        each = each->next;
    }
    return each;
}

/* With the lock held. */
static tddp_status add(tddp_wrapper_fill *fill, const tddp_backend_v1 *const inner[TDDP_MAX_INNER],
                       const tddp_wrapper **out)
{
    tddp_wrapper *made = tddp_alloc(sizeof *made);
    if (!made) {
        return TDDP_OUT_OF_MEMORY;
    }
    made->fill = fill;
    memcpy(made->inner, inner, sizeof made->inner);
    tddp_status status = fill(made);
    if (status) {
        free(made);
        return status;
    }
    made->next = wrappers;
    wrappers = made;
    *out = made;
    return TDDP_OK;
}

tddp_status tddp_wrapper_table(tddp_wrapper_fill *fill,
                               const tddp_backend_v1 *const inner[TDDP_MAX_INNER],
                               const tddp_backend_v1 **out)
{
    tddp_status status = TDDP_OK;
    pthread_mutex_lock(&lock);
    const tddp_wrapper *found = find(fill, inner);
    if (!found) {
        status = add(fill, inner, &found);
    }
    pthread_mutex_unlock(&lock);
    if (status == TDDP_OK) {
        *out = &found->table;
    }
    return status;
}
