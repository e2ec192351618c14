/*
 * The options: defaults, checks, and the comparison between ranks. Pure functions; verify_params.c
 * exchanges the options of all ranks.
 */
#include <inttypes.h>
#include <stdio.h>

#include <tddp/call.h>

#include "base/options.h"
#include "reducer/reducer.h"

enum { LIMITS_TEXT = 128 };

void tddp_reducer_opts_init(tddp_reducer_opts *opts, size_t size)
{
    const tddp_reducer_opts defaults = TDDP_REDUCER_OPTS_INIT;
    tddp_opts_fill(&defaults, sizeof defaults, opts, size);
}

tddp_status tddp_reducer_read_options(const tddp_reducer_opts *opts, tddp_reducer_opts *out)
{
    static const size_t limits[] = {TDDP_FIRST_BUCKET_BYTES, TDDP_BUCKET_CAP_BYTES};
    tddp_reducer_opts all = TDDP_REDUCER_OPTS_INIT;
    tddp_status status =
        opts ? tddp_opts_read("TDDP_REDUCER_OPTS_INIT", opts,
                              TDDP_OPTS_UNTIL(tddp_reducer_opts, device), &all, sizeof all)
             : TDDP_OK;
    if (status) {
        return status;
    }
    opts = &all;
    if (!opts->limits != !opts->limit_count) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "%zu bucket limits%s: expected at least one, or neither limits nor "
                         "limit_count",
                         opts->limit_count, opts->limits ? "" : " but limits is NULL");
    }
    if (opts->skip_unused && !opts->find_unused && !opts->static_graph) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "skip_unused without find_unused or static_graph: expected one of them, "
                         "because without them unused parameters are not detected");
    }
    *out = *opts;
    if (!opts->limits) {
        out->limits = limits;
        out->limit_count = 2;
    }
    return TDDP_OK;
}

tddp_reducer_opts_summary tddp_reducer_summarize_opts(const tddp_reducer_opts *opts)
{
    tddp_reducer_opts_summary mine = {.limit_count = (int64_t)opts->limit_count,
                                      .find_unused = opts->find_unused != 0,
                                      .static_graph = opts->static_graph != 0,
                                      .skip_unused = opts->skip_unused != 0};
    uint64_t hash = TDDP_DIGEST_START;
    for (size_t i = 0; i < opts->limit_count; i++) {
        hash = tddp_digest(hash, &opts->limits[i], sizeof opts->limits[i]);
        if (i < TDDP_REDUCER_LIMITS_SHOWN) {
            mine.limits[i] = (int64_t)opts->limits[i];
        }
    }
    mine.limits_hash = (int64_t)hash;
    return mine;
}

/* "[1048576, 26214400]" */
static void limits_text(const tddp_reducer_opts_summary *of, char *text)
{
    int64_t shown =
        of->limit_count < TDDP_REDUCER_LIMITS_SHOWN ? of->limit_count : TDDP_REDUCER_LIMITS_SHOWN;
    size_t used = (size_t)snprintf(text, LIMITS_TEXT, "[");
    for (int64_t i = 0; i < shown; i++) {
        used += (size_t)snprintf(text + used, LIMITS_TEXT - used, "%s%" PRId64, i ? ", " : "",
                                 of->limits[i]);
    }
    (void)snprintf(text + used, LIMITS_TEXT - used, "%s", shown < of->limit_count ? ", ...]" : "]");
}

static tddp_status compare_flag(const char *name, int64_t mine, int rank, int64_t theirs)
{
    if (mine == theirs) {
        return TDDP_OK;
    }
    return tddp_fail(TDDP_MISMATCH,
                     "%s is %s at rank 0, but %s at rank %d: give every rank the same options",
                     name, mine ? "on" : "off", theirs ? "on" : "off", rank);
}

tddp_status tddp_reducer_compare_opts(const tddp_reducer_opts_summary *mine, int rank,
                                      const tddp_reducer_opts_summary *theirs)
{
    if (mine->limits_hash != theirs->limits_hash || mine->limit_count != theirs->limit_count) {
        char text[LIMITS_TEXT];
        char other_text[LIMITS_TEXT];
        limits_text(mine, text);
        limits_text(theirs, other_text);
        return tddp_fail(TDDP_MISMATCH,
                         "rank 0 asks for buckets of %s bytes, rank %d for %s: give every rank the "
                         "same bucket sizes",
                         text, rank, other_text);
    }
    tddp_status status = compare_flag("find_unused", mine->find_unused, rank, theirs->find_unused);
    if (status == TDDP_OK) {
        status = compare_flag("static_graph", mine->static_graph, rank, theirs->static_graph);
    }
    if (status == TDDP_OK) {
        status = compare_flag("skip_unused", mine->skip_unused, rank, theirs->skip_unused);
    }
    return status;
}
