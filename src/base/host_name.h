/*
 * The machine's name.
 */
#ifndef TDDP_HOST_NAME_H
#define TDDP_HOST_NAME_H

enum { TDDP_HOST_NAME_BYTES = 256 };

/* Fills in the name, "?" where the system does not tell; returns `text`. Any thread. */
const char *tddp_host_name(char text[TDDP_HOST_NAME_BYTES]);

#endif
