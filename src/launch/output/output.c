/*
 * Decides where each stream of each worker goes, and owns the folders and files it goes to. A
 * stream that goes to a file alone is given that file, so that it loses nothing should torchrun be
 * killed; all others come through pipes and take their routes (route.c). Main thread.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/host_name.h"
#include "launch/output/layout.h"
#include "launch/output/output.h"
#include "launch/output/prefix.h"
#include "launch/output/route.h"

static const int stream_bits[] = {TDDP_LAUNCH_STDOUT, TDDP_LAUNCH_STDERR};
static const char *const log_names[] = {"stdout.log", "stderr.log"};
static const char *const filtered_names[] = {"filtered_stdout.log", "filtered_stderr.log"};
static const char null_device[] = "/dev/null";

typedef struct member {
    char *mark;  /* its prefix */
    char *color; /* the same for a terminal, or NULL */
    tddp_launch_route routes[TDDP_LAUNCH_STREAMS];
} member;

struct tddp_launch_output {
    const tddp_launch_options *options;
    tddp_launch_console *console;
    tddp_launch_layout layout;
    bool discards; /* --log-dir=/dev/null: what would go to a log file goes nowhere */
    tddp_launch_log_file filtered[TDDP_LAUNCH_STREAMS];
    int null_fd; /* for streams that nobody wants; -1: not opened */
    member *members;
    int count;
};

/* --- the run --------------------------------------------------------------------------------- */

static tddp_status make_layout(tddp_launch_output *output, const char *run_id)
{
    const tddp_launch_options *options = output->options;
    bool files = options->redirects.given || options->tee.given ||
                 options->out_filters.count > 0 || options->err_filters.count > 0;
    output->discards = options->log_dir && strcmp(options->log_dir, null_device) == 0;
    if (!output->discards && (options->log_dir || files)) {
        tddp_status status = tddp_launch_layout_make(options->log_dir, run_id, &output->layout);
        if (status == TDDP_OK && !options->log_dir) {
            tddp_launch_console_say(output->console, "logs are in %s", output->layout.run);
        }
        return status;
    }
    if (tddp_launch_layout_make_private(options->private_folder, &output->layout) != TDDP_OK) {
        tddp_launch_console_say(output->console, "%s: workers have no error file (set TMPDIR)",
                                tddp_error_message());
    }
    return TDDP_OK;
}

tddp_status tddp_launch_output_create(const tddp_launch_options *options, const char *run_id,
                                      tddp_launch_console *console, tddp_launch_output **out)
{
    tddp_launch_output *output = tddp_alloc(sizeof *output);
    if (!output) {
        return TDDP_OUT_OF_MEMORY;
    }
    *output = (tddp_launch_output){
        .options = options,
        .console = console,
        .filtered = {{.fd = -1}, {.fd = -1}},
        .null_fd = -1,
    };
    tddp_status status = make_layout(output, run_id);
    if (status == TDDP_OK) {
        *out = output;
    } else {
        tddp_launch_output_free(output);
    }
    return status;
}

static void forget_attempt(tddp_launch_output *output)
{
    for (int i = 0; i < output->count; i++) {
        for (int stream = 0; stream < TDDP_LAUNCH_STREAMS; stream++) {
            tddp_launch_route_free(&output->members[i].routes[stream]);
        }
        free(output->members[i].mark);
        free(output->members[i].color);
    }
    free(output->members);
    output->members = NULL;
    output->count = 0;
    for (int stream = 0; stream < TDDP_LAUNCH_STREAMS; stream++) {
        tddp_launch_log_file_close(&output->filtered[stream]);
    }
}

void tddp_launch_output_free(tddp_launch_output *output)
{
    if (output) {
        forget_attempt(output);
        tddp_close(output->null_fd);
        tddp_launch_layout_free(&output->layout);
        free(output);
    }
}

/* --- an attempt ------------------------------------------------------------------------------ */

static const tddp_launch_filters *filters_of(const tddp_launch_output *output, int stream)
{
    const tddp_launch_options *options = output->options;
    return stream == TDDP_LAUNCH_OUT ? &options->out_filters : &options->err_filters;
}

/* Makes a file of the attempt; if it cannot be made, that is said together with what follows. */
static bool open_log(tddp_launch_output *output, int local_rank, const char *name,
                     const char *otherwise, tddp_launch_log_file *file)
{
    if (output->discards) {
        return true;
    }
    char *path = tddp_launch_layout_path(&output->layout, local_rank, name);
    if (tddp_launch_log_file_open(file, path) == TDDP_OK) {
        return true;
    }
    if (path) {
        tddp_launch_console_say(output->console, "%s: %s", tddp_error_message(), otherwise);
    }
    return false;
}

static void open_filtered(tddp_launch_output *output)
{
    for (int stream = 0; stream < TDDP_LAUNCH_STREAMS; stream++) {
        if (filters_of(output, stream)->count > 0) {
            (void)open_log(output, -1, filtered_names[stream], "nothing is written there",
                           &output->filtered[stream]);
        }
    }
}

static tddp_status make_prefixes(const tddp_launch_output *output, const tddp_launch_world *world,
                                 int local_rank, member *made)
{
    char host[TDDP_HOST_NAME_BYTES];
    const char *template = output->options->line_prefix;
    tddp_launch_prefix_values values = {
        .role_name = output->options->role,
        .hostname = tddp_host_name(host),
        .rank = world->base_rank + local_rank,
        .local_rank = local_rank,
    };
    made->mark = tddp_launch_prefix_fill(template && *template != '\0' ? template : NULL, &values);
    if (made->mark && tddp_launch_prefix_colors()) {
        made->color = tddp_launch_prefix_color(made->mark, local_rank);
    }
    return made->mark ? TDDP_OK : TDDP_OUT_OF_MEMORY;
}

