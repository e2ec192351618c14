/*
 * Runs a scenario again and again while the nth system call, then the nth allocation fails, until
 * nothing is left to fail. Each time it must end, either well or with a status and a text, and
 * leave no descriptor and no thread behind.
 */
#ifndef TDDP_TEST_SCENARIO_H
#define TDDP_TEST_SCENARIO_H

#include <tddp/status.h>

/* Does something from beginning to end and frees it all, whatever fails. */
typedef tddp_status (*scenario)(void);

/* How long a scenario should wait for what does not come: little while something is made to fail,
 * so that hundreds of runs take no long time. */
extern int scenario_patience_ms;

void scenario_fail_system_calls(scenario body);
void scenario_fail_allocations(scenario body);

/* Must go well although calls are interrupted and transfers short. */
void scenario_disturb(scenario body);

#endif
