/*
 * What --rdzv-conf's seconds make of each duration, and the clock that gives generations.
 */
#include "launch/rendezvous/times.h"

#include <time.h>

#include "base/base.h"

enum {
    LEAST_BEATS = 6, /* within the time after which a node is lost */
    MOST_BEAT_MS = 5000,
    LEAST_READ_MS = 500,
    MOST_READ_MS = 5000,
    RECONNECT_MS = 200,
    TAKEOVER_MS = 2000,
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

tddp_launch_times tddp_launch_times_of(const tddp_launch_options *options)
{
    const tddp_launch_conf *conf = &options->conf;
    int64_t silence_ms = (int64_t)tddp_launch_silence_s(options) * 1000;
    int64_t beat_ms = silence_ms > 0 ? least(silence_ms / LEAST_BEATS, MOST_BEAT_MS) : MOST_BEAT_MS;
    int64_t read_ms = silence_ms > 0 ? least(silence_ms / 4, MOST_READ_MS) : MOST_READ_MS;
    read_ms = read_ms > LEAST_READ_MS ? read_ms : LEAST_READ_MS;
    if (conf->keep_alive_interval > 0) {
        beat_ms = least(beat_ms, (int64_t)conf->keep_alive_interval * 1000);
    }
    return (tddp_launch_times){
        .beat_ms = beat_ms,
        .silence_ms = silence_ms,
        .read_ms = least(read_ms, (int64_t)conf->read_timeout * 1000),
        .join_ms = (int64_t)conf->join_timeout * 1000,
        .last_call_ms = (int64_t)conf->last_call_timeout * 1000,
        .close_ms = (int64_t)conf->close_timeout * 1000,
        .reconnect_ms = RECONNECT_MS,
        .takeover_ms = TAKEOVER_MS,
        .report_ms = (int64_t)conf->report_interval * 1000,
    };
}
