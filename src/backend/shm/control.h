/*
 * The layout of a segment, and what a rank keeps of its own and its peers' segments. Private to the
 * files that implement shm.h; algorithms use shm.h.
 *
 * Whatever one rank writes and others read while operations run has its own cache line, and so has
 * anything with its own reader or its own update rate.
 */
#ifndef TDDP_SHM_CONTROL_H
#define TDDP_SHM_CONTROL_H

#include <pthread.h>
#include <sched.h>
#include <sys/types.h>

#include <tddp/call.h>

#include "backend/shm/algorithms.h"
#include "backend/shm/shm.h"

enum {
    TDDP_SHM_LINE = 64,
    TDDP_SHM_PAGE = 4096,
    TDDP_SHM_HUGE = 2 * 1024 * 1024,
    TDDP_SHM_POPULATE_BYTES = 16 * 1024 * 1024, /* populated at a time */
    TDDP_SHM_FAILURE_TEXT_BYTES = 2048,
    TDDP_SHM_STEP_BITS = 24,
    TDDP_SHM_FLAG_BITS = 2
};

#define TDDP_SHM_ALIGNED _Alignas(64)

/* A rank's own state. */
enum { TDDP_SHM_ACTIVE = 0, TDDP_SHM_LEFT = 1, TDDP_SHM_FAILED = 2 };

/* Which buffers are in the segment: flags beside the epoch in slot.entered. */
enum { TDDP_SHM_INPUT_SHARED = 1, TDDP_SHM_OUTPUT_SHARED = 2 };

/* At the start of a segment. */
typedef struct tddp_shm_control {
    /* epoch << 24 | step: only grows */
    TDDP_SHM_ALIGNED _Atomic uint64_t progress;
    /* What other ranks sleep on until this rank publishes something. */
    TDDP_SHM_ALIGNED tddp_eventcount published;
    /* Ranks that poll an operation which waits for this rank: it counts an event for them too. */
    _Atomic uint32_t pollers;
    /* Written once, after status, last_epoch and text. */
    TDDP_SHM_ALIGNED _Atomic uint32_t state;
    uint32_t status;
    uint64_t last_epoch; /* the last epoch that it entered */
    char text[TDDP_SHM_FAILURE_TEXT_BYTES];
    /* In the first view of a segment: this rank's events in all views. */
    TDDP_SHM_ALIGNED tddp_eventcount events;
    /* Other ranks that no longer use this view. */
    TDDP_SHM_ALIGNED _Atomic uint32_t detached;
    /* Set before the segment is sent to others. */
    TDDP_SHM_ALIGNED cpu_set_t cores;
    int32_t core_limit; /* of its control groups; INT_MAX: none */
    uint64_t cache_bytes;
} tddp_shm_control;

/* A call with its inline payload. A small operation reads only the first cache line of another
 * rank. */
typedef struct tddp_shm_slot {
    TDDP_SHM_ALIGNED _Atomic uint64_t entered; /* epoch << 2 | flags of shared buffers */
    uint64_t digest;                           /* 0: compare the calls */
    char payload[TDDP_SHM_PAYLOAD_BYTES];
    /* Read only when needed. */
    TDDP_SHM_ALIGNED uint64_t input;
    uint64_t output;
    double premul;
    tddp_call calls[]; /* to each rank; only the first is set if the call is the same to all */
} tddp_shm_slot;

/* Offsets in a view: equal for all ranks of a group. */
typedef struct tddp_shm_layout {
    size_t slots;
    size_t slot_bytes;
    size_t staging;
    size_t p2p;
    size_t bytes;
} tddp_shm_layout;

/* A segment as mapped by this process. Reference-counted: arena memory outlives the context, and
 * ranks that are threads of one process share the owner's mapping. */
typedef struct tddp_shm_segment {
    _Atomic int references;
    int fd;
    bool owned; /* made by this process: its rank is a thread of it */
    pid_t pid;  /* of the process that created or mapped it */
    char *base;
    size_t bytes;
    size_t arena;       /* its offset, a multiple of 2 MiB; only known to the owner */
    size_t allocations; /* spans of it that are in use; arena.c */
} tddp_shm_segment;

/* A rank of this host, this one included. */
typedef struct tddp_shm_peer {
    char *view;
    tddp_shm_control *control;
    tddp_shm_slot *slots[2];
    tddp_shm_segment *segment;
    tddp_eventcount *events; /* in the segment's first view */
    int group_rank;          /* its number in the group */
    int rank_name;
    _Atomic uint32_t process_ended; /* without having published a state */
    _Atomic int64_t lost_since;     /* when its end or failure was first seen; 0: it is active */
} tddp_shm_peer;

struct tddp_shm {
    int rank;
    int size;
    pid_t pid;
    tddp_shm_layout layout;
    /* NULL: its segments are its own. */
    tddp_shm_fabric *fabric;
    struct tddp_shm_view *view; /* this rank's */
    tddp_shm_peer *peers;
    size_t cache_bytes;
    int ranks_per_core;
    bool foreign_senders; /* messages also come from elsewhere */
    struct tddp_shm_matching *matching;
    tddp_observer observer;
    tddp_shm_choices choices;

