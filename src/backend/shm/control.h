/*
 * How a segment is laid out, and what a rank keeps of its segment and the others': private to the
 * files that make the base of this room (shm.h is what algorithms use).
 *
 * Everything that one rank writes and others read while operations run has a cache line of its own,
 * and so has each thing with a reader or a rhythm of its own.
 */
#ifndef TDDP_SHM_CONTROL_H
#define TDDP_SHM_CONTROL_H

#include <pthread.h>
#include <sched.h>
#include <sys/types.h>

#include <tddp/call.h>

#include "backend/shm/choose.h"
#include "backend/shm/shm.h"

enum {
    TDDP_SHM_LINE = 64,
    TDDP_SHM_PAGE = 4096,
    TDDP_SHM_HUGE = 2 * 1024 * 1024,
    TDDP_SHM_PIECE = 16 * 1024 * 1024, /* that is populated at a time */
    TDDP_SHM_FAREWELL_BYTES = 2048,
    TDDP_SHM_STEP_BITS = 24,
    TDDP_SHM_FLAG_BITS = 2
};

#define TDDP_SHM_ALIGNED _Alignas(64)

/* What has become of a rank, as it says itself. */
enum { TDDP_SHM_HERE = 0, TDDP_SHM_LEFT = 1, TDDP_SHM_FAILED = 2 };

/* Where op->input and op->output lie, beside the turn in slot.entered. */
enum { TDDP_SHM_HAS_INPUT = 1, TDDP_SHM_HAS_OUTPUT = 2 };

/* At the start of a segment. */
typedef struct tddp_shm_control {
    /* turn << 24 | step: only grows. */
    TDDP_SHM_ALIGNED _Atomic uint64_t progress;
    /* Ranks asleep until this one says something; written by them. */
    TDDP_SHM_ALIGNED _Atomic uint32_t sleepers;
    /* What they sleep on: changes whenever they are woken. */
    _Atomic uint32_t bell;
    /* Once: the words stand before the state does. */
    TDDP_SHM_ALIGNED _Atomic uint32_t state;
    uint32_t status;
    uint64_t left_after; /* the last turn that it entered */
    char text[TDDP_SHM_FAREWELL_BYTES];
    /* Set before the segment is handed over. */
    TDDP_SHM_ALIGNED cpu_set_t cores;
    uint64_t core_quota; /* in thousandths of a core; 0: none */
    uint64_t cache_bytes;
} tddp_shm_control;

/* A call with its payload. The first line is all that a small operation reads of another rank. */
typedef struct tddp_shm_slot {
    TDDP_SHM_ALIGNED _Atomic uint64_t entered; /* turn << 2 | which of its buffers lie there */
    uint64_t digest;                           /* 0: compare the calls */
    char payload[TDDP_SHM_PAYLOAD_BYTES];
    /* Not read unless needed. */
    TDDP_SHM_ALIGNED uint64_t input;
    uint64_t output;
    double premul;
    tddp_call calls[]; /* towards each rank; the first stands for all where they are alike */
} tddp_shm_slot;

/* Where things begin in every segment of a host: equal for all its ranks. */
typedef struct tddp_shm_layout {
    size_t slots;
    size_t slot_bytes;
    size_t staging;
    size_t mail;
    size_t arena; /* a multiple of 2 MiB */
    size_t bytes; /* of the whole segment */
} tddp_shm_layout;

/*
 * A segment as this process sees it. Counted: memory of the arena outlives the context, and ranks
 * that are threads of one process share what the owner has mapped.
 */
typedef struct tddp_shm_segment {
    _Atomic int references;
    int fd;
    bool own;
    pid_t pid; /* of the process that made or mapped it */
    char *base;
    size_t bytes;
    /* memory.c's: free spans of the own arena, by where they lie. */
    pthread_mutex_t mutex;
    struct tddp_shm_span *spans;
    size_t span_count;
    size_t span_capacity;
    size_t taken; /* allocations */
} tddp_shm_segment;

/* Another rank, or this one. */
typedef struct tddp_shm_peer {
    char *base;
    tddp_shm_control *control;
    tddp_shm_slot *slots[2];
    tddp_shm_segment *segment;
    bool inside; /* a thread of this process: alive as long as this one */
    int number;  /* in the whole group */
    int name;
    _Atomic uint32_t ended; /* its process has, without a word */
    _Atomic int64_t
        gone_since; /* when this was first seen here, or that it gave up; 0: it is here */
} tddp_shm_peer;

