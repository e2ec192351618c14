/*
 * What a rank has to tell the store: its reports, and notices. They wait here, in order, while the
 * store is silent, so that neither a group's thread nor its end waits for it. Any thread, with the
 * detector's lock held, puts messages in; the watcher sends them.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "group/failure_detector/detector_state.h"

enum {
    LOG_BYTES = 4 << 20, /* the size to which all ranks' reports may add up */
    LEAST_REPORT_BYTES = 100,
    MOST_REPORT_BYTES = 900,
};

void tddp_detector_put(tddp_detector *detector, const char *key, tddp_notice_kind notice,
                       tddp_bytes *line)
{
    tddp_detector_message **end = &detector->outbox;
    tddp_detector_message *message =
        detector->store_lost ? NULL : tddp_alloc(sizeof *message); /* zeroed */
    if (!message) {
        if (line) {
            tddp_bytes_free(line);
        }
        return;
    }
    (void)snprintf(message->key, sizeof message->key, "%s", key);
    message->notice = notice;
    if (line) {
        message->line = *line;
        *line = (tddp_bytes){0};
    }
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
    size_t used = 0;
    text[0] = '\0';
    for (const tddp_detector_entry *each = detector->entries; each && used < size;
         each = each->next) {
        tddp_recorder_position position = tddp_recorder_read_position(each->group->recorder);
        const tddp_recorder_op_summary *op =
            position.current.any ? &position.current : &position.message;
        if (each != self && op->any) {
            char name[TDDP_REPORT_OP_NAME_BYTES];
            int length =
                snprintf(text + used, size - used, "%sin group \"%.64s\" in %s for %.1f s",
                         used ? ", " : "", each->group->name,
                         tddp_status_report_op_name(op->kind, op->sequence, op->peer, name),
                         (double)(tddp_now_ns() - op->at_ns) / 1e9);
            used += (size_t)length;
        }
    }
}

/* Reports the failed operation as the current one: others may run beside it. */
static void set_failed_operation(const tddp_detector_entry *self, tddp_recorder_position *position)
{
    tddp_recorder_op_summary *current = &position->current;
    if (current->any && current->kind == self->op.kind && current->sequence == self->op.sequence) {
        return;
    }
    *current = (tddp_recorder_op_summary){.any = true,
                                          .kind = self->op.kind,
                                          .sequence = self->op.sequence,
                                          .peer = self->op.peer,
                                          .at_ns = tddp_now_ns()};
    (void)snprintf(current->text, sizeof current->text, "%s",
                   self->described ? self->described : "");
}

void tddp_detector_put_report(tddp_detector *detector, const tddp_detector_entry *self,
                              tddp_status_report_kind kind, const char *text)
{
    tddp_group *group = self->group;
    char other_groups[256];
    char seen[MOST_REPORT_BYTES + 1];
    tddp_bytes line = {0};
    tddp_recorder_position position = tddp_recorder_read_position(group->recorder);
    bool failed = kind == TDDP_REPORT_FAILURE;
    if (failed) {
        set_failed_operation(self, &position);
        tddp_observed_describe(&group->observed, text ? text : "", seen, sizeof seen);
        text = seen;
    }
    describe_other_groups(detector, self, other_groups, sizeof other_groups);
    size_t most = (size_t)(LOG_BYTES / group->world_size);
    most = most < LEAST_REPORT_BYTES  ? LEAST_REPORT_BYTES
           : most > MOST_REPORT_BYTES ? MOST_REPORT_BYTES
                                      : most;
    if (tddp_status_report_write(&line, kind, group->rank, failed ? self->status : TDDP_OK,
                                 &position, other_groups, text ? text : "", most)) {
        tddp_bytes_free(&line);
        return;
    }
    tddp_detector_put(detector, self->key, TDDP_NOTICE_KINDS, &line);
}

void tddp_detector_drop_message(tddp_detector *detector)
{
    tddp_detector_message *message = detector->outbox;
    detector->outbox = message->next;
    detector->told++;
    tddp_bytes_free(&message->line);
    free(message);
}
