/*
 * The rendezvous thread and the mailbox between it and the agent. The thread alone uses the store,
 * whose calls block; the agent's poll must not. Orders go one way (with a cancel token that ends
 * the thread's wait), news the other (with an eventfd). Invariant: `lock` covers orders, news and
 * `over`; the token is triggered and calmed under it, so no order is missed.
 */
#include <poll.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <tddp/store.h>

#include "base/base.h"
#include "launch/rendezvous/nodes.h"
#include "net/net.h"

enum { END_MS = 1000 };

struct tddp_launch_rendezvous {
    tddp_launch_nodes nodes;
    pthread_t thread;
    pthread_mutex_t lock;
    int fd;
    tddp_launch_orders orders;
    bool joined; /* JOINED waits to be read */
    tddp_launch_world world;
    tddp_launch_news news; /* another news waits to be read */
    char text[TDDP_LAUNCH_NEWS_BYTES];
    bool over;
};

static void wake(const tddp_launch_rendezvous *rendezvous)
{
    uint64_t one = 1;
    ssize_t ignored = write(rendezvous->fd, &one, sizeof one);
    (void)ignored;
}

static void post(tddp_launch_rendezvous *rendezvous, tddp_launch_news news,
                 const tddp_launch_world *world, const char *text)
{
    pthread_mutex_lock(&rendezvous->lock);
    if (news == TDDP_LAUNCH_NEWS_JOINED) {
        rendezvous->world = *world;
        rendezvous->joined = true;
    } else {
        rendezvous->news = news;
        (void)snprintf(rendezvous->text, sizeof rendezvous->text, "%s", text);
    }
    wake(rendezvous);
    pthread_mutex_unlock(&rendezvous->lock);
}

tddp_launch_orders tddp_launch_orders_take(tddp_launch_rendezvous *rendezvous)
{
    pthread_mutex_lock(&rendezvous->lock);
    tddp_launch_orders orders = rendezvous->orders;
    rendezvous->orders = (tddp_launch_orders){0};
    tddp_cancel_reset(rendezvous->nodes.cancel);
    pthread_mutex_unlock(&rendezvous->lock);
    return orders;
}

/* Waits until the agent has cleared away this round; false if it wants no other. */
static bool await_again(tddp_launch_rendezvous *rendezvous)
{
    for (;;) {
        tddp_launch_orders orders = tddp_launch_orders_take(rendezvous);
        if (orders.quit || orders.tell == TDDP_LAUNCH_NEWS_STOPPED) {
            return false;
        }
        if (orders.again) {
            return true;
        }
        (void)!tddp_net_sleep(tddp_deadline_after_ms(60 * 1000),
                              tddp_cancel_fd(rendezvous->nodes.cancel));
    }
}

static void *body(void *data)
{
    tddp_launch_rendezvous *rendezvous = data;
    tddp_launch_nodes *nodes = &rendezvous->nodes;
    tddp_launch_world world;
    char text[TDDP_LAUNCH_NEWS_BYTES];
    if (tddp_launch_nodes_meet(nodes) != TDDP_OK) {
        post(rendezvous, TDDP_LAUNCH_NEWS_ERROR, NULL, tddp_error_message());
    } else {
        for (int round = 0;; round++) {
            tddp_launch_news news = tddp_launch_nodes_join(nodes, round, &world, text);
            if (news == TDDP_LAUNCH_NEWS_JOINED) {
                post(rendezvous, news, &world, NULL);
                news = tddp_launch_nodes_watch(nodes, round, text);
            }
            post(rendezvous, news, NULL, text);
            if (news != TDDP_LAUNCH_NEWS_FAILED || round >= nodes->options->max_restarts ||
                !await_again(rendezvous)) {
                break;
            }
        }
        tddp_launch_nodes_leave(nodes);
    }
    pthread_mutex_lock(&rendezvous->lock);
    rendezvous->over = true;
    wake(rendezvous);
    pthread_mutex_unlock(&rendezvous->lock);
    return NULL;
}

