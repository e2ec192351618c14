/* What coll.c needs of messages.c. */
#ifndef TDDP_COLL_MESSAGES_H
#define TDDP_COLL_MESSAGES_H

#include "backend/coll/coll.h"

/* Cancels the transfers of requests that are left, which may only be dropped then, and frees what
 * messages need of memory. */
void tddp_coll_end_messages(tddp_coll *coll);

#endif
