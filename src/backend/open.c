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

#include "backend/devices/devices.h"
#include "backend/hosts/hosts.h"
#include "backend/shm/shm.h"
#include "base/base.h"

/* What holds where TDDP_SHM is not set. */
static const bool SHARED_BY_DEFAULT = true;

/* What a rank says that has an unfit TDDP_SHM; by its beginning all others know. */
static const char UNFIT[] = "TDDP_SHM=\"";

typedef struct wish {
    bool wanted;
    const char *refusal; /* what is told to others where it is not; NULL: it is */
    char *unfit;         /* what is wrong with it; NULL: nothing */
} wish;

static tddp_status read_wish(wish *out)
{
    const char *text = getenv("TDDP_SHM");
    *out = (wish){.wanted = SHARED_BY_DEFAULT};
    if (!text || !*text) {
        out->refusal = SHARED_BY_DEFAULT ? NULL : "TDDP_SHM=1 is not set";
        return TDDP_OK;
    }
    if (strcmp(text, "0") == 0 || strcmp(text, "1") == 0) {
        out->wanted = *text == '1';
        out->refusal = out->wanted ? NULL : "TDDP_SHM=0";
        return TDDP_OK;
    }
    out->unfit = tddp_format("%s%.64s\": expected 1 or 0, for shared memory between the ranks of a "
                             "host or none",
                             UNFIT, text);
    return out->unfit ? TDDP_OK : TDDP_OUT_OF_MEMORY;
}

/* Whether several ranks of the group run on one host: hosts are numbered as they come. */
static bool hosts_are_shared(const tddp_backend_opts *opts)
{
    int hosts = 0;
    for (int rank = 0; opts->hosts && rank < opts->world_size; rank++) {
        hosts = opts->hosts[rank] >= hosts ? opts->hosts[rank] + 1 : hosts;
    }
    return hosts > 0 && hosts < opts->world_size;
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

/* NULL for all where a rank cannot have it, or does not want it. */
static tddp_status join(const tddp_backend_opts *opts, const wish *mine, const tddp_wait *wait,
                        tddp_shm **out)
{
    const char *refusal = mine->unfit ? mine->unfit : mine->refusal;
    tddp_status status = tddp_shm_join(opts, refusal, wait, out);
    if (status != TDDP_UNAVAILABLE) {
        return status;
    }
    const char *why = tddp_error_message();
    if (strstr(why, UNFIT)) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "%s", why);
    }
    /* Who does not want it need not be told. */
    if (opts->rank == 0) {
        tddp_log(mine->wanted ? TDDP_LOG_WARN : TDDP_LOG_DEBUG, "backend",
                 "group \"%s\" goes without shared memory: %s", opts->group, why);
    }
    *out = NULL;
    return TDDP_OK;
}

static tddp_status find_shared(const tddp_backend_v1 *asked, const tddp_backend_opts *opts,
                               const tddp_wait *wait, tddp_shm **out)
{
    *out = NULL;
    if (!(asked->traits & TDDP_BACKEND_SHARES_HOSTS)) {
        return TDDP_OK;
    }
    wish mine;
    tddp_status status = read_wish(&mine);
    if (status) {
        return status;
    }
    if (hosts_are_shared(opts) && (is_one_host(opts) || tddp_hosts_can_use(asked))) {
        status = join(opts, &mine, wait, out);
    } else if (mine.unfit) {
        status = tddp_fail(TDDP_INVALID_ARGUMENT, "%s", mine.unfit);
    }
    free(mine.unfit);
    return status;
}

tddp_status tddp_backend_open(const tddp_backend_v1 *asked, const tddp_backend_opts *opts,
                              const tddp_wait *wait, const tddp_backend_v1 **serving,
                              void **context)
{
    tddp_devices *several = tddp_devices_of(asked);
    if (several) {
        return tddp_devices_open(several, opts, wait, serving, context);
    }
    int64_t deadline = tddp_wait_deadline(wait, opts->timeout_ms);
    tddp_wait left = {tddp_deadline_poll_ms(deadline), tddp_wait_cancel(wait)};
    tddp_shm *shm;
    tddp_status status = find_shared(asked, opts, &left, &shm);
    if (status) {
        return status;
    }
    left.timeout_ms = tddp_deadline_poll_ms(deadline);
    const tddp_backend_v1 *carrier = asked;
    if (!shm) {
        status = asked->create(opts, &left, context);
    } else if (is_one_host(opts)) {
        carrier = tddp_shm_backend();
        *context = shm;
    } else {
        tddp_hosts *hosts = NULL;
        carrier = tddp_hosts_backend();
        status = tddp_hosts_create(asked, shm, opts, &left, &hosts);
        if (status == TDDP_OK) {
            *context = hosts;
        }
    }
    if (status == TDDP_OK) {
        *serving = carrier;
    }
    return status;
}
