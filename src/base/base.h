/*
 * What every room uses: time and deadlines, memory, growing buffers, threads, small system
 * helpers, SHA-256, SipHash. Public parts of this room: <tddp/status.h>, <tddp/wait.h>,
 * <tddp/log.h>, <tddp/buffer.h>.
 */
#ifndef TDDP_BASE_H
#define TDDP_BASE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include <tddp/buffer.h>
#include <tddp/log.h>
#include <tddp/status.h>
#include <tddp/wait.h>

/* --- clock.c --------------------------------------------------------------------------------- */

/* Nanoseconds on the monotonic clock. A deadline is such a moment. */
int64_t tddp_now_ns(void);

#define TDDP_NS_PER_MS INT64_C(1000000)
#define TDDP_NS_PER_S INT64_C(1000000000)

/* The moment `timeout_ms` from now; far in the future if that would overflow. */
int64_t tddp_deadline_after_ms(int64_t timeout_ms);

/* The same from a given moment. */
int64_t tddp_deadline_from(int64_t now_ns, int64_t timeout_ms);

/* Milliseconds left, rounded up, 0 if it has passed; at most INT_MAX, for poll(2). */
int tddp_deadline_poll_ms(int64_t deadline_ns);

/* The deadline of a tddp_wait; `wait` may be NULL, `default_ms` is the default of the object. */
int64_t tddp_wait_deadline(const tddp_wait *wait, int64_t default_ms);

/* --- cancel.c -------------------------------------------------------------------------------- */

/*
 * A token. One on the stack, for a call that ends at a time of its own too, is made of another's:
 * {.fd = tddp_cancel_fd(also), .also = also, .deadline = deadline}; `also` may be NULL, and then it
 * cannot be polled, only queried.
 */
struct tddp_cancel {
    int fd;
    _Atomic uint32_t begun;   /* triggers */
    _Atomic uint32_t written; /* those that are in the descriptor */
    _Atomic uint32_t settled; /* those before the last reset */
    const tddp_cancel *also;  /* triggered with this one; no deeper */
    int64_t deadline;         /* triggered from then on; 0: by nothing but the others */
};

/* One that is triggered already, for what is tried without waiting. */
#define TDDP_CANCEL_AT_ONCE     \
    {                           \
        .fd = -1, .deadline = 1 \
    }

/* Whether it was triggered when it was made; NULL is fine. */
static inline bool tddp_cancel_at_once(const tddp_cancel *cancel)
{
    return cancel && cancel->deadline == 1;
}

/* When a token triggers by itself, for a thread that sleeps meanwhile; INT64_MAX:
 * never. NULL is fine. */
int64_t tddp_cancel_deadline(const tddp_cancel *cancel);

/* Becomes readable when triggered; -1 if `cancel` is NULL. Borrowed. */
int tddp_cancel_fd(const tddp_cancel *cancel);

/* The cancel token of a tddp_wait that may be NULL. */
static inline tddp_cancel *tddp_wait_cancel(const tddp_wait *wait)
{
    return wait ? wait->cancel : NULL;
}

/* --- memory.c -------------------------------------------------------------------------------- */

/* As calloc, realloc, strdup and vasprintf, but NULL is returned with an error text; and in test
 * builds the nth of them can be made to fail. Freed with free(). */
void *tddp_alloc(size_t bytes);
void *tddp_alloc_array(size_t count, size_t bytes_each);
void *tddp_resize(void *memory, size_t bytes);

/* Makes room for one more, cleared, behind the `count` of an array, which doubles at each power of
 * two; an array that this alone grows may get shorter again. Returns where it is now; NULL: it is
 * as it was. */
void *tddp_grow(void *array, size_t count, size_t bytes_each);
char *tddp_copy_string(const char *text);
char *tddp_format(const char *format, ...) TDDP_PRINTF(1, 2);

/* Adds to a text in so many bytes, its end included; what has no room is cut. */
void tddp_add_text(char *text, size_t bytes, const char *format, ...) TDDP_PRINTF(3, 4);

/* Makes the nth allocation from now fail (1: the next one), in this process, in whichever thread;
 * 0: none. Returns whether the one of the call before has failed. For tests. */
TDDP_API bool tddp_fail_allocation(long nth);

/* A buffer that grows at its end and is read from its start. All zero is an empty one. */
typedef struct tddp_bytes {
    char *data;
    size_t size;     /* bytes in use */
    size_t capacity; /* bytes allocated */
} tddp_bytes;

/* Makes room for `more` bytes after `size`. */
TDDP_NODISCARD tddp_status tddp_bytes_reserve(tddp_bytes *bytes, size_t more);
TDDP_NODISCARD tddp_status tddp_bytes_append(tddp_bytes *bytes, const void *data, size_t size);
/* As printf; a NUL follows, which does not count. */
TDDP_NODISCARD tddp_status tddp_bytes_format(tddp_bytes *bytes, const char *format, ...)
    TDDP_PRINTF(2, 3);
/* Removes `size` bytes from the start. */
void tddp_bytes_consume(tddp_bytes *bytes, size_t size);
void tddp_bytes_free(tddp_bytes *bytes);

/* --- buffer.c -------------------------------------------------------------------------------- */

/* At least one part as one buffer: with their address if they are contiguous, else without data. */
tddp_buffer tddp_buffers_joined(const tddp_buffer *parts, size_t count);

