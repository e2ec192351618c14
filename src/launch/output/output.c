/*
 * Decides where each stream of each worker goes, and owns the folders and files it goes to. A
 * stream that goes to a file alone is given that file, so that it loses nothing should torchrun be
 * killed; all others come through pipes and take their routes (route.c). Main thread.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/host_name.h"
#include "launch/output/output.h"
#include "launch/output/route.h"

static const char *const log_names[] = {"stdout.log", "stderr.log"};
static const char null_device[] = "/dev/null";

struct tddp_launch_output {
    const tddp_launch_options *options;
    tddp_launch_console *console;
    char *run;     /* the run's folder; NULL: there is none */
    bool kept;     /* it stays when the run is over */
    char *attempt; /* of the attempt that goes on; NULL: none */
    bool discards; /* --log-dir=/dev/null: what would go to a log file goes nowhere */
    tddp_launch_sink filtered[TDDP_LAUNCH_STREAMS];
    tddp_launch_route *routes; /* TDDP_LAUNCH_STREAMS for each worker */
    int count;                 /* of workers */
};

/* --- the run --------------------------------------------------------------------------------- */

tddp_status tddp_launch_output_create(const tddp_launch_options *options, const char *run_id,
                                      tddp_launch_console *console, tddp_launch_output **out)
{
    tddp_launch_output *output = tddp_alloc(sizeof *output);
    if (!output) {
        return TDDP_OUT_OF_MEMORY;
    }
    const char *log_dir = options->log_dir;
    bool files = options->redirects.given || options->tee.given || options->out_filters.count > 0 ||
                 options->err_filters.count > 0;
    bool discards = log_dir && strcmp(log_dir, null_device) == 0;
    *output = (tddp_launch_output){
        .options = options,
        .console = console,
        .kept = !discards && (log_dir || files),
        .discards = discards,
        .filtered = {{.fd = -1}, {.fd = -1}},
    };
    if (output->kept) {
        output->run = tddp_launch_folder_name(log_dir, log_dir ? run_id : "torchrun_logs");
    } else if (options->private_folder) {
        output->run = tddp_copy_string(options->private_folder);
    }
    bool failed = (output->kept || options->private_folder) && !output->run;
    if (!failed && output->kept && mkdir(output->run, 0777) != 0) {
        (void)tddp_fail(TDDP_SYSTEM, "cannot make the folder %s: %s", output->run, strerror(errno));
        failed = true;
    }
    if (failed) {
        tddp_launch_output_free(output);
        return TDDP_SYSTEM;
    }
    if (!output->run) {
        tddp_launch_console_log(console,
                                "no temporary folder: workers have no error file (set TMPDIR)");
    } else if (output->kept && !log_dir) {
        tddp_launch_console_log(console, "logs are in %s", output->run);
    }
    *out = output;
    return TDDP_OK;
}

static void forget_attempt(tddp_launch_output *output)
{
    for (int i = 0; i < output->count * TDDP_LAUNCH_STREAMS; i++) {
        tddp_launch_route_free(&output->routes[i]);
    }
    for (int stream = 0; stream < TDDP_LAUNCH_STREAMS; stream++) {
        tddp_launch_sink_close(&output->filtered[stream]);
    }
    free(output->routes);
    free(output->attempt);
    output->routes = NULL;
    output->attempt = NULL;
    output->count = 0;
}

void tddp_launch_output_free(tddp_launch_output *output)
{
    if (output) {
        forget_attempt(output);
        free(output->run);
        free(output);
    }
}

/* --- an attempt ------------------------------------------------------------------------------ */

/* Makes a file of the attempt; if it cannot be made, that is reported with what follows. */
static bool open_log(tddp_launch_output *output, char *path, const char *otherwise,
                     tddp_launch_sink *file)
{
    bool known = path != NULL;
    if (tddp_launch_sink_create(file, path) == TDDP_OK) {
        return true;
    }
    if (known) {
        tddp_launch_console_log(output->console, "%s: %s", tddp_error_message(), otherwise);
    }
    return false;
}

