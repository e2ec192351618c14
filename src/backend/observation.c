/*
 * The weight and the words of single observations, for backends and the failure detector. Pure
 * functions, any thread.
 */
#include <inttypes.h>
#include <stdio.h>

#include <tddp/observation.h>

#include "base/base.h"

enum { TEXT_BYTES = 2048 };

static int weight_of(const tddp_observation *seen)
{
    switch (seen->kind) {
    case TDDP_OBSERVED_ENDED:
    case TDDP_OBSERVED_CLOSED:
        return 5;
    case TDDP_OBSERVED_FAILED:
        return seen->status == TDDP_PEER_LOST || seen->status == TDDP_GROUP_FAILED ? 3 : 4;
    case TDDP_OBSERVED_LEFT:
        return 2;
    default:
        return seen->kind != TDDP_OBSERVED_NOTHING;
    }
}

int tddp_observation_precedes(const tddp_observation *one, const tddp_observation *other)
{
    const int difference = weight_of(one) - weight_of(other);
    const bool earlier =
        one->seen_ns != 0 && (other->seen_ns == 0 || one->seen_ns < other->seen_ns);
    return difference > 0 || (difference == 0 && earlier);
}

const char *tddp_observation_text(const tddp_observation *seen, char *text, size_t size)
{
    const char *more = seen->text ? seen->text : "";
    switch (seen->kind) {
    case TDDP_OBSERVED_ENDED:
        (void)snprintf(text, size, "lost rank %d (its process has ended)", seen->rank);
        break;
    case TDDP_OBSERVED_CLOSED:
        (void)snprintf(text, size, "lost rank %d (%s)", seen->rank, more);
        break;
    case TDDP_OBSERVED_FAILED:
        (void)snprintf(text, size, "lost rank %d, which gave up: %s", seen->rank, more);
        break;
    case TDDP_OBSERVED_LEFT:
        (void)snprintf(text, size, "rank %d has left the group", seen->rank);
        break;
    case TDDP_OBSERVED_NOT_ENTERED:
        if (seen->sequence != 0) {
            (void)snprintf(text, size, "rank %d (last in %s, operation %" PRIu64 ")", seen->rank,
                           more, seen->sequence);
            break;
        }
        /* fall through */
    default:
        (void)snprintf(text, size, "rank %d", seen->rank);
        break;
    }
    return text;
}

tddp_status tddp_observation_fail(const tddp_observation *seen)
{
    char text[TEXT_BYTES];
    const bool differs = seen->kind == TDDP_OBSERVED_FAILED && seen->status == TDDP_MISMATCH;
    return tddp_fail(differs ? TDDP_MISMATCH : TDDP_PEER_LOST, "%s",
                     tddp_observation_text(seen, text, sizeof text));
}
