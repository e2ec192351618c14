/*
 * The one file that lets go of the GVL. A blocking call of libtddp gets a cancel token; an
 * interrupt of Ruby's triggers it, the call returns TDDP_CANCELED, and only then, with the GVL held
 * and every C frame left in order, does the interrupt become an exception. Entered by Ruby threads,
 * and by tddp_rb_blocking_in_backward() from libtorch's backward. Invariant: no jump leaves this
 * file; whoever called frees first and settles then.
 *
 * Two ways to block. Here: on Ruby's own thread. Aside: on a thread made for the call, while Ruby's
 * thread watches and may run signal handlers. Aside is for calls that cannot be started again after
 * a handler that raised nothing; and for long waits of a thread that is not Ruby's only one,
 * because Ruby (3.1 and 3.2) tells its main thread nothing of a signal if the others end while it
 * is blocked.
 */
#include "torch_ddp.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <ruby/thread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

/* How long a thread that is not the only one waits here before it waits aside, and how often a
 * thread that watches looks for interrupts that nobody told it of. */
enum { PATIENCE_MS = 100, LOOK_MS = 250 };

/* In place of a jump's number: what would be raised is pending still. */
enum { INTERRUPTED = -1 };

/* rb_nogvl() runs nothing if an interrupt is pending already, and raises nothing. */
enum { NO_JUMP = RB_NOGVL_INTR_FAIL | RB_NOGVL_UBF_ASYNC_SAFE };

/* --- what a thread needs to be woken ---------------------------------------------------------- */

/* Kept with its thread for the next call: an operation of a few microseconds must not pay for
 * descriptors. A signal handler that runs in the midst of a call makes calls of its own, and those
 * have tokens of their own. */
typedef struct token {
    tddp_cancel *cancel;
    int wake;           /* an eventfd */
    pid_t maker;        /* after a fork the descriptors are shared with the parent */
    struct token *next; /* another that no call has */
} token;

/* The first of a thread's tokens that no call has. */
static pthread_key_t token_key;

static void token_clear(token *mine)
{
    tddp_cancel_free(mine->cancel);
    mine->cancel = NULL;
    if (mine->wake >= 0)
        close(mine->wake);
    mine->wake = -1;
}

static void tokens_free(void *data)
{
    for (token *one = data, *next; one != NULL; one = next) {
        next = one->next;
        token_clear(one);
        free(one);
    }
}

/* The call is over. */
static void token_give(token *mine)
{
    mine->next = pthread_getspecific(token_key);
    if (pthread_setspecific(token_key, mine) != 0) {
        mine->next = NULL;
        tokens_free(mine);
    }
}

static token *token_of_thread(void)
{
    token *mine = pthread_getspecific(token_key);
    if (mine != NULL) {
        if (pthread_setspecific(token_key, mine->next) != 0)
            return NULL;
        mine->next = NULL;
        return mine;
    }
    mine = calloc(1, sizeof(*mine));
    if (mine != NULL)
        mine->wake = -1;
    return mine;
}

/* A fresh token for a call: token_give(). NULL with a text if it cannot be made. */
static token *token_take(void)
{
    token *mine = token_of_thread();
    if (mine == NULL) {
        tddp_fail(TDDP_OUT_OF_MEMORY, "no memory to start a call that can be interrupted");
        return NULL;
    }
    if (mine->cancel != NULL && mine->maker == getpid()) {
        tddp_cancel_reset(mine->cancel);
        return mine;
    }
    token_clear(mine);
    mine->maker = getpid();
    mine->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (mine->wake < 0)
        tddp_fail(TDDP_SYSTEM, "eventfd: %s", strerror(errno));
    else if (tddp_cancel_create(&mine->cancel) == TDDP_OK)
        return mine;
    tokens_free(mine);
    return NULL;
}

/* --- a call ----------------------------------------------------------------------------------- */