struct tddp_shm {
    int rank;
    int size;
    pid_t pid;
    tddp_shm_layout layout;
    tddp_shm_peer *peers;
    size_t cache_bytes;
    int ranks_per_core;
    struct tddp_shm_posts *posts;
    tddp_shm_choices choices;

    /* The operation, on its thread. */
    const tddp_op *op;
    uint64_t turn; /* counts operations that were entered here */
    uint64_t sequence;
    uint64_t digest;
    uint64_t flags; /* those of all ranks, after meet() */
    bool announced; /* that this rank has entered, to those asleep */
    int64_t deadline;
    tddp_shm_course course;

    _Atomic uint32_t aborted;
    _Atomic uint32_t said; /* farewell */
};

static inline tddp_shm_peer *tddp_shm_self(const tddp_shm *shm)
{
    return &shm->peers[shm->rank];
}

/* --- segment.c: files and mappings ----------------------------------------------------------- */

/* `arena` as agreed on by the ranks of the host. */
tddp_shm_layout tddp_shm_lay_out(int size, size_t arena);

/* The own one: sized, its base (all but the arena) backed by memory, locked. */
TDDP_NODISCARD tddp_status tddp_shm_segment_create(size_t bytes, size_t base_bytes,
                                                   tddp_shm_segment **out);
/* Another's: takes the descriptor over, in any case. */
TDDP_NODISCARD tddp_status tddp_shm_segment_map(int fd, size_t bytes, tddp_shm_segment **out);
tddp_shm_segment *tddp_shm_segment_retain(tddp_shm_segment *segment);
void tddp_shm_segment_release(tddp_shm_segment *segment);

/* Whether the process that made it has ended. One system call. */
bool tddp_shm_segment_is_orphan(const tddp_shm_segment *segment);

/* --- room.c: what the system lets a process have ---------------------------------------------- */

/* How large a file of this process may be: one that is larger is answered with a signal. */
size_t tddp_shm_largest_file(void);

/*
 * The address space that each of `size` segments may take for its arena: 0 for none, if so wanted
 * with TDDP_SHM_ARENA or if there is no more. Under a limit (ulimit -v) all segments together take
 * a part of what is left only. Errors: TDDP_UNAVAILABLE (too little for segments without arenas),
 * TDDP_INVALID_ARGUMENT.
 */
TDDP_NODISCARD tddp_status tddp_shm_arena_room(int size, size_t *out);

/*
 * Whether the memory limits of this process's control groups have room for so many bytes more,
 * while `ranks` ranks populate memory at the same time. Errors: TDDP_OUT_OF_MEMORY, with the limit
 * in the text: who takes memory in spite of it is ended by the kernel.
 */
TDDP_NODISCARD tddp_status tddp_shm_check_memory(int ranks, size_t bytes);

/* --- sockets.c: between processes of a host --------------------------------------------------- */

enum { TDDP_SHM_ADDRESS_BYTES = 64 };

/* A listening socket; `address` gets its name. */
TDDP_NODISCARD tddp_status tddp_shm_listen(int backlog, int *fd,
                                           char address[TDDP_SHM_ADDRESS_BYTES]);

/* Who is at the other end: the same user, or TDDP_UNAVAILABLE. `*inside`: this process itself. */
TDDP_NODISCARD tddp_status tddp_shm_check_user(int fd, int rank_name, bool *inside);

/* Asks a rank for its segment. Without a text: TDDP_PEER_LOST, nobody is there; TDDP_TIMEOUT, too
 * many ask at a time. */
TDDP_NODISCARD tddp_status tddp_shm_dial(const char address[TDDP_SHM_ADDRESS_BYTES], int number,
                                         int rank_name, int *out, bool *inside);

typedef enum tddp_shm_heard { TDDP_SHM_NOT_YET, TDDP_SHM_HEARD, TDDP_SHM_GONE } tddp_shm_heard;

/* Which rank asks; its number in the whole group. */
tddp_shm_heard tddp_shm_hear(int fd, int *number);
/* Answers with the own segment; false if the other is gone. */
bool tddp_shm_give(const tddp_shm *shm, int to, bool inside);
/* The answer of a rank; once heard, `*status` says whether it is of use. */
tddp_shm_heard tddp_shm_take(const tddp_shm *shm, int rank, int from, tddp_status *status,
                             tddp_shm_segment **out);

/* --- handover.c: all of them ------------------------------------------------------------------ */

typedef struct tddp_shm_handover {
    tddp_shm *shm; /* the own segment is in place; those of the others are put there */
    int listen_fd;
    char (*addresses)[TDDP_SHM_ADDRESS_BYTES]; /* by rank of this host */
    int64_t deadline;
    int cancel_fd;
} tddp_shm_handover;

