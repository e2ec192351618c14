/*
 * Reads JSON as a stream of items, without a tree: for texts of which a few fields matter.
 */
#ifndef TDDP_JSON_READ_H
#define TDDP_JSON_READ_H

#include <stdbool.h>
#include <stddef.h>

enum { TDDP_JSON_WORD_BYTES = 32 }; /* of a number or another word without quotes, with its NUL */

/* What is called for the items of a JSON text, in their order. Elements of an array have the key of
 * the array; the outermost value has "". */
typedef struct tddp_json_visitor {
    void *context;
    /* An object begins. NULL: not called. */
    void (*object)(void *context, const char *key);
    /* A string with its escapes decoded, or a number, "true", "false" or "null" as it stands. */
    void (*scalar)(void *context, const char *key, const char *text);
} tddp_json_visitor;

/* Visits the items; false if the text is no valid JSON value, after the items before the error.
 * Depth is bounded. Any thread. */
bool tddp_json_read(const char *text, size_t size, const tddp_json_visitor *visitor);

#endif
