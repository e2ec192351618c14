/*
 * Against a model: calls in random order, of random size, in random memory, drawn equally by all
 * ranks; and messages that each rank draws for itself. Interrupted operations resume.
 */
#include "moving.h"
#include "ranks.h"

/* A random sequence that depends only on its seed. */
static uint32_t draw(uint32_t *seed, uint32_t below)
{
    *seed = *seed * 1664525u + 1013904223u;
    return (*seed >> 8) % below;
}

static size_t draw_count(uint32_t *seed)
{
    static const size_t limits[] = {1, 64, 2100, 5000, 70000, 300000};
    return draw(seed, (uint32_t)limits[draw(seed, sizeof limits / sizeof *limits)] + 1);
}

static void sum(mover *it)
{
    moving_buffer buffer = moving_make(it, it->count);
    int32_t *data = buffer.buffer.data;
    buffer.buffer.dtype = TDDP_INT32;
    for (size_t i = 0; i < it->count; i++) {
        data[i] = it->rank + (int32_t)i;
    }
    CHECK_OK(tddp_all_reduce(it->group, buffer.buffer, TDDP_REDUCE_SUM, 0, NULL));
    for (size_t i = 0; i < it->count; i++) {
        CHECK_INT(data[i], it->size * (it->size - 1) / 2 + it->size * (int32_t)i);
    }
    moving_drop(&buffer);
}

static void in_any_order(shm_rank *rank)
{
    mover it = {.group = rank->group, .rank = rank->rank, .size = rank->size};
    uint32_t seed = *(uint32_t *)rank->data;
    for (int i = 0; i < 150; i++) {
        it.dtype = TDDP_INT32;
        it.memory = (moving_memory)draw(&seed, MOVING_MEMORIES);
        it.count = draw_count(&seed);
        uint32_t kind = draw(&seed, MOVING_KINDS + 2);
        int root = (int)draw(&seed, (uint32_t)rank->size);
        if (kind == MOVING_KINDS) {
            CHECK_OK(tddp_barrier(it.group, NULL));
        } else if (kind > MOVING_KINDS) {
            sum(&it);
        } else {
            moving_call(&it, (int)kind, root);
        }
    }
}

MULTI_TEST(calls_in_any_order, 1, 120)
{
    for (uint32_t seed = 1; seed <= 3; seed++) {
        run_shm_groups(SHM_PROCESSES, 1 + (int)seed, in_any_order, &seed);
        run_shm_groups(SHM_THREADS, 1 + (int)seed, in_any_order, &seed);
    }
}

/* --- messages -------------------------------------------------------------------------------- */

enum { MESSAGES = 300, TAGS = 3, LARGE_BYTES = 100000 };

/* A message from one rank to another, drawn equally by both. */
typedef struct message {
    uint32_t tag;
    size_t bytes;
    unsigned char *data;
    tddp_work *work;
} message;

static void draw_messages(message *all, int from, int to, uint32_t seed)
{
    seed += (uint32_t)(from * 17 + to);
    for (int i = 0; i < MESSAGES; i++) {
        all[i].tag = draw(&seed, TAGS);
        all[i].bytes = draw(&seed, 8) == 0 ? draw(&seed, LARGE_BYTES) : draw(&seed, 3000);
        all[i].data = malloc(all[i].bytes + 1);
        CHECK(all[i].data != NULL);
    }
}

static unsigned char content(int from, int number, size_t k)
{
    return (unsigned char)((size_t)from * 91 + (size_t)number * 7 + k * 3 + k / 256);
}

/* Posts the next send to the peer. */
static void send_next(const shm_rank *rank, message *all, int number, int peer)
{
    message *it = &all[number];
    for (size_t k = 0; k < it->bytes; k++) {
        it->data[k] = content(rank->rank, number, k);
    }
    CHECK_OK(tddp_send(rank->group, shm_buffer(it->data, it->bytes, TDDP_UINT8), peer, it->tag,
                       &it->work));
}

/* Posts the receive of the next message with some tag; messages of a tag match in order. */
static bool receive_next(const shm_rank *rank, message *all, uint32_t tag, int peer)
{
    int number = 0;
    while (number < MESSAGES && (all[number].work || all[number].tag != tag)) {
        number++;
    }
    if (number == MESSAGES) {
        return false;
    }
    message *it = &all[number];
    CHECK_OK(tddp_recv(rank->group, shm_buffer(it->data, it->bytes, TDDP_UINT8), peer, it->tag,
                       &it->work));
    return true;
}

static void finish_messages(message *all, int from, bool received)
{
    for (int i = 0; i < MESSAGES; i++) {
        CHECK_OK(tddp_work_wait(all[i].work, NULL));
        tddp_work_release(all[i].work);
        for (size_t k = 0; k < all[i].bytes && received; k++) {
            CHECK_INT(all[i].data[k], content(from, i, k));
        }
        free(all[i].data);
    }
}

