/*
 * torchrun's private temporary folder, where workers leave their error files:
 * FOLDER/attempt_N/LOCAL_RANK/error.json.
 */
#ifndef TDDP_LAUNCH_SCRATCH_H
#define TDDP_LAUNCH_SCRATCH_H

#include <tddp/status.h>

/* Makes the folder, readable by this user alone, under TMPDIR or /tmp. free() the path after
 * tddp_launch_scratch_remove(). Errors: TDDP_SYSTEM, TDDP_OUT_OF_MEMORY. */
TDDP_NODISCARD tddp_status tddp_launch_scratch_make(char **out);

/* Makes the folder of one worker's attempt; the path of its error file: free(). NULL with a text.
 */
char *tddp_launch_scratch_error_file(const char *folder, int attempt, int local_rank);

/* Removes the folder with all that is in it, and frees the path. NULL is fine. */
void tddp_launch_scratch_remove(char *folder);

#endif
