/*
 * What a worker runs: the program's file and its arguments, worked out and checked once, before
 * anything starts; and files that are installed beside torchrun.
 */
#ifndef TDDP_LAUNCH_PROGRAM_H
#define TDDP_LAUNCH_PROGRAM_H

#include "base/base.h"
#include "launch/command/options.h"

typedef struct tddp_launch_program {
    char *path;             /* of the file to execute; owned */
    const char **arguments; /* argv with macros still in it, NULL at its end; owned, its strings are
                               the options', the environment's or constant */
    const char *name;       /* for people: the script, borrowed from the options */
} tddp_launch_program;

/*
 * Chooses the interpreter (a .py: PYTHON_EXEC or python3; --no-ruby: none; else TDDP_RUBY or ruby,
 * with the file TDDP_RUBY_PRELOAD loaded first if that is set) and finds it and the script. Caller:
 * tddp_launch_program_free(). Errors: TDDP_NOT_FOUND, TDDP_OUT_OF_MEMORY.
 */
TDDP_NODISCARD tddp_status tddp_launch_program_prepare(const tddp_launch_options *options,
                                                       tddp_launch_program *out);
void tddp_launch_program_free(tddp_launch_program *program);

/* argv for one worker, each ${local_rank} replaced, in one piece of memory with its texts: free().
 * NULL if memory is short. */
char **tddp_launch_program_argv(const tddp_launch_program *program, int local_rank);

/* An argv or envp of texts that follow each other, each with its NUL, in one piece of memory with
 * them: free(). NULL if memory is short; `failed`: it was before. Frees `texts`. */
char **tddp_launch_list_texts(tddp_bytes *texts, bool failed);

/* --- program_linux.c ------------------------------------------------------------------------- */

/* The path of a file that `flag` needs, `place` being its path from torchrun's folder. Caller:
 * free(). Errors: TDDP_NOT_FOUND, TDDP_OUT_OF_MEMORY. */
TDDP_NODISCARD tddp_status tddp_launch_installed(const char *flag, const char *place, char **out);

#endif
