/*
 * torchrun's two processes.
 *
 *     shell -- front ("torchrun")    torchrun's pid; passes on signals and the exit status
 *                `-- agent ("torchrun-agent")   all the work; a process group of its own
 *                      `-- workers, each in a session of its own, and what they start
 *
 * Each watches the other. If the front is killed, the agent gets a signal from the kernel and ends
 * the workers in order. If the agent is killed, the front adopts all its processes, and kills them.
 * The agent's group of its own keeps what is meant for torchrun's group (Ctrl-C, kill(1) of a
 * group) from reaching it twice, and SIGKILL for the group from reaching both.
 */
#ifndef TDDP_LAUNCH_FRONT_H
#define TDDP_LAUNCH_FRONT_H

#include "launch/workers/processes.h"
#include "launch/workers/signals.h"

/*
 * Forks, once signals are blocked and before any thread is started. In the agent `*agent` is 0 and
 * the signals are open; in the front it is the agent's pid. Errors, in either: TDDP_SYSTEM.
 */
TDDP_NODISCARD tddp_status tddp_launch_front_split(tddp_launch_signals *signals, pid_t *agent);

/*
 * The front's life: passes signals on until the agent has ended; returns torchrun's exit status,
 * the agent's or 128 + the signal that killed it. Then no process is left of the job, but for
 * `unrelated`.
 * Ctrl-Z stops the workers with the front, and they continue with it; the agent runs on, so that
 * this node is not lost to the others.
 */
int tddp_launch_front_watch(pid_t agent, const tddp_launch_signals *signals, const char *unrelated);

/* In the agent: torchrun's pid as people know it, which is the front's. */
pid_t tddp_launch_torchrun_pid(void);

#endif
