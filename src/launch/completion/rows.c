/*
 * A program for the build: prints the table of flags for the scripts that complete torchrun's
 * command line, a row for each form of a flag: the form (with "=" if it takes a value), the values,
 * the start of the help. Between them are tabs.
 */
#include <stdio.h>
#include <string.h>

#include "launch/command/options.h"

static void print_row(const tddp_launch_flag *flag, const char *dashes, const char *name)
{
    static const char *const offers[] = {
        [TDDP_LAUNCH_OFFER_NOTHING] = "@nothing",
        [TDDP_LAUNCH_OFFER_FILES] = "@files",
        [TDDP_LAUNCH_OFFER_FOLDERS] = "@folders",
        [TDDP_LAUNCH_OFFER_HOSTS] = "@hosts",
    };
    const char *end = strpbrk(flag->help, ";:"); /* shells show one line */
    printf("%s%s%s\t%s\t%.*s\n", dashes, name, flag->value ? "=" : "",
           flag->choices ? flag->choices : offers[flag->offer],
           end ? (int)(end - flag->help) : (int)strlen(flag->help), flag->help);
}

int main(void)
{
    for (size_t i = 0; i < tddp_launch_flag_count; i++) {
        const tddp_launch_flag *flag = &tddp_launch_flags[i];
        if (flag->letter) {
            print_row(flag, "-", (char[]){flag->letter, '\0'});
        }
        if (tddp_launch_flag_is_long(flag)) {
            print_row(flag, "--", flag->name);
        }
        if (flag->alias) {
            print_row(flag, "--", flag->alias);
        }
    }
    return fflush(stdout) == 0 ? 0 : 1;
}
