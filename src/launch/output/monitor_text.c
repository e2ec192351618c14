/*
 * Makes the monitor's texts from a view of the job. What workers wrote is cut to the width of the
 * screen, counted in columns, and holds nothing that a terminal would act on. Pure.
 */
#include <stdio.h>
#include <string.h>

#include "launch/output/monitor_text.h"

enum { LINE_BYTES = 1024, MOST_IN_LINE = 8 };

/* The width of a character on the screen: none for marks that stand above others, two for those of
 * East Asia and pictures. */
static int width_of(uint32_t code)
{
    if ((code >= 0x300 && code <= 0x36f) || (code >= 0x200b && code <= 0x200f) ||
        (code >= 0xfe00 && code <= 0xfe0f)) {
        return 0;
    }
    bool wide = (code >= 0x1100 && code <= 0x115f) || (code >= 0x2e80 && code <= 0xa4cf) ||
                (code >= 0xac00 && code <= 0xd7a3) || (code >= 0xf900 && code <= 0xfaff) ||
                (code >= 0xfe30 && code <= 0xfe6f) || (code >= 0xff00 && code <= 0xff60) ||
                (code >= 0x1f300 && code <= 0x1faff) || (code >= 0x20000 && code <= 0x3fffd);
    return wide ? 2 : 1;
}

/* The character at `text` and its bytes; 0 bytes if it is none. */
static size_t decode(const char *text, uint32_t *code)
{
    const unsigned char *at = (const unsigned char *)text;
    size_t bytes = at[0] < 0x80             ? 1
                   : (at[0] & 0xe0) == 0xc0 ? 2
                   : (at[0] & 0xf0) == 0xe0 ? 3
                   : (at[0] & 0xf8) == 0xf0 ? 4
                                            : 0;
    *code = bytes == 1 ? at[0] : bytes > 1 ? at[0] & (0x7fU >> bytes) : 0;
    for (size_t i = 1; i < bytes; i++) {
        if ((at[i] & 0xc0) != 0x80) {
            return 0;
        }
        *code = *code << 6 | (at[i] & 0x3f);
    }
    return bytes;
}

/* Appends as much of a text as is at most `columns` wide. */
static tddp_status append_cut(tddp_bytes *to, const char *text, int columns)
{
    tddp_status status = TDDP_OK;
    while (*text != '\0' && status == TDDP_OK) {
        uint32_t code;
        size_t bytes = decode(text, &code);
        bool shown = bytes > 0 && code >= ' ' && !(code >= 0x7f && code < 0xa0);
        int width = shown ? width_of(code) : 1;
        if (width > columns) {
            break;
        }
        columns -= width;
        status = tddp_bytes_append(to, shown ? text : "?", shown ? bytes : 1);
        text += bytes > 0 ? bytes : 1;
    }
    return status;
}

static void put_time(int64_t seconds, char text[32])
{
    (void)snprintf(text, 32, "%lld:%02d:%02d", (long long)(seconds / 3600),
                   (int)(seconds / 60 % 60), (int)(seconds % 60));
}

static void put_memory(uint64_t bytes, char text[16])
{
    double mebibytes = (double)bytes / (1 << 20);
    if (mebibytes < 1000) {
        (void)snprintf(text, 16, "%.0f MiB", mebibytes);
    } else {
        (void)snprintf(text, 16, "%.1f GiB", mebibytes / 1024);
    }
}

static void put_cpu(double cores, char text[16])
{
    if (cores < 0) {
        (void)snprintf(text, 16, "-");
    } else {
        (void)snprintf(text, 16, "%.0f%%", cores * 100);
    }
}

/* "2 nodes of 2:4", "node 0 of 2", or "" on one node. */
static void put_nodes(const tddp_launch_view *view, char text[96])
{
    text[0] = '\0';
    if (view->max_nodes > 1 && view->nodes == 0) {
        (void)snprintf(text, 96, ", --nnodes=%d:%d", view->min_nodes, view->max_nodes);
    } else if (view->max_nodes > 1) {
        (void)snprintf(text, 96, ", node %d of %d (--nnodes=%d:%d), world size %d", view->node_rank,
                       view->nodes, view->min_nodes, view->max_nodes, view->world_size);
    }
}

