/*
 * The one file that lets go of the GVL. A blocking call of libtddp gets a cancel token; Ruby's
 * unblock function triggers it, the call returns TDDP_CANCELED, and only then, with the GVL held
 * and every C frame left in order, does the interrupt become an exception. Entered by Ruby threads,
 * and by tddp_rb_through() from the end of libtorch's backward. Invariant: no jump leaves this
 * file; whoever called frees first and settles then.
 */
#include "torch_ddp.h"

#include <pthread.h>
#include <ruby/thread.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

/* Exported by Ruby, but declared in no public header before Ruby 3.4. */
int ruby_thread_has_gvl_p(void);
int ruby_native_thread_p(void);

/* A thread's token, made once: an operation of a few microseconds must not pay for a descriptor. */
typedef struct token {
    tddp_cancel *cancel;
    pid_t maker; /* after a fork the descriptor is shared with the parent */
} token;

static pthread_key_t token_key;

static void token_free(void *data)
{
    token *mine = data;
    tddp_cancel_free(mine->cancel);
    free(mine);
}

/* The calling thread's token, fresh; NULL with a text if it cannot be made. */
static tddp_cancel *token_take(void)
{
    token *mine = pthread_getspecific(token_key);
    if (mine == NULL) {
        mine = calloc(1, sizeof(*mine));
        if (mine == NULL || pthread_setspecific(token_key, mine) != 0) {
            free(mine);
            tddp_fail(TDDP_OUT_OF_MEMORY, "no memory to start a call that can be interrupted");
            return NULL;
        }
    }
    pid_t self = getpid();
    if (mine->cancel != NULL && mine->maker != self) {
        tddp_cancel_free(mine->cancel);
        mine->cancel = NULL;
    }
    if (mine->cancel == NULL) {
        if (tddp_cancel_create(&mine->cancel) != TDDP_OK) {
            mine->cancel = NULL;
            return NULL;
        }
        mine->maker = self;
    }
    tddp_cancel_reset(mine->cancel);
    return mine->cancel;
}

typedef struct blocking_call {
    tddp_rb_body body;
    void *data;
    tddp_wait wait;
    tddp_status status;
    bool ran;
} blocking_call;

static void *run(void *data)
{
    blocking_call *call = data;
    call->ran = true;
    call->status = call->body(call->data, &call->wait);
    return NULL;
}

static void unblock(void *cancel)
{
    tddp_cancel_trigger(cancel);
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

tddp_rb_outcome tddp_rb_blocking(tddp_rb_body body, void *data, int64_t timeout_ms, bool once)
{
    tddp_rb_outcome outcome = {Qnil, 0};
    blocking_call call = {.body = body, .data = data};
    int64_t started = timeout_ms < 0 ? 0 : now_ms();
    for (;;) {
        call.wait.cancel = token_take();
        if (call.wait.cancel == NULL) {
            outcome.error = tddp_rb_error(TDDP_OUT_OF_MEMORY);
            return outcome;
        }
        call.wait.timeout_ms = time_left(timeout_ms, started);
        call.status = TDDP_CANCELED;
        call.ran = false;
        /* The variant that runs nothing and raises nothing when an interrupt is already pending. */
        rb_thread_call_without_gvl2(run, &call, unblock, call.wait.cancel);
        if (call.status == TDDP_OK)
            return outcome;
        if (call.status != TDDP_CANCELED) {
            outcome.error = tddp_rb_error(call.status);
            return outcome;
        }
        VALUE error = call.ran && once ? tddp_rb_error(TDDP_CANCELED) : Qnil;
        rb_protect(check_interrupts, Qnil, &outcome.state);
        if (outcome.state != 0)
            return outcome;
        if (!NIL_P(error)) {
            outcome.error = error;
            return outcome;
        }
    }
}

void tddp_rb_settle(tddp_rb_outcome outcome)
{
    if (outcome.state != 0)
        rb_jump_tag(outcome.state);
    if (!NIL_P(outcome.error))
        rb_exc_raise(outcome.error);
}

/* --- waiting inside libtorch's backward ------------------------------------------------------- */

typedef struct through_call {
    tddp_status (*body)(void *data, tddp_cancel *cancel);
    void *data;
    tddp_cancel *cancel;
    tddp_status status;
} through_call;

static void *run_through(void *data)
{
    through_call *call = data;
    call->status = call->body(call->data, call->cancel);
    return NULL;
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

/*
 * Something wants this thread's attention in the midst of backward, whose C++ frames no jump may
 * cross. A signal handler is run, and if it returns backward goes on. What would be raised is left
 * pending, or made pending again, for Ruby to raise once backward has returned with an error.
 */
static bool may_go_on(void)
{
    int state = 0;
    VALUE pending = rb_protect(has_pending_interrupt, rb_thread_current(), &state);
    if (state == 0 && RTEST(pending))
        return false;
    state = 0;
    rb_protect(check_interrupts, Qnil, &state);
    if (state == 0)
        return true;
    VALUE error = rb_errinfo();
    rb_set_errinfo(Qnil);
    if (rb_obj_is_kind_of(error, rb_eException)) {
        rb_protect(raise_later, error, &state);
        if (state != 0)
            rb_set_errinfo(Qnil);
    }
    return false;
}

tddp_status tddp_rb_through(tddp_status (*body)(void *data, tddp_cancel *cancel), void *data)
{
    if (!ruby_native_thread_p() || !ruby_thread_has_gvl_p())
        return body(data, NULL);
    through_call call = {.body = body, .data = data};
    do {
        call.cancel = token_take();
        if (call.cancel == NULL)
            return TDDP_OUT_OF_MEMORY;
        call.status = TDDP_CANCELED;
        rb_thread_call_without_gvl2(run_through, &call, unblock, call.cancel);
    } while (call.status == TDDP_CANCELED && may_go_on());
    if (call.status == TDDP_CANCELED)
        return tddp_fail(TDDP_CANCELED, "backward was interrupted while gradients were reduced");
    return call.status;
}

void tddp_rb_init_nogvl(void)
{
    if (pthread_key_create(&token_key, token_free) != 0)
        rb_raise(rb_eRuntimeError, "no thread-specific data left in this process");
}
