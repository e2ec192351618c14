/*
 * What --rdzv-conf's seconds make of each duration. Pure.
 */
#include "launch/rendezvous/times.h"

#include "base/base.h"

enum {
    BEAT_MS = 500,
    LEAST_BEATS = 3, /* within the time after which a node is lost */
    MARGIN_MS = 500,
    LEAST_READ_MS = 500,
    MOST_READ_MS = 5000,
    RETURN_MS = 1000,
    SETTLE_MS = 2000,
    /* PyTorch's, where only the other one is given. */
    KEEP_ALIVE_INTERVAL_S = 5,
    KEEP_ALIVE_MAX_ATTEMPT = 3
};

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

int tddp_launch_silence_s(const tddp_launch_conf *conf)
{
    int interval =
        conf->keep_alive_interval > 0 ? conf->keep_alive_interval : KEEP_ALIVE_INTERVAL_S;
    int attempts =
        conf->keep_alive_max_attempt > 0 ? conf->keep_alive_max_attempt : KEEP_ALIVE_MAX_ATTEMPT;
    bool given = conf->keep_alive_interval > 0 || conf->keep_alive_max_attempt > 0;
    return given ? interval * attempts : conf->heartbeat_timeout;
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
