/*
 * Ends workers whose timers have expired. The rest is that of any worker that fails. Main thread.
 */
#include <signal.h>
#include <stdlib.h>

#include "launch/agent/agent_state.h"

/* The one with this process id; a child of a worker has none. */
static tddp_launch_worker *find_worker(const tddp_launch_agent *agent, pid_t pid)
{
    for (int i = 0; i < agent->count; i++) {
        if (agent->workers[i].alive && agent->workers[i].pid == pid) {
            return &agent->workers[i];
        }
    }
    return NULL;
}

static void end_worker(tddp_launch_agent *agent, tddp_launch_worker *worker,
                       const tddp_launch_timer *timer)
{
    tddp_launch_console_say(&agent->console,
                            "rank %d (pid %d): its timer \"%s\" has expired: ending it",
                            worker->rank, (int)worker->pid, timer->scope);
    free(worker->expired_timer);
    worker->expired_timer = tddp_copy_string(timer->scope); /* short memory costs the name */
    (void)kill(worker->pid, timer->signal);
    (void)kill(worker->pid, SIGCONT); /* a stopped process takes no other signal */
}

void tddp_launch_agent_on_timers(tddp_launch_agent *agent)
{
    tddp_launch_timer timer;
    if (!tddp_launch_timers_read(agent->timers)) {
        tddp_launch_console_say(&agent->console,
                                "the workers have too many timers: further ones do not count");
    }
    while (tddp_launch_timers_expired(agent->timers, &timer)) {
        tddp_launch_worker *worker = find_worker(agent, timer.pid);
        if (worker && agent->phase == TDDP_LAUNCH_RUNNING) {
            end_worker(agent, worker, &timer);
        }
    }
}
