/*
 * The only file that releases the GVL. A blocking call of libtddp gets a cancel token; an interrupt
 * of Ruby's triggers the token, the call returns TDDP_CANCELED, and only then, with the GVL held
 * and all C frames unwound, Ruby raises the interrupt. Called by Ruby threads, and from libtorch's
 * backward by tddp_rb_blocking_in_backward(). Invariant: no longjmp leaves this file; the caller
 * frees its memory first, then calls tddp_rb_raise_outcome().
 *
 * A call runs on the calling Ruby thread, or on a helper thread made for the call, while the Ruby
 * thread waits for it and may run signal handlers. A helper runs calls that can't be restarted
 * after a signal handler that raised nothing. It also runs long waits if there are other Ruby
 * threads, because Ruby 3.1 and 3.2 don't wake the blocked main thread for a signal after the other
 * threads have ended.
 */
#define _GNU_SOURCE /* sem_clockwait */
#include "torch_ddp.h"

#include <pthread.h>
#include <ruby/thread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* How long a thread that isn't the only one waits before a helper takes over, and how often a
 * thread that waits for a helper polls for interrupts. */
enum { INLINE_WAIT_MS = 100, POLL_MS = 250 };

/* In place of a longjmp's tag: the exception is still pending. */
enum { INTERRUPTED = -1 };

/* rb_nogvl() doesn't run the function if an interrupt is pending, and doesn't raise. */
enum { NOGVL_FLAGS = RB_NOGVL_INTR_FAIL | RB_NOGVL_UBF_ASYNC_SAFE };

/* --- tokens ----------------------------------------------------------------------------------- */

/* What ends a call's wait. Each thread caches tokens: an operation of a few microseconds must not
 * open a descriptor. A signal handler that runs during a call uses another token. */
typedef struct token {
    tddp_cancel *cancel;
    pid_t maker;        /* after a fork the descriptor is shared with the parent */
    struct token *next; /* in the list of unused tokens */
} token;

/* The thread's unused tokens. */
static pthread_key_t token_key;

static void tokens_free(void *data)
{
    for (token *one = data, *next; one != NULL; one = next) {
        next = one->next;
        tddp_cancel_free(one->cancel);
        free(one);
    }
}

static void token_release(token *self)
{
    self->next = pthread_getspecific(token_key);
    if (pthread_setspecific(token_key, self) != 0) {
        self->next = NULL;
        tokens_free(self);
    }
}

/* A token for a call. Caller: token_release(). NULL on failure, with the error text set. */
static token *token_acquire(void)
{
    token *self = pthread_getspecific(token_key);
    if (self != NULL && pthread_setspecific(token_key, self->next) != 0)
        self = NULL;
    else if (self == NULL)
        self = calloc(1, sizeof(*self));
    if (self == NULL) {
        tddp_fail(TDDP_OUT_OF_MEMORY, "no memory to start a call that can be interrupted");
        return NULL;
    }
    self->next = NULL;
    if (self->cancel != NULL && self->maker == tddp_rb_process_id()) {
        tddp_cancel_reset(self->cancel);
        return self;
    }
    tddp_cancel_free(self->cancel);
    self->cancel = NULL;
    self->maker = tddp_rb_process_id();
    if (tddp_cancel_create(&self->cancel) == TDDP_OK)
        return self;
    tokens_free(self);
    return NULL;
}

/* --- a call ----------------------------------------------------------------------------------- */

typedef struct blocking_call {
    tddp_rb_body body;
    void *data;
    tddp_wait wait;
    tddp_status status;
    bool started;
} blocking_call;

static void *run(void *data)
{
    blocking_call *call = data;
    call->started = true;
    call->status = call->body(call->data, &call->wait);
    return NULL;
}

/* The next two are async-signal-safe. */
static void cancel(void *handle)
{
    tddp_cancel_trigger(handle);
}

static void wake(void *semaphore)
{
    sem_post(semaphore);
}

static VALUE check_interrupts(VALUE nothing)
{
    rb_thread_check_ints();
    return nothing;
}

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static int64_t time_left(int64_t timeout_ms, int64_t started_ms)
{
    if (timeout_ms < 0)
        return timeout_ms;
    int64_t spent = now_ms() - started_ms;
    return spent >= timeout_ms ? 0 : timeout_ms - spent;
}

/* --- helper threads --------------------------------------------------------------------------- */

typedef struct helper_call {
    blocking_call *call;
    char *text; /* the error text, which is thread-local */
    sem_t wake; /* its end, or an interrupt */
    atomic_bool done;
} helper_call;

