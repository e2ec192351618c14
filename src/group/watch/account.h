/*
 * What a rank says of itself when its group is in trouble: that it failed and how, where it is in
 * its operations, that it has left. Each is a line in the group's log in the store; appending keeps
 * the order in which the ranks spoke. Plain functions on text; any thread.
 */
#ifndef TDDP_GROUP_ACCOUNT_H
#define TDDP_GROUP_ACCOUNT_H

#include "group/recorder/recorder.h"

typedef enum tddp_account_kind {
    TDDP_ACCOUNT_NONE,
    TDDP_ACCOUNT_POSITION, /* it lives, and is there */
    TDDP_ACCOUNT_FAILURE,  /* its own operation failed */
    TDDP_ACCOUNT_LEFT,     /* it has destroyed the group */
} tddp_account_kind;

/* An operation as another rank tells of it. */
typedef struct tddp_account_moment {
    bool any;
    tddp_op_kind kind;
    uint64_t sequence;
    int peer;
    int64_t age_ms; /* since it began or ended, when the line was written */
} tddp_account_moment;

/* What is known of one rank. Texts lie in the log that was read, or are "". */
typedef struct tddp_account {
    tddp_account_kind kind; /* a failure stays one; else the latest */
    int order;              /* of its failure among all failures of the log, from 1 */
    tddp_status status;     /* of its failure */
    tddp_account_moment current;
    tddp_account_moment last;
    tddp_account_moment message;
    const char *described; /* what its current operation was said to be */
    const char *elsewhere; /* what it does in other groups */
    const char *text;      /* what its failure is, without its place */
} tddp_account;

/* "all_reduce 2", "recv 3 from rank 1", "recv 3 from any rank"; returns `text`. */
enum { TDDP_ACCOUNT_OP_BYTES = 64 };
const char *tddp_account_op(tddp_op_kind kind, uint64_t sequence, int peer,
                            char text[TDDP_ACCOUNT_OP_BYTES]);

/* Adds one line to `line`. `position` is where the rank is; `text` and `elsewhere` are cut to fit
 * into about `bytes`. */
TDDP_NODISCARD tddp_status tddp_account_write(tddp_bytes *line, tddp_account_kind kind, int rank,
                                              tddp_status status,
                                              const tddp_recorder_position *position,
                                              const char *elsewhere, const char *text,
                                              size_t bytes);

/* Reads a whole log into `accounts[count]`, which is cleared first. The log is cut into strings and
 * must live as long as the accounts; lines that make no sense are passed over. */
void tddp_account_read(char *log, tddp_account *accounts, int count);

/* Where the rank is, for people: "in broadcast 3 (\"weights\") for 5.1 s"; returns `text`. */
enum { TDDP_ACCOUNT_PLACE_BYTES = 512 };
const char *tddp_account_place(const tddp_account *account, char text[TDDP_ACCOUNT_PLACE_BYTES]);

#endif
