/*
 * The table of flags, and what the files of this folder share.
 */
#ifndef TDDP_LAUNCH_FLAGS_H
#define TDDP_LAUNCH_FLAGS_H

#include "launch/command/options.h"

enum { TDDP_LAUNCH_WORD_BYTES = 64 };

typedef struct tddp_launch_flag tddp_launch_flag;

/* Reads a value into its field; false: it is none of the flag's. */
typedef bool tddp_launch_reader(const tddp_launch_flag *flag, const char *value, void *field);

/* One row: parser, messages, help, completion and variables of a flag all come from it. */
struct tddp_launch_flag {
    const char *names; /* "r redirects": -r, --redirects and PET_REDIRECTS; a name in upper case is
                          a further variable, weaker than those after it; none: a heading */
    tddp_launch_reader *read; /* NULL: settings, which have rows of their own */
    size_t offset;            /* of its field in tddp_launch_options; 0: it has several */
    int min;
    int max;           /* of a text its bytes; 0: there is no limit, or no number */
    const char *value; /* what stands for its value in texts: "static|c10d"; NULL for a switch */
    const char *help;
};

extern const tddp_launch_flag tddp_launch_flags[];
extern const size_t tddp_launch_flag_count;

/* The keys of --rdzv-conf, which have one name each. */
extern const tddp_launch_flag tddp_launch_conf_keys[];
extern const size_t tddp_launch_conf_key_count;

/* Copies a word of those that spaces or bars separate in `text`; false if there are fewer. */
bool tddp_launch_word(const char *text, int index, char word[TDDP_LAUNCH_WORD_BYTES]);

/* --- values.c -------------------------------------------------------------------------------- */

tddp_launch_reader tddp_launch_read_action; /* a switch that has no variable */
tddp_launch_reader tddp_launch_read_switch; /* an int, as with actions */
tddp_launch_reader tddp_launch_read_text, tddp_launch_read_number;
tddp_launch_reader tddp_launch_read_code;   /* text that may be empty or begin with a dash */
tddp_launch_reader tddp_launch_read_choice; /* an int: the place among the words of `value` */
tddp_launch_reader tddp_launch_read_seconds, tddp_launch_read_nodes, tddp_launch_read_processes;
tddp_launch_reader tddp_launch_read_host, tddp_launch_read_listener, tddp_launch_read_endpoints;
tddp_launch_reader tddp_launch_read_by_rank, tddp_launch_read_filters, tddp_launch_read_signals;
tddp_launch_reader tddp_launch_read_copy, tddp_launch_read_first_line;

/* Stores `value` in the field of `flag`; `source` names it in a failure's text. */
TDDP_NODISCARD tddp_status tddp_launch_value_store(const tddp_launch_flag *flag, const char *source,
                                                   const char *value, tddp_launch_options *out);

/* --- resolve.c ------------------------------------------------------------------------------- */

/* Checks several flags together, and resolves what they leave open. */
TDDP_NODISCARD tddp_status tddp_launch_options_resolve(tddp_launch_options *options);

#endif
