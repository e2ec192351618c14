/*
 * Shows the job on a terminal or in lines. The terminal's cursor always stands where the output
 * goes on, be it within a line: the block is drawn below it, on lines made free before, and the
 * cursor brought back; so taking the block away disturbs nothing. Drawn beside the console's queue,
 * only while that is empty. Main thread.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "launch/output/monitor.h"
#include "launch/output/monitor_text.h"
#include "launch/output/monitor_usage.h"

enum {
    EVERY_MS = 1000,
    PLAIN_EVERY_MS = 10000,
    USED_EVERY_MS = 900, /* CPU time comes in hundredths of a second: shorter would tell nothing */
    LEAST_MS = 100,      /* between two drawings, however much is written */
    TAKEN_MS = 200,      /* a terminal that takes nothing for so long has been stopped */
    KEPT_ROWS = 3        /* of the screen, for the output */
};

struct tddp_launch_monitor {
    tddp_launch_console *console;
    int terminal; /* -1: lines instead */
    int64_t created;
    int64_t next;  /* when to look again */
    int64_t drawn; /* when last */
    bool visible;
    struct winsize size; /* of the screen when it was drawn */
    tddp_bytes block;    /* what was drawn last */
    int lines;           /* in it */
    tddp_launch_usage usage;
};

/* --- the terminal ---------------------------------------------------------------------------- */

static void write_all(const tddp_launch_monitor *monitor, const char *data, size_t size)
{
    int64_t deadline = tddp_deadline_after_ms(TAKEN_MS);
    while (size > 0) {
        struct pollfd ready = {.fd = monitor->terminal, .events = POLLOUT};
        if (poll(&ready, 1, tddp_deadline_poll_ms(deadline)) == 0) {
            return;
        }
        ssize_t wrote = write(monitor->terminal, data, size);
        if (wrote > 0) {
            data += wrote;
            size -= (size_t)wrote;
        } else if (errno != EINTR && errno != EAGAIN) {
            return;
        }
    }
}

/* Of a job in the background only the output shows, and a stopped terminal takes nothing. The agent
 * has a process group of its own: what the shell knows is that of the front. */
static bool may_draw(const tddp_launch_monitor *monitor)
{
    struct pollfd ready = {.fd = monitor->terminal, .events = POLLOUT};
    pid_t foreground = tcgetpgrp(monitor->terminal);
    return (foreground < 0 || foreground == getpgid(getppid())) && poll(&ready, 1, 0) == 1 &&
           (ready.revents & POLLOUT) && !tddp_launch_console_pending(monitor->console);
}

/* From the cursor's line downwards nothing but the block is there. */
static void hide(void *data)
{
    static const char erase[] = "\0337\033[B\r\033[J\0338";
    tddp_launch_monitor *monitor = data;
    if (monitor->visible) {
        write_all(monitor, erase, sizeof erase - 1);
        monitor->visible = false;
    }
}

static struct winsize screen_size(const tddp_launch_monitor *monitor)
{
    struct winsize size;
    if (ioctl(monitor->terminal, TIOCGWINSZ, &size) != 0 || size.ws_col == 0 || size.ws_row == 0) {
        size = (struct winsize){.ws_row = 24, .ws_col = 80};
    }
    return size;
}

static tddp_status append_text(tddp_bytes *to, const char *text)
{
    return tddp_bytes_append(to, text, strlen(text));
}

/* Appends what draws the block: where it is not there yet, first makes room, which scrolls the
 * output up if need be, and goes back to the cursor's place in it. */
static tddp_status append_drawing(const tddp_launch_monitor *monitor, tddp_bytes *to)
{
    char back[32];
    tddp_status status = TDDP_OK;
    for (int i = 0; i < monitor->lines && !monitor->visible && status == TDDP_OK; i++) {
        status = append_text(to, "\033D");
    }
    (void)snprintf(back, sizeof back, "\033[%dA", monitor->lines);
    if (status == TDDP_OK && !monitor->visible) {
        status = append_text(to, back);
    }
    if (status == TDDP_OK) {
        status = append_text(to, "\0337\033[0m");
    }
    const char *at = monitor->block.data;
    const char *end = at + monitor->block.size;
    while (at <= end && status == TDDP_OK) {
        const char *newline = memchr(at, '\n', (size_t)(end - at));
        const char *stop = newline ? newline : end;
        status = append_text(to, "\r\033[B\033[K");
        if (status == TDDP_OK) {
            status = tddp_bytes_append(to, at, (size_t)(stop - at));
        }
        at = stop + 1;
    }
    return status == TDDP_OK ? append_text(to, "\0338") : status;
}