static void messages(shm_rank *rank)
{
    static _Thread_local message out[4][MESSAGES];
    static _Thread_local message in[4][MESSAGES];
    uint32_t local_seed = (uint32_t)rank->rank + 77;
    int sent[4] = {0};
    int left = 0;
    memset(out, 0, sizeof out);
    memset(in, 0, sizeof in);
    for (int peer = 0; peer < rank->size; peer++) {
        if (peer != rank->rank) {
            draw_messages(out[peer], rank->rank, peer, 5);
            draw_messages(in[peer], peer, rank->rank, 5);
            left += 2 * MESSAGES;
        }
    }
    while (left > 0) {
        int peer = (int)draw(&local_seed, (uint32_t)rank->size);
        if (peer == rank->rank) {
            continue;
        }
        if (draw(&local_seed, 2) == 0) {
            left -= receive_next(rank, in[peer], draw(&local_seed, TAGS), peer);
        } else if (sent[peer] < MESSAGES) {
            send_next(rank, out[peer], sent[peer]++, peer);
            left--;
        }
    }
    for (int peer = 0; peer < rank->size; peer++) {
        if (peer != rank->rank) {
            finish_messages(out[peer], rank->rank, false);
            finish_messages(in[peer], peer, true);
        }
    }
}

MULTI_TEST(messages_in_any_order, 1, 120)
{
    run_shm_groups(SHM_PROCESSES, 2, messages, NULL);
    run_shm_groups(SHM_THREADS, 2, messages, NULL);
    run_shm_groups(SHM_PROCESSES, 3, messages, NULL);
}

/* --- interruptions --------------------------------------------------------------------------- */

/* More chunks than staging holds, and fewer. */
enum { LONG_PART = 600011, SHORT_PART = 70001 };

typedef struct interrupted {
    shm_rank *rank;
    tddp_cancel *cancel;
    unsigned char *in;
    unsigned char *out;
    uint32_t local_seed;
    int times; /* of interruptions */
} interrupted;

/* Runs one operation, interrupted at random moments that differ between ranks. */
static void run_resuming(interrupted *it, tddp_op *op)
{
    const tddp_backend_v1 *backend = tddp_shm_backend();
    for (;;) {
        tddp_cancel_reset(it->cancel);
        if (draw(&it->local_seed, 3) > 0) {
            tddp_cancel_trigger(it->cancel);
        }
        op->cancel = draw(&it->local_seed, 4) > 0 ? it->cancel : NULL;
        op->awaited = draw(&it->local_seed, 2) == 0;
        tddp_status status = backend->run[op->kind](it->rank->shm, op);
        if (status == TDDP_OK) {
            return;
        }
        CHECK_STATUS(status, TDDP_CANCELED);
        it->times++;
    }
}

static void run_interrupted(interrupted *it, tddp_op_kind kind, int turn)
{
    int size = it->rank->size;
    int rank = it->rank->rank;
    tddp_op op = shm_op(it->rank, kind);
    tddp_buffer send_parts[4];
    tddp_buffer recv_parts[4];
    bool is_all_gather = kind == TDDP_OP_ALL_GATHER;
    bool is_broadcast = kind == TDDP_OP_BROADCAST;
    size_t part_bytes = turn < 3 ? LONG_PART : SHORT_PART;
    for (int peer = 0; peer < size; peer++) {
        send_parts[peer] = shm_buffer(it->in + (size_t)peer * part_bytes, part_bytes, TDDP_UINT8);
        recv_parts[peer] = shm_buffer(it->out + (size_t)peer * part_bytes, part_bytes, TDDP_UINT8);
        moving_fill(send_parts[peer], rank + turn, is_all_gather ? 0 : peer);
    }
    op.root = turn % size;
    op.input = is_broadcast || is_all_gather
                   ? send_parts[0]
                   : shm_buffer(it->in, part_bytes * (size_t)size, TDDP_UINT8);
    op.output =
        is_broadcast ? op.input : shm_buffer(it->out, part_bytes * (size_t)size, TDDP_UINT8);
    op.input_parts = kind == TDDP_OP_ALL_TO_ALL ? send_parts : NULL;
    op.output_parts = is_broadcast ? NULL : recv_parts;
    run_resuming(it, &op);
    for (int peer = 0; peer < size; peer++) {
        if (is_broadcast) {
            moving_check(send_parts[0], op.root + turn, 0);
        } else {
            moving_check(recv_parts[peer], peer + turn, is_all_gather ? 0 : rank);
        }
    }
}

static void interruptions(shm_rank *rank)
{
    static const tddp_op_kind kinds[] = {TDDP_OP_BROADCAST, TDDP_OP_ALL_GATHER, TDDP_OP_ALL_TO_ALL};
    size_t bytes = (size_t)LONG_PART * (size_t)rank->size;
    interrupted it = {.rank = rank, .local_seed = (uint32_t)rank->rank * 7 + 1};
    CHECK_OK(tddp_cancel_create(&it.cancel));
    for (int registered = 0; registered < 2; registered++) {
        void *handles[2] = {0};
        void *data[2];
        for (int i = 0; i < 2; i++) {
            if (registered) {
                CHECK_OK(tddp_shm_allocate(rank->shm, bytes, &handles[i], &data[i]));
            } else {
                data[i] = malloc(bytes);
                CHECK(data[i] != NULL);
            }
        }
        it.in = data[0];
        it.out = data[1];
        for (int turn = 0; turn < 36; turn++) {
            run_interrupted(&it, kinds[turn % 3], turn);
        }
        for (int i = 0; i < 2; i++) {
            if (registered) {
                tddp_shm_deallocate(handles[i]);
            } else {
                free(data[i]);
            }
        }
    }
    CHECK(rank->size == 1 || it.times > 0);
    tddp_cancel_free(it.cancel);
}

MULTI_TEST(interrupted_exchanges_resume, 1, 120)
{
    for (int size = 1; size <= 4; size++) {
        run_shm(SHM_PROCESSES, size, interruptions, NULL);
        run_shm(SHM_THREADS, size, interruptions, NULL);
    }
}
