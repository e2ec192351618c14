/*
 * Prints --help from the table of flags. Any thread.
 */
#include <ctype.h>
#include <string.h>

#include <tddp/version.h>

#include "launch/command/flags.h"

enum { COLUMN = 32, WIDTH = 100 };

/* Prints `text` from `column` on, broken between words at WIDTH, further lines at COLUMN. */
static void print_wrapped(FILE *to, const char *text, int column)
{
    if (column + 1 >= COLUMN) {
        fprintf(to, "\n");
        column = 0;
    }
    fprintf(to, "%*s", COLUMN - column, "");
    column = COLUMN;
    while (*text != '\0') {
        int length = (int)strcspn(text, " ");
        if (column > COLUMN && column + 1 + length > WIDTH) {
            fprintf(to, "\n%*s", COLUMN, "");
            column = COLUMN;
        }
        column += fprintf(to, "%s%.*s", column > COLUMN ? " " : "", length, text);
        text += length;
        text += strspn(text, " ");
    }
    fprintf(to, "\n");
}

static void print_flag(FILE *to, const tddp_launch_flag *flag)
{
    char name[TDDP_LAUNCH_WORD_BYTES];
    int column = 0;
    bool is_long = true;
    for (int i = 0; tddp_launch_word(flag->names, i, name); i++) {
        if (!isupper((unsigned char)*name)) {
            is_long = name[1] != '\0';
            column += fprintf(to, "%s%s%s", column > 0 ? ", " : "  ", is_long ? "--" : "-", name);
        }
    }
    if (column == 0) {
        fprintf(to, "\n%s\n", flag->help);
        return;
    }
    if (flag->value) {
        column += fprintf(to, "%s%s", is_long ? "=" : " ", flag->value);
    }
    print_wrapped(to, flag->help, column);
}

void tddp_launch_options_help(FILE *to)
{
    fprintf(to,
            "torchrun (torch-ddp %s): runs a training script on several processes.\n\n"
            "  torchrun [FLAGS] SCRIPT [ARGUMENTS]\n"
            "  torchrun [FLAGS] -e 'CODE' [ARGUMENTS]\n"
            "  torchrun [FLAGS] -m NAME [ARGUMENTS]\n"
            "  torchrun [FLAGS] --no-ruby PROGRAM [ARGUMENTS]\n"
            "  torchrun [FLAGS] --check\n\n"
            "  torchrun --nproc-per-node=2 train.rb --epochs 5\n"
            "  torchrun --nnodes=2 --node-rank=0 --rdzv-backend=c10d "
            "--rdzv-endpoint=host0:29400 \\\n"
            "           --rdzv-id=my-job --nproc-per-node=gpu train.rb\n",
            TDDP_VERSION);
    for (size_t i = 0; i < tddp_launch_flag_count; i++) {
        print_flag(to, &tddp_launch_flags[i]);
    }
    fprintf(to, "\nKeys of --rdzv-conf\n");
    for (size_t i = 0; i < tddp_launch_conf_key_count; i++) {
        const tddp_launch_flag *key = &tddp_launch_conf_keys[i];
        print_wrapped(to, key->help, fprintf(to, "  %s=%s", key->names, key->value));
    }
    fprintf(
        to,
        "\nA .py script runs under python3, any other under ruby. ${local_rank} in ARGUMENTS is "
        "replaced.\nFlags may be spelt with _ for -. A flag's default is taken from PET_ and "
        "its name, such as\nPET_NPROC_PER_NODE (0 or 1 for a flag without a value); the "
        "command line wins.\n\nEach worker has OMP_NUM_THREADS, OPENBLAS_NUM_THREADS and "
        "MKL_NUM_THREADS, unless\nthey are set, for its share of the cores that torchrun may "
        "use (PyTorch's has one thread).\n\nTDDP_STORE_SECRET, the same text on all machines, "
        "or TDDP_STORE_SECRET_FILE, a file that has it,\nkeeps processes that do not know it "
        "out of the job; TDDP_STORE_MAX_* and\nTDDP_STORE_CLIENT_TIMEOUT_MS limit what clients "
        "of its stores can do. TDDP_LOG=info logs more,\ndebug most. The README lists all "
        "variables.\n\nExit status: 0 if all workers succeeded, 1 if one failed (the report "
        "names it), 2 for a wrong\ncommand line, 128 + N if torchrun was ended by signal N.\n");
}
