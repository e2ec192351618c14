/*
 * The agent: starts, supervises and ends a node's workers.
 */
#ifndef TDDP_LAUNCH_AGENT_H
#define TDDP_LAUNCH_AGENT_H

#include "launch/command/options.h"
#include "launch/command/program.h"
#include "launch/workers/machine.h"
#include "launch/workers/signals.h"

/* Runs the job on `local_size` workers; `devices` are the GPUs that were found for them. Returns
 * torchrun's exit status: 0, 1, or 128 + the signal that ended it. */
int tddp_launch_run(const tddp_launch_options *options, const tddp_launch_program *program,
                    tddp_launch_signals *signals, const tddp_launch_devices *devices,
                    int local_size);

#endif
