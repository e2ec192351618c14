/*
 * Base64, the form of keys and values in etcd's JSON.
 */
#ifndef TDDP_ETCD_BASE64_H
#define TDDP_ETCD_BASE64_H

#include <tddp/store.h>

#include "base/base.h"

/* Appends the text of some bytes. */
TDDP_NODISCARD tddp_status tddp_base64_append(tddp_bytes *to, tddp_slice bytes);

/* Replaces `out` with the bytes of a text, followed by a NUL; false if it is damaged or memory is
 * short. */
bool tddp_base64_decode(const char *text, tddp_blob *out);

#endif
