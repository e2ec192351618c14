/*
 * Starts and stops the store server, and runs its event loop on one thread. The thread owns
 * everything but the fields set before it starts; the owner calls start and stop. In a forked child
 * the thread does not exist and its data may be inconsistent, so only descriptors are closed there,
 * and the memory stays reachable and untouched.
 */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/options.h"
#include "store/queue.h"
#include "store/server/server.h"

enum { EVENTS = 128, ACCEPTS_A_ROUND = 64, ACCEPT_REST_MS = 100, TELL_EVERY_S = 10 };

/* Servers that this process inherited by a fork: not leaked, only never used again. */
static tddp_store_server *_Atomic abandoned;

static tddp_status watch_listeners(tddp_store_server *server, bool on)
{
    for (int i = 0; i < TDDP_SERVER_LISTENERS; i++) {
        int *fd = &server->listen_fds[i];
        struct epoll_event event = {.events = EPOLLIN, .data = {.ptr = fd}};
        if (*fd >= 0 &&
            epoll_ctl(server->epoll_fd, on ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, *fd, &event)) {
            return tddp_fail_errno("epoll_ctl");
        }
    }
    return TDDP_OK;
}

/* No descriptors or memory left: the listener stays readable, so look away for a while rather than
 * spin. New connections wait in the kernel's queue. */
static void rest_from_accepting(tddp_store_server *server, int error)
{
    int64_t now = tddp_now_ns();
    if (server->accept_logged_ns == 0 ||
        now - server->accept_logged_ns > TELL_EVERY_S * TDDP_NS_PER_S) {
        tddp_log(TDDP_LOG_WARN, "store", "cannot accept clients on port %d for now: %s",
                 server->port, strerror(error));
        server->accept_logged_ns = now;
    }
    server->accept_again_ns = tddp_deadline_after_ms(ACCEPT_REST_MS);
    (void)watch_listeners(server, false);
}

/* Without descriptors accept(2) fails whether or not there is a connection to accept. */
static bool someone_knocks(int listen_fd)
{
    struct pollfd listener = {.fd = listen_fd, .events = POLLIN};
    return poll(&listener, 1, 0) != 0;
}

static void accept_clients(tddp_store_server *server, int listen_fd)
{
    for (int i = 0; i < ACCEPTS_A_ROUND; i++) {
        int fd;
        tddp_net_address from;
        if (tddp_net_accept(listen_fd, &fd, &from)) {
            tddp_server_client_add(server, fd, &from);
        } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
            int error = errno;
            if (!someone_knocks(listen_fd)) {
                return;
            }
            if (!tddp_server_evict(server)) {
                rest_from_accepting(server, error);
                return;
            }
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            return;
        }
        /* Anything else was one client's failure: go on with the next. */
    }
}

/* The milliseconds for which epoll_wait may sleep; -1: there is no end. */
static int until_something_is_due(const tddp_store_server *server)
{
    const tddp_server_client *late = TAILQ_FIRST(&server->late);
    const int64_t moments[] = {server->accept_again_ns, late ? late->late_ns : 0, server->expire_ns,
                               tddp_server_lines_due(server)};
    int64_t first = 0;
    for (size_t i = 0; i < sizeof moments / sizeof *moments; i++) {
        first = moments[i] && (first == 0 || moments[i] < first) ? moments[i] : first;
    }
    return first ? tddp_deadline_poll_ms(first) : -1;
}

/* False if the server is to stop. */
static bool take_event(tddp_store_server *server, const struct epoll_event *event)
{
    void *source = event->data.ptr;
    if (source == &server->wake_fd) {
        uint64_t ignored;
        ssize_t size = read(server->wake_fd, &ignored, sizeof ignored);
        (void)size;
        return !atomic_load(&server->stopping);
    }
    for (int i = 0; i < TDDP_SERVER_LISTENERS; i++) {
        if (source == &server->listen_fds[i]) {
            accept_clients(server, server->listen_fds[i]);
            return true;
        }
    }
    tddp_server_client_event(server, source, event->events);
    return true;
}

