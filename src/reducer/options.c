/*
 * The options: defaults, checks, and the text in which ranks compare them. Pure functions.
 */
#include <inttypes.h>
#include <stdio.h>

#include <tddp/call.h>

#include "base/options.h"
#include "reducer/reducer.h"

enum { LIMITS_SHOWN = 4 };

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

static const char *on_or_off(int flag)
{
    return flag ? "on" : "off";
}

void tddp_reducer_opts_text(const tddp_reducer_opts *opts, char text[TDDP_REDUCER_OPTS_TEXT])
{
    const size_t bytes = opts->limit_count * sizeof *opts->limits;
    size_t used = (size_t)snprintf(text, TDDP_REDUCER_OPTS_TEXT, "buckets of [");
    for (size_t i = 0; i < opts->limit_count && i < LIMITS_SHOWN; i++) {
        used += (size_t)snprintf(text + used, TDDP_REDUCER_OPTS_TEXT - used, "%s%zu", i ? ", " : "",
                                 opts->limits[i]);
    }
    if (opts->limit_count > LIMITS_SHOWN) {
        used += (size_t)snprintf(text + used, TDDP_REDUCER_OPTS_TEXT - used,
                                 ", ... (%zu, checksum %016" PRIx64 ")", opts->limit_count,
                                 tddp_digest(TDDP_DIGEST_START, opts->limits, bytes));
    }
    (void)snprintf(text + used, TDDP_REDUCER_OPTS_TEXT - used,
                   "] bytes, find_unused %s, static_graph %s, skip_unused %s",
                   on_or_off(opts->find_unused), on_or_off(opts->static_graph),
                   on_or_off(opts->skip_unused));
}