typedef struct blocking_call {
    tddp_rb_body body;
    void *data;
    tddp_wait wait;
    tddp_status status;
    bool begun;
} blocking_call;

static void *run(void *data)
{
    blocking_call *call = data;
    call->begun = true;
    call->status = call->body(call->data, &call->wait);
    return NULL;
}

/* Both may be called by a signal handler. */
static void cancel(void *handle)
{
    tddp_cancel_trigger(handle);
}

static void wake(void *descriptor)
{
    const uint64_t one = 1;
    int before = errno;
    (void)!write(*(int *)descriptor, &one, sizeof(one));
    errno = before;
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

/* --- aside ------------------------------------------------------------------------------------ */

typedef struct aside {
    blocking_call *call;
    char *text; /* the failure's text, which belongs to the thread that failed */
    int wake;
    atomic_bool done;
} aside;

static void *run_aside(void *data)
{
    aside *work = data;
    run(work->call);
    work->text = work->call->status == TDDP_OK ? NULL : strdup(tddp_error_message());
    atomic_store(&work->done, true);
    wake(&work->wake);
    return NULL;
}

static void *watch(void *data)
{
    const aside *work = data;
    struct pollfd wanted = {.fd = work->wake, .events = POLLIN};
    if (!atomic_load(&work->done))
        poll(&wanted, 1, LOOK_MS);
    uint64_t count;
    (void)!read(work->wake, &count, sizeof(count));
    return NULL;
}

static bool start_aside(pthread_t *thread, aside *work)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int fault = pthread_create(thread, NULL, run_aside, work);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (fault != 0)
        tddp_fail(TDDP_SYSTEM, "no thread for a call that blocks: %s", strerror(fault));
    return fault == 0;
}

/* Runs the call on a thread of its own until it is done or `may_go_on` says no. */
static tddp_status run_watched(blocking_call *call, token *mine, bool (*may_go_on)(void *data),
                               void *data)
{
    pthread_t thread;
    aside work = {.call = call, .wake = mine->wake};
    call->status = TDDP_CANCELED;
    if (!start_aside(&thread, &work))
        return TDDP_SYSTEM;
    while (!atomic_load(&work.done)) {
        rb_nogvl(watch, &work, wake, &work.wake, NO_JUMP);
        if (!atomic_load(&work.done) && !may_go_on(data)) {
            tddp_cancel_trigger(call->wait.cancel);
            break;
        }
    }
    pthread_join(thread, NULL); /* It has ended or ends now; it never asks for the GVL. */
    if (work.text != NULL)
        (void)tddp_fail(call->status, "%s", work.text);
    free(work.text);
    return call->status;
}

/* --- calls from Ruby -------------------------------------------------------------------------- */

/* Has the interrupts' handlers run; false if one of them raises, which is kept in `*state`. */
static bool no_jump(void *state)
{
    rb_protect(check_interrupts, Qnil, state);
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
        return kill(getpid(), number) == 0 ? Qtrue : Qfalse;
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
    tddp_rb_defer_error(); /* A handler was run, and raised, on the way to the answer. */
    return true;
}

/*
 * Something wants this thread's attention in the midst of backward, whose C++ frames no jump may
 * cross. A signal handler is run, and if it returns backward goes on. What would be raised is left
 * pending, or made pending again, for Ruby to raise once backward has returned with an error.
 */
static bool no_jump_after_backward(void *nothing)
{
    (void)nothing;
    if (tddp_rb_interrupt_pending())
        return false;
    int state = 0;
    rb_protect(check_interrupts, Qnil, &state);
    if (state == 0)
        return true;
    tddp_rb_defer_error();
    return false;
}

/* The same for a communication hook, which is left and not unwound. */
static bool no_jump_in_hook(void *state)
{
    bool goes_on = no_jump_after_backward(NULL);
    if (!goes_on)
        *(int *)state = INTERRUPTED;
    return goes_on;
}

