/* Calls in random order, of random size, in random memory, as all ranks draw alike; and messages
 * beside them as each draws for itself, against a model. Interrupted operations go on. */
#include "moving.h"
#include "ranks.h"

/* A sequence that is equal wherever its seed is. */
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

enum { MESSAGES = 300, TAGS = 3, MOST = 100000 };

/* What one rank sends another: drawn alike by both. */
typedef struct parcel {
    uint32_t tag;
    size_t bytes;
    unsigned char *data;
    tddp_work *work;
} parcel;

static void draw_parcels(parcel *all, int from, int to, uint32_t seed)
{
    seed += (uint32_t)(from * 17 + to);
    for (int i = 0; i < MESSAGES; i++) {
        all[i].tag = draw(&seed, TAGS);
        all[i].bytes = draw(&seed, 8) == 0 ? draw(&seed, MOST) : draw(&seed, 3000);
        all[i].data = malloc(all[i].bytes + 1);
        CHECK(all[i].data != NULL);
    }
}

static unsigned char content(int from, int number, size_t k)
{
    return (unsigned char)((size_t)from * 91 + (size_t)number * 7 + k * 3 + k / 256);
}

/* Begins the next send to the peer. */
static void send_next(const shm_rank *rank, parcel *all, int number, int peer)
{
    parcel *it = &all[number];
    for (size_t k = 0; k < it->bytes; k++) {
        it->data[k] = content(rank->rank, number, k);
    }
    CHECK_OK(tddp_send(rank->group, shm_buffer(it->data, it->bytes, TDDP_UINT8), peer, it->tag,
                       &it->work));
}

/* Begins the receive of the next message with some tag; those of each tag match in order. */
static bool receive_next(const shm_rank *rank, parcel *all, uint32_t tag, int peer)
{
    int number = 0;
    while (number < MESSAGES && (all[number].work || all[number].tag != tag)) {
        number++;
    }
    if (number == MESSAGES) {
        return false;
    }
    parcel *it = &all[number];
    CHECK_OK(tddp_recv(rank->group, shm_buffer(it->data, it->bytes, TDDP_UINT8), peer, it->tag,
                       &it->work));
    return true;
}

static void finish_parcels(parcel *all, int from, bool received)
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
    static _Thread_local parcel out[4][MESSAGES];
    static _Thread_local parcel in[4][MESSAGES];
    uint32_t own = (uint32_t)rank->rank + 77;
    int sent[4] = {0};
    int left = 0;
    memset(out, 0, sizeof out);
    memset(in, 0, sizeof in);
    for (int peer = 0; peer < rank->size; peer++) {
        if (peer != rank->rank) {
            draw_parcels(out[peer], rank->rank, peer, 5);
            draw_parcels(in[peer], peer, rank->rank, 5);
            left += 2 * MESSAGES;
        }
    }
    while (left > 0) {
        int peer = (int)draw(&own, (uint32_t)rank->size);
        if (peer == rank->rank) {
            continue;
        }
        if (draw(&own, 2) == 0) {
            left -= receive_next(rank, in[peer], draw(&own, TAGS), peer);
        } else if (sent[peer] < MESSAGES) {
            send_next(rank, out[peer], sent[peer]++, peer);
            left--;
        }
    }
    for (int peer = 0; peer < rank->size; peer++) {
        if (peer != rank->rank) {
            finish_parcels(out[peer], rank->rank, false);
            finish_parcels(in[peer], peer, true);
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
enum { PIECE = 600011, SHORT_PIECE = 70001 };

typedef struct interrupted {
    shm_rank *rank;
    tddp_cancel *cancel;
    unsigned char *in;
    unsigned char *out;
    uint32_t own;
    int times; /* that something was */
} interrupted;

/* Runs one operation, of which this rank lets go every now and then, as each draws for itself. */
static void carry_out(interrupted *it, tddp_op *op)
{
    const tddp_backend_v1 *backend = tddp_shm_backend();
    for (;;) {
        tddp_cancel_reset(it->cancel);
        if (draw(&it->own, 3) > 0) {
            tddp_cancel_trigger(it->cancel);
        }
        op->cancel = draw(&it->own, 4) > 0 ? it->cancel : NULL;
        op->awaited = draw(&it->own, 2) == 0;
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
    tddp_buffer given[4];
    tddp_buffer wanted[4];
    bool gathers = kind == TDDP_OP_ALL_GATHER;
    bool spreads = kind == TDDP_OP_BROADCAST;
    size_t piece = turn < 3 ? PIECE : SHORT_PIECE;
    for (int peer = 0; peer < size; peer++) {
        given[peer] = shm_buffer(it->in + (size_t)peer * piece, piece, TDDP_UINT8);
        wanted[peer] = shm_buffer(it->out + (size_t)peer * piece, piece, TDDP_UINT8);
        moving_fill(given[peer], rank + turn, gathers ? 0 : peer);
    }
    op.root = turn % size;
    op.input = spreads || gathers ? given[0] : shm_buffer(it->in, piece * (size_t)size, TDDP_UINT8);
    op.output = spreads ? op.input : shm_buffer(it->out, piece * (size_t)size, TDDP_UINT8);
    op.input_parts = kind == TDDP_OP_ALL_TO_ALL ? given : NULL;
    op.output_parts = spreads ? NULL : wanted;
    carry_out(it, &op);
    for (int peer = 0; peer < size; peer++) {
        if (spreads) {
            moving_check(given[0], op.root + turn, 0);
        } else {
            moving_check(wanted[peer], peer + turn, gathers ? 0 : rank);
        }
    }
}

static void interruptions(shm_rank *rank)
{
    static const tddp_op_kind kinds[] = {TDDP_OP_BROADCAST, TDDP_OP_ALL_GATHER, TDDP_OP_ALL_TO_ALL};
    size_t bytes = (size_t)PIECE * (size_t)rank->size;
    interrupted it = {.rank = rank, .own = (uint32_t)rank->rank * 7 + 1};
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

MULTI_TEST(what_is_interrupted_goes_on, 1, 120)
{
    for (int size = 1; size <= 4; size++) {
        run_shm(SHM_PROCESSES, size, interruptions, NULL);
        run_shm(SHM_THREADS, size, interruptions, NULL);
    }
}