static char *file_of(const tddp_launch_output *output, int local_rank, const char *name)
{
    return output->attempt ? tddp_format("%s/%d/%s", output->attempt, local_rank, name) : NULL;
}

static const tddp_launch_filters *filters_of(const tddp_launch_output *output, int stream)
{
    const tddp_launch_options *options = output->options;
    const tddp_launch_filters *filters =
        stream == TDDP_LAUNCH_OUT ? &options->out_filters : &options->err_filters;
    return filters->count > 0 ? filters : NULL;
}

static void open_filtered(tddp_launch_output *output)
{
    for (int stream = 0; stream < TDDP_LAUNCH_STREAMS; stream++) {
        if (filters_of(output, stream) && output->attempt && !output->discards) {
            (void)open_log(output,
                           tddp_format("%s/filtered_%s", output->attempt, log_names[stream]),
                           "nothing is written there", &output->filtered[stream]);
        }
    }
}

/* What stands before a worker's lines; NULL: short memory. */
static char *make_prefix(const tddp_launch_output *output, const tddp_launch_world *world,
                         int local_rank)
{
    char host[TDDP_HOST_NAME_BYTES];
    char rank[16];
    char local[16];
    const tddp_launch_macro macros[] = {{"role_name", output->options->role},
                                        {"hostname", tddp_host_name(host)},
                                        {"rank", rank},
                                        {"local_rank", local},
                                        {NULL, NULL}};
    const char *given = output->options->line_prefix;
    (void)snprintf(rank, sizeof rank, "%d", world->base_rank + local_rank);
    (void)snprintf(local, sizeof local, "%d", local_rank);
    return tddp_launch_fill(given && *given != '\0' ? given : "[${role_name}${local_rank}]:",
                            macros);
}

/* Whether a flag names a worker's stream. */
static bool names(const tddp_launch_by_rank *streams, int local_rank, int stream)
{
    return streams->of[local_rank] & 1 << stream;
}

/* Whether a stream is to be seen on the console. */
static bool is_shown(const tddp_launch_options *options, int local_rank, int stream)
{
    bool elsewhere =
        names(&options->redirects, local_rank, stream) && !names(&options->tee, local_rank, stream);
    const tddp_launch_by_rank *filter = &options->local_ranks_filter;
    return !elsewhere && (!filter->given || filter->of[local_rank] != 0);
}

static tddp_launch_route *route_of(const tddp_launch_output *output, int local_rank, int stream)
{
    return &output->routes[local_rank * TDDP_LAUNCH_STREAMS + stream];
}

/* `alone`: no other worker's output is on the console's stream. */
static tddp_status choose_route(tddp_launch_output *output, const tddp_launch_world *world,
                                int local_rank, int stream, bool alone)
{
    const tddp_launch_options *options = output->options;
    tddp_launch_route *route = route_of(output, local_rank, stream);
    tddp_launch_sink *sink = output->console->streams[stream];
    bool teed = names(&options->tee, local_rank, stream);
    bool logged = teed || names(&options->redirects, local_rank, stream);
    bool shown = is_shown(options, local_rank, stream);
    route->filters = filters_of(output, stream);
    route->filtered = &output->filtered[stream];
    if (logged || (!shown && !route->filters)) {
        char *path = output->discards || !logged ? tddp_copy_string(null_device)
                                                 : file_of(output, local_rank, log_names[stream]);
        if (!open_log(output, path, "what it would hold is shown here", &route->file)) {
            shown = true;
            alone = output->count == 1;
        }
    }
    bool templated = options->line_prefix && *options->line_prefix != '\0';
    bool marked = teed || templated || (sink->terminal && !alone);
    route->shown = shown ? sink : NULL;
    route->raw = alone && !marked;
    route->marked = marked;
    route->prefix = make_prefix(output, world, local_rank);
    /* A worker that is alone may ask the terminal what it is. */
    bool owns = sink->terminal && route->raw && output->count == 1 && !logged;
    int own_fd = stream == TDDP_LAUNCH_OUT ? STDOUT_FILENO : STDERR_FILENO;
    route->fd = route->filters ? -1 : !shown ? route->file.fd : owns ? own_fd : -1;
    return route->prefix ? TDDP_OK : TDDP_OUT_OF_MEMORY;
}

