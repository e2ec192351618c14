/* A rank is killed at a random moment, a thousand times. */
#include "kills.h"

MULTI_TEST(killed_a_thousand_times, 1, 900)
{
    run_kills(1000, 4711);
}
