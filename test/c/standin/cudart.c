/*
 * The CUDA runtime's stand-in. A stream is a thread with a queue; an event is a count of what its
 * stream has done. The default stream is whoever calls: what is put on it is done at once, so that
 * a program's own work on host memory is what a GPU's default stream would do, in order. One lock
 * guards everything, one condition tells of all that is done. Memory is in cudart_memory.c.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "standin/cudart.h"

enum { DEVICES = 8, NAME_BYTES = 64, ERROR_INVALID_VALUE = 1, ERROR_INVALID_DEVICE = 101 };

typedef struct task {
    void (*call)(void *data);
    void *data;
    struct task *next;
} task;

struct CUstream_st {
    pthread_t thread;
    pthread_cond_t given; /* to the thread: a task, or the end */
    task *head;
    task *tail;
    uint64_t put;
    uint64_t done;
    bool ends;
    int references; /* of its owner, and of events */
};

struct CUevent_st {
    tddp_cuda_stream stream; /* NULL: not recorded, or on the default stream: done */
    uint64_t ticket;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int alive; /* streams */
static int capture;
static _Atomic int delay_ms;
static _Atomic int default_detached;
static char failing[NAME_BYTES];
static int failing_with;
static int failing_times;
static _Atomic unsigned contexts;
static _Thread_local int device;
static _Thread_local tddp_cuda_error last_error;

/* --- control --------------------------------------------------------------------------------- */

void standin_set_delay_ms(int ms)
{
    atomic_store(&delay_ms, ms);
}

void standin_set_default_detached(int detached)
{
    atomic_store(&default_detached, detached);
}

void standin_fail_times(const char *name, int error, int times)
{
    pthread_mutex_lock(&lock);
    failing[0] = '\0';
    if (name) {
        strncpy(failing, name, sizeof failing - 1);
    }
    failing_with = error;
    failing_times = times;
    pthread_mutex_unlock(&lock);
}

void standin_fail_next(const char *name, int error)
{
    standin_fail_times(name, error, 1);
}

int standin_failure_of(const char *name)
{
    int error = 0;
    pthread_mutex_lock(&lock);
    if (strcmp(failing, name) == 0) {
        error = failing_with;
        failing_times--;
        if (failing_times == 0) {
            failing[0] = '\0';
        }
    }
    pthread_mutex_unlock(&lock);
    return error;
}

int standin_alive(void)
{
    pthread_mutex_lock(&lock);
    int count = alive;
    pthread_mutex_unlock(&lock);
    return count + standin_pieces();
}

void standin_set_capture(int status)
{
    pthread_mutex_lock(&lock);
    capture = status;
    pthread_mutex_unlock(&lock);
}

/* Of the device that is current here, which this call needs. */
void standin_make_context(void)
{
    atomic_fetch_or(&contexts, 1u << device);
}

unsigned standin_contexts(void)
{
    return atomic_load(&contexts);
}

/* The driver's. */
EXPORT int cuDevicePrimaryCtxGetState(int of, unsigned *flags, int *active);

EXPORT int cuDevicePrimaryCtxGetState(int of, unsigned *flags, int *active)
{
    *flags = 0;
    *active = (standin_contexts() >> of & 1u) != 0;
    return 0;
}

tddp_cuda_error standin_fail(const char *name)
{
    last_error = standin_failure_of(name);
    return last_error;
}

/* --- streams --------------------------------------------------------------------------------- */

/* With the lock held. */
static void drop(struct CUstream_st *stream)
{
    if (--stream->references == 0) {
        pthread_cond_destroy(&stream->given);
        free(stream);
    }
}

static void *body(void *data)
{
    struct CUstream_st *self = data;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!self->head && !self->ends) {
            pthread_cond_wait(&self->given, &lock);
        }
        task *first = self->head;
        if (!first) {
            break;
        }
        self->head = first->next;
        self->tail = self->head ? self->tail : NULL;
        pthread_mutex_unlock(&lock);
        int ms = atomic_load(&delay_ms);
        if (ms > 0) {
            nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000L}, NULL);
        }
        first->call(first->data);
        free(first);
        pthread_mutex_lock(&lock);
        self->done++;
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

static struct CUstream_st *make_stream(void)
{
    struct CUstream_st *made = calloc(1, sizeof *made);
    if (!made) {
        abort();
    }
    made->references = 1;
    if (pthread_cond_init(&made->given, NULL) || pthread_create(&made->thread, NULL, body, made)) {
        abort();
    }
    return made;
}

void standin_put(tddp_cuda_stream stream, void (*call)(void *data), void *data)
{
    if (!stream) {
        call(data);
        return;
    }
    task *made = calloc(1, sizeof *made);
    if (!made) {
        abort();
    }
    *made = (task){call, data, NULL};
    pthread_mutex_lock(&lock);
    if (stream->tail) {
        stream->tail->next = made;
    } else {
        stream->head = made;
    }
    stream->tail = made;
    stream->put++;
    pthread_cond_signal(&stream->given);
    pthread_mutex_unlock(&lock);
}

EXPORT tddp_cuda_error cudaStreamCreateWithPriority(tddp_cuda_stream *stream, unsigned flags,
                                                    int priority)
{
    (void)flags;
    (void)priority;
    FAIL_IF_TOLD();
    standin_make_context();
    pthread_mutex_lock(&lock);
    alive++;
    *stream = make_stream();
    pthread_mutex_unlock(&lock);
    return 0;
}

