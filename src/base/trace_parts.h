/*
 * What the files of traces share: trace.c accepts spans and has them written, trace_file.c keeps
 * the file valid, trace_rows.c assigns a row to each span. Internal to these.
 */
#ifndef TDDP_TRACE_PARTS_H
#define TDDP_TRACE_PARTS_H

#include <sys/types.h>

#include "base/base.h"

/* --- trace_file.c ---------------------------------------------------------------------------- */

/* A JSON array that is valid after every write. One thread at a time. */
typedef struct tddp_trace_file {
    char *path;
    int fd;
    off_t end; /* where the next event goes: before the closing bracket */
    int64_t most_bytes;
} tddp_trace_file;

/* Makes DIR/trace_rank_N.json, in folders that are made where they are missing, with `first` as its
 * only event; the path and the descriptor are the file's until tddp_trace_file_close(). With
 * `known` (may be NULL), the same file as it was closed before, goes on at its end. */
TDDP_NODISCARD tddp_status tddp_trace_file_open(const char *dir, int rank, const char *first,
                                                const tddp_trace_file *known, tddp_trace_file *out);

/* Appends events, each with ",\n" before it. On failure the file stays valid, without them. */
TDDP_NODISCARD tddp_status tddp_trace_file_append(tddp_trace_file *file, tddp_bytes *events);

/* Closes the descriptor; path and end stay, for another open. */
void tddp_trace_file_close(tddp_trace_file *file);

/* --- trace_rows.c ---------------------------------------------------------------------------- */

/* The lanes of a trace; freed with free(). One thread at a time. */
typedef struct tddp_trace_rows tddp_trace_rows;

tddp_trace_rows *tddp_trace_rows_create(void);

/* Where a span is shown. */
typedef struct tddp_trace_place {
    const char *lane; /* the lane's own name, kept with the rows */
    int row;          /* of the lane, from 0 */
    int thread;       /* a number of the row's own; they grow from lane to lane, row to row */
    bool fresh;       /* nothing was shown there yet */
} tddp_trace_place;

/* The first row of the lane in which the span lies beside, within or round those shown before. */
tddp_trace_place tddp_trace_rows_place(tddp_trace_rows *rows, const char *lane, int64_t start_ns,
                                       int64_t end_ns);

#endif
