/*
 * Programs of steps: appends them, and executes them in order. On the thread that runs the
 * operation, one at a time.
 *
 * Invariants: a step is executed once, except that one that waits is tried again after an
 * interruption. A transfer belongs to the step that has posted it until it is complete; so what a
 * failure leaves under way is found and released before the caller's memory is its own again. The
 * headers, by which the other ranks learn of a mismatch, go on then: their memory is the links'.
 */
#include <stdlib.h>
#include <string.h>

#include "backend/coll/coll.h"

/* Half of the smallest first-level cache: the factor is applied while the sum is in the cache. */
#define BLOCK_BYTES ((size_t)16 * 1024)

enum { FIRST_STEPS = 64 };

/* --- tags of payloads ------------------------------------------------------------------------ */

/* 26 bits of a digest of what both ends know, and the lowest 16 bits of the sequence number above:
 * payloads of different calls never match. The fingerprint is left out, since a rank without one
 * agrees with all; so are factors, which may differ. The operation's data and number are its own,
 * also where it is a part of another. */
static uint64_t tag_of(const tddp_op *op, int rank, int peer, bool sends, tddp_coll_phase phase)
{
    tddp_op standalone = *op;
    standalone.part_of = NULL;
    tddp_call call = tddp_call_of(&standalone, rank, peer);
    call.sends = call.expects = sends ? call.sends : call.expects;
    call.fingerprint = 0;
    call.premul = 0;
    const uint64_t hash = tddp_digest(TDDP_DIGEST_START, &call, sizeof call);
    return TDDP_COLL_TAG(0, (call.sequence & 0xffffu) << 29 | (hash >> 38) << 3 | (uint64_t)phase);
}

/* --- building -------------------------------------------------------------------------------- */

void tddp_coll_add(tddp_coll *coll, tddp_coll_step step)
{
    tddp_coll_program *program = &coll->program;
    if (program->count == program->capacity && !program->incomplete) {
        tddp_coll_step *grown =
            tddp_resize(program->steps, 2 * program->capacity * sizeof *program->steps);
        program->incomplete = !grown;
        program->steps = grown ? grown : program->steps;
        program->capacity *= grown ? 2 : 1;
    }
    if (!program->incomplete) {
        program->steps[program->count++] = step;
    }
}

size_t tddp_coll_send(tddp_coll *coll, const tddp_op *op, int peer, tddp_coll_phase phase,
                      const char *data, size_t bytes)
{
    const uint64_t tag = tag_of(op, coll->rank, peer, true, phase);
    ADD_STEP(coll, .kind = STEP_SEND, .peer = peer, .from = data, .bytes = bytes, .tag = tag);
    return coll->program.count - 1;
}

size_t tddp_coll_recv(tddp_coll *coll, const tddp_op *op, int peer, tddp_coll_phase phase,
                      char *data, size_t bytes)
{
    const uint64_t tag = tag_of(op, coll->rank, peer, false, phase);
    ADD_STEP(coll, .kind = STEP_RECV, .peer = peer, .to = data, .bytes = bytes, .tag = tag);
    return coll->program.count - 1;
}

void tddp_coll_await_step(tddp_coll *coll, int peer, size_t posted)
{
    ADD_STEP(coll, .kind = STEP_WAIT, .peer = peer, .posted = posted);
}

void tddp_coll_copy(tddp_coll *coll, void *to, const void *from, size_t bytes)
{
    if (bytes > 0 && to != from) {
        ADD_STEP(coll, .kind = STEP_COPY, .to = to, .from = from, .bytes = bytes);
    }
}

void tddp_coll_scale(tddp_coll *coll, void *data, size_t bytes, double factor)
{
    if (bytes > 0 && factor != 1.0) {
        ADD_STEP(coll, .kind = STEP_SCALE, .to = data, .bytes = bytes, .factor = factor);
    }
}

void tddp_coll_combine(tddp_coll *coll, void *into, const void *from, size_t bytes, double factor)
{
    ADD_STEP(coll, .kind = STEP_COMBINE, .to = into, .from = from, .bytes = bytes,
             .factor = factor);
}

void tddp_coll_send_header(tddp_coll *coll, int peer, const void *data, size_t bytes)
{
    ADD_STEP(coll, .kind = STEP_EXPECT, .peer = peer);
    ADD_STEP(coll, .kind = STEP_ANSWER, .peer = peer, .from = data, .bytes = bytes);
}

void tddp_coll_recv_headers(tddp_coll *coll)
{
    EACH_PEER(coll, peer)
    {
        ADD_STEP(coll, .kind = STEP_HEADER, .peer = peer);
    }
}

