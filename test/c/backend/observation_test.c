/*
 * Which observation is likelier the root cause.
 */
#include <tddp/observation.h>

#include "check.h"

static tddp_observation seen(tddp_observation_kind kind, tddp_status status, int64_t seen_ns)
{
    return (tddp_observation){.kind = kind, .status = status, .seen_ns = seen_ns};
}

static void check_order(tddp_observation first, tddp_observation second)
{
    CHECK(tddp_observation_precedes(&first, &second));
    CHECK(!tddp_observation_precedes(&second, &first));
}

TEST(the_root_cause_comes_first)
{
    const tddp_observation order[] = {
        seen(TDDP_OBSERVED_ENDED, TDDP_OK, 9),         seen(TDDP_OBSERVED_FAILED, TDDP_TIMEOUT, 8),
        seen(TDDP_OBSERVED_FAILED, TDDP_PEER_LOST, 7), seen(TDDP_OBSERVED_LEFT, TDDP_OK, 6),
        seen(TDDP_OBSERVED_ENTERED, TDDP_OK, 5),       seen(TDDP_OBSERVED_NOTHING, TDDP_OK, 4),
    };
    for (size_t i = 1; i < sizeof order / sizeof *order; i++) {
        check_order(order[i - 1], order[i]);
    }
}

/* It aborted its group because that had failed. */
TEST(a_rank_whose_group_had_failed_is_a_victim)
{
    check_order(seen(TDDP_OBSERVED_FAILED, TDDP_TIMEOUT, 2),
                seen(TDDP_OBSERVED_FAILED, TDDP_GROUP_FAILED, 1));
    check_order(seen(TDDP_OBSERVED_FAILED, TDDP_PEER_LOST, 1),
                seen(TDDP_OBSERVED_FAILED, TDDP_GROUP_FAILED, 2));
}

TEST(among_equals_what_is_known_to_be_earlier)
{
    check_order(seen(TDDP_OBSERVED_ENDED, TDDP_OK, 1), seen(TDDP_OBSERVED_CLOSED, TDDP_OK, 2));
    check_order(seen(TDDP_OBSERVED_ENDED, TDDP_OK, 1), seen(TDDP_OBSERVED_ENDED, TDDP_OK, 0));
    const tddp_observation unknown = seen(TDDP_OBSERVED_ENDED, TDDP_OK, 0);
    CHECK(!tddp_observation_precedes(&unknown, &unknown));
}
