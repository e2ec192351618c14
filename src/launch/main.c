/*
 * torchrun: command line, checks that need nothing started, then its two processes, front and
 * agent. Signals are blocked before these part, so that every thread made later inherits that.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <tddp/version.h>

#include "base/base.h"
#include "launch/agent/agent.h"
#include "launch/front/front.h"
#include "launch/output/output.h"

enum { EXIT_USAGE = 2 };

static int complain(int status)
{
    fprintf(stderr, "torchrun: %s\n", tddp_error_message());
    return status;
}

/* A closed descriptor below 3 would be given to the next pipe, and a worker's dup2 would cross it.
 * Those that are filled here are the workers' too. */
static bool fill_standard_descriptors(void)
{
    int fd;
    do {
        fd = open("/dev/null", O_RDWR);
    } while (fd >= 0 && fd <= STDERR_FILENO);
    tddp_close(fd);
    return fd >= 0;
}

static int run(tddp_launch_options *options)
{
    tddp_launch_program program = {0};
    tddp_launch_devices devices;
    tddp_launch_signals signals;
    int local_size;
    int status = EXIT_FAILURE;
    if (tddp_launch_count_processes(options, &devices, &local_size) != TDDP_OK) {
        (void)complain(status);
    } else if (tddp_launch_options_check_local(options, local_size) != TDDP_OK) {
        status = complain(EXIT_USAGE);
    } else if (tddp_launch_program_prepare(options, &program) != TDDP_OK ||
               tddp_launch_signals_block(options->signals, options->signal_count, &signals) !=
                   TDDP_OK) {
        (void)complain(status);
    } else {
        char *folder = tddp_launch_folder_make(NULL, "torchrun");
        options->private_folder = folder;
        if (tddp_launch_split(&signals, &status) != TDDP_OK) {
            status = complain(EXIT_FAILURE);
        } else if (status < 0) {
            status = tddp_launch_run(options, &program, &signals, &devices, local_size);
            tddp_close(signals.fd);
        }
        tddp_launch_folder_remove(folder); /* by whichever process lives: one may be killed */
        free(folder);
    }
    tddp_launch_program_free(&program);
    tddp_launch_devices_free(&devices);
    return status;
}

/* Prints the script that was installed for a shell. */
static int print_completion(int shell)
{
    static const char *const places[] = {"../share/bash-completion/completions/torchrun",
                                         "../share/zsh/site-functions/_torchrun",
                                         "../share/fish/vendor_completions.d/torchrun.fish"};
    char *path = NULL;
    if (tddp_launch_installed("--print-completion", places[shell], &path) == TDDP_OK) {
        (void)execlp("cat", "cat", path, (char *)NULL);
        (void)tddp_fail_errno("cat");
        free(path);
    }
    return complain(EXIT_FAILURE);
}

int main(int argc, char **argv)
{
    tddp_launch_options options;
    if (!fill_standard_descriptors()) {
        return EXIT_FAILURE;
    }
    if (tddp_launch_options_parse(argc, argv, getenv, &options) != TDDP_OK) {
        return complain(EXIT_USAGE);
    }
    if (options.help) {
        tddp_launch_options_help(stdout);
    } else if (options.version) {
        printf("torchrun (torch-ddp) %s\n", TDDP_VERSION);
    } else if (options.print_completion >= 0) {
        return print_completion(options.print_completion);
    } else {
        return run(&options);
    }
    return fflush(stdout) == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
