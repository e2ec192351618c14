/*
 * Which message is for which receive. Entered by all threads that post and finish messages.
 *
 * A message is matched with the first receive, in the order in which they were posted, that its
 * sender and its tag fit, by whichever thread of the receiver's finds its letter; messages that
 * nobody expects yet are kept. Letters that find no room in the ring to their receiver wait in a
 * list, and go when anybody of this rank's looks.
 *
 * Invariant: with the mutex held, letters of a pair are put and taken in the order of their
 * numbers; a request that is settled is in no list and may be gone.
 */
#include <stdlib.h>
#include <string.h>

#include "backend/shm/post.h"

/* A message that was not expected when it came. */
typedef struct kept {
    int from;
    tddp_shm_letter letter;
    struct kept *next;
} kept;

typedef struct link {
    uint32_t sent; /* letters put into the ring to that rank */
    uint32_t got;  /* letters taken out of the ring from it */
    _Atomic int64_t looked;
    tddp_shm_post *crowded; /* sends whose letters found no room, in their order */
    tddp_shm_post **crowded_end;
} link;

struct tddp_shm_posts {
    pthread_mutex_t mutex;
    tddp_shm_stock stock;
    uint32_t heard; /* the bell, when the rings were looked at last */
    tddp_shm_post *expecting;
    tddp_shm_post **expecting_end;
    kept *kept;
    kept **kept_end;
    int size;
    link links[];
};

typedef struct tddp_shm_posts posts;

tddp_status tddp_shm_posts_create(tddp_shm *shm, struct tddp_shm_posts **out)
{
    size_t size = (size_t)tddp_shm_size(shm);
    posts *self = tddp_alloc(sizeof *self + size * sizeof self->links[0]);
    if (!self) {
        return TDDP_OUT_OF_MEMORY;
    }
    pthread_mutex_init(&self->mutex, NULL);
    self->size = (int)size;
    self->expecting_end = &self->expecting;
    self->kept_end = &self->kept;
    for (size_t i = 0; i < size; i++) {
        self->links[i].crowded_end = &self->links[i].crowded;
    }
    *out = self;
    return TDDP_OK;
}

void tddp_shm_posts_destroy(struct tddp_shm_posts *self)
{
    if (!self) {
        return;
    }
    while (self->kept) {
        kept *next = self->kept->next;
        free(self->kept);
        self->kept = next;
    }
    pthread_mutex_destroy(&self->mutex);
    free(self);
}

/* --- lists, with the mutex held -------------------------------------------------------------- */

static void append(tddp_shm_post ***end, tddp_shm_post *post)
{
    post->next = NULL;
    **end = post;
    *end = &post->next;
}

static void unlink_at(tddp_shm_post **at, tddp_shm_post ***end)
{
    if (*end == &(*at)->next) {
        *end = at;
    }
    *at = (*at)->next;
}

static void remove_from(tddp_shm_post **first, tddp_shm_post ***end, const tddp_shm_post *post)
{
    for (tddp_shm_post **at = first; *at; at = &(*at)->next) {
        if (*at == post) {
            unlink_at(at, end);
            return;
        }
    }
}

static bool fits(const tddp_shm_post *post, int from, const tddp_shm_letter *letter)
{
    return post->op->tag == letter->tag &&
           (post->op->peer == TDDP_ANY_SOURCE || post->op->peer == from);
}

static void settle(tddp_shm_post *post, int peer, const tddp_shm_letter *letter)
{
    post->peer = peer;
    memcpy(&post->letter, letter, sizeof *letter);
    /* From here on it may be gone. */
    atomic_store_explicit(&post->settled, true, memory_order_release);
}

/* A letter has come: for the first receive that it fits, or to be kept. */
static tddp_status deliver(posts *self, int from, const tddp_shm_letter *letter, bool *settled)
{
    for (tddp_shm_post **at = &self->expecting; *at; at = &(*at)->next) {
        if (fits(*at, from, letter)) {
            tddp_shm_post *post = *at;
            unlink_at(at, &self->expecting_end);
            settle(post, from, letter);
            *settled = true;
            return TDDP_OK;
        }
    }
    kept *added = tddp_alloc(sizeof *added);
    if (!added) {
        return TDDP_OUT_OF_MEMORY;
    }
    added->from = from;
    memcpy(&added->letter, letter, sizeof *letter);
    *self->kept_end = added;
    self->kept_end = &added->next;
    return TDDP_OK;
}

/* Takes in what has come since the bell was heard last. */
static tddp_status take_in(tddp_shm *shm, posts *self, bool *settled)
{
    uint32_t bell = tddp_shm_bell(shm);
    if (bell == self->heard) {
        return TDDP_OK;
    }
    for (int from = 0; from < self->size; from++) {
        tddp_shm_letter letter;
        link *of = &self->links[from];
        while (from != tddp_shm_rank(shm) && tddp_shm_letter_get(shm, from, of->got, &letter)) {
            of->got++;
            tddp_status status = deliver(self, from, &letter, settled);
            if (status) {
                return status;
            }
        }
    }
    self->heard = bell;
    return TDDP_OK;
}

