/*
 * What --rdzv-conf's seconds make of each duration, and the clock that gives generations.
 */
#include "launch/rendezvous/times.h"

#include <time.h>

#include "base/base.h"

enum {
    BEAT_MS = 500,
    LEAST_BEATS = 3, /* within the time after which a node is lost */
    MARGIN_MS = 500,
    LEAST_READ_MS = 500,
    MOST_READ_MS = 5000,
    RETURN_MS = 1000,
    SETTLE_MS = 2000,
    LEAST_LEASE_S = 2, /* etcd's own least, with its usual election timeout of one second */
};

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

int64_t tddp_launch_new_generation(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

int64_t tddp_launch_coordinator_lease_s(const tddp_launch_times *times)
{
    return (times->silence_ms + 999) / 1000;
}

int64_t tddp_launch_node_lease_s(const tddp_launch_times *times)
{
    int64_t half_s = times->silence_ms / 2000;
    return half_s > LEAST_LEASE_S ? half_s : LEAST_LEASE_S;
}

tddp_launch_times tddp_launch_times_of(const tddp_launch_conf *conf)
{
    int64_t silence_ms = (int64_t)tddp_launch_silence_s(conf) * 1000;
    int64_t beat_ms =
        conf->keep_alive_interval > 0 ? (int64_t)conf->keep_alive_interval * 1000 : BEAT_MS;
    int64_t read_ms = least(silence_ms / 4, MOST_READ_MS);
    read_ms = read_ms > LEAST_READ_MS ? read_ms : LEAST_READ_MS;
    return (tddp_launch_times){
        .beat_ms = least(beat_ms, silence_ms / LEAST_BEATS),
        .silence_ms = silence_ms,
        .margin_ms = least(silence_ms / 10, MARGIN_MS),
        .read_ms = least(read_ms, (int64_t)conf->read_timeout * 1000),
        .join_ms = (int64_t)conf->join_timeout * 1000,
        .last_call_ms = (int64_t)conf->last_call_timeout * 1000,
        .close_ms = (int64_t)conf->close_timeout * 1000,
        .return_ms = RETURN_MS,
        .settle_ms = SETTLE_MS,
        .report_ms = (int64_t)conf->report_interval * 1000,
    };
}