    /* The current operation, on its thread. */
    const tddp_op *op;
    uint64_t epoch; /* counts the operations that this rank has entered */
    uint64_t sequence;
    uint64_t digest;
    uint64_t flags;       /* common to all ranks after tddp_shm_sync() */
    bool entry_announced; /* sleeping ranks know that this rank has entered */
    int64_t deadline;
    int64_t next_check; /* when to ask the kernel about lost ranks again */
    int polled_rank;    /* whose pollers this rank is among; -1: none */
    tddp_shm_cursor cursor;

    _Atomic uint32_t aborted;
    _Atomic uint32_t state_published; /* publish_state() has run */
};

static inline tddp_shm_peer *tddp_shm_self(const tddp_shm *shm)
{
    return &shm->peers[shm->rank];
}

/* --- segment.c: files and mappings ----------------------------------------------------------- */

tddp_shm_layout tddp_shm_layout_of(int size);

/* Where the arena begins, after the first view. */
size_t tddp_shm_arena_at(const tddp_shm_layout *layout);

/* This rank's own, for `arena` bytes of arena, agreed on by the ranks of the host: sized, locked,
 * and with memory allocated for the first view, except for messages. */
TDDP_NODISCARD tddp_status tddp_shm_segment_create(const tddp_shm_layout *layout, size_t arena,
                                                   tddp_shm_segment **out);
/* Allocates memory for a part of a segment's file now: running out of it later is a signal. */
TDDP_NODISCARD tddp_status tddp_shm_allocate_pages(int fd, size_t at, size_t bytes);

/* A peer's. Takes ownership of the descriptor in any case. */
TDDP_NODISCARD tddp_status tddp_shm_segment_map(int fd, size_t bytes, tddp_shm_segment **out);
tddp_shm_segment *tddp_shm_segment_retain(tddp_shm_segment *segment);
void tddp_shm_segment_release(tddp_shm_segment *segment);

/* Whether the process that made it, if that is another one, has ended. One system call. */
bool tddp_shm_segment_owner_ended(const tddp_shm_segment *segment);

/* --- arena.c: parts of the own segment's arena ----------------------------------------------- */

/* Of a page or more. */
typedef struct tddp_shm_span {
    tddp_shm_segment *segment;
    char *data;
    size_t bytes;
    bool allocated; /* a caller has it: a forked child gets a copy */
    void *copy;     /* during a fork; NULL: none */
    struct tddp_shm_span *next;
} tddp_shm_span;

/* Reserves address space, a multiple of a page, that takes no memory yet. `*out` stays where it is
 * until the release. Errors: TDDP_OUT_OF_MEMORY, TDDP_UNAVAILABLE (there is no space). */
TDDP_NODISCARD tddp_status tddp_shm_arena_reserve(tddp_shm_segment *segment, size_t bytes,
                                                  tddp_shm_span *out);
/* Frees it and its memory. Not in a forked child. */
void tddp_shm_arena_release(tddp_shm_span *span);

/* --- fabric.c -------------------------------------------------------------------------------- */

enum { TDDP_SHM_FABRIC_ID_BYTES = 64 };

/* Where a rank's view is. */
typedef struct tddp_shm_place {
    char id[TDDP_SHM_FABRIC_ID_BYTES]; /* of the fabric; "-": it has no segments, or no space */
    int rank;                          /* in the fabric */
    size_t at;                         /* in that rank's segment */
} tddp_shm_place;

/* Attaches a new view to this rank of a group that is being made, with the memory that every
 * operation needs, and says where it is. */
void tddp_shm_fabric_take_view(tddp_shm_fabric *fabric, tddp_shm *shm, tddp_shm_place *out);
/* Gives it back; no other rank has attached it. */
void tddp_shm_fabric_drop_view(tddp_shm *shm);
/* Attaches another rank's view. */
TDDP_NODISCARD tddp_status tddp_shm_fabric_attach(tddp_shm *shm, int rank,
                                                  const tddp_shm_place *place);
/* This rank has finished with its view and those of the others. Its own is given back once no other
 * rank uses it. */
void tddp_shm_fabric_detach(tddp_shm *shm);
/* Leaves the segments of a group to later groups, if it is the first. */
void tddp_shm_fabric_fill(tddp_shm_fabric *fabric, const tddp_shm *shm, const char *id);

/* --- limits.c: what the system lets a process have ------------------------------------------- */

/* The largest file that this process may create; a larger one raises SIGXFSZ. */
size_t tddp_shm_max_file_bytes(void);

/*
 * The address space that each of `size` segments may use for its arena. 0: none, because
 * TDDP_SHM_ARENA says so or because there is too little. Under a limit (ulimit -v) all segments
 * together take only a part of what is left. Errors: TDDP_UNAVAILABLE (too little even for
 * segments without arenas), TDDP_INVALID_ARGUMENT.
 */
