/*
 * A program for the build: prints the table of flags for the scripts that complete torchrun's
 * command line, a row for each form of a flag: the form (with "=" if it takes a value), the values,
 * the start of the help. Between them are tabs.
 */
#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "launch/command/flags.h"

/* What stands in the help for a value: a text for the user, or one to choose. */
static void print_offer(const char *value)
{
    char word[TDDP_LAUNCH_WORD_BYTES];
    bool any = false;
    for (int i = 0; tddp_launch_word(value, i, word); i++) {
        if (islower((unsigned char)*word) || isdigit((unsigned char)*word)) {
            printf("%s%s", any ? " " : "", word);
            any = true;
        }
    }
    if (!any) {
        printf("%s", strcmp(value, "FILE") == 0       ? "@files"
                     : strcmp(value, "FOLDER") == 0   ? "@folders"
                     : strncmp(value, "HOST", 4) == 0 ? "@hosts"
                                                      : "@nothing");
    }
}

int main(void)
{
    char name[TDDP_LAUNCH_WORD_BYTES];
    for (size_t i = 0; i < tddp_launch_flag_count; i++) {
        const tddp_launch_flag *flag = &tddp_launch_flags[i];
        for (int j = 0; tddp_launch_word(flag->names, j, name); j++) {
            if (isupper((unsigned char)*name)) {
                continue; /* a variable */
            }
            printf("-%s%s%s\t", name[1] != '\0' ? "-" : "", name, flag->value ? "=" : "");
            print_offer(flag->value ? flag->value : "");
            printf("\t%.*s\n", (int)strcspn(flag->help, ";:"),
                   flag->help); /* shells show one line */
        }
    }
    return fflush(stdout) == 0 ? 0 : 1;
}
