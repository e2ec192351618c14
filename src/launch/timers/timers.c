/*
 * The pipe and the list of running timers. This process also holds the pipe's other end, so that it
 * never sees an end of it. The time of a request is on the wall clock, which may be set while a
 * timer runs: it becomes a deadline on the monotonic one.
 */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/json_read.h"
#include "launch/timers/timers.h"

enum { MOST_TIMERS = 4096, READ_BYTES = 1 << 14, MOST_READS = 4 };

static const double LONGEST_S = 1e9; /* thirty years */

tddp_status tddp_launch_timers_open(const char *folder, tddp_launch_timers **out)
{
    tddp_launch_timers *self = tddp_alloc(sizeof *self);
    if (!self) {
        return TDDP_OUT_OF_MEMORY;
    }
    self->fd = -1;
    self->path = tddp_format("%s/timers", folder);
    self->list = tddp_alloc_array(MOST_TIMERS, sizeof *self->list);
    tddp_status status = self->path && self->list ? TDDP_OK : TDDP_OUT_OF_MEMORY;
    if (status == TDDP_OK && (mkfifo(self->path, 0600) != 0 ||
                              (self->fd = open(self->path, O_RDWR | O_NONBLOCK | O_CLOEXEC)) < 0)) {
        status = tddp_fail_errno(self->path);
    }
    if (status != TDDP_OK) {
        tddp_launch_timers_close(self);
        return status;
    }
    *out = self;
    return TDDP_OK;
}

void tddp_launch_timers_close(tddp_launch_timers *timers)
{
    if (!timers) {
        return;
    }
    tddp_close(timers->fd);
    free(timers->path);
    free(timers->list);
    free(timers);
}

/* --- requests -------------------------------------------------------------------------------- */

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

bool tddp_launch_timer_parse(const char *line, size_t size, tddp_launch_timer *out)
{
    *out = (tddp_launch_timer){.signal = SIGKILL};
    request self = {.timer = out, .expires = NAN};
    const tddp_json_visitor visitor = {.context = &self, .scalar = take_item};
    struct timespec wall;
    if (!tddp_json_read(line, size, &visitor) || out->pid == 0 || out->scope[0] == '\0' ||
        !isfinite(self.expires)) {
        return false;
    }
    (void)clock_gettime(CLOCK_REALTIME, &wall);
    double left = self.expires - (double)wall.tv_sec - (double)wall.tv_nsec / (double)TDDP_NS_PER_S;
    left = left < 0 ? 0 : left > LONGEST_S ? LONGEST_S : left;
    out->deadline =
        self.expires < 0 ? INT64_MIN : tddp_now_ns() + (int64_t)(left * (double)TDDP_NS_PER_S);
    return true;
}

static void remove_at(tddp_launch_timers *self, int at)
{
    self->list[at] = self->list[--self->count];
}

/* Starts a timer, in place of one of this scope, or stops that. */
static void execute(tddp_launch_timers *self, const tddp_launch_timer *timer)
{
    int at = 0;
    while (at < self->count &&
           (self->list[at].pid != timer->pid || strcmp(self->list[at].scope, timer->scope) != 0)) {
        at++;
    }
    if (at < self->count) {
        remove_at(self, at);
    }
    if (timer->deadline != INT64_MIN && self->count < MOST_TIMERS) {
        self->list[self->count++] = *timer;
    } else if (timer->deadline != INT64_MIN && !self->full) {
        self->full = true;
        tddp_log(TDDP_LOG_WARN, "launch",
                 "the workers have too many timers (%d): further ones do not count", MOST_TIMERS);
    }
}

static void take_bytes(tddp_launch_timers *self, const char *data, size_t size)
{
    tddp_launch_timer timer;
    for (size_t i = 0; i < size; i++) {
        if (data[i] == '\n') {
            if (!self->skipping && tddp_launch_timer_parse(self->line, self->size, &timer)) {
                execute(self, &timer);
            }
            self->size = 0;
            self->skipping = false;
        } else if (self->size == sizeof self->line) {
            self->skipping = true;
        } else {
            self->line[self->size++] = data[i];
        }
    }
}

void tddp_launch_timers_read(tddp_launch_timers *timers)
{
    char data[READ_BYTES];
    ssize_t got = 1;
    /* Bounded: a worker may write as fast as this reads. */
    for (int i = 0; got > 0 && i < MOST_READS; i++) {
        got = read(timers->fd, data, sizeof data);
        take_bytes(timers, data, got > 0 ? (size_t)got : 0);
    }
}

/* --- time ------------------------------------------------------------------------------------ */

int64_t tddp_launch_timers_deadline(const tddp_launch_timers *timers)
{
    int64_t first = INT64_MAX;
    for (int i = 0; i < timers->count; i++) {
        first = timers->list[i].deadline < first ? timers->list[i].deadline : first;
    }
    return first;
}

bool tddp_launch_timers_expired(tddp_launch_timers *timers, tddp_launch_timer *out)
{
    int64_t now = tddp_now_ns();
    for (int i = 0; i < timers->count; i++) {
        if (timers->list[i].deadline <= now) {
            *out = timers->list[i];
            remove_at(timers, i);
            return true;
        }
    }
    return false;
}
