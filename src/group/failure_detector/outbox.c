/*
 * What a rank has to tell the store: its reports, and notices. They wait here, in order, while the
 * store is silent, so that neither a group's thread nor its end waits for it. Any thread, with the
 * detector's lock held, puts messages in; the watcher sends them.
 */
#include <stdio.h>
#include <stdlib.h>

#include "group/failure_detector/detector_state.h"

enum {
    LOG_BYTES = 4 << 20, /* the size to which all ranks' reports may add up */
    LEAST_REPORT_BYTES = 100,
    MOST_REPORT_BYTES = 900,
};

void tddp_detector_put(tddp_detector *detector, const char *key, char notice, tddp_bytes line)
{
    tddp_detector_message **end = &detector->outbox;
    const bool lost = detector->store_state == TDDP_DETECTOR_STORE_LOST;
    tddp_detector_message *message = lost ? NULL : tddp_alloc(sizeof *message);
    if (!message) {
        tddp_bytes_free(&line);
        return;
    }
    (void)snprintf(message->notice, sizeof message->notice, "%c%s", notice, key);
    message->line = line;
    while (*end) {
        end = &(*end)->next;
    }
    *end = message;
    detector->queued++;
}

/* Formats this rank's operations in the job's other groups. */
static void describe_other_groups(const tddp_detector *detector, const tddp_detector_entry *self,
                                  char *text, size_t size)
{
    text[0] = '\0';
    for (const tddp_detector_entry *each = detector->entries; each; each = each->next) {
        tddp_recorder_position position = tddp_recorder_read_position(each->group->recorder);
        const tddp_recorder_op_summary *op =
            position.current.any ? &position.current : &position.message;
        if (each != self && op->any) {
            char name[TDDP_REPORT_OP_NAME_BYTES];
            tddp_add_text(text, size, "%sin group \"%.64s\" in %s for %.1f s", text[0] ? ", " : "",
                          each->group->name,
                          tddp_status_report_op_name(op->kind, op->sequence, op->peer, name),
                          (double)(tddp_now_ns() - op->at_ns) / 1e9);
        }
    }
}

/* Reports the failed operation, if it was one, as the current one: others may run beside it. */
static void set_failed_operation(const tddp_failure *failure, tddp_recorder_op_summary *current)
{
    const tddp_op *op = &failure->op;
    const bool is_set =
        current->any && current->kind == op->kind && current->sequence == op->sequence;
    if (op->sequence != 0 && !is_set) {
        *current = (tddp_recorder_op_summary){.any = true,
                                              .kind = op->kind,
                                              .sequence = op->sequence,
                                              .peer = op->peer,
                                              .at_ns = tddp_now_ns()};
        (void)snprintf(current->text, sizeof current->text, "%s",
                       failure->described ? failure->described : "");
    }
}

void tddp_detector_put_report(tddp_detector *detector, const tddp_detector_entry *self,
                              tddp_status_report_kind kind, const char *text)
{
    tddp_group *group = self->group;
    char other_groups[256];
    char seen[MOST_REPORT_BYTES + 1];
    tddp_bytes line = {0};
    tddp_recorder_position position = tddp_recorder_read_position(group->recorder);
    tddp_status status = TDDP_OK;
    if (kind == TDDP_REPORT_FAILURE) {
        set_failed_operation(self->failure, &position.current);
        tddp_observed_describe(&group->observed, text, seen, sizeof seen);
        text = seen;
        status = self->failure->status;
    }
    describe_other_groups(detector, self, other_groups, sizeof other_groups);
    size_t most = (size_t)(LOG_BYTES / group->world_size);
    most = most < LEAST_REPORT_BYTES  ? LEAST_REPORT_BYTES
           : most > MOST_REPORT_BYTES ? MOST_REPORT_BYTES
                                      : most;
    if (tddp_status_report_write(&line, kind, group->rank, status, &position, other_groups,
                                 text ? text : "", most)) {
        tddp_bytes_free(&line);
    } else {
        tddp_detector_put(detector, self->key, ' ', line);
    }
}

void tddp_detector_pop_message(tddp_detector *detector)
{
    tddp_detector_message *message = detector->outbox;
    detector->outbox = message->next;
    detector->told++;
    tddp_bytes_free(&message->line);
    free(message);
}

void tddp_detector_clear_outbox(tddp_detector *detector)
{
    while (detector->outbox) {
        tddp_detector_pop_message(detector);
    }
}
