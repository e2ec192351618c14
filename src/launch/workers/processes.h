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

/* The children that were there before torchrun started any (a shell may have exec'd it): not ours
 * to end. All zero: none. */
typedef struct tddp_launch_unrelated {
    pid_t *list;
    size_t count;
} tddp_launch_unrelated;

/* From now on orphaned descendants become our children, so that they can be found and reaped. */
TDDP_NODISCARD tddp_status tddp_launch_adopt_orphans(void);

/* In a forked child: die with SIGKILL when the parent's thread that forked does; false if the
 * parent is gone already. Async-signal-safe. */
bool tddp_launch_die_with(pid_t parent);

/* In a forked child: have the kernel send `number` when the parent's thread that forked ends; false
 * if the parent is gone already. Async-signal-safe. */
bool tddp_launch_hear_of_end(pid_t parent, int number);

/* What lists of processes call this one; at most 15 bytes count. */
void tddp_launch_name_process(const char *name);

/* In a forked child: closes descriptors from 3 on at the exec. Async-signal-safe. */
void tddp_launch_close_on_exec_from(int first);

/* Whether this process has a child, ended ones that were not waited for among them. With orphans
 * adopted, nobody descends from a process without children. */
bool tddp_launch_has_children(void);

/* The children there are now; none where the kernel does not list them. Errors: TDDP_OUT_OF_MEMORY.
 */
TDDP_NODISCARD tddp_status tddp_launch_unrelated_find(tddp_launch_unrelated *out);
void tddp_launch_unrelated_free(tddp_launch_unrelated *unrelated);

/* Whom a signal to all descendants leaves out; borrowed. All zero: nobody. */
typedef struct tddp_launch_exempt {
    const tddp_launch_unrelated *unrelated; /* these and all that descend from them; may be NULL */
    pid_t process;                          /* this one alone; 0: none */
    const pid_t *groups;                    /* the members of these process groups */
    size_t group_count;
    int unless_ignoring; /* all that do not ignore this other signal; 0: does not matter */
} tddp_launch_exempt;

/* Sends a signal to every other descendant of this process (NULL: to every one); returns how many
 * were found, ended ones that were not waited for left out. */
size_t tddp_launch_signal_descendants(const tddp_launch_exempt *exempt, int number);

#endif