tddp_status tddp_launch_output_begin(tddp_launch_output *output, const tddp_launch_world *world)
{
    forget_attempt(output);
    if (output->run) {
        output->attempt = tddp_launch_folder_begin(output->run, world->restart, world->local_size);
        if (!output->attempt) {
            tddp_launch_console_log(output->console,
                                    "%s: there are no logs and error files of this attempt",
                                    tddp_error_message());
        }
    }
    size_t count = (size_t)world->local_size * TDDP_LAUNCH_STREAMS;
    output->routes = tddp_alloc_array(count, sizeof *output->routes);
    if (!output->routes) {
        return TDDP_OUT_OF_MEMORY;
    }
    output->count = world->local_size;
    for (size_t i = 0; i < count; i++) {
        output->routes[i] =
            (tddp_launch_route){.console = output->console, .file.fd = -1, .source.fd = -1};
    }
    open_filtered(output);
    tddp_status status = TDDP_OK;
    for (int stream = 0; stream < TDDP_LAUNCH_STREAMS; stream++) {
        int shown = 0;
        for (int i = 0; i < output->count; i++) {
            shown += is_shown(output->options, i, stream);
        }
        for (int i = 0; i < output->count && status == TDDP_OK; i++) {
            status = choose_route(output, world, i, stream, shown == 1);
        }
    }
    return status;
}

/* --- what comes ------------------------------------------------------------------------------ */

int tddp_launch_output_fd(const tddp_launch_output *output, int local_rank, int stream)
{
    return route_of(output, local_rank, stream)->fd;
}

tddp_status tddp_launch_output_watch(tddp_launch_output *output, tddp_launch_loop *loop,
                                     int local_rank, const int pipes[TDDP_LAUNCH_STREAMS])
{
    tddp_status out = tddp_launch_route_watch(route_of(output, local_rank, 0), loop, pipes[0]);
    tddp_status err = tddp_launch_route_watch(route_of(output, local_rank, 1), loop, pipes[1]);
    return out == TDDP_OK ? err : out;
}

void tddp_launch_output_hold_back(tddp_launch_output *output)
{
    for (int i = 0; output && i < output->count * TDDP_LAUNCH_STREAMS; i++) {
        tddp_launch_route *route = &output->routes[i];
        bool full = route->shown && tddp_launch_sink_full(route->shown);
        route->source.events = full ? 0 : POLLIN;
    }
}

void tddp_launch_output_drain(tddp_launch_output *output)
{
    for (int i = 0; output && i < output->count * TDDP_LAUNCH_STREAMS; i++) {
        tddp_launch_route_drain(&output->routes[i]);
    }
}

/* --- what others ask ------------------------------------------------------------------------- */

char *tddp_launch_output_error_file(const tddp_launch_output *output, int local_rank)
{
    return file_of(output, local_rank, "error.json");
}

char *tddp_launch_output_log_file(const tddp_launch_output *output, int local_rank, int stream)
{
    const tddp_launch_sink *file =
        local_rank < output->count ? &route_of(output, local_rank, stream)->file : NULL;
    return file && file->fd >= 0 && strcmp(file->name, null_device) != 0
               ? tddp_copy_string(file->name)
               : NULL;
}

const char *tddp_launch_output_folder(const tddp_launch_output *output)
{
    return output->kept ? output->run : NULL;
}