static void *run_helper(void *data)
{
    helper_call *work = data;
    run(work->call);
    work->text = work->call->status == TDDP_OK ? NULL : strdup(tddp_error_message());
    atomic_store(&work->done, true);
    wake(&work->wake);
    return NULL;
}

static void *wait_for_helper(void *data)
{
    helper_call *work = data;
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += POLL_MS * 1000000L;
    until.tv_sec += until.tv_nsec / 1000000000L;
    until.tv_nsec %= 1000000000L;
    (void)sem_clockwait(&work->wake, CLOCK_MONOTONIC, &until);
    return NULL;
}

static bool start_helper(pthread_t *thread, helper_call *work)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int fault = pthread_create(thread, NULL, run_helper, work);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (fault != 0)
        tddp_fail(TDDP_SYSTEM, "cannot create a thread for a blocking call: %s", strerror(fault));
    return fault == 0;
}

/* Runs the call on a helper thread. Cancels it when `may_continue` returns false. */
static tddp_status run_on_helper(blocking_call *call, bool (*may_continue)(void *data), void *data)
{
    pthread_t thread;
    helper_call work = {.call = call};
    call->status = TDDP_CANCELED;
    sem_init(&work.wake, 0, 0);
    if (!start_helper(&thread, &work))
        return TDDP_SYSTEM;
    while (!atomic_load(&work.done)) {
        rb_nogvl(wait_for_helper, &work, wake, &work.wake, NOGVL_FLAGS);
        if (!atomic_load(&work.done) && !may_continue(data)) {
            tddp_cancel_trigger(call->wait.cancel);
            break;
        }
    }
    pthread_join(thread, NULL); /* It ends at once; it never acquires the GVL. */
    sem_destroy(&work.wake);
    if (work.text != NULL)
        (void)tddp_fail(call->status, "%s", work.text);
    free(work.text);
    return call->status;
}

/* --- calls from Ruby -------------------------------------------------------------------------- */

int tddp_rb_run_handlers(void)
{
    int state = 0;
    rb_protect(check_interrupts, Qnil, &state);
    return state;
}

/* Returns false if a handler raises, with its tag in `*state`. */
static bool run_handlers(void *state)
{
    *(int *)state = tddp_rb_run_handlers();
    return *(int *)state == 0;
}

static VALUE has_pending_interrupt(VALUE thread)
{
    return rb_funcall(thread, rb_intern("pending_interrupt?"), 0);
}

static VALUE raise_in(RB_BLOCK_CALL_FUNC_ARGLIST(yielded, pair))
{
    (void)yielded;
    return rb_funcall(rb_ary_entry(pair, 0), rb_intern("raise"), 1, rb_ary_entry(pair, 1));
}

static VALUE raise_later(VALUE error)
{
    if (rb_obj_is_kind_of(error, rb_eSignal)) {
        int number = NUM2INT(rb_funcall(error, rb_intern("signo"), 0));
        return kill(tddp_rb_process_id(), number) == 0 ? Qtrue : Qfalse;
    }
    VALUE pair = rb_ary_new_from_args(2, rb_thread_current(), error);
    return rb_block_call(rb_cThread, rb_intern("new"), 0, NULL, raise_in, pair);
}

void tddp_rb_raise_later(VALUE error)
{
    int state = 0;
    rb_protect(raise_later, error, &state);
    if (state != 0)
        rb_set_errinfo(Qnil);
}

void tddp_rb_defer_error(void)
{
    VALUE error = rb_errinfo();
    rb_set_errinfo(Qnil);
    if (tddp_rb_is_exception(error))
        tddp_rb_raise_later(error);
}

bool tddp_rb_interrupt_pending(void)
{
    int state = 0;
    VALUE pending = rb_protect(has_pending_interrupt, rb_thread_current(), &state);
    if (state == 0)
        return RTEST(pending);
    tddp_rb_defer_error(); /* pending_interrupt? ran a handler, which raised */
    return true;
}

/*
 * An interrupt during backward, whose C++ frames no longjmp may cross. Runs signal handlers; if
 * they return, backward continues. An exception stays pending, or is made pending again: Ruby
 * raises it after backward has returned with an error.
 */
static bool run_handlers_in_backward(void *nothing)
{
    (void)nothing;
    if (tddp_rb_interrupt_pending())
        return false;
    if (tddp_rb_run_handlers() == 0)
        return true;
    tddp_rb_defer_error();
    return false;
}

/* The same for a communication hook, which is suspended, not unwound. */
static bool run_handlers_in_hook(void *state)
{
    bool continues = run_handlers_in_backward(NULL);
    if (!continues)
        *(int *)state = INTERRUPTED;
    return continues;
}

/* Runs the call on this thread, and again after a handler that raised nothing. Returns false if it
 * should continue on a helper thread. */
