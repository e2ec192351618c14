/*
 * What both sides of the rendezvous backend etcd share: the client that --rdzv-endpoint and
 * --rdzv-conf describe, and the names of keys (text.h says what is in them).
 */
#ifndef TDDP_LAUNCH_ETCD_KEYS_H
#define TDDP_LAUNCH_ETCD_KEYS_H

#include "launch/etcd/etcd.h"

enum { TDDP_LAUNCH_KEY_BYTES = 512 };

/* A client for one thread. Errors: those of tddp_etcd_open(). Caller: tddp_etcd_close(). */
TDDP_NODISCARD tddp_status tddp_launch_etcd_open(const tddp_launch_options *options,
                                                 tddp_etcd **out);

/* "/torchrun/RUN_ID/NAME" and, of a term, "/torchrun/RUN_ID/TERM/NAME"; the name takes printf's
 * arguments. `text` holds it: the slice is borrowed from there. Any run id fits that the command
 * line takes with etcd. */
tddp_slice tddp_launch_etcd_key(const char *run_id, char text[TDDP_LAUNCH_KEY_BYTES],
                                const char *name);
tddp_slice tddp_launch_etcd_term_key(const char *run_id, int64_t term,
                                     char text[TDDP_LAUNCH_KEY_BYTES], const char *format, ...)
    TDDP_PRINTF(4, 5);

/* Makes a transaction hold only while the coordinator of this term leads. */
void tddp_launch_etcd_while_leading(tddp_etcd_txn *txn, const char *run_id, int64_t term);

/* The number that a key ends in, after its last slash; -1: there is none. */
int64_t tddp_launch_etcd_number(const tddp_blob *key);

#endif