TDDP_NODISCARD tddp_status tddp_shm_arena_limit(int size, size_t *out);

/* Whether the memory limits of this process's control groups allow `bytes` more while `ranks`
 * ranks populate memory at the same time. Errors: TDDP_OUT_OF_MEMORY, with the limit in the
 * text: the kernel kills a process that exceeds it. */
TDDP_NODISCARD tddp_status tddp_shm_check_memory(int ranks, size_t bytes);

/* --- segment_exchange.c ---------------------------------------------------------------------- */

enum { TDDP_SHM_ADDRESS_BYTES = 64 };

/* Opens a socket for other ranks' segments and writes its name to `address`. */
TDDP_NODISCARD tddp_status tddp_shm_listen(int backlog, int *fd,
                                           char address[TDDP_SHM_ADDRESS_BYTES]);
/* Closes it, and sets it to -1; nothing happens if it is that. Changes the thread's error text. */
void tddp_shm_stop_listening(int *listen_fd);
/* False: nobody listens there. */
bool tddp_shm_is_listening(const char *address);

typedef struct tddp_shm_exchange {
    tddp_shm *shm; /* its own segment is attached; those of the others will be */
    int listen_fd;
    char (*addresses)[TDDP_SHM_ADDRESS_BYTES]; /* by rank of this host */
    int64_t deadline;
    int cancel_fd;
    int lost;   /* a rank that does not listen; -1: none was found */
    bool *sent; /* the own segment, by rank of this host; the exchange's own, like the next */
    bool retry; /* one could not be sent just now */
} tddp_shm_exchange;

/* Sends the own segment to all other ranks of the host and receives theirs. Errors:
 * TDDP_PEER_LOST, without a text, with `lost`; TDDP_TIMEOUT, TDDP_CANCELED; with any other error
 * this rank can't share memory, and the text says why. */
TDDP_NODISCARD tddp_status tddp_shm_exchange_segments(tddp_shm_exchange *self);

/* Attaches the view at an offset of a segment to a rank, which then owns the reference. */
void tddp_shm_attach(tddp_shm *shm, int rank, tddp_shm_segment *segment, size_t at);

/* --- cores.c --------------------------------------------------------------------------------- */

/* Writes what this rank knows of its processor, before its segment is sent to others. */
void tddp_shm_publish_cores(tddp_shm_control *control);
/* Computes cores and cache from what all ranks wrote. */
void tddp_shm_count_cores(tddp_shm *shm);

/* --- liveness.c ------------------------------------------------------------------------------ */

/* Records which ranks have ended or failed; with `check_locks` also asks the kernel about each,
 * by a system call. Any thread. */
void tddp_shm_update_liveness(tddp_shm *shm, bool check_locks);

/* Why waiting for `rank` (negative: any) can't succeed, or TDDP_OK. `epoch` 0: the wait belongs
 * to no collective. Sets no text. */
tddp_status tddp_shm_check_liveness(const tddp_shm *shm, int rank, uint64_t epoch, int64_t now);

/* Reports all ranks that are gone, and fails because of the likeliest cause among them, after
 * tddp_shm_check_liveness() returned TDDP_PEER_LOST. */
TDDP_NODISCARD tddp_status tddp_shm_fail_lost(const tddp_shm *shm, int rank, uint64_t epoch);

/* --- wait.c ---------------------------------------------------------------------------------- */

/* Waits until *word >> shift of `rank` is at least `goal`. */
TDDP_NODISCARD tddp_status tddp_shm_wait_word(tddp_shm *shm, int rank, const _Atomic uint64_t *word,
                                              unsigned shift, uint64_t goal);

/* The operation that this rank polls is over. */
void tddp_shm_stop_polling(tddp_shm *shm);

/* Counts an event for every other rank. */
void tddp_shm_notify_pollers(const tddp_shm *shm);

/* Wakes the ranks that wait for this one. */
static inline void tddp_shm_notify(const tddp_shm *shm)
{
    tddp_shm_control *control = tddp_shm_self(shm)->control;
    tddp_eventcount_notify(&control->published);
    if (atomic_load(&control->pollers) > 0) {
        tddp_shm_notify_pollers(shm);
    }
}

/* Wakes waiters for this rank's entry, once an operation; skipped while this rank might continue
 * at once. */
static inline void tddp_shm_announce_entry(tddp_shm *shm)
{
    if (!shm->entry_announced) {
        shm->entry_announced = true;
        tddp_shm_notify(shm);
    }
}

/* --- call_slots.c ---------------------------------------------------------------------------- */

/* The number of the operation that a rank has entered in an epoch, the last or the one before it;
 * 0: there is none. */
uint64_t tddp_shm_sequence_of(const tddp_shm *shm, int rank, uint64_t epoch);

/* Sets the text for a wait that failed. If the ranks that have entered disagree, that mismatch
 * is reported in place of `status`. */
tddp_status tddp_shm_fail_wait(tddp_shm *shm, tddp_status status, int rank);

#endif
