/*
 * The pipe and the list of running timers. This process also holds the pipe's other end, so that it
 * never sees an end of it.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "launch/timers/timers.h"

enum { MOST_TIMERS = 4096, READ_BYTES = 1 << 14, MOST_READS = 4 };

struct tddp_launch_timers {
    char *folder;
    char *path;
    int fd;
    bool full;     /* that was reported */
    bool skipping; /* the rest of a line that is too long */
    size_t size;   /* of the line that is not complete */
    char line[PIPE_BUF];
    int count;
    tddp_launch_timer *list; /* room for MOST_TIMERS */
};

tddp_status tddp_launch_timers_open(const char *folder, tddp_launch_timers **out)
{
    tddp_launch_timers *self = tddp_alloc(sizeof *self);
    if (!self) {
        return TDDP_OUT_OF_MEMORY;
    }
    self->fd = -1;
    self->folder = tddp_copy_string(folder);
    self->path = tddp_format("%s/timers", folder);
    self->list = tddp_alloc_array(MOST_TIMERS, sizeof *self->list);
    tddp_status status = self->folder && self->path && self->list ? TDDP_OK : TDDP_OUT_OF_MEMORY;
    if (status == TDDP_OK && mkdir(folder, 0700) != 0 && errno != EEXIST) {
        status = tddp_fail_errno(folder);
    }
    if (status == TDDP_OK && mkfifo(self->path, 0600) != 0) {
        status = tddp_fail_errno(self->path);
    }
    if (status == TDDP_OK) {
        self->fd = open(self->path, O_RDWR | O_NONBLOCK | O_CLOEXEC);
        status = self->fd >= 0 ? TDDP_OK : tddp_fail_errno(self->path);
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
    if (timers->fd >= 0) {
        (void)unlink(timers->path);
    }
    if (timers->folder) {
        (void)rmdir(timers->folder); /* fails if others have something there, who remove it */
    }
    free(timers->folder);
    free(timers->path);
    free(timers->list);
    free(timers);
}

const char *tddp_launch_timers_path(const tddp_launch_timers *timers)
{
    return timers ? timers->path : NULL;
}

int tddp_launch_timers_fd(const tddp_launch_timers *timers)
{
    return timers ? timers->fd : -1;
}

/* --- requests -------------------------------------------------------------------------------- */

static int find(const tddp_launch_timers *self, const tddp_launch_timer *timer)
{
    int at = 0;
    while (at < self->count &&
           (self->list[at].pid != timer->pid || strcmp(self->list[at].scope, timer->scope) != 0)) {
        at++;
    }
    return at;
}

static void remove_at(tddp_launch_timers *self, int at)
{
    self->list[at] = self->list[--self->count];
}

/* Returns false if there is no room for it. */
static bool execute(tddp_launch_timers *self, const tddp_launch_timer *timer)
{
    int at = find(self, timer);
    if (timer->deadline == INT64_MIN) {
        if (at < self->count) {
            remove_at(self, at);
        }
        return true;
    }
    if (at == MOST_TIMERS) {
        return false;
    }
    self->list[at] = *timer;
    self->count += at == self->count;
    return true;
}

/* Returns false if a timer had no room. */
static bool take_bytes(tddp_launch_timers *self, const char *data, size_t size)
{
    tddp_launch_timer timer;
    bool room = true;
    for (size_t i = 0; i < size; i++) {
        if (data[i] == '\n') {
            if (!self->skipping && tddp_launch_timer_parse(self->line, self->size, &timer)) {
                room &= execute(self, &timer);
            }
            self->size = 0;
            self->skipping = false;
        } else if (self->size == sizeof self->line) {
            self->skipping = true;
        } else {
            self->line[self->size++] = data[i];
        }
    }
    return room;
}

bool tddp_launch_timers_read(tddp_launch_timers *timers)
{
    char data[READ_BYTES];
    bool room = true;
    ssize_t got = 1;
    /* Bounded: a worker may write as fast as this reads. */
    for (int i = 0; timers && got > 0 && i < MOST_READS; i++) {
        got = read(timers->fd, data, sizeof data);
        room &= got <= 0 || take_bytes(timers, data, (size_t)got);
    }
    if (room || timers->full) {
        return true;
    }
    timers->full = true;
    return false;
}

/* --- time ------------------------------------------------------------------------------------ */

int64_t tddp_launch_timers_deadline(const tddp_launch_timers *timers)
{
    int64_t first = INT64_MAX;
    for (int i = 0; timers && i < timers->count; i++) {
        first = timers->list[i].deadline < first ? timers->list[i].deadline : first;
    }
    return first;
}

bool tddp_launch_timers_expired(tddp_launch_timers *timers, tddp_launch_timer *out)
{
    int64_t now = tddp_now_ns();
    for (int i = 0; timers && i < timers->count; i++) {
        if (timers->list[i].deadline <= now) {
            *out = timers->list[i];
            remove_at(timers, i);
            return true;
        }
    }
    return false;
}

void tddp_launch_timers_forget(tddp_launch_timers *timers)
{
    if (timers) {
        timers->count = 0;
    }
}
