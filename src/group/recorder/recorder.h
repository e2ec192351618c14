/*
 * The flight recorder inside the room: who tells it what, and what the room asks it. What it is for
 * and what its dumps contain is said in <tddp/recorder.h>.
 *
 *   recorder.c  the ring and its hooks; where a group is in its operations
 *   trace.c     all of it as JSON
 *   dump.c      its files
 */
#ifndef TDDP_GROUP_RECORDER_H
#define TDDP_GROUP_RECORDER_H

#include <tddp/recorder.h>

#include "group/group.h"

enum { TDDP_RECORD_TEXT_BYTES = 256, TDDP_RECORD_FAILURE_BYTES = 1024 };

typedef struct tddp_recorder tddp_recorder;

typedef enum tddp_record_state {
    TDDP_RECORD_QUEUED,
    TDDP_RECORD_STARTED,
    TDDP_RECORD_COMPLETED,
    TDDP_RECORD_FAILED,
} tddp_record_state;

/* One operation. Moments are on the monotonic clock; 0: not come yet. */
typedef struct tddp_record {
    uint64_t id; /* counts the group's operations of all kinds, from 1 */
    uint64_t sequence;
    size_t input_count;
    size_t output_count;
    int64_t queued_ns;
    int64_t started_ns;
    int64_t ended_ns;
    int64_t device_ns; /* how long a device took for it; 0: not known */
    int64_t timeout_ms;
    tddp_op_kind kind;
    tddp_dtype dtype;
    tddp_reduce_op reduce;
    tddp_record_state state;
    tddp_status status;
    int root;
    int peer;
    uint32_t tag;
    uint32_t fingerprint;
    pid_t thread;
    char text[TDDP_RECORD_TEXT_BYTES]; /* the start of its description; "": none */
} tddp_record;

/* An operation in few words, for telling where a rank is. */
typedef struct tddp_recorder_op_summary {
    bool any; /* false: there is none, and the rest means nothing */
    tddp_op_kind kind;
    uint64_t sequence;
    int peer;
    int64_t at_ns; /* when it started, or when it ended */
    char text[TDDP_RECORD_TEXT_BYTES];
} tddp_recorder_op_summary;

/* Where a group is: kept also where the ring is turned off. */
typedef struct tddp_recorder_position {
    tddp_recorder_op_summary current; /* the operation that the progress thread carries out */
    tddp_recorder_op_summary last;    /* the one that it ended last */
    tddp_recorder_op_summary message; /* the oldest send or receive under way, as far as is known */
    size_t messages;                  /* sends and receives under way */
} tddp_recorder_position;

/* --- hooks: the works' way through the group. Any thread, with or without the group's lock -------
 */

/* The work has its number and is about to be seen by other threads. */
void tddp_recorder_queued(tddp_group *group, tddp_work *work);

/* The backend is asked for it at this moment. */
void tddp_recorder_started(tddp_group *group, tddp_work *work, int64_t now);

/* Both at once. */
void tddp_recorder_queued_and_started(tddp_group *group, tddp_work *work, int64_t now);

/* Its outcome is known; before anybody else learns of it. tddp_group_complete() does it. */
void tddp_recorder_finished(tddp_group *group, tddp_work *work, tddp_status status,
                            const char *text);

/* The group has failed without an operation of this rank. */
void tddp_recorder_set_failure(tddp_recorder *recorder, tddp_status status, const char *text);

/* --- the rest of the room -------------------------------------------------------------------- */

/* Before there is a progress thread; TDDP_FR_BUFFER_SIZE is read here. */
TDDP_NODISCARD tddp_status tddp_recorder_create(tddp_group *group);

/* Lets dumps of the whole process find it, once the group is made. In group.c alone. */
void tddp_recorder_register(tddp_recorder *recorder);

/* The group goes: no dump begins with it any more. NULL is fine. */
void tddp_recorder_close(tddp_recorder *recorder);

tddp_recorder_position tddp_recorder_read_position(tddp_recorder *recorder);

/* Writes what TDDP_FR_DUMP asks for after the group's failure; a line is logged if that fails. */
void tddp_recorder_dump_failure(tddp_group *group);

/* --- between recorder.c, trace.c and dump.c -------------------------------------------------- */

struct tddp_recorder {
    atomic_int references;
    char *name;
    const char *backend;
    int rank;
    int world_size;
    int root_rank;     /* this process's rank in the group that the others were made from */
    tddp_peers *peers; /* NULL before the ranks have met */
    tddp_recorder *next_listed;

    pthread_mutex_t mutex; /* guards what follows; nothing else is locked while it is held */
    tddp_recorder_position position;
    tddp_status failure; /* of the operation that failed last */
    char failure_text[TDDP_RECORD_FAILURE_BYTES];
    uint64_t count; /* of records so far; the last has this id */
    size_t capacity;
    size_t next;       /* where the next record goes */
    tddp_record *ring; /* record `id` lies at (id - 1) % capacity */
};

void tddp_recorder_release(tddp_recorder *recorder);

/* The listed recorders, each with a reference, the newest first; `*out` is to be freed. */
TDDP_NODISCARD tddp_status tddp_recorder_all(tddp_recorder ***out, size_t *count);

/* The records there are, oldest first; `*out` is to be freed. */
TDDP_NODISCARD tddp_status tddp_recorder_copy(tddp_recorder *recorder, tddp_record **out,
                                              size_t *count);

/* What some groups of one rank did, as JSON; tddp_bytes_free(). At least one. */
TDDP_NODISCARD tddp_status tddp_recorder_text(tddp_recorder *const *all, size_t count,
                                              tddp_bytes *out);

#endif
