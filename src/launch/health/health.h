/*
 * --health-check-port: answers HTTP requests for the agent's state, 200 while its loop turns and
 * nothing has failed, else 503. A thread of its own answers, so that there is an answer when the
 * loop hangs.
 *
 *     health.c   what the agent reports; the answer's text
 *     server.c   the thread: connections, with a time and a size that none can exceed
 *     request.c  parses a request
 */
#ifndef TDDP_LAUNCH_HEALTH_H
#define TDDP_LAUNCH_HEALTH_H

#include "base/base.h"

typedef struct tddp_launch_health tddp_launch_health;

/* Listens on all addresses (port 0: a free one) and starts the thread. `limit_ms`: without a turn
 * for longer the loop hangs. */
TDDP_NODISCARD tddp_status tddp_launch_health_start(int port, int64_t limit_ms,
                                                    tddp_launch_health **out);

int tddp_launch_health_port(const tddp_launch_health *health);

/* The loop turns. NULL is fine. */
void tddp_launch_health_turn(tddp_launch_health *health);

/* When it should turn next; INT64_MAX for NULL. */
int64_t tddp_launch_health_deadline(const tddp_launch_health *health);

/* The state, from now on: `members` are a JSON object's, with a comma before the first. Takes
 * them. */
void tddp_launch_health_publish(tddp_launch_health *health, bool healthy, tddp_bytes *members);

/* Ends the thread. NULL is fine. */
void tddp_launch_health_end(tddp_launch_health *health);

/* --- between the files of this folder -------------------------------------------------------- */

/* Longer requests are refused. */
enum { TDDP_LAUNCH_HEALTH_REQUEST_BYTES = 2048 };

typedef enum tddp_launch_health_status {
    TDDP_LAUNCH_HEALTH_INCOMPLETE = 0, /* more is to come */
    TDDP_LAUNCH_HEALTH_OK = 200,       /* it asks for the state */
    TDDP_LAUNCH_HEALTH_BAD = 400,
    TDDP_LAUNCH_HEALTH_NOT_FOUND = 404,
    TDDP_LAUNCH_HEALTH_METHOD = 405,
    TDDP_LAUNCH_HEALTH_TOO_LARGE = 431,
    TDDP_LAUNCH_HEALTH_UNAVAILABLE = 503, /* the answer if something has failed */
} tddp_launch_health_status;

/* Any bytes. `*head`: the answer has no body. */
tddp_launch_health_status tddp_launch_health_parse(const char *data, size_t size, bool *head);

/* Writes the answer to a request with this outcome. */
TDDP_NODISCARD tddp_status tddp_launch_health_answer(tddp_launch_health *health,
                                                     tddp_launch_health_status status, bool head,
                                                     tddp_bytes *out);

/* The thread's loop, until `stop_fd` is readable. */
void tddp_launch_health_serve(tddp_launch_health *health, int listen_fd, int stop_fd);

#endif
