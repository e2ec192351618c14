/* A key of another rank's in the store, waited for on a connection of its own. Any thread. */
#ifndef TDDP_NCCL_STORE_KEY_H
#define TDDP_NCCL_STORE_KEY_H

#include "backend/nccl/communicator.h"

/* Waits in the server for the key and returns its value, to be freed. A store of several threads
 * has one connection, which a wait would keep from the others; one of them may have to set the key
 * that the other rank waits for. So the wait has a connection of its own, `*own`, made for the
 * first and kept for the next, to be released by the caller. `late` explains a timeout. */
TDDP_NODISCARD tddp_status tddp_nccl_await_key(tddp_store *store, tddp_store **own, tddp_slice key,
                                               tddp_nccl_limits limits, const char *late,
                                               tddp_blob *out);

#endif
