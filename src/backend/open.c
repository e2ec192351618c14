/*
 * Making what carries a group's operations. Runs on the thread that makes the group; keeps nothing.
 *
 * Invariant: all ranks of a group choose alike, or find out together that they cannot: who shares a
 * host is known to all of them alike, and everything else is agreed on by tddp_shm_join(), in which
 * also those take part that want no shared memory.
 */
#include "backend/open.h"

#include <stdlib.h>
#include <string.h>

#include "backend/hosts/hosts.h"
#include "backend/shm/shm.h"
#include "base/base.h"

/* What holds where TDDP_SHM is not set. */
static const bool SHARED_BY_DEFAULT = false;

/* What a rank says that has an unfit TDDP_SHM; by its beginning all others know. */
static const char UNFIT[] = "TDDP_SHM=\"";

typedef struct wish {
    bool wanted;
    char *unfit; /* what is wrong with it; NULL: nothing */
} wish;

static tddp_status read_wish(wish *out)
{
    const char *text = getenv("TDDP_SHM");
    *out = (wish){.wanted = SHARED_BY_DEFAULT};
    if (!text || !*text) {
        return TDDP_OK;
    }
    if (strcmp(text, "0") == 0 || strcmp(text, "1") == 0) {
        out->wanted = *text == '1';
        return TDDP_OK;
    }
    out->unfit = tddp_format("%s%.64s\": expected 1 or 0, for shared memory between the ranks of a "
                             "host or none",
                             UNFIT, text);
    return out->unfit ? TDDP_OK : TDDP_OUT_OF_MEMORY;
}

/* Whether several ranks of the group run on one host. */
static bool hosts_are_shared(const tddp_backend_opts *opts)
{
    for (int rank = 1; opts->hosts && rank < opts->world_size; rank++) {
        for (int before = 0; before < rank; before++) {
            if (opts->hosts[before] == opts->hosts[rank]) {
                return true;
            }
        }
    }
    return false;
}

static bool is_one_host(const tddp_backend_opts *opts)
{
    for (int rank = 1; rank < opts->world_size; rank++) {
        if (opts->hosts[rank] != opts->hosts[0]) {
            return false;
        }
    }
    return true;
}

/* Shared memory for all, or TDDP_UNAVAILABLE for all. */
static tddp_status join(const tddp_backend_opts *opts, const tddp_wait *wait, tddp_shm **out)
{
    wish mine;
    tddp_status status = read_wish(&mine);
    if (status) {
        return status;
    }
    const char *refusal = mine.unfit ? mine.unfit : mine.wanted ? NULL : "TDDP_SHM is not 1";
    status = tddp_shm_join(opts, refusal, wait, out);
    free(mine.unfit);
    if (status == TDDP_UNAVAILABLE) {
        const char *why = tddp_error_message();
        if (strstr(why, UNFIT)) {
            return tddp_fail(TDDP_INVALID_ARGUMENT, "%s", why);
        }
        /* Who does not want it need not be told. */
        if (opts->rank == 0) {
            tddp_log(mine.wanted ? TDDP_LOG_WARN : TDDP_LOG_DEBUG, "backend",
                     "group \"%s\" goes without shared memory: %s", opts->group, why);
        }
    }
    return status;
}

static tddp_status open_over_hosts(const tddp_backend_v1 *asked, tddp_shm *shm,
                                   const tddp_backend_opts *opts, const tddp_wait *wait,
                                   void **context)
{
    tddp_hosts *hosts = NULL;
    tddp_status status = tddp_hosts_create(asked, shm, opts, wait, &hosts);
    if (status == TDDP_OK) {
        *context = hosts;
    }
    return status;
}

tddp_status tddp_backend_open(const tddp_backend_v1 *asked, const tddp_backend_opts *opts,
                              const tddp_wait *wait, const tddp_backend_v1 **serving,
                              void **context)
{
    const tddp_backend_v1 *carrier = asked;
    tddp_status status = TDDP_UNAVAILABLE;
    bool shares = (asked->traits & TDDP_BACKEND_SHARES_HOSTS) && hosts_are_shared(opts);
    if (shares && (is_one_host(opts) || tddp_hosts_can_use(asked))) {
        tddp_shm *shm = NULL;
        int64_t deadline = tddp_wait_deadline(wait, opts->timeout_ms);
        tddp_wait left = {tddp_deadline_poll_ms(deadline), tddp_wait_cancel(wait)};
        status = join(opts, &left, &shm);
        if (status && status != TDDP_UNAVAILABLE) {
            return status;
        }
        left.timeout_ms = tddp_deadline_poll_ms(deadline);
        if (status == TDDP_OK && is_one_host(opts)) {
            carrier = tddp_shm_backend();
            *context = shm;
        } else if (status == TDDP_OK) {
            carrier = tddp_hosts_backend();
            status = open_over_hosts(asked, shm, opts, &left, context);
        } else {
            status = asked->create(opts, &left, context);
        }
    } else {
        status = asked->create(opts, wait, context);
    }
    if (status == TDDP_OK) {
        *serving = carrier;
    }
    return status;
}