/* The thread does what is left and goes. */
EXPORT tddp_cuda_error cudaStreamDestroy(tddp_cuda_stream stream)
{
    standin_make_context();
    pthread_mutex_lock(&lock);
    stream->ends = true;
    pthread_cond_signal(&stream->given);
    pthread_mutex_unlock(&lock);
    pthread_join(stream->thread, NULL);
    pthread_mutex_lock(&lock);
    alive--;
    drop(stream);
    pthread_mutex_unlock(&lock);
    return 0;
}

/* --- events ---------------------------------------------------------------------------------- */

EXPORT tddp_cuda_error cudaEventCreateWithFlags(tddp_cuda_event *event, unsigned flags)
{
    (void)flags;
    FAIL_IF_TOLD();
    standin_make_context();
    *event = standin_make_piece(sizeof **event);
    return 0;
}

EXPORT tddp_cuda_error cudaEventDestroy(tddp_cuda_event event)
{
    standin_make_context();
    pthread_mutex_lock(&lock);
    if (event->stream) {
        drop(event->stream);
    }
    pthread_mutex_unlock(&lock);
    standin_free_piece(event);
    return 0;
}

EXPORT tddp_cuda_error cudaEventRecord(tddp_cuda_event event, tddp_cuda_stream stream)
{
    FAIL_IF_TOLD();
    standin_make_context();
    pthread_mutex_lock(&lock);
    if (event->stream) {
        drop(event->stream);
    }
    event->stream = stream;
    if (stream) {
        stream->references++;
        event->ticket = stream->put;
    }
    pthread_mutex_unlock(&lock);
    return 0;
}

EXPORT tddp_cuda_error cudaEventQuery(tddp_cuda_event event)
{
    FAIL_IF_TOLD();
    standin_make_context();
    pthread_mutex_lock(&lock);
    bool done = !event->stream || event->stream->done >= event->ticket;
    pthread_mutex_unlock(&lock);
    last_error = done ? 0 : TDDP_CUDA_NOT_READY;
    return last_error;
}

EXPORT tddp_cuda_error cudaEventElapsedTime(float *ms, tddp_cuda_event start, tddp_cuda_event end)
{
    standin_make_context();
    (void)start;
    (void)end;
    *ms = 12.5F; /* as good as any: nobody else measures */
    return 0;
}

typedef struct awaited {
    struct CUstream_st *stream;
    uint64_t ticket;
} awaited;

static void await(void *data)
{
    awaited *it = data;
    pthread_mutex_lock(&lock);
    while (it->stream->done < it->ticket) {
        pthread_cond_wait(&changed, &lock);
    }
    drop(it->stream);
    pthread_mutex_unlock(&lock);
    free(it);
}

EXPORT tddp_cuda_error cudaStreamWaitEvent(tddp_cuda_stream stream, tddp_cuda_event event,
                                           unsigned flags)
{
    (void)flags;
    FAIL_IF_TOLD();
    standin_make_context();
    awaited *it = calloc(1, sizeof *it);
    if (!it) {
        abort();
    }
    pthread_mutex_lock(&lock);
    bool recorded = event->stream != NULL && (stream || !atomic_load(&default_detached));
    if (recorded) {
        *it = (awaited){event->stream, event->ticket};
        it->stream->references++;
    }
    pthread_mutex_unlock(&lock);
    if (recorded) {
        standin_put(stream, await, it);
    } else {
        free(it);
    }
    return 0;
}

EXPORT tddp_cuda_error cudaLaunchHostFunc(tddp_cuda_stream stream, void (*function)(void *data),
                                          void *data)
{
    FAIL_IF_TOLD();
    standin_make_context();
    standin_put(stream, function, data);
    return 0;
}

/* --- the rest -------------------------------------------------------------------------------- */

EXPORT tddp_cuda_error cudaRuntimeGetVersion(int *version)
{
    FAIL_IF_TOLD();
    *version = 12040;
    return 0;
}

EXPORT tddp_cuda_error cudaGetDeviceCount(int *count)
{
    FAIL_IF_TOLD();
    const char *text = getenv("STANDIN_DEVICES");
    *count = text ? atoi(text) : DEVICES;
    return 0;
}

EXPORT tddp_cuda_error cudaGetDevice(int *out)
{
    *out = device;
    return 0;
}

EXPORT tddp_cuda_error cudaSetDevice(int number)
{
    FAIL_IF_TOLD();
    if (number < 0 || number >= DEVICES) {
        last_error = ERROR_INVALID_DEVICE;
        return last_error;
    }
    device = number;
    standin_make_context(); /* since CUDA 12 */
    return 0;
}

EXPORT const char *cudaGetErrorString(tddp_cuda_error error)
{
    return error == 0 ? "no error" : error == TDDP_CUDA_NOT_READY ? "not ready" : "made to fail";
}

EXPORT tddp_cuda_error cudaGetLastError(void)
{
    tddp_cuda_error error = last_error;
    last_error = 0;
    return error;
}

EXPORT tddp_cuda_error cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    standin_make_context();
    *least = 0;
    *greatest = -5;
    return 0;
}

EXPORT tddp_cuda_error cudaStreamIsCapturing(tddp_cuda_stream stream, int *status)
{
    standin_make_context();
    (void)stream;
    pthread_mutex_lock(&lock);
    *status = capture;
    pthread_mutex_unlock(&lock);
    return 0;
}

EXPORT tddp_cuda_error cudaThreadExchangeStreamCaptureMode(int *mode)
{
    standin_make_context();
    return *mode < 0 ? ERROR_INVALID_VALUE : 0;
}