char *tddp_coll_payload(const tddp_coll *coll, int peer)
{
    const tddp_coll_link *link = &coll->links[peer];
    return link->inbox[link->next] + HEADER_BYTES;
}

char *tddp_coll_scratch(tddp_coll *coll, size_t bytes)
{
    if (bytes > coll->scratch_bytes) {
        free(coll->scratch);
        coll->scratch = tddp_alloc(bytes);
        coll->scratch_bytes = coll->scratch ? bytes : 0;
    }
    return coll->scratch;
}

tddp_status tddp_coll_make_program(tddp_coll *coll)
{
    coll->program.steps = tddp_alloc_array(FIRST_STEPS, sizeof *coll->program.steps);
    coll->program.capacity = FIRST_STEPS;
    return coll->program.steps ? TDDP_OK : TDDP_OUT_OF_MEMORY;
}

/* --- executing ------------------------------------------------------------------------------- */

/* Waits for the transfer that a step has posted, if it is not known to be complete. */
static tddp_status await_transfer(tddp_coll *coll, tddp_coll_step *step)
{
    void **transfer =
        step->kind == STEP_ANSWER ? &coll->links[step->peer].departure : &step->transfer;
    if (!*transfer) {
        return TDDP_OK;
    }
    const tddp_status status =
        tddp_coll_await(coll, &coll->program.wait, *transfer, step->peer, NULL);
    if (status == TDDP_OK) {
        tddp_coll_release(coll, transfer);
    }
    return status;
}

/* to *= factor, for `bytes` of the operation's elements */
static void scale(const tddp_op *op, char *to, size_t bytes, double factor)
{
    if (factor != 1.0) {
        tddp_scale(op->input.dtype, to, bytes / tddp_dtype_size(op->input.dtype), factor);
    }
}

static void combine(const tddp_op *op, const tddp_coll_step *step)
{
    const size_t element = tddp_dtype_size(op->input.dtype);
    const size_t block = step->factor == 1.0 ? step->bytes : BLOCK_BYTES;
    for (size_t at = 0; at < step->bytes; at += block) {
        const size_t bytes = tddp_coll_min(block, step->bytes - at);
        tddp_combine(op->reduce, op->input.dtype, step->to + at, step->from + at, bytes / element);
        scale(op, step->to + at, bytes, step->factor);
    }
}

static tddp_status execute(tddp_coll *coll, const tddp_op *op, tddp_coll_step *step)
{
    switch (step->kind) {
    case STEP_SEND:
        return tddp_coll_start_send(coll, step->peer, step->tag, step->from, step->bytes,
                                    &step->transfer);
    case STEP_RECV:
        return tddp_coll_start_recv(coll, step->peer, step->tag, step->to, step->bytes,
                                    &step->transfer);
    case STEP_WAIT:
        return await_transfer(coll, &coll->program.steps[step->posted]);
    case STEP_EXPECT:
        return tddp_coll_post_inbox(coll, step->peer);
    case STEP_ANSWER:
        return tddp_coll_post_header(coll, op, step);
    case STEP_HEADER:
        return tddp_coll_await_header(coll, op, step->peer);
    case STEP_COPY:
        memcpy(step->to, step->from, step->bytes);
        return TDDP_OK;
    case STEP_SCALE:
        scale(op, step->to, step->bytes, step->factor);
        return TDDP_OK;
    case STEP_SCALE_PEER:
        scale(op, step->to, step->bytes, coll->links[step->peer].before.theirs.premul);
        return TDDP_OK;
    case STEP_COMBINE:
        combine(op, step);
        return TDDP_OK;
    }
    return tddp_fail(TDDP_INTERNAL, "no such step");
}

tddp_status tddp_coll_execute(tddp_coll *coll, const tddp_op *op)
{
    tddp_coll_program *program = &coll->program;
    tddp_status status = TDDP_OK;
    program->wait.op = op;
    while (status == TDDP_OK && program->executed < program->count) {
        status = execute(coll, op, &program->steps[program->executed]);
        program->executed += status == TDDP_OK;
    }
    while (status == TDDP_OK && program->drained < program->count) {
        status = await_transfer(coll, &program->steps[program->drained]);
        program->drained += status == TDDP_OK;
    }
    return status;
}

void tddp_coll_end_program(tddp_coll *coll)
{
    tddp_coll_program *program = &coll->program;
    for (size_t i = program->drained; i < program->count; i++) {
        tddp_coll_release(coll, &program->steps[i].transfer);
    }
    program->count = program->executed = program->drained = 0;
    program->incomplete = false;
    program->sequence = 0;
}
