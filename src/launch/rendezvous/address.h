/*
 * Addresses of nodes: which one a node tells the others, and whether the others get there.
 */
#ifndef TDDP_LAUNCH_ADDRESS_H
#define TDDP_LAUNCH_ADDRESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tddp/status.h>
#include <tddp/wait.h>

/* Room for any numeric address, with its NUL. */
enum { TDDP_LAUNCH_ADDRESS_BYTES = 96 };

/* Whether this is a numeric loopback address. */
bool tddp_launch_address_is_loopback(const char *address);

/* The numeric address of a host, or of this host on the way to `host`; a name is looked up. Short
 * (at most ten seconds), ended early by `cancel`. */
TDDP_NODISCARD tddp_status tddp_launch_address_of(const char *host, tddp_cancel *cancel,
                                                  char out[TDDP_LAUNCH_ADDRESS_BYTES]);
TDDP_NODISCARD tddp_status tddp_launch_address_towards(const char *host, tddp_cancel *cancel,
                                                       char out[TDDP_LAUNCH_ADDRESS_BYTES]);

/*
 * Under which address the others find what listens here. `own` is how this node sees itself; a
 * loopback address will do only if all `others` have one too, since then all are on this host: else
 * it becomes the address on the way to the first of them that has another.
 */
void tddp_launch_address_choose(const char *own, const char *const *others, size_t count,
                                tddp_cancel *cancel, char out[TDDP_LAUNCH_ADDRESS_BYTES]);

/* Connects once, within `limit_ms`. `own` is this node's address, `master_host` what rank 0's host
 * is called; a failure's text says what to do about a wrong interface. */
TDDP_NODISCARD tddp_status tddp_launch_address_check(const char *address, int port,
                                                     const char *master_host, const char *own,
                                                     int64_t limit_ms, tddp_cancel *cancel);

#endif
