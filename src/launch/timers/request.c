/*
 * Parses requests for timers. Their time is on the wall clock, which may be set while a timer runs:
 * it becomes a deadline on the monotonic one.
 */
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/json_read.h"
#include "launch/timers/timers.h"

static const double LONGEST_S = 1e9; /* thirty years */

typedef struct request {
    tddp_launch_timer *timer;
    double expires; /* NaN: not given */
} request;

static void take_item(void *context, const char *key, const char *text)
{
    request *self = context;
    int64_t number;
    if (strcmp(key, "scope_id") == 0) {
        (void)snprintf(self->timer->scope, sizeof self->timer->scope, "%s", text);
    } else if (strcmp(key, "expiration_time") == 0) {
        self->expires = strtod(text, NULL);
    } else if (strcmp(key, "pid") == 0 && tddp_parse_int(text, 1, INT32_MAX, &number)) {
        self->timer->pid = (pid_t)number;
    } else if (strcmp(key, "signal") == 0 && tddp_parse_int(text, 1, SIGRTMAX, &number)) {
        self->timer->signal = (int)number;
    }
}

static int64_t deadline_of(double expires)
{
    struct timespec wall;
    if (expires < 0) {
        return INT64_MIN;
    }
    (void)clock_gettime(CLOCK_REALTIME, &wall);
    double left = expires - (double)wall.tv_sec - (double)wall.tv_nsec / (double)TDDP_NS_PER_S;
    left = left < 0 ? 0 : left > LONGEST_S ? LONGEST_S : left;
    return tddp_now_ns() + (int64_t)(left * (double)TDDP_NS_PER_S);
}

bool tddp_launch_timer_parse(const char *line, size_t size, tddp_launch_timer *out)
{
    *out = (tddp_launch_timer){.signal = SIGKILL};
    request self = {.timer = out, .expires = NAN};
    const tddp_json_visitor visitor = {.context = &self, .scalar = take_item};
    if (!tddp_json_read(line, size, &visitor) || out->pid == 0 || out->scope[0] == '\0' ||
        !isfinite(self.expires)) {
        return false;
    }
    out->deadline = deadline_of(self.expires);
    return true;
}