/* Waits here, and calls again after a handler that raised nothing. True if that was all. */
static bool run_here(blocking_call *call, int64_t timeout_ms, int64_t started,
                     bool (*no_jump)(void *state), int *state)
{
    do {
        int64_t left = time_left(timeout_ms, started);
        bool partly = !rb_thread_alone() && (left < 0 || left > PATIENCE_MS);
        call->wait.timeout_ms = partly ? PATIENCE_MS : left;
        call->status = TDDP_CANCELED;
        tddp_cancel_reset(call->wait.cancel);
        int64_t begun = partly ? now_ms() : 0;
        rb_nogvl(run, call, cancel, call->wait.cancel, NO_JUMP);
        if (partly && call->status == TDDP_TIMEOUT && now_ms() - begun >= PATIENCE_MS)
            return false;
    } while (call->status == TDDP_CANCELED && no_jump(state));
    return true;
}

static tddp_rb_outcome block(tddp_rb_body body, void *data, int64_t timeout_ms, bool once,
                             int64_t started, bool (*no_jump)(void *state))
{
    tddp_rb_outcome outcome = {Qnil, 0};
    token *mine = token_take();
    if (mine == NULL) {
        outcome.error = tddp_rb_error(TDDP_SYSTEM);
        return outcome;
    }
    blocking_call call = {.body = body, .data = data, .wait = {timeout_ms, mine->cancel}};
    if (once || !run_here(&call, timeout_ms, started, no_jump, &outcome.state)) {
        call.wait.timeout_ms = time_left(timeout_ms, started);
        call.status = run_watched(&call, mine, no_jump, &outcome.state);
    }
    token_give(mine);
    if (outcome.state == 0 && call.status != TDDP_OK)
        outcome.error = tddp_rb_error(call.status);
    return outcome;
}

tddp_rb_outcome tddp_rb_blocking(tddp_rb_body body, void *data, int64_t timeout_ms, bool once)
{
    int64_t started = now_ms();
    if (once || !tddp_rb_in_hook())
        return block(body, data, timeout_ms, once, started, no_jump);
    for (;;) {
        tddp_rb_outcome outcome = {Qnil, INTERRUPTED};
        if (!tddp_rb_hook_interrupted())
            outcome = block(body, data, timeout_ms, once, started, no_jump_in_hook);
        if (outcome.state != INTERRUPTED)
            return outcome;
        tddp_rb_leave_hook();
    }
}

tddp_rb_outcome tddp_rb_brief(tddp_rb_body body, void *data)
{
    return tddp_rb_blocking(body, data, -1, !rb_thread_alone());
}

void tddp_rb_settle(tddp_rb_outcome outcome)
{
    if (outcome.state != 0)
        rb_jump_tag(outcome.state);
    if (!NIL_P(outcome.error))
        rb_exc_raise(outcome.error);
}

/* --- waiting inside libtorch's backward ------------------------------------------------------- */

/* The other ranks wait for what the body begins: it runs also if an interrupt was pending before,
 * and then waits for nothing. */
static void run_alone(blocking_call *call)
{
    do {
        tddp_cancel_reset(call->wait.cancel);
        call->status = TDDP_CANCELED;
        rb_nogvl(run, call, cancel, call->wait.cancel, NO_JUMP);
    } while (call->status == TDDP_CANCELED && no_jump_after_backward(NULL));
    if (!call->begun) {
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
    token *mine = token_take();
    if (mine == NULL)
        return TDDP_SYSTEM;
    blocking_call call = {.body = body, .data = data, .wait = {-1, mine->cancel}};
    if (rb_thread_alone())
        run_alone(&call);
    else
        call.status = run_watched(&call, mine, no_jump_after_backward, NULL);
    token_give(mine);
    return call.status;
}

void tddp_rb_init_nogvl(void)
{
    if (pthread_key_create(&token_key, tokens_free) != 0)
        rb_raise(rb_eRuntimeError, "no thread-specific data left in this process");
}
