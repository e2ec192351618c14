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

static tddp_status add_entry(tddp_launch_view *view, tddp_slice id, tddp_slice value)
{
    tddp_launch_entry *entries = tddp_launch_grow(view->entries, view->count, sizeof *entries);
    if (!entries) {
        return TDDP_OUT_OF_MEMORY;
    }
    tddp_launch_entry *entry = &entries[view->count];
    view->entries = entries;
    tddp_status status = tddp_launch_entry_read(value.data, value.size, entry);
    if (status == TDDP_PROTOCOL) {
        tddp_log(TDDP_LOG_WARN, "launch", "%s", tddp_error_message());
        return TDDP_OK;
    }
    if (status == TDDP_OK) { /* no two have the same */
        (void)snprintf(entry->self.id, sizeof entry->self.id, "%.*s", (int)id.size, id.data);
        view->count++;
    }
    return status;
}

tddp_status tddp_launch_view_add(tddp_launch_view *view, tddp_slice key, tddp_slice value)
{
    static const char node[] = "node/";
    if (key.size == 6 && memcmp(key.data, "leader", 6) == 0) {
        (void)snprintf(view->leader, sizeof view->leader, "%.*s", (int)value.size, value.data);
    } else if (key.size == 5 && memcmp(key.data, "state", 5) == 0) {
        tddp_blob_free(&view->state);
        return tddp_blob_copy(value, &view->state);
    } else if (key.size > sizeof node - 1 && memcmp(key.data, node, sizeof node - 1) == 0) {
        const size_t at = sizeof node - 1;
        return add_entry(view, (tddp_slice){key.data + at, key.size - at}, value);
    }
    return TDDP_OK;
}
