/*
 * Writes JSON: members in order, commas and escapes looked after. A lack of memory marks the whole
 * text as failed, so that callers need not check each step.
 */
#ifndef TDDP_LAUNCH_JSON_H
#define TDDP_LAUNCH_JSON_H

#include "base/base.h"

/* All zero is an empty one. Free `text` with tddp_bytes_free(). */
typedef struct tddp_launch_json {
    tddp_bytes text;
    bool follows; /* something stands before at this depth: a comma is due */
    bool failed;  /* short memory; the text is of no use */
} tddp_launch_json;

/* `key` is NULL for what stands in an array or alone. `bracket` is '{' or '['. */
void tddp_launch_json_open(tddp_launch_json *json, const char *key, char bracket);
void tddp_launch_json_close(tddp_launch_json *json, char bracket);

/* A text; NULL becomes null. */
void tddp_launch_json_text(tddp_launch_json *json, const char *key, const char *value);
void tddp_launch_json_number(tddp_launch_json *json, const char *key, int64_t value);
void tddp_launch_json_bool(tddp_launch_json *json, const char *key, bool value);

/* Replaces what is in the file. A pipe or the like is written to without waiting. Errors:
 * TDDP_SYSTEM (the text names the file). */
TDDP_NODISCARD tddp_status tddp_launch_write_file(const char *path, const char *data, size_t size);

#endif
