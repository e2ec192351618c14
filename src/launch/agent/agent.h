/*
 * The agent: starts, supervises and ends a node's workers.
 */
#ifndef TDDP_LAUNCH_AGENT_H
#define TDDP_LAUNCH_AGENT_H

#include "launch/command/options.h"
#include "launch/command/program.h"
#include "launch/workers/signals.h"

/* Runs the job; returns torchrun's exit status: 0, 1, or 128 + the signal that ended it. */
int tddp_launch_run(const tddp_launch_options *options, const tddp_launch_program *program,
                    tddp_launch_signals *signals, int local_size);

#endif
