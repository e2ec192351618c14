/*
 * Finds the interpreter and the script, and makes each worker's argv. All is looked up before the
 * first fork, so that a misspelt script is one clear message. Main thread.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/base.h"
#include "launch/command/module.h"
#include "launch/command/program.h"
#include "launch/installed/installed.h"

enum { HEAD = 8 };

static const char macro[] = "${local_rank}";
static const char local_rank_argument[] = "--local-rank=${local_rank}";

static bool is_program(const char *path)
{
    struct stat found;
    return stat(path, &found) == 0 && S_ISREG(found.st_mode) && access(path, X_OK) == 0;
}

static tddp_status missing(const char *path, const char *what)
{
    struct stat found;
    if (stat(path, &found) != 0) {
        return tddp_fail(TDDP_NOT_FOUND, "%s %s: %s", what, path, strerror(errno));
    }
    if (S_ISDIR(found.st_mode)) {
        return tddp_fail(TDDP_NOT_FOUND, "%s %s: is a directory", what, path);
    }
    return tddp_fail(TDDP_NOT_FOUND, "%s %s: not executable; chmod +x makes it so", what, path);
}

/* A program by its path, or by its name in PATH, as execvp() finds it. */
static tddp_status find_program(const char *name, char **out)
{
    if (strchr(name, '/')) {
        if (!is_program(name)) {
            return missing(name, "program");
        }
        *out = tddp_copy_string(name);
        return *out ? TDDP_OK : TDDP_OUT_OF_MEMORY;
    }
    const char *folders = getenv("PATH");
    folders = folders ? folders : "/usr/local/bin:/usr/bin:/bin";
    for (const char *at = folders;; at++) {
        size_t length = strcspn(at, ":");
        char *path =
            length > 0 ? tddp_format("%.*s/%s", (int)length, at, name) : tddp_format("./%s", name);
        if (!path) {
            return TDDP_OUT_OF_MEMORY;
        }
        if (is_program(path)) {
            *out = path;
            return TDDP_OK;
        }
        free(path);
        at += length;
        if (*at == '\0') {
            return tddp_fail(TDDP_NOT_FOUND, "program %s: not found in PATH (%s)", name, folders);
        }
    }
}

static tddp_status check_script(const char *path)
{
    struct stat found;
    if (stat(path, &found) != 0 || access(path, R_OK) != 0) {
        return tddp_fail(TDDP_NOT_FOUND, "script %s: %s", path, strerror(errno));
    }
    if (S_ISDIR(found.st_mode)) {
        return tddp_fail(TDDP_NOT_FOUND, "script %s: is a directory", path);
    }
    return TDDP_OK;
}

static bool ends_with(const char *text, const char *end)
{
    size_t length = strlen(text);
    return length >= strlen(end) && strcmp(text + length - strlen(end), end) == 0;
}

static const char *from_environment(const char *name)
{
    const char *value = getenv(name);
    return value && *value != '\0' ? value : NULL;
}

static size_t make_python_head(const tddp_launch_options *options, const char *head[HEAD])
{
    size_t count = 0;
    const char *python = from_environment("PYTHON_EXEC"); /* PyTorch's own variable */
    head[count++] = python ? python : "python3";
    head[count++] = "-u";
    if (options->module) {
        head[count++] = "-m";
    }
    head[count++] = options->module ? options->module : options->script;
    return count;
}

/* Fills `head` with what comes before the script's own arguments; returns how many. */
static size_t make_head(const tddp_launch_options *options, const char *head[HEAD])
{
    size_t count = 0;
    if (options->no_ruby) {
        head[count++] = options->script;
        return count;
    }
    if (options->module ? tddp_launch_module_is_python(options->module)
                        : options->script && ends_with(options->script, ".py")) {
        return make_python_head(options, head);
    }
    const char *ruby = from_environment("TDDP_RUBY");
    const char *preload = from_environment("TDDP_RUBY_PRELOAD");
    head[count++] = ruby ? ruby : "ruby";
    if (preload) {
        head[count++] = "-r";
        head[count++] = preload;
    }
    if (!options->script) {
        head[count++] = "-e";
        head[count++] = options->code ? options->code : tddp_launch_module_code;
    }
    /* A script may be called "-x.rb", and an argument after code be "-x": ruby would take it for a
     * flag. */
    head[count++] = "--";
    if (!options->code) {
        head[count++] = options->script ? options->script : options->module;
    }
    return count;
}