/* No client may wait for a server that has stopped: clients are disconnected, new ones
 * refused. The descriptors stay until it is stopped. */
static void give_up(tddp_store_server *server, int error)
{
    tddp_log(TDDP_LOG_ERROR, "store", "the server on port %d ends: epoll_wait: %s", server->port,
             strerror(error));
    tddp_server_clients_drop(server);
    tddp_server_check_departures(server);
    for (int i = 0; i < TDDP_SERVER_LISTENERS; i++) {
        if (server->listen_fds[i] >= 0) {
            (void)shutdown(server->listen_fds[i], SHUT_RDWR);
        }
    }
}

static void *server_body(void *data)
{
    tddp_store_server *server = data;
    struct epoll_event events[EVENTS];
    for (;;) {
        int count = epoll_wait(server->epoll_fd, events, EVENTS, until_something_is_due(server));
        if (count < 0 && errno != EINTR) {
            give_up(server, errno);
            return NULL;
        }
        if (server->accept_again_ns && tddp_now_ns() >= server->accept_again_ns) {
            server->accept_again_ns = 0;
            (void)watch_listeners(server, true);
        }
        for (int i = 0; i < count; i++) {
            if (!take_event(server, &events[i])) {
                tddp_server_say_rest(server, true);
                return NULL;
            }
        }
        if (count < EVENTS) { /* else what late clients sent may still be unread */
            tddp_server_late_drop(server);
            tddp_server_expire(server);
        }
        tddp_server_say_rest(server, false);
        tddp_server_resume(server);
        tddp_server_answer_watches(server);
        tddp_server_clients_reap(server);
        tddp_server_check_departures(server);
    }
}

static tddp_status adopt_listener(int fd)
{
    int listening = 0;
    socklen_t length = sizeof listening;
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &length) || !listening) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "descriptor %d is not a listening socket", fd);
    }
    return tddp_net_adopt(fd);
}

/* Where this host reaches what listens: by loopback where that is every address. */
static tddp_status find_address(tddp_store_server *server)
{
    tddp_net_address local;
    tddp_status status = tddp_net_local(server->listen_fds[0], &local);
    if (status) {
        return status;
    }
    server->port = tddp_net_port(&local);
    (void)tddp_net_host_text(&local, server->address);
    if (strcmp(server->address, "::") == 0 || strcmp(server->address, "0.0.0.0") == 0) {
        strcpy(server->address, tddp_net_loopback());
    }
    return TDDP_OK;
}

static tddp_status open_descriptors(tddp_store_server *server)
{
    server->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    server->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (server->epoll_fd < 0 || server->wake_fd < 0) {
        return tddp_fail_errno(server->epoll_fd < 0 ? "epoll_create1" : "eventfd");
    }
    struct epoll_event wake = {.events = EPOLLIN, .data = {.ptr = &server->wake_fd}};
    if (epoll_ctl(server->epoll_fd, EPOLL_CTL_ADD, server->wake_fd, &wake)) {
        return tddp_fail_errno("epoll_ctl");
    }
    return watch_listeners(server, true);
}

void tddp_server_clear(tddp_store_server *server)
{
    tddp_store_map_clear(&server->values);
    tddp_store_queues_clear(&server->queues);
    tddp_store_map_clear(&server->waits);
    tddp_store_map_clear(&server->barriers);
}

static void close_and_free(tddp_store_server *server)
{
    tddp_server_clients_free(server);
    tddp_server_clear(server);
    for (int i = 0; i < TDDP_SERVER_LISTENERS; i++) {
        tddp_net_close(server->listen_fds[i]);
    }
    tddp_close(server->epoll_fd);
    tddp_close(server->wake_fd);
    tddp_auth_secret_free(server->secret);
    pthread_mutex_destroy(&server->departures_mutex);
    free(server);
}