/* Gives the own segment to all others of the host and gets theirs. Errors: TDDP_PEER_LOST with
 * `*lost`, TDDP_TIMEOUT, TDDP_CANCELED; others: this rank cannot, and the text says why. */
TDDP_NODISCARD tddp_status tddp_shm_hand_over(const tddp_shm_handover *work, int *lost);

/* Puts a segment in a peer's place. */
void tddp_shm_attach(tddp_shm *shm, int rank, tddp_shm_segment *segment);

/* --- words.c: in the store, while ranks join -------------------------------------------------- */

enum { TDDP_SHM_WORD_BYTES = 1024 };

typedef struct tddp_shm_word {
    char text[TDDP_SHM_WORD_BYTES];
} tddp_shm_word;

typedef struct tddp_shm_words {
    const tddp_backend_opts *opts;
    int64_t deadline;
    tddp_cancel *cancel;
    bool said[2]; /* the words of this rank that stand in the store */
} tddp_shm_words;

/* What a rank of the whole group is called. */
int tddp_shm_words_name(const tddp_shm_words *self, int number);
/* `round` 0: before segments are handed over; 1: after. */
TDDP_NODISCARD tddp_status tddp_shm_words_say(tddp_shm_words *self, int round, const char *text,
                                              const tddp_wait *wait);
TDDP_NODISCARD tddp_status tddp_shm_words_say_in_time(tddp_shm_words *self, int round,
                                                      const char *text);
/* Waits for another's word, at most so long. */
TDDP_NODISCARD tddp_status tddp_shm_words_read(const tddp_shm_words *self, int number, int round,
                                               int64_t most_ms, tddp_shm_word *out);
bool tddp_shm_word_begins(const tddp_shm_word *word, const char *with);
/* What another's word means for this rank: TDDP_OK if it is "yes" or "after". */
TDDP_NODISCARD tddp_status tddp_shm_words_judge(const tddp_shm_words *self, int number,
                                                const tddp_shm_word *word);

/* --- cores.c --------------------------------------------------------------------------------- */

/* Fills in what this rank knows of its processor, before its segment is handed over. */
void tddp_shm_tell_cores(tddp_shm_control *control);
/* From what all have told. */
void tddp_shm_count_cores(tddp_shm *shm);

/* --- liveness.c ------------------------------------------------------------------------------ */

/* Notes who is gone; with `locks` also by a system call for each. Any thread. */
void tddp_shm_look_around(tddp_shm *shm, bool locks);

/* What stands against waiting longer for `rank` (any, if it is negative); `turn` 0: for no
 * operation of all. Without a text. */
tddp_status tddp_shm_verdict(const tddp_shm *shm, int rank, uint64_t turn, int64_t now);

/* "lost rank 2 (why); gone as well: rank 1; rank 3 has left the group", after the verdict
 * TDDP_PEER_LOST. Returns that, or TDDP_MISMATCH where the rank gave up since calls differ: all are
 * to be told the same. */
TDDP_NODISCARD tddp_status tddp_shm_who_is_gone(const tddp_shm *shm, int rank, uint64_t turn,
                                                char *text, size_t bytes);

/* --- await.c --------------------------------------------------------------------------------- */

/* Waits until *word >> shift of `rank` is at least `goal`. */
TDDP_NODISCARD tddp_status tddp_shm_wait_for(tddp_shm *shm, int rank, const _Atomic uint64_t *word,
                                             unsigned shift, uint64_t goal);

/* Wakes those asleep until this rank says something. */
void tddp_shm_ring(tddp_shm_control *control);

static inline void tddp_shm_announce(tddp_shm_control *control)
{
    /* Reading and writing as one: it comes after what was stored before, for those who add
     * themselves. */
    if (atomic_fetch_add_explicit(&control->sleepers, 0, memory_order_seq_cst) > 0) {
        tddp_shm_ring(control);
    }
}

/* The same of entering, once an operation: not while it may go on at once. */
static inline void tddp_shm_settle(tddp_shm *shm)
{
    if (!shm->announced) {
        shm->announced = true;
        tddp_shm_announce(tddp_shm_self(shm)->control);
    }
}

/* --- slots.c --------------------------------------------------------------------------------- */

/* The text of a wait of this operation that ends badly: a disagreement among those who have come
 * is told in place of `status`. */
tddp_status tddp_shm_explain(tddp_shm *shm, tddp_status status, int rank);

#endif
