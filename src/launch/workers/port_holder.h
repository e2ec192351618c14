/*
 * Who has a TCP port that is in use, for the error that says so.
 */
#ifndef TDDP_LAUNCH_PORT_HOLDER_H
#define TDDP_LAUNCH_PORT_HOLDER_H

#include <stdbool.h>
#include <stddef.h>

/* Enough for what is told of a holder. */
enum { TDDP_LAUNCH_HOLDER_BYTES = 256 };

/* Puts who listens on a port of this machine into `text`: "ruby train.rb (pid 123)", or "a process
 * of user 1000" where more cannot be seen. False, and an empty text, if nobody is found. Takes as
 * long as a look at every process does: for errors only. */
bool tddp_launch_port_holder(int port, char *text, size_t size);

#endif
