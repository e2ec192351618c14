/*
 * Options structs across versions: their first member is their size. A new field comes last and
 * begins at or behind the sizeof of the struct before it: never in that one's padding, whose bytes
 * older callers do not set. 0 in it means what older libraries do.
 */
#ifndef TDDP_OPTIONS_H
#define TDDP_OPTIONS_H

#include <stddef.h>

#include <tddp/status.h>

/* Bytes of an options struct up to a field and with it. */
#define TDDP_OPTS_UNTIL(type, field) (offsetof(type, field) + sizeof(((type *)NULL)->field))

/*
 * Reads a caller's options into `out`, which holds the defaults of all `known` bytes. A caller
 * compiled against older headers has fewer fields, at least those of the first release (`least`
 * bytes): the others keep their defaults. One compiled against newer headers may have more, as long
 * as they are zero. `what` names the options' initializer in the error, TDDP_INVALID_ARGUMENT. Any
 * thread.
 */
TDDP_NODISCARD tddp_status tddp_opts_read(const char *what, const void *opts, size_t least,
                                          void *out, size_t known);

/* Fills a caller's options of `size` bytes with defaults, of which it may know fewer or more. */
void tddp_opts_fill(const void *defaults, size_t known, void *opts, size_t size);

#endif
