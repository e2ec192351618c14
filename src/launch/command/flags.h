/*
 * The table of flags, and what the files of this folder share.
 */
#ifndef TDDP_LAUNCH_FLAGS_H
#define TDDP_LAUNCH_FLAGS_H

#include "launch/command/options.h"

enum { TDDP_LAUNCH_WORD_BYTES = 64 };

typedef enum tddp_launch_kind {
    TDDP_LAUNCH_KIND_ACTION, /* a switch that has no variable */
    TDDP_LAUNCH_KIND_SWITCH, /* an int, as with ACTION */
    TDDP_LAUNCH_KIND_TEXT,
    TDDP_LAUNCH_KIND_CODE,   /* as text, but may be empty or begin with a dash */
    TDDP_LAUNCH_KIND_CHOICE, /* an int: the place of the value among those in `value` */
    TDDP_LAUNCH_KIND_NUMBER,
    TDDP_LAUNCH_KIND_SECONDS,
    TDDP_LAUNCH_KIND_NODES,
    TDDP_LAUNCH_KIND_PROCESSES,
    TDDP_LAUNCH_KIND_HOST,
    TDDP_LAUNCH_KIND_LISTENER,
    TDDP_LAUNCH_KIND_ENDPOINTS,
    TDDP_LAUNCH_KIND_STREAMS,
    TDDP_LAUNCH_KIND_RANKS,
    TDDP_LAUNCH_KIND_FILTERS,
    TDDP_LAUNCH_KIND_SIGNALS,
    TDDP_LAUNCH_KIND_CONF,
    TDDP_LAUNCH_KIND_CONF_TEXT,     /* in --rdzv-conf: a copy, without "=" */
    TDDP_LAUNCH_KIND_PASSWORD,      /* with it */
    TDDP_LAUNCH_KIND_PASSWORD_FILE, /* the same, from a file's first line */
} tddp_launch_kind;

/* One row: parser, messages, help, completion and variables of a flag all come from it. */
typedef struct tddp_launch_flag {
    const char *names; /* "r redirects": -r, --redirects and PET_REDIRECTS; a name in upper case is
                          a further variable, weaker than PET_'s; none: a heading of the help */
    tddp_launch_kind kind;
    size_t offset; /* of its field in tddp_launch_options; 0: it has several */
    int min;
    int max;           /* 0: it has no number */
    const char *value; /* what stands for its value in texts: "static|c10d"; NULL for a switch */
    const char *help;
} tddp_launch_flag;

extern const tddp_launch_flag tddp_launch_flags[];
extern const size_t tddp_launch_flag_count;

/* The keys of --rdzv-conf, which have one name each. */
extern const tddp_launch_flag tddp_launch_conf_keys[];
extern const size_t tddp_launch_conf_key_count;

/* Copies a word of those that spaces or bars separate in `text`; false if there are fewer. */
bool tddp_launch_word(const char *text, int index, char word[TDDP_LAUNCH_WORD_BYTES]);

/* Stores `value` in the field of `flag`; `source` names it in a failure's text. */
TDDP_NODISCARD tddp_status tddp_launch_value_store(const tddp_launch_flag *flag, const char *source,
                                                   const char *value, tddp_launch_options *out);

/* Checks several flags together, and resolves what they leave open. */
TDDP_NODISCARD tddp_status tddp_launch_options_resolve(tddp_launch_options *options);

#endif