static void draw(tddp_launch_monitor *monitor)
{
    tddp_bytes drawing = {0};
    if (monitor->lines > 0 && may_draw(monitor)) {
        if (append_drawing(monitor, &drawing) == TDDP_OK) {
            write_all(monitor, drawing.data, drawing.size);
            monitor->visible = true;
            monitor->console->hidden = false;
        }
        monitor->drawn = tddp_now_ns();
    }
    tddp_bytes_free(&drawing);
}

/* The console has written all it had. */
static void show_again(void *data)
{
    tddp_launch_monitor_wake(data);
}

static void show_block(tddp_launch_monitor *monitor, const tddp_launch_view *view)
{
    struct winsize size = screen_size(monitor);
    int most = size.ws_row > KEPT_ROWS + 1 ? size.ws_row - KEPT_ROWS : 1;
    tddp_bytes block = {0};
    int lines;
    /* Text in the last column would leave some terminals' cursor beyond the line. */
    if (tddp_launch_view_block(view, size.ws_col - 1, most, &block, &lines) != TDDP_OK) {
        tddp_bytes_free(&block);
        return;
    }
    if (lines != monitor->lines || size.ws_col != monitor->size.ws_col ||
        size.ws_row != monitor->size.ws_row) {
        hide(monitor);
    }
    tddp_bytes_free(&monitor->block);
    monitor->block = block;
    monitor->lines = lines;
    monitor->size = size;
    draw(monitor);
}

/* --- for the agent --------------------------------------------------------------------------- */

static int find_terminal(const tddp_launch_console *console)
{
    const char *kind = getenv("TERM");
    bool dumb = !kind || kind[0] == '\0' || strcmp(kind, "dumb") == 0;
    return dumb ? -1 : tddp_launch_console_terminal(console);
}

tddp_status tddp_launch_monitor_create(tddp_launch_console *console, tddp_launch_monitor **out)
{
    tddp_launch_monitor *monitor = tddp_alloc(sizeof *monitor);
    if (!monitor) {
        return TDDP_OUT_OF_MEMORY;
    }
    monitor->console = console;
    monitor->terminal = find_terminal(console);
    monitor->created = tddp_now_ns();
    monitor->next = monitor->created;
    if (monitor->terminal < 0) {
        monitor->next = tddp_deadline_after_ms(PLAIN_EVERY_MS);
    } else {
        console->hook = (tddp_launch_console_hook){hide, show_again, monitor};
    }
    *out = monitor;
    return TDDP_OK;
}

void tddp_launch_monitor_free(tddp_launch_monitor *monitor)
{
    if (!monitor) {
        return;
    }
    if (monitor->terminal >= 0) {
        hide(monitor);
        monitor->console->hook = (tddp_launch_console_hook){0};
        monitor->console->hidden = false;
    }
    tddp_launch_usage_free(&monitor->usage);
    tddp_bytes_free(&monitor->block);
    free(monitor);
}

int64_t tddp_launch_monitor_deadline(const tddp_launch_monitor *monitor)
{
    return monitor ? monitor->next : INT64_MAX;
}

void tddp_launch_monitor_wake(tddp_launch_monitor *monitor)
{
    if (monitor && monitor->terminal >= 0) {
        int64_t soonest = monitor->drawn + LEAST_MS * TDDP_NS_PER_MS;
        monitor->next = soonest < monitor->next ? soonest : monitor->next;
    }
}

void tddp_launch_monitor_show(tddp_launch_monitor *monitor, tddp_launch_view *view)
{
    view->seconds = (tddp_now_ns() - monitor->created) / TDDP_NS_PER_S;
    monitor->next = tddp_deadline_after_ms(monitor->terminal >= 0 ? EVERY_MS : PLAIN_EVERY_MS);
    if (tddp_launch_usage_look(&monitor->usage, view->workers, view->count,
                               USED_EVERY_MS * TDDP_NS_PER_MS) != TDDP_OK) {
        return;
    }
    if (monitor->terminal >= 0) {
        show_block(monitor, view);
    } else {
        char text[4096];
        tddp_launch_view_line(view, text, sizeof text);
        tddp_launch_console_say(monitor->console, "%s", text);
    }
}
