/*
 * The prefix of a worker's lines: "[default0]:", or by a template.
 */
#ifndef TDDP_LAUNCH_PREFIX_H
#define TDDP_LAUNCH_PREFIX_H

#include <stdbool.h>
#include <stddef.h>

/* What a template's macros stand for. */
typedef struct tddp_launch_prefix_values {
    const char *role_name;
    const char *hostname;
    int rank;
    int local_rank;
} tddp_launch_prefix_values;

/*
 * Fills in role_name, local_rank, rank and hostname, written ${name} or $name; $$ is one $, and
 * what is none of these stays. A template of NULL is PyTorch's "[${role_name}${local_rank}]:".
 * free() the text; NULL if memory is short.
 */
char *tddp_launch_prefix_fill(const char *template, const tddp_launch_prefix_values *values);

/* The same text in a colour of the worker's own, for a terminal. free(); NULL if memory is short.
 */
char *tddp_launch_prefix_color(const char *prefix, int local_rank);

/* Whether people want colours on a terminal (NO_COLOR, TERM=dumb). */
bool tddp_launch_prefix_colors(void);

#endif
