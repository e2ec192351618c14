/*
 * The flight recorder's private interface: its hooks, and what the rest of the room reads from it.
 * <tddp/recorder.h> documents its purpose and the content of its dumps.
 *
 *   recorder.c  the ring buffer and its hooks; a group's position in its operations
 *   trace.c     the records as JSON
 *   dump.c      the files
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

/* One operation. Times are on the monotonic clock; 0: not yet. */
typedef struct tddp_record {
    uint64_t id; /* counts the group's operations of all kinds, from 1 */
    uint64_t sequence;
    size_t input_count;
    size_t output_count;
    int64_t queued_ns;
    int64_t started_ns;
    int64_t ended_ns;
    int64_t device_ns; /* how long it ran on a device; 0: not known */
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

/* The essentials of an operation, for a rank's position. */
typedef struct tddp_recorder_op_summary {
    bool any; /* false: there is none, and the rest means nothing */
    tddp_op_kind kind;
    uint64_t sequence;
    int peer;
    int64_t at_ns; /* when it started, or when it ended */
    char text[TDDP_RECORD_TEXT_BYTES];
} tddp_recorder_op_summary;

/* A group's position in its operations: maintained even if the ring is turned off. */
typedef struct tddp_recorder_position {
    tddp_recorder_op_summary current; /* the operation that is being executed */
    tddp_recorder_op_summary last;    /* the one that ended last */
    tddp_recorder_op_summary message; /* the oldest send or receive under way in the ring */
    size_t messages;                  /* sends and receives under way */
} tddp_recorder_position;

/* --- hooks, called in this order. Any thread, with or without the group's lock --------------- */

/* The work has its number and is not visible to other threads yet. */
void tddp_recorder_queued(tddp_group *group, tddp_work *work);

/* The backend is about to be called for it, at once (then it was not queued) or later. */
void tddp_recorder_started(tddp_group *group, tddp_work *work, int64_t now);

/* Its outcome is known and not delivered yet. Called by tddp_group_record_outcome(). */
void tddp_recorder_finished(tddp_group *group, tddp_work *work, tddp_status status,
                            const char *text);

/* The group has failed on another rank. */
void tddp_recorder_set_failure(tddp_recorder *recorder, const char *text);

/* --- the rest of the room -------------------------------------------------------------------- */

/* Called before the group's first operation; reads TDDP_FR_BUFFER_SIZE. */
TDDP_NODISCARD tddp_status tddp_recorder_create(tddp_group *group);

/* Adds it to the dumps of the whole process, once the group is created. */
void tddp_recorder_register(tddp_recorder *recorder);

/* Removes it from later dumps and drops the group's reference. NULL is fine. */
void tddp_recorder_close(tddp_recorder *recorder);

tddp_recorder_position tddp_recorder_read_position(tddp_recorder *recorder);

/* Writes the files that TDDP_FR_DUMP asks for after a failure; logs a line if that fails. */
void tddp_recorder_dump_failure(tddp_group *group);

/* --- between recorder.c, trace.c and dump.c -------------------------------------------------- */

struct tddp_recorder {
    atomic_int references;
    char *name;
    char *backend;
    int rank;
    int world_size;
    int root_rank;     /* this process's rank in the group that the others were made from */
    tddp_peers *peers; /* NULL before all ranks have joined */
    tddp_recorder *next_registered;

    pthread_mutex_t mutex; /* guards what follows; nothing else is locked while it is held */
    tddp_recorder_position position;
    char failure_text[TDDP_RECORD_FAILURE_BYTES]; /* of the operation that failed last */
    uint64_t count;                               /* of records so far; the last has this id */
    size_t capacity;
    size_t next;       /* index of the next record */
    tddp_record *ring; /* record `id` is at (id - 1) % capacity */
};

void tddp_recorder_release(tddp_recorder *recorder);

/* The first that is set of a setting's names in the environment, our own one and PyTorch's, and its
 * value, which is not empty; NULL: none is. */
enum { TDDP_RECORDER_NAMES = 3 };
const char *tddp_recorder_setting(const char *const names[TDDP_RECORDER_NAMES], const char **value);

/* The lowest rank from `from` on of which there are registered recorders; -1: there is none. */
int tddp_recorder_next_rank(int from);

/* The registered recorders of a rank, each with a reference, the oldest first; `*out` is to be
 * freed. */
TDDP_NODISCARD tddp_status tddp_recorder_all(int rank, tddp_recorder ***out, size_t *count);

/* Copies the records, oldest first; `*out` is to be freed. */
TDDP_NODISCARD tddp_status tddp_recorder_copy(tddp_recorder *recorder, tddp_record **out,
                                              size_t *count);

/* Formats the records of one or more groups of a rank as JSON; tddp_bytes_free(). */
TDDP_NODISCARD tddp_status tddp_recorder_to_json(tddp_recorder *const *all, size_t count,
                                                 tddp_bytes *out);

#endif