/* Puts letters into the ring to a rank while there is room. True if there was for one. */
static bool put_out(tddp_shm *shm, posts *self, int to)
{
    link *of = &self->links[to];
    bool any = false;
    while (of->crowded && tddp_shm_letter_put(shm, to, of->sent, &of->crowded->letter)) {
        tddp_shm_post *post = of->crowded;
        unlink_at(&of->crowded, &of->crowded_end);
        of->sent++;
        any = true;
        atomic_store_explicit(&post->settled, true, memory_order_release);
    }
    return any;
}

/* --- for all requests ------------------------------------------------------------------------ */

tddp_status tddp_shm_posts_bring_on(tddp_shm *shm)
{
    posts *self = tddp_shm_posts_of(shm);
    bool own = false;
    pthread_mutex_lock(&self->mutex);
    tddp_status status = take_in(shm, self, &own);
    for (int to = 0; to < self->size; to++) {
        if (self->links[to].crowded && put_out(shm, self, to)) {
            own = true;
            tddp_shm_bell_ring(shm, to);
        }
    }
    pthread_mutex_unlock(&self->mutex);
    if (own) {
        tddp_shm_bell_ring(shm, tddp_shm_rank(shm));
    }
    return status;
}

void tddp_shm_posts_add_send(tddp_shm *shm, tddp_shm_post *self)
{
    posts *all = tddp_shm_posts_of(shm);
    int to = self->peer;
    pthread_mutex_lock(&all->mutex);
    append(&all->links[to].crowded_end, self);
    bool any = put_out(shm, all, to);
    pthread_mutex_unlock(&all->mutex);
    if (any) {
        tddp_shm_bell_ring(shm, to);
    }
}

void tddp_shm_posts_add_receive(tddp_shm *shm, tddp_shm_post *self)
{
    posts *all = tddp_shm_posts_of(shm);
    pthread_mutex_lock(&all->mutex);
    kept **at = &all->kept;
    while (*at && !fits(self, (*at)->from, &(*at)->letter)) {
        at = &(*at)->next;
    }
    kept *found = *at;
    if (found) {
        if (all->kept_end == &found->next) {
            all->kept_end = at;
        }
        *at = found->next;
        settle(self, found->from, &found->letter);
    } else {
        append(&all->expecting_end, self);
    }
    pthread_mutex_unlock(&all->mutex);
    free(found);
}

void tddp_shm_posts_remove(tddp_shm *shm, const tddp_shm_post *self)
{
    posts *all = tddp_shm_posts_of(shm);
    pthread_mutex_lock(&all->mutex);
    if (self->op->kind == TDDP_OP_SEND) {
        link *of = &all->links[self->peer];
        remove_from(&of->crowded, &of->crowded_end, self);
    } else {
        remove_from(&all->expecting, &all->expecting_end, self);
    }
    pthread_mutex_unlock(&all->mutex);
}

/* --- blocks ---------------------------------------------------------------------------------- */

uint32_t tddp_shm_posts_take_parcel(tddp_shm *shm, size_t bytes)
{
    posts *all = tddp_shm_posts_of(shm);
    pthread_mutex_lock(&all->mutex);
    uint32_t parcel = tddp_shm_parcel_take(shm, &all->stock, bytes);
    pthread_mutex_unlock(&all->mutex);
    return parcel;
}

uint32_t tddp_shm_posts_take_block(tddp_shm *shm, tddp_shm_block_kind kind)
{
    posts *all = tddp_shm_posts_of(shm);
    pthread_mutex_lock(&all->mutex);
    uint32_t block = tddp_shm_block_take(shm, &all->stock, kind);
    pthread_mutex_unlock(&all->mutex);
    return block;
}

void tddp_shm_posts_free_block(tddp_shm *shm, tddp_shm_block_kind kind, uint32_t block)
{
    posts *all = tddp_shm_posts_of(shm);
    pthread_mutex_lock(&all->mutex);
    tddp_shm_block_free(shm, &all->stock, kind, block);
    pthread_mutex_unlock(&all->mutex);
}

bool tddp_shm_posts_time_to_look(tddp_shm *shm, int peer, int64_t now)
{
    _Atomic int64_t *looked = &tddp_shm_posts_of(shm)->links[peer].looked;
    if (now - atomic_load_explicit(looked, memory_order_relaxed) < TDDP_SHM_LOOK_NS) {
        return false;
    }
    atomic_store_explicit(looked, now, memory_order_relaxed);
    return true;
}
