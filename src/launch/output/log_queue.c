/*
 * A queue of bounded size between any thread, which logs, and the main thread, which has the
 * console. Invariant: `lock` guards all fields but those of the main thread. Static, since a thread
 * that the rendezvous has stopped waiting for may log until the process ends.
 */
#include <string.h>

#include "launch/output/log_queue.h"

enum { QUEUE_BYTES = 1 << 14 };

static struct {
    pthread_mutex_t lock;
    tddp_cancel *wake;      /* triggered while there is something; NULL: not open */
    char text[QUEUE_BYTES]; /* lines, each with its NUL */
    size_t size;
    uint64_t lost; /* lines for which there was no room */
    /* The main thread's. */
    tddp_launch_loop *loop;
    tddp_launch_console *console;
    tddp_launch_source source;
} queue = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void put(tddp_log_level level, const char *room, const char *text, void *data)
{
    (void)level, (void)room, (void)data;
    size_t size = strlen(text) + 1;
    pthread_mutex_lock(&queue.lock);
    if (size <= sizeof queue.text - queue.size) {
        memcpy(queue.text + queue.size, text, size);
        queue.size += size;
    } else {
        queue.lost++;
    }
    if (queue.wake) {
        tddp_cancel_trigger(queue.wake);
    }
    pthread_mutex_unlock(&queue.lock);
}

static tddp_status on_lines(void *data, int events)
{
    char lines[QUEUE_BYTES];
    (void)data, (void)events;
    pthread_mutex_lock(&queue.lock);
    size_t size = queue.size;
    uint64_t lost = queue.lost;
    memcpy(lines, queue.text, size);
    queue.size = 0;
    queue.lost = 0;
    tddp_cancel_reset(queue.wake);
    pthread_mutex_unlock(&queue.lock);
    tddp_launch_console_lose(queue.console, lost);
    for (char *line = lines, *next; line < lines + size; line = next) {
        next = line + strlen(line) + 1;
        tddp_launch_console_log(queue.console, line);
    }
    return TDDP_OK;
}

tddp_status tddp_launch_log_queue_open(tddp_launch_loop *loop, tddp_launch_console *console)
{
    tddp_cancel *wake;
    tddp_status status = tddp_cancel_create(&wake);
    if (status != TDDP_OK) {
        return status;
    }
    queue.source = (tddp_launch_source){
        .fd = tddp_cancel_fd(wake),
        .events = POLLIN,
        .priority = TDDP_LAUNCH_PRIORITY_EVENT,
        .callback = on_lines,
    };
    status = tddp_launch_loop_add(loop, &queue.source);
    if (status != TDDP_OK) {
        tddp_cancel_free(wake);
        return status;
    }
    queue.loop = loop;
    queue.console = console;
    queue.wake = wake; /* no other thread is there yet */
    tddp_log_set_sink(put, NULL);
    return TDDP_OK;
}

void tddp_launch_log_queue_close(void)
{
    if (!queue.wake) {
        return;
    }
    (void)!on_lines(NULL, 0);
    tddp_launch_loop_remove(queue.loop, &queue.source);
    pthread_mutex_lock(&queue.lock);
    tddp_cancel_free(queue.wake);
    queue.wake = NULL;
    pthread_mutex_unlock(&queue.lock);
}
