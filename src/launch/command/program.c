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
#include "launch/command/program.h"

enum { HEAD = 7 };

static const char macro[] = "${local_rank}";

/* -m NAME: Ruby has no such flag. NAME is looked for, in this order, as a program of a gem of the
 * bundle, as a library on the load path, in ./lib and the current folder, and in a gem of that
 * name. The file becomes $0, so that `if $0 == __FILE__` holds. Names of the code's own would be
 * the program's top-level variables: a block keeps them in. */
static const char module_code[] =
    "proc do |name|\n"
    "  $LOAD_PATH.concat(%w[lib .].map { |folder| File.expand_path(folder) })\n"
    "  on_path = -> { $LOAD_PATH.resolve_feature_path(name)&.last }\n"
    "  gem = Gem::Specification.find { |found| found.executables.include?(name) }\n"
    "  gem.activate if gem && !gem.activated?\n"
    "  path = gem ? gem.bin_file(name) : on_path.call\n"
    "  path ||= on_path.call if Gem.try_activate(name)\n"
    "  abort \"torchrun: -m #{name}: no gem has such a program, and the load path, ./lib and the "
    "\" "
    "+\n"
    "    \"current folder have no #{name}.rb\" unless path\n"
    "  $0 = path\n"
    "  path\n"
    "end.call(ARGV.shift).then { |path| load(path) }\n";

/* --- files ----------------------------------------------------------------------------------- */

/* Whether a file is there and may be read or executed (R_OK, X_OK). */
static tddp_status check_file(const char *what, const char *path, int mode)
{
    struct stat found;
    if (stat(path, &found) != 0) {
        return tddp_fail(TDDP_NOT_FOUND, "%s %s: %s", what, path, strerror(errno));
    }
    if (S_ISDIR(found.st_mode)) {
        return tddp_fail(TDDP_NOT_FOUND, "%s %s: is a directory", what, path);
    }
    if (access(path, mode) != 0) {
        return tddp_fail(TDDP_NOT_FOUND, "%s %s: %s%s", what, path, strerror(errno),
                         mode == X_OK ? "; chmod +x makes it executable" : "");
    }
    return TDDP_OK;
}

/* A program by its path, or by its name in PATH, as execvp() finds it. */
static tddp_status find_program(const char *name, char **out)
{
    if (strchr(name, '/')) {
        *out = tddp_copy_string(name);
        return *out ? check_file("program", name, X_OK) : TDDP_OUT_OF_MEMORY;
    }
    const char *folders = getenv("PATH");
    folders = folders ? folders : "/usr/local/bin:/usr/bin:/bin";
    for (const char *at = folders;; at++) {
        int length = (int)strcspn(at, ":");
        *out = length > 0 ? tddp_format("%.*s/%s", length, at, name) : tddp_format("./%s", name);
        if (!*out || check_file("program", *out, X_OK) == TDDP_OK) {
            return *out ? TDDP_OK : TDDP_OUT_OF_MEMORY;
        }
        free(*out);
        *out = NULL;
        at += length;
        if (*at == '\0') {
            return tddp_fail(TDDP_NOT_FOUND, "program %s: not found in PATH (%s)", name, folders);
        }
    }
}

/* --- arguments ------------------------------------------------------------------------------- */

static const char *variable_or(const char *name, const char *otherwise)
{
    const char *value = getenv(name);
    return value && *value != '\0' ? value : otherwise;
}

static bool is_python(const char *script)
{
    size_t length = script ? strlen(script) : 0;
    return length >= 3 && strcmp(script + length - 3, ".py") == 0;
}

/* Fills `head` with what comes before the script's own arguments; NULL: nothing. */
static void make_head(const tddp_launch_options *options, const char *head[HEAD])
{
    const char *name = options->module ? options->module : options->script;
    const char *code = options->module ? module_code : options->code;
    if (options->check || options->no_ruby) {
        head[0] = options->check ? "torchrun-check" : options->script;
    } else if (is_python(options->script)) {
        head[0] = variable_or("PYTHON_EXEC", "python3"); /* PyTorch's own variable */
        head[1] = "-u";
        head[2] = name;
    } else {
        head[0] = variable_or("TDDP_RUBY", "ruby");
        head[2] = variable_or("TDDP_RUBY_PRELOAD", NULL);
        head[1] = head[2] ? "-r" : NULL;
        head[3] = code ? "-e" : NULL;
        head[4] = code;
        /* A script may be called "-x.rb", and an argument after code be "-x": ruby would take it
         * for a flag. */
        head[5] = "--";
        head[6] = options->code ? NULL : name;
    }
}

tddp_status tddp_launch_program_prepare(const tddp_launch_options *options,
                                        tddp_launch_program *out)
{
    const char *head[HEAD] = {NULL};
    size_t given = options->check ? 0 : (size_t)options->argument_count;
    tddp_launch_program program = {.name = options->check    ? "torchrun --check"
                                           : options->script ? options->script
                                           : options->module ? options->module
                                                             : "-e"};
    make_head(options, head);
    tddp_status status = options->script && !options->no_ruby
                             ? check_file("script", options->script, R_OK)
                             : TDDP_OK;
    if (status == TDDP_OK) {
        status = options->check ? tddp_launch_installed("--check", head[0], &program.path)
                                : find_program(head[0], &program.path);
    }
    if (status == TDDP_OK) {
        program.arguments = tddp_alloc_array(HEAD + given + 2, sizeof *program.arguments);
        status = program.arguments ? TDDP_OK : TDDP_OUT_OF_MEMORY;
    }
    if (status != TDDP_OK) {
        tddp_launch_program_free(&program);
        return status;
    }
    size_t count = 0;
    for (size_t i = 0; i < HEAD + given; i++) {
        program.arguments[count] = i < HEAD ? head[i] : options->arguments[i - HEAD];
        count += program.arguments[count] != NULL;
    }
    program.arguments[count] =
        options->pass_local_rank && !options->check ? "--local-rank=${local_rank}" : NULL;
    *out = program;
    return TDDP_OK;
}

void tddp_launch_program_free(tddp_launch_program *program)
{
    free(program->path);
    free(program->arguments);
    *program = (tddp_launch_program){0};
}

char **tddp_launch_program_argv(const tddp_launch_program *program, int local_rank)
{
    tddp_bytes text = {0};
    char number[16];
    bool failed = false;
    (void)snprintf(number, sizeof number, "%d", local_rank);
    for (size_t i = 0; program->arguments[i] && !failed; i++) {
        const char *at = program->arguments[i];
        for (const char *found; (found = strstr(at, macro)); at = found + sizeof macro - 1) {
            failed |= tddp_bytes_append(&text, at, (size_t)(found - at)) != TDDP_OK ||
                      tddp_bytes_append(&text, number, strlen(number)) != TDDP_OK;
        }
        failed |= tddp_bytes_append(&text, at, strlen(at) + 1) != TDDP_OK;
    }
    return tddp_launch_list_texts(&text, failed);
}

char **tddp_launch_list_texts(tddp_bytes *texts, bool failed)
{
    size_t count = 0;
    for (size_t at = 0; at < texts->size && !failed; at += strlen(texts->data + at) + 1) {
        count++;
    }
    char **list = failed ? NULL : tddp_alloc((count + 1) * sizeof *list + texts->size);
    char *next = list ? memcpy(list + count + 1, texts->data, texts->size) : NULL;
    for (size_t i = 0; list && i < count; i++) {
        list[i] = next;
        next += strlen(next) + 1;
    }
    tddp_bytes_free(texts);
    return list; /* tddp_alloc() has put a NULL at its end */
}
