/*
 * torchrun's two processes.
 *
 *     shell -- front ("torchrun")    torchrun's pid; passes on signals and the exit status
 *                `-- agent ("torchrun-agent")   all the work; a process group of its own
 *                      `-- workers, each in a session of its own, and what they start
 *
 * Each watches the other. If the front is killed, the agent gets a signal from the kernel and ends
 * the workers in order. If the agent is killed, the front adopts all its processes, and kills them:
 * one process could not, since what workers start would be adopted above it. The agent's group of
 * its own keeps what is meant for torchrun's group (Ctrl-C, kill(1) of a group) from reaching it
 * twice, and SIGKILL for the group from reaching both.
 */
#ifndef TDDP_LAUNCH_FRONT_H
#define TDDP_LAUNCH_FRONT_H

#include "launch/workers/signals.h"

/*
 * Forks, once signals are blocked and before any thread is started. In the agent it returns at
 * once, `*status` being -1 and the signals open; getppid() is torchrun's pid as people know it.
 *
 * In the front it passes signals on until the agent has ended; then `*status` is torchrun's exit
 * status, the agent's or 128 + the signal that killed it, and no process is left of the job.
 * Children from before are left alone. Ctrl-Z stops the workers with the front, and they continue
 * with it; the agent runs on, so that this node is not lost to the others.
 *
 * Errors, in either: TDDP_SYSTEM, TDDP_OUT_OF_MEMORY.
 */
TDDP_NODISCARD tddp_status tddp_launch_split(tddp_launch_signals *signals, int *status);

#endif