static void put_head(const tddp_launch_view *view, char *text, size_t size)
{
    char time[32];
    char nodes[96];
    put_time(view->seconds, time);
    put_nodes(view, nodes);
    (void)snprintf(text, size, "%s: %s, %s%s, round %d, restart %d of %d", view->run_id,
                   view->state, time, nodes, view->round, view->restart, view->max_restarts);
}

static void put_worker(const tddp_launch_view_worker *worker, char *text, size_t size)
{
    char pid[16] = "-";
    char cpu[16];
    char memory[16];
    put_cpu(worker->cpu, cpu);
    put_memory(worker->memory, memory);
    if (worker->pid > 0) {
        (void)snprintf(pid, sizeof pid, "%d", (int)worker->pid);
    }
    (void)snprintf(text, size, "%5d %8s  %-17.17s %6s %9s  ", worker->rank, pid, worker->state,
                   worker->alive ? cpu : "", worker->alive ? memory : "");
}

/* --- the block ------------------------------------------------------------------------------- */

typedef struct block {
    tddp_bytes *to;
    int columns;
    int lines;
    tddp_status status;
} block;

static void begin_line(block *made)
{
    if (made->lines++ > 0 && made->status == TDDP_OK) {
        made->status = tddp_bytes_append(made->to, "\n", 1);
    }
}

static void add_line(block *made, const char *text, const char *rest)
{
    char line[LINE_BYTES];
    begin_line(made);
    (void)snprintf(line, sizeof line, "%s%s", text, rest);
    if (made->status == TDDP_OK) {
        made->status = append_cut(made->to, line, made->columns);
    }
}

tddp_status tddp_launch_view_block(const tddp_launch_view *view, int columns, int most,
                                   tddp_bytes *to, int *lines)
{
    char text[LINE_BYTES];
    block made = {.to = to, .columns = columns, .status = TDDP_OK};
    put_head(view, text, sizeof text);
    add_line(&made, "torchrun ", text);
    if (view->waits_for[0] != '\0' && made.lines < most) {
        add_line(&made, "waits: ", view->waits_for);
    }
    if (made.lines + 1 < most && view->count > 0) {
        add_line(&made, " rank      pid  state                cpu    memory  last line", "");
    }
    int room = most - made.lines;
    for (int i = 0; i < view->count && room > 0; i++) {
        if (i == room - 1 && view->count > room) {
            (void)snprintf(text, sizeof text, "%5s and %d more", "", view->count - i);
            add_line(&made, text, "");
            break;
        }
        put_worker(&view->workers[i], text, sizeof text);
        add_line(&made, text, view->workers[i].last_line);
    }
    *lines = made.lines;
    return made.status;
}

/* --- the line -------------------------------------------------------------------------------- */

void tddp_launch_view_line(const tddp_launch_view *view, char *text, size_t size)
{
    put_head(view, text, size);
    for (int i = 0; i < view->count; i++) {
        const tddp_launch_view_worker *worker = &view->workers[i];
        char cpu[16];
        char memory[16];
        size_t at = strlen(text);
        if (i == MOST_IN_LINE) {
            (void)snprintf(text + at, size - at, "; and %d more", view->count - i);
            break;
        }
        put_cpu(worker->cpu, cpu);
        put_memory(worker->memory, memory);
        (void)snprintf(text + at, size - at, "; rank %d %s%s%s%s%s", worker->rank, worker->state,
                       worker->alive ? " " : "", worker->alive ? cpu : "", worker->alive ? " " : "",
                       worker->alive ? memory : "");
    }
    size_t at = strlen(text);
    if (view->waits_for[0] != '\0') {
        (void)snprintf(text + at, size - at, "; waits: %s", view->waits_for);
    }
}
