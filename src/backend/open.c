/*
 * Creates the context that runs a group's operations. Runs on the thread that creates the group;
 * keeps no state.
 *
 * Invariant: all ranks of a group choose the same backend, or all fail. They have the same map of
 * hosts, and agree on everything else in tddp_shm_join(), in which ranks that must not use shared
 * memory also take part.
 */
#include "backend/open.h"

#include <stdlib.h>
#include <string.h>

#include "backend/coll/coll.h"
#include "backend/fake/fake.h"
#include "backend/hosts/hosts.h"
#include "backend/shm/shm.h"
#include "base/base.h"

/* Applies if TDDP_SHM is not set. */
static const bool SHARED_BY_DEFAULT = true;

/* What the reason of a rank with an invalid setting contains; the other ranks recognise it. */
static const char INVALID_MARK[] = "\": expected ";

typedef struct preference {
    bool wanted;
    const char *refusal; /* the reason for other ranks if it isn't wanted; NULL: it is */
    char *invalid;       /* what is wrong with the setting; NULL: nothing */
} preference;

static tddp_status read_preference(preference *out)
{
    const char *text = getenv("TDDP_SHM");
    const char *hosts = getenv("TDDP_HOSTS");
    *out = (preference){.wanted = SHARED_BY_DEFAULT};
    if (hosts && *hosts && strcmp(hosts, "gloo") != 0 && strcmp(hosts, "ucx") != 0) {
        out->invalid = tddp_format(
            "TDDP_HOSTS=\"%.64s%sgloo or ucx, which moves data between hosts", hosts, INVALID_MARK);
        return out->invalid ? TDDP_OK : TDDP_OUT_OF_MEMORY;
    }
    if (!text || !*text) {
        out->refusal = SHARED_BY_DEFAULT ? NULL : "TDDP_SHM=1 is not set";
        return TDDP_OK;
    }
    if (strcmp(text, "0") == 0 || strcmp(text, "1") == 0) {
        out->wanted = *text == '1';
        out->refusal = out->wanted ? NULL : "TDDP_SHM=0";
        return TDDP_OK;
    }
    out->invalid = tddp_format("TDDP_SHM=\"%.64s%s1 or 0, for shared memory between the ranks of a "
                               "host or none",
                               text, INVALID_MARK);
    return out->invalid ? TDDP_OK : TDDP_OUT_OF_MEMORY;
}

/* Whether several ranks of the group run on one host: hosts are numbered by first appearance. */
static bool any_host_is_shared(const tddp_backend_opts *opts)
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

/* `*out` is NULL on all ranks if a rank can't or must not share memory. */
static tddp_status join_shm(const tddp_backend_opts *opts, const preference *mine,
                            const tddp_wait *wait, tddp_shm **out)
{
    const char *refusal = mine->invalid ? mine->invalid : mine->refusal;
    tddp_status status = tddp_shm_join(opts, refusal, wait, out);
    if (status != TDDP_UNAVAILABLE) {
        return status;
    }
    const char *why = tddp_error_message();
    if (strstr(why, INVALID_MARK)) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "%s", why);
    }
    /* No warning if this rank does not want it. */
    if (opts->rank == 0) {
        tddp_log(mine->wanted ? TDDP_LOG_WARN : TDDP_LOG_DEBUG, "backend",
                 "group \"%s\" goes without shared memory: %s", opts->group, why);
    }
    *out = NULL;
    return TDDP_OK;
}

static tddp_status join_if_useful(const tddp_backend_v1 *requested, const tddp_backend_opts *opts,
                                  const tddp_wait *wait, tddp_shm **out)
{
    *out = NULL;
    if (!(requested->traits & TDDP_BACKEND_SHARES_HOSTS)) {
        return TDDP_OK;
    }
    preference mine;
    tddp_status status = read_preference(&mine);
    if (status) {
        return status;
    }
    if (any_host_is_shared(opts) && (is_one_host(opts) || tddp_hosts_can_use(requested))) {
        status = join_shm(opts, &mine, wait, out);
    } else if (mine.invalid) {
        tddp_transport_refuse(opts, mine.invalid);
        status = tddp_fail(TDDP_INVALID_ARGUMENT, "%s", mine.invalid);
    }
    free(mine.invalid);
    return status;
}

static tddp_status open_with_faults(const tddp_backend_opts *opts, const tddp_wait *wait,
                                    tddp_inner *out)
{
    char name[TDDP_FAKE_NAME_BYTES];
    const tddp_backend_v1 *beneath;
    tddp_status status = tddp_fake_over(opts->rank, name);
    status = status ? status : tddp_backend_find(name, &beneath);
    status = status ? status : tddp_backend_open(beneath, opts, wait, out);
    return status ? status : tddp_fake_wrap(opts->rank, out);
}

tddp_status tddp_backend_open(const tddp_backend_v1 *requested, const tddp_backend_opts *opts,
                              const tddp_wait *wait, tddp_inner *out)
{
    if (requested == tddp_fake_backend()) {
        return open_with_faults(opts, wait, out);
    }
    int64_t deadline = tddp_wait_deadline(wait, opts->timeout_ms);
    tddp_wait left = {tddp_deadline_poll_ms(deadline), tddp_wait_cancel(wait)};
    tddp_shm *shm;
    tddp_status status = join_if_useful(requested, opts, &left, &shm);
    if (status) {
        return status;
    }
    left.timeout_ms = tddp_deadline_poll_ms(deadline);
    const tddp_backend_v1 *chosen = requested;
    void *context = shm;
    if (!shm) {
        tddp_backend_opts own = *opts;
        own.backend = requested;
        status = requested->create(&own, &left, &context);
    } else if (is_one_host(opts)) {
        chosen = tddp_shm_backend();
    } else {
        tddp_hosts *hosts = NULL;
        chosen = tddp_hosts_backend();
        status = tddp_hosts_create(requested, shm, opts, &left, &hosts);
        context = hosts;
    }
    if (status == TDDP_OK) {
        out->backend = chosen;
        out->context = context;
    }
    return status;
}