static bool run_on_caller(blocking_call *call, int64_t timeout_ms, int64_t started,
                          bool (*may_continue)(void *state), int *state)
{
    do {
        int64_t left = time_left(timeout_ms, started);
        bool bounded = !rb_thread_alone() && (left < 0 || left > INLINE_WAIT_MS);
        call->wait.timeout_ms = bounded ? INLINE_WAIT_MS : left;
        call->status = TDDP_CANCELED;
        tddp_cancel_reset(call->wait.cancel);
        int64_t attempt = bounded ? now_ms() : 0;
        rb_nogvl(run, call, cancel, call->wait.cancel, NOGVL_FLAGS);
        if (bounded && call->status == TDDP_TIMEOUT && now_ms() - attempt >= INLINE_WAIT_MS)
            return false;
    } while (call->status == TDDP_CANCELED && may_continue(state));
    return true;
}

static tddp_rb_outcome block(tddp_rb_body body, void *data, int64_t timeout_ms, bool no_restart,
                             int64_t started, bool (*may_continue)(void *state))
{
    tddp_rb_outcome outcome = {Qnil, 0};
    token *self = token_acquire();
    if (self == NULL) {
        outcome.error = tddp_rb_error(TDDP_SYSTEM);
        return outcome;
    }
    blocking_call call = {.body = body, .data = data, .wait = {timeout_ms, self->cancel}};
    if (no_restart || !run_on_caller(&call, timeout_ms, started, may_continue, &outcome.state)) {
        call.wait.timeout_ms = time_left(timeout_ms, started);
        call.status = run_on_helper(&call, may_continue, &outcome.state);
    }
    token_release(self);
    if (outcome.state == 0 && call.status != TDDP_OK)
        outcome.error = tddp_rb_error(call.status);
    return outcome;
}

tddp_rb_outcome tddp_rb_blocking(tddp_rb_body body, void *data, int64_t timeout_ms, bool no_restart)
{
    int64_t started = now_ms();
    if (no_restart || !tddp_rb_in_hook())
        return block(body, data, timeout_ms, no_restart, started, run_handlers);
    for (;;) {
        tddp_rb_outcome outcome = {Qnil, INTERRUPTED};
        if (!tddp_rb_hook_interrupted())
            outcome = block(body, data, timeout_ms, no_restart, started, run_handlers_in_hook);
        if (outcome.state != INTERRUPTED)
            return outcome;
        tddp_rb_suspend_hook();
    }
}

tddp_rb_outcome tddp_rb_blocking_brief(tddp_rb_body body, void *data)
{
    return tddp_rb_blocking(body, data, -1, !rb_thread_alone());
}

tddp_rb_outcome tddp_rb_outcome_of(tddp_status status)
{
    return (tddp_rb_outcome){status == TDDP_OK ? Qnil : tddp_rb_error(status), 0};
}

void tddp_rb_raise_outcome(tddp_rb_outcome outcome)
{
    if (outcome.state != 0)
        rb_jump_tag(outcome.state);
    if (!NIL_P(outcome.error))
        rb_exc_raise(outcome.error);
}

/* --- blocking within libtorch's backward ------------------------------------------------------ */

/* The body submits operations that the other ranks wait for: it runs even if an interrupt was
 * pending before, and then waits for nothing. */
static void run_in_backward(blocking_call *call)
{
    do {
        tddp_cancel_reset(call->wait.cancel);
        call->status = TDDP_CANCELED;
        rb_nogvl(run, call, cancel, call->wait.cancel, NOGVL_FLAGS);
    } while (call->status == TDDP_CANCELED && run_handlers_in_backward(NULL));
    if (!call->started) {
        tddp_cancel_trigger(call->wait.cancel);
        run(call);
    }
    if (call->status == TDDP_CANCELED)
        (void)tddp_fail(TDDP_CANCELED, "backward was interrupted while gradients were reduced");
}

tddp_status tddp_rb_blocking_in_backward(tddp_rb_body body, void *data)
{
    if (!tddp_rb_may_run())
        return body(data, NULL);
    token *self = token_acquire();
    if (self == NULL)
        return TDDP_SYSTEM;
    blocking_call call = {.body = body, .data = data, .wait = {-1, self->cancel}};
    if (rb_thread_alone())
        run_in_backward(&call);
    else
        call.status = run_on_helper(&call, run_handlers_in_backward, NULL);
    token_release(self);
    return call.status;
}

void tddp_rb_init_nogvl(void)
{
    if (pthread_key_create(&token_key, tokens_free) != 0)
        rb_raise(rb_eRuntimeError, "no thread-specific data left in this process");
}