tddp_status tddp_launch_rendezvous_start(const tddp_launch_options *options, const char *run_id,
                                         int local_size, tddp_launch_rendezvous **out)
{
    tddp_launch_rendezvous *made = tddp_alloc(sizeof *made);
    if (!made) {
        return TDDP_OUT_OF_MEMORY;
    }
    made->nodes = (tddp_launch_nodes){.options = options,
                                      .run_id = run_id,
                                      .local_size = local_size,
                                      .mailbox = made,
                                      .rank = options->node_rank};
    (void)pthread_mutex_init(&made->lock, NULL);
    made->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    tddp_status status =
        made->fd < 0 ? tddp_fail_errno("eventfd") : tddp_cancel_create(&made->nodes.cancel);
    if (status == TDDP_OK) {
        status = tddp_thread_start(&made->thread, "tddp-nodes", body, made);
    }
    if (status != TDDP_OK) {
        tddp_cancel_free(made->nodes.cancel);
        tddp_close(made->fd);
        free(made);
        return status;
    }
    *out = made;
    return TDDP_OK;
}

int tddp_launch_rendezvous_fd(const tddp_launch_rendezvous *rendezvous)
{
    return rendezvous->fd;
}

tddp_launch_news tddp_launch_rendezvous_next(tddp_launch_rendezvous *rendezvous,
                                             tddp_launch_world *world, char *text)
{
    tddp_launch_news news = TDDP_LAUNCH_NEWS_NONE;
    uint64_t count;
    pthread_mutex_lock(&rendezvous->lock);
    ssize_t ignored = read(rendezvous->fd, &count, sizeof count);
    (void)ignored;
    if (rendezvous->joined) {
        rendezvous->joined = false;
        *world = rendezvous->world;
        news = TDDP_LAUNCH_NEWS_JOINED;
    } else if (rendezvous->news != TDDP_LAUNCH_NEWS_NONE) {
        news = rendezvous->news;
        rendezvous->news = TDDP_LAUNCH_NEWS_NONE;
        (void)snprintf(text, TDDP_LAUNCH_NEWS_BYTES, "%s", rendezvous->text);
    }
    pthread_mutex_unlock(&rendezvous->lock);
    return news;
}

void tddp_launch_rendezvous_tell(tddp_launch_rendezvous *rendezvous, tddp_launch_news how,
                                 const char *text)
{
    pthread_mutex_lock(&rendezvous->lock);
    rendezvous->orders.tell = how;
    (void)snprintf(rendezvous->orders.text, sizeof rendezvous->orders.text, "%s", text);
    tddp_cancel_trigger(rendezvous->nodes.cancel);
    pthread_mutex_unlock(&rendezvous->lock);
}

void tddp_launch_rendezvous_again(tddp_launch_rendezvous *rendezvous)
{
    pthread_mutex_lock(&rendezvous->lock);
    rendezvous->orders.again = true;
    tddp_cancel_trigger(rendezvous->nodes.cancel);
    pthread_mutex_unlock(&rendezvous->lock);
}

bool tddp_launch_rendezvous_over(tddp_launch_rendezvous *rendezvous)
{
    pthread_mutex_lock(&rendezvous->lock);
    bool over = rendezvous->over;
    pthread_mutex_unlock(&rendezvous->lock);
    return over;
}

/* Gives the thread a moment to end; false if it has not. */
static bool await_over(tddp_launch_rendezvous *rendezvous)
{
    int64_t deadline = tddp_deadline_after_ms(END_MS);
    while (!tddp_launch_rendezvous_over(rendezvous)) {
        uint64_t count;
        if (tddp_net_poll(rendezvous->fd, POLLIN, deadline, -1) != TDDP_OK) {
            return false;
        }
        ssize_t ignored = read(rendezvous->fd, &count, sizeof count);
        (void)ignored;
    }
    return true;
}

void tddp_launch_rendezvous_end(tddp_launch_rendezvous *rendezvous)
{
    if (!rendezvous) {
        return;
    }
    pthread_mutex_lock(&rendezvous->lock);
    rendezvous->orders.quit = true;
    tddp_cancel_trigger(rendezvous->nodes.cancel);
    pthread_mutex_unlock(&rendezvous->lock);
    if (!await_over(rendezvous)) {
        return; /* it waits for a host that does not answer: the process's end takes it along */
    }
    (void)pthread_join(rendezvous->thread, NULL);
    tddp_launch_nodes_close(&rendezvous->nodes);
    tddp_cancel_free(rendezvous->nodes.cancel);
    tddp_close(rendezvous->fd);
    (void)pthread_mutex_destroy(&rendezvous->lock);
    free(rendezvous);
}
