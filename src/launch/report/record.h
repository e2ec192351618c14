/*
 * The outcome of the job, for programs: a JSON file with every failed attempt, and the root cause
 * in the form in which PyTorch's launchers report it to their parent.
 */
#ifndef TDDP_LAUNCH_RECORD_H
#define TDDP_LAUNCH_RECORD_H

#include "launch/report/json.h"
#include "launch/report/report.h"

/* The attempts that failed so far. All zero is an empty one. */
typedef struct tddp_launch_record {
    tddp_launch_json attempts;
    int count;
    int omitted; /* earlier ones that took too much room */
} tddp_launch_record;

/* How the job ended; texts are borrowed and may be NULL. */
typedef struct tddp_launch_outcome {
    int exit_status;
    int signal;              /* torchrun was told to end by it; 0: it was not */
    const char *cause;       /* when it is no worker of this node */
    const char *report_file; /* --report-file */
    const char *error_file;  /* TORCHELASTIC_ERROR_FILE of torchrun itself */
} tddp_launch_outcome;

/* Takes down an attempt that failed; `elsewhere` tells of another node's failure, or is NULL. Once
 * its workers have ended and before they are forgotten. */
void tddp_launch_record_attempt(tddp_launch_record *record, const tddp_launch_attempt *attempt,
                                const char *elsewhere);

/*
 * Writes outcome->report_file, if there is one, and, if the job failed, outcome->error_file. A file
 * that cannot be written is named on the console.
 */
void tddp_launch_record_write(const tddp_launch_record *record, const tddp_launch_attempt *attempt,
                              const tddp_launch_outcome *outcome, tddp_launch_console *console);

void tddp_launch_record_free(tddp_launch_record *record);

#endif