static tddp_status copy_arguments(const tddp_launch_options *options, const char *const *head,
                                  size_t head_count, tddp_launch_program *out)
{
    size_t given = head_count + (size_t)options->argument_count;
    size_t total = given + (options->pass_local_rank ? 1 : 0);
    out->arguments = tddp_alloc_array(total + 1, sizeof *out->arguments);
    if (!out->arguments) {
        return TDDP_OUT_OF_MEMORY;
    }
    out->first_own = head_count;
    for (size_t i = 0; i < total; i++) {
        const char *text = i < head_count ? head[i]
                           : i < given    ? options->arguments[i - head_count]
                                          : local_rank_argument;
        out->arguments[i] = tddp_copy_string(text);
        if (!out->arguments[i]) {
            return TDDP_OUT_OF_MEMORY;
        }
        out->count++;
    }
    return TDDP_OK;
}

static tddp_status prepare_check(tddp_launch_program *out)
{
    static const tddp_launch_options no_arguments;
    static const char *const head[] = {"torchrun-check"};
    tddp_status status = tddp_launch_installed("--check", head[0], &out->path);
    return status == TDDP_OK ? copy_arguments(&no_arguments, head, 1, out) : status;
}

static tddp_status prepare_script(const tddp_launch_options *options, tddp_launch_program *out)
{
    const char *head[HEAD];
    size_t head_count = make_head(options, head);
    tddp_status status =
        options->script && !options->no_ruby ? check_script(options->script) : TDDP_OK;
    if (status == TDDP_OK) {
        status = find_program(head[0], &out->path);
    }
    return status == TDDP_OK ? copy_arguments(options, head, head_count, out) : status;
}

tddp_status tddp_launch_program_prepare(const tddp_launch_options *options,
                                        tddp_launch_program *out)
{
    tddp_launch_program program = {.name = options->check    ? "torchrun --check"
                                           : options->script ? options->script
                                           : options->module ? options->module
                                                             : "-e"};
    tddp_status status =
        options->check ? prepare_check(&program) : prepare_script(options, &program);
    if (status != TDDP_OK) {
        tddp_launch_program_free(&program);
        return status;
    }
    *out = program;
    return TDDP_OK;
}

void tddp_launch_program_free(tddp_launch_program *program)
{
    free(program->path);
    tddp_launch_list_free(program->arguments);
    *program = (tddp_launch_program){0};
}

void tddp_launch_list_free(char **list)
{
    for (size_t i = 0; list && list[i]; i++) {
        free(list[i]);
    }
    free(list);
}

char *tddp_launch_substitute(const char *text, int local_rank)
{
    tddp_bytes made = {0};
    char number[16];
    int digits = snprintf(number, sizeof number, "%d", local_rank);
    tddp_status status = TDDP_OK;
    const char *found;
    while (status == TDDP_OK && (found = strstr(text, macro))) {
        status = tddp_bytes_append(&made, text, (size_t)(found - text));
        if (status == TDDP_OK) {
            status = tddp_bytes_append(&made, number, (size_t)digits);
        }
        text = found + sizeof macro - 1;
    }
    if (status == TDDP_OK) {
        status = tddp_bytes_append(&made, text, strlen(text) + 1);
    }
    if (status != TDDP_OK) {
        tddp_bytes_free(&made);
    }
    return made.data;
}

char **tddp_launch_program_argv(const tddp_launch_program *program, int local_rank)
{
    char **list = tddp_alloc_array(program->count + 1, sizeof *list);
    for (size_t i = 0; list && i < program->count; i++) {
        list[i] = i < program->first_own
                      ? tddp_copy_string(program->arguments[i])
                      : tddp_launch_substitute(program->arguments[i], local_rank);
        if (!list[i]) {
            tddp_launch_list_free(list);
            return NULL;
        }
    }
    return list;
}
