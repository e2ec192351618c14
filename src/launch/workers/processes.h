/*
 * Processes as the kernel keeps them: adopting orphans, dying with the parent, finding descendants.
 * What is the system's own stands in processes_linux.c.
 */
#ifndef TDDP_LAUNCH_PROCESSES_H
#define TDDP_LAUNCH_PROCESSES_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#include <tddp/status.h>

/* From now on orphaned descendants become our children, so that they can be found and reaped. */
TDDP_NODISCARD tddp_status tddp_launch_adopt_orphans(void);

/* In a forked child: has the kernel send `number` when the parent's thread that forked ends; false
 * if the parent has ended already. Async-signal-safe. */
bool tddp_launch_signal_at_end_of(pid_t parent, int number);

/* In a forked child: closes descriptors from this one on at the exec. Async-signal-safe. */
void tddp_launch_close_on_exec_from(int first);

/* Whether this process has a child, ended ones that were not waited for among them. With orphans
 * adopted, nobody descends from a process without children. */
bool tddp_launch_has_children(void);

/* The children there are now, as a list for tddp_launch_exempt: free(). NULL if there are none, or
 * the kernel does not list them. */
char *tddp_launch_list_children(void);

/* Whom a signal to all descendants leaves out; borrowed. All zero: nobody. */
typedef struct tddp_launch_exempt {
    const char *unrelated; /* children that torchrun has not started (a shell may have exec'd it),
                              and all that descend from them; NULL: none */
    pid_t group;           /* a process group; 0: none */
    int unless_ignoring;   /* all that do not ignore this other signal; 0: does not matter */
} tddp_launch_exempt;

/*
 * Sends a signal once to every other descendant of this process (NULL: to every one): to whole
 * process groups that descendants lead, which no fork escapes, and to all others by themselves.
 * Returns how many descendants were found, ended ones that were not waited for left out.
 */
size_t tddp_launch_signal_descendants(const tddp_launch_exempt *exempt, int number);

#endif