/* Whether a stream is to be seen on the console. */
static bool is_shown(const tddp_launch_options *options, int local_rank, int stream)
{
    int bit = stream_bits[stream];
    bool teed = tddp_launch_streams_of(&options->tee, local_rank) & bit;
    bool redirected = tddp_launch_streams_of(&options->redirects, local_rank) & bit;
    return (teed || !redirected) && tddp_launch_ranks_has(&options->local_ranks_filter, local_rank);
}

/* How many workers share the console, told for each stream: 1 is alone there. */
static int shown_count(const tddp_launch_output *output, int stream)
{
    int count = 0;
    for (int i = 0; i < output->count; i++) {
        count += is_shown(output->options, i, stream);
    }
    return count;
}

static void choose_route(tddp_launch_output *output, int local_rank, int stream, int shown_there)
{
    const tddp_launch_options *options = output->options;
    member *owner = &output->members[local_rank];
    tddp_launch_route *route = &owner->routes[stream];
    bool teed = tddp_launch_streams_of(&options->tee, local_rank) & stream_bits[stream];
    bool logged =
        teed || (tddp_launch_streams_of(&options->redirects, local_rank) & stream_bits[stream]);
    bool terminal = tddp_launch_console_is_terminal(output->console, stream);
    route->shown = is_shown(options, local_rank, stream);
    if (logged && !open_log(output, local_rank, log_names[stream],
                            "what it would hold is shown here", &route->file)) {
        route->shown = true;
        shown_there = output->count;
    }
    if (filters_of(output, stream)->count > 0) {
        route->filters = filters_of(output, stream);
        route->filtered = &output->filtered[stream];
        route->mark = owner->mark;
    }
    bool templated = options->line_prefix && *options->line_prefix != '\0';
    if (teed || templated || (terminal && shown_there > 1)) {
        route->prefix = terminal && owner->color ? owner->color : owner->mark;
    }
    route->live = terminal;
    route->raw = shown_there == 1 && !route->prefix;
    /* Whoever is alone may ask the terminal what it is. */
    route->inherited = terminal && route->raw && output->count == 1 && !logged && !route->filters;
    route->own = !route->shown && !route->filters;
}

tddp_status tddp_launch_output_begin(tddp_launch_output *output, const tddp_launch_world *world)
{
    forget_attempt(output);
    if (tddp_launch_layout_begin(&output->layout, world->restart, world->local_size) != TDDP_OK) {
        tddp_launch_console_say(output->console,
                                "%s: there are no logs and error files of this attempt",
                                tddp_error_message());
    }
    output->members = tddp_alloc_array((size_t)world->local_size, sizeof *output->members);
    if (!output->members) {
        return TDDP_OUT_OF_MEMORY;
    }
    output->count = world->local_size;
    for (int i = 0; i < output->count; i++) {
        for (int stream = 0; stream < TDDP_LAUNCH_STREAMS; stream++) {
            output->members[i].routes[stream] = (tddp_launch_route){
                .console = output->console, .stream = stream, .file = {.fd = -1}};
        }
    }
    open_filtered(output);
    int shown[] = {shown_count(output, TDDP_LAUNCH_OUT), shown_count(output, TDDP_LAUNCH_ERR)};
    bool unwanted = false;
    for (int i = 0; i < output->count; i++) {
        tddp_status status = make_prefixes(output, world, i, &output->members[i]);
        if (status != TDDP_OK) {
            return status;
        }
        for (int stream = 0; stream < TDDP_LAUNCH_STREAMS; stream++) {
            choose_route(output, i, stream, shown[stream]);
            const tddp_launch_route *route = &output->members[i].routes[stream];
            unwanted |= route->own && route->file.fd < 0;
        }
    }
    if (unwanted && output->null_fd < 0) {
        output->null_fd = open(null_device, O_WRONLY | O_CLOEXEC);
    }
    return TDDP_OK;
}

/* --- what comes ------------------------------------------------------------------------------ */

static const tddp_launch_route *route_of(const tddp_launch_output *output, int local_rank,
                                         int stream)
{
    return &output->members[local_rank].routes[stream];
}

int tddp_launch_output_fd(const tddp_launch_output *output, int local_rank, int stream)
{
    const tddp_launch_route *route = route_of(output, local_rank, stream);
    if (route->inherited) {
        return stream == TDDP_LAUNCH_OUT ? STDOUT_FILENO : STDERR_FILENO;
    }
    if (!route->own) {
        return -1;
    }
    return route->file.fd >= 0 ? route->file.fd : output->null_fd;
}

bool tddp_launch_output_full(const tddp_launch_output *output, int local_rank, int stream)
{
    return route_of(output, local_rank, stream)->shown &&
           tddp_launch_console_full(output->console, stream);
}

tddp_status tddp_launch_output_take(tddp_launch_output *output, int local_rank, int stream,
                                    const char *data, size_t size, bool at_end)
{
    return tddp_launch_route_take(&output->members[local_rank].routes[stream], data, size, at_end);
}

/* --- what others ask ------------------------------------------------------------------------- */

char *tddp_launch_output_error_file(const tddp_launch_output *output, int local_rank)
{
    return tddp_launch_layout_path(&output->layout, local_rank, "error.json");
}

char *tddp_launch_output_log_file(const tddp_launch_output *output, int local_rank, int stream)
{
    const char *path =
        local_rank < output->count ? route_of(output, local_rank, stream)->file.path : NULL;
    return path && route_of(output, local_rank, stream)->file.fd >= 0 ? tddp_copy_string(path)
                                                                      : NULL;
}

const char *tddp_launch_output_folder(const tddp_launch_output *output)
{
    return output->layout.kept ? output->layout.run : NULL;
}
