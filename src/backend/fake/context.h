/* What the files of the `fake` backend share. */
#ifndef TDDP_BACKEND_FAKE_CONTEXT_H
#define TDDP_BACKEND_FAKE_CONTEXT_H

#include "backend/fake/faults.h"
#include "base/base.h"

/* messages.c: the sends and receives of a group. */
typedef struct tddp_fake_p2p {
    pthread_mutex_t mutex; /* guards what follows */
    tddp_store *store; /* its own connection, opened for the first message: a collective may block
                          the other one */
    struct tddp_fake_counter *counters;
    struct tddp_fake_message *unmatched; /* wildcard receives and those behind them, in order */
} tddp_fake_p2p;

typedef struct tddp_fake_context {
    int rank;
    int world_size;
    tddp_store *store;
    tddp_cancel *cancel;
    tddp_fake_faults faults;
    tddp_fake_p2p p2p;
} tddp_fake_context;

/* The status of an operation whose store call failed: TDDP_GROUP_FAILED for one canceled by an
 * abort. */
TDDP_NODISCARD tddp_status tddp_fake_translate(const tddp_fake_context *self, tddp_status status);

/* collectives.c: runs any collective. */
TDDP_NODISCARD tddp_status tddp_fake_run(void *context, const tddp_op *op);

/* messages.c: the slots of sends and receives. */
TDDP_NODISCARD tddp_status tddp_fake_post(void *context, const tddp_op *op, void **request);
TDDP_NODISCARD tddp_status tddp_fake_finish(void *context, void *request, int *source);
void tddp_fake_p2p_free(tddp_fake_p2p *p2p);

#endif