/* --- cgroup.c -------------------------------------------------------------------------------- */

/* Called with a group's version, 1 or 2, and its folder; false: nothing more is visited. */
typedef bool tddp_cgroup_visit(int version, const char *folder, void *data);

/* Visits this process's control groups in which `controller` ("cpu", "memory") may count, each
 * followed by those around it. `root` stands before /proc and /sys: "", but for tests. */
void tddp_cgroup_walk(const char *root, const char *controller, tddp_cgroup_visit *visit,
                      void *data);

/* The limit of a control group that leaves this process the least memory. */
typedef struct tddp_memory_limit {
    uint64_t bytes; /* UINT64_MAX: there is none */
    uint64_t
        left; /* before the kernel ends a process: pages of files and free swap count as free */
    char file[512]; /* where the limit stands; "" if there is none */
} tddp_memory_limit;

void tddp_cgroup_memory(tddp_memory_limit *out);

/* The cores' worth of time that the control groups let this process have, rounded up; INT_MAX: no
 * limit. */
int tddp_core_limit(void);

/* Looks below `root`, which is kept, instead of at the system's own files; "": at these. For tests.
 */
void tddp_cgroup_root(const char *root);

/* --- json.c ---------------------------------------------------------------------------------- */

/* The bytes of the UTF-8 character at `at`; 0 if it is none. */
size_t tddp_utf8_length(const unsigned char *at);

/* Appends a text in quotes, as JSON has it; bytes that are no UTF-8 become U+FFFD. */
TDDP_NODISCARD tddp_status tddp_bytes_append_json(tddp_bytes *bytes, const char *text);

/* --- printable.c ----------------------------------------------------------------------------- */

/* Replaces what a terminal would act on by '?', in place; newlines and tabs stay. Returns `text`.
 */
char *tddp_mask_controls(char *text);

/* --- thread.c -------------------------------------------------------------------------------- */

/* Starts a thread with every signal blocked, so that the host language's handlers run elsewhere,
 * and named `name` (at most 15 bytes). */
TDDP_NODISCARD tddp_status tddp_thread_start(pthread_t *thread, const char *name,
                                             void *(*body)(void *), void *data);

/* The same with a stack of `stack_bytes`; 0: the system's default. */
TDDP_NODISCARD tddp_status tddp_thread_start_sized(pthread_t *thread, const char *name,
                                                   void *(*body)(void *), void *data,
                                                   size_t stack_bytes);

/* A condition variable on the monotonic clock. */
TDDP_NODISCARD tddp_status tddp_cond_init(pthread_cond_t *cond);

/* Waits until signalled or the deadline; false at the deadline. */
bool tddp_cond_wait_until(pthread_cond_t *cond, pthread_mutex_t *mutex, int64_t deadline_ns);

/* --- eventcount.c ---------------------------------------------------------------------------- */

/* A number that changes with each event, and how many threads sleep until the next; zero at first.
 * May lie in memory that processes share. */
struct tddp_eventcount {
    _Atomic uint32_t count;
    _Atomic uint32_t waiters;
};
typedef struct tddp_eventcount tddp_eventcount;

uint32_t tddp_eventcount_read(const tddp_eventcount *events);

/* One on the heap, for transports in modules, which see these three in <tddp/transport.h>. */
TDDP_API TDDP_NODISCARD tddp_status tddp_eventcount_create(tddp_eventcount **out);
TDDP_API void tddp_eventcount_free(tddp_eventcount *events);

/* After a change. A system call only if a thread sleeps. */
TDDP_API void tddp_eventcount_notify(tddp_eventcount *events);

/* Waits until the count differs from `seen`: spins for `spin_ns`, then sleeps for at most
 * `sleep_ns` (0: returns at once). May return early. */
void tddp_eventcount_wait(tddp_eventcount *events, uint32_t seen, int64_t spin_ns,
                          int64_t sleep_ns);

/* Tells the processor that this thread spins. */
static inline void tddp_cpu_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* --- sha256.c -------------------------------------------------------------------------------- */

enum { TDDP_SHA256_BYTES = 32 };

void tddp_sha256(const void *data, size_t size, unsigned char out[TDDP_SHA256_BYTES]);
void tddp_hmac_sha256(const void *key, size_t key_size, const void *data, size_t size,
                      unsigned char out[TDDP_SHA256_BYTES]);

/* Compares in constant time. */
bool tddp_equal_bytes(const void *a, const void *b, size_t size);

/* --- siphash.c ------------------------------------------------------------------------------- */

/* SipHash-2-4 with a key of 16 bytes. */
uint64_t tddp_siphash(const uint64_t key[2], const void *data, size_t size);

/* The same with a key that is random in each process, for hash tables. */
uint64_t tddp_hash(const void *data, size_t size);

/* --- system.c -------------------------------------------------------------------------------- */

/* Sets the text "what: strerror(errno)" and returns TDDP_SYSTEM. */
tddp_status tddp_fail_errno(const char *what);

/* getpid(2) without a system call: what is checked before each use of what a fork leaves behind. */
pid_t tddp_process_id(void);

/* close(2) that keeps errno; -1 is fine. */
void tddp_close(int fd);

/* Parses all of `text` as a decimal number between `min` and `max`. */
bool tddp_parse_int(const char *text, int64_t min, int64_t max, int64_t *out);

#endif