static tddp_status open_listeners(tddp_store_server *server, const tddp_store_server_opts *opts)
{
    if (opts->listen_fd < 0) {
        return tddp_server_listen(opts->host, opts->port, server->listen_fds);
    }
    tddp_status status = adopt_listener(opts->listen_fd);
    if (status == TDDP_OK) {
        server->listen_fds[0] = opts->listen_fd;
    }
    return status;
}

static tddp_status start(const tddp_store_server_opts *opts, tddp_store_server **out)
{
    tddp_store_server *server = tddp_alloc(sizeof *server);
    if (!server) {
        tddp_net_close(opts->listen_fd);
        return TDDP_OUT_OF_MEMORY;
    }
    server->pid = getpid();
    for (int i = 0; i < TDDP_SERVER_LISTENERS; i++) {
        server->listen_fds[i] = -1;
    }
    server->epoll_fd = -1;
    server->wake_fd = -1;
    pthread_mutex_init(&server->departures_mutex, NULL);
    tddp_status status = tddp_server_configure(server, opts);
    if (status && status != TDDP_INVALID_ARGUMENT) {
        tddp_net_close(opts->listen_fd);
    }
    status = status ? status : open_listeners(server, opts);
    status = status ? status : find_address(server);
    status = status ? status : open_descriptors(server);
    status =
        status ? status : tddp_thread_start(&server->thread, "tddp-store", server_body, server);
    if (status) {
        close_and_free(server);
    } else {
        *out = server;
    }
    return status;
}

void tddp_store_server_opts_init(tddp_store_server_opts *opts, size_t size)
{
    const tddp_store_server_opts defaults = TDDP_STORE_SERVER_OPTS_INIT;
    tddp_opts_fill(&defaults, sizeof defaults, opts, size);
}

tddp_status tddp_store_server_start(const tddp_store_server_opts *opts, tddp_store_server **out)
{
    tddp_store_server_opts all = TDDP_STORE_SERVER_OPTS_INIT;
    tddp_status status =
        tddp_opts_read("TDDP_STORE_SERVER_OPTS_INIT", opts,
                       TDDP_OPTS_UNTIL(tddp_store_server_opts, max_pending), &all, sizeof all);
    if (status == TDDP_OK && !out) {
        status = tddp_fail(TDDP_INVALID_ARGUMENT, "store server: out is NULL");
    }
    return status ? status : start(&all, out);
}

int tddp_store_server_port(const tddp_store_server *server)
{
    return server->port;
}

const char *tddp_store_server_address(const tddp_store_server *server)
{
    return server->address;
}

void tddp_server_poke(tddp_store_server *server)
{
    uint64_t one = 1;
    ssize_t ignored = write(server->wake_fd, &one, sizeof one); /* full: it is awake anyway */
    (void)ignored;
}

static void abandon(tddp_store_server *server)
{
    for (tddp_server_slots *slots = &server->slots; slots; slots = atomic_load(&slots->next)) {
        for (size_t i = 0; i < sizeof slots->fds / sizeof *slots->fds; i++) {
            tddp_close(atomic_load(&slots->fds[i]) - 1);
        }
    }
    for (int i = 0; i < TDDP_SERVER_LISTENERS; i++) {
        tddp_close(server->listen_fds[i]);
    }
    tddp_close(server->epoll_fd);
    tddp_close(server->wake_fd);
    server->next_abandoned = atomic_load(&abandoned);
    while (!atomic_compare_exchange_weak(&abandoned, &server->next_abandoned, server)) {
    }
}

void tddp_store_server_stop(tddp_store_server *server)
{
    if (!server) {
        return;
    }
    if (server->pid != getpid()) {
        abandon(server);
        return;
    }
    atomic_store(&server->stopping, true);
    tddp_server_poke(server);
    (void)pthread_join(server->thread, NULL);
    close_and_free(server);
}
