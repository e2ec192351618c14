/*
 * The folders of a run: RUN/attempt_N/LOCAL_RANK/{stdout.log,stderr.log,error.json}, with
 * filtered_stdout.log and filtered_stderr.log beside the ranks. RUN is LOG_DIR/RUN_ID_RANDOM, or a
 * private temporary folder that goes with the run.
 */
#ifndef TDDP_LAUNCH_LAYOUT_H
#define TDDP_LAUNCH_LAYOUT_H

#include <stdbool.h>

#include <tddp/status.h>

typedef struct tddp_launch_layout {
    char *run;     /* NULL: there are no folders */
    char *attempt; /* of the attempt that goes on; NULL: none */
    bool kept;     /* it stays when the run is over */
} tddp_launch_layout;

/* Makes the run's folder in `log_dir`, which is made if need be, or in a new temporary folder with
 * `log_dir` NULL. Errors: TDDP_SYSTEM, TDDP_OUT_OF_MEMORY. */
TDDP_NODISCARD tddp_status tddp_launch_layout_make(const char *log_dir, const char *run_id,
                                                   tddp_launch_layout *out);

/* A name under TMPDIR or /tmp that nobody can guess, for a private folder: free(). NULL with a
 * text.
 */
char *tddp_launch_layout_private_name(void);

/* Makes a folder for error files alone, readable by this user alone: `path`, or with NULL one of
 * its own naming. */
TDDP_NODISCARD tddp_status tddp_launch_layout_make_private(const char *path,
                                                           tddp_launch_layout *out);

/* Removes a private folder with all that is in it; no links are followed. */
void tddp_launch_layout_remove(const char *path);

/* Makes the folders of one start of `local_size` workers. One more start with the same count of
 * restarts (other nodes came or left) gets attempt_N.1, attempt_N.2 and so on. */
TDDP_NODISCARD tddp_status tddp_launch_layout_begin(tddp_launch_layout *layout, int restart,
                                                    int local_size);

/* A file of the attempt, of one worker or (local_rank -1) of all: free(). NULL if there are no
 * folders or memory is short. */
char *tddp_launch_layout_path(const tddp_launch_layout *layout, int local_rank, const char *name);

/* Forgets the folders; a private one is removed with all that is in it. */
void tddp_launch_layout_free(tddp_launch_layout *layout);

#endif
