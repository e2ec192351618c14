/* What the files of the `fake` backend share. */
#ifndef TDDP_BACKEND_FAKE_CONTEXT_H
#define TDDP_BACKEND_FAKE_CONTEXT_H

#include "backend/fake/faults.h"
#include "base/base.h"

/* messages.c: the sends and receives of a group. */
typedef struct tddp_fake_mail {
    pthread_mutex_t mutex; /* guards what follows */
    tddp_store *store;     /* a connection of its own, made for the first message: a collective may
                              block the other one */
    struct tddp_fake_lane *lanes;
    struct tddp_fake_message *undecided; /* receives without a sender yet, in their order */
} tddp_fake_mail;

typedef struct tddp_fake_context {
    int rank;
    int world_size;
    tddp_store *store;
    tddp_cancel *cancel;
    tddp_fake_faults faults;
    tddp_fake_mail mail;
} tddp_fake_context;

/* What a failed call of the store means to the operation: an aborted group's end as canceled. */
TDDP_NODISCARD tddp_status tddp_fake_translate(const tddp_fake_context *self, tddp_status status);

/* collectives.c: the run slot of every collective. */
TDDP_NODISCARD tddp_status tddp_fake_run(void *context, const tddp_op *op);

/* messages.c: the slots of sends and receives. */
TDDP_NODISCARD tddp_status tddp_fake_post(void *context, const tddp_op *op, void **request);
TDDP_NODISCARD tddp_status tddp_fake_finish(void *context, void *request, int *source);
void tddp_fake_mail_free(tddp_fake_mail *mail);

#endif
