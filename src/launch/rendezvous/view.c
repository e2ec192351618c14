/*
 * What a backend found, as the values of its keys say. Pure but for logging.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "launch/rendezvous/backend.h"
#include "store/store_impl.h"

void tddp_launch_view_free(tddp_launch_view *view)
{
    free(view->entries);
    tddp_blob_free(&view->state);
    *view = (tddp_launch_view){0};
}

static tddp_status add_entry(tddp_launch_view *view, const char *id, const tddp_blob *value)
{
    tddp_launch_entry *entries = tddp_grow(view->entries, (size_t)view->count, sizeof *entries);
    if (!entries) {
        return TDDP_OUT_OF_MEMORY;
    }
    tddp_launch_entry *entry = &entries[view->count];
    view->entries = entries;
    tddp_status status = tddp_launch_entry_read(value->data, value->size, entry);
    if (status == TDDP_PROTOCOL) {
        tddp_log(TDDP_LOG_WARN, "launch", "%s", tddp_error_message());
        return TDDP_OK;
    }
    if (status == TDDP_OK) { /* no two have the same */
        (void)snprintf(entry->self.id, sizeof entry->self.id, "%s", id);
        view->count++;
    }
    return status;
}

tddp_status tddp_launch_view_add(tddp_launch_view *view, const tddp_blob *key, size_t prefix,
                                 const tddp_blob *value)
{
    const char *name = key->size > prefix ? key->data + prefix : "";
    if (strcmp(name, "leader") == 0) {
        (void)snprintf(view->leader, sizeof view->leader, "%s", value->data);
    } else if (strcmp(name, "state") == 0) {
        tddp_blob_free(&view->state);
        return tddp_blob_copy((tddp_slice){value->data, value->size}, &view->state);
    } else if (strncmp(name, "node/", 5) == 0) {
        return add_entry(view, name + 5, value);
    }
    return TDDP_OK;
}
