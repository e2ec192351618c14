/*
 * The parts of the server.
 *
 *   server.c    start, stop, thread, event loop
 *   listen.c    where it listens
 *   settings.c  its limits
 *   clients.c   connections: bytes in, bytes out
 *   lines.c     what is logged of clients
 *   admit.c     admission and time limits of clients
 *   buffers.c   the memory of all clients' buffers
 *   await_clients.c   waits for the clients to leave
 *   requests.c  executes requests
 *   waits.c     which clients wait for a key
 *   watches.c   which clients watch a prefix
 *   ephemeral.c keys that go with their client
 *
 * All but start and stop run on the server's one thread.
 */
#ifndef TDDP_STORE_SERVER_H
#define TDDP_STORE_SERVER_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/queue.h>
#include <sys/types.h>

#include "net/net.h"
#include "store/auth.h"
#include "store/map.h"
#include "store/store_impl.h"
#include "store/wire.h"
#include <tddp/store.h>

typedef struct tddp_server_client tddp_server_client;

/* One key that a client waits for: in the key's list and in its client's. */
typedef struct tddp_server_wait {
    struct tddp_server_wait *next; /* of the same key */
    struct tddp_server_wait *previous;
    struct tddp_server_wait *next_of_client;
    tddp_store_entry *entry; /* its `data` is the first of the key's list; NULL once fulfilled */
    tddp_store_map *map;     /* that the entry is in */
    tddp_server_client *client;
} tddp_server_wait;

/* A key that goes with its client: `data` of its entry in the server's values. */
typedef struct tddp_server_ephemeral {
    LIST_ENTRY(tddp_server_ephemeral) of_client;
    tddp_store_entry *entry;
    tddp_server_client *client;
    int64_t limit_ns; /* 0: none */
} tddp_server_ephemeral;

struct tddp_server_client {
    LIST_ENTRY(tddp_server_client) of_all;
    STAILQ_ENTRY(tddp_server_client) of_unsent; /* those with fresh output */
    LIST_ENTRY(tddp_server_client) of_watching;
    TAILQ_ENTRY(tddp_server_client) of_late; /* that owe the rest of a message, or its reading */
    tddp_server_client *next_dropped;
    int64_t late_ns; /* 0, or the end of the period in which it must move enough */
    uint64_t moved;  /* bytes in this period */
    size_t in_bytes; /* what is counted of it in the server's sums */
    size_t out_bytes;
    int fd;
    atomic_int *slot; /* where a forked child finds the descriptor */
    tddp_net_address address;
    const tddp_wire_dialect *dialect; /* NULL until its first bytes have arrived */
    bool validated;
    bool admitted; /* its first message has arrived, and its proof where one is required */
    bool unsent;
    bool dropped;
    bool received;    /* it has sent something */
    tddp_auth *auth;  /* during the challenge and response */
    uint32_t events;  /* what epoll watches for */
    tddp_bytes in;    /* the start of a request, or requests held back */
    size_t in_needed; /* bytes before parsing is worth while */
    tddp_wire_progress in_read;
    tddp_bytes out;
    size_t out_sent; /* of those */
    tddp_server_wait *waits;
    size_t missing;       /* keys that the pending wait still lacks */
    size_t waiting_bytes; /* what its keys take */
    bool watching;        /* what begins with the prefix */
    bool changed;         /* something of it, since the client was notified */
    bool watch_waits;     /* a request is to be answered once something has changed */
    tddp_bytes prefix;
    LIST_HEAD(, tddp_server_ephemeral) ephemerals;
    int64_t received_ns; /* if it has ephemeral keys: when it sent something last */
    bool overdue;        /* it seemed too long when looked at last */
};

/* Descriptors of all connections, in a form that is consistent at every moment, since a fork may
 * copy it at any moment. */
typedef struct tddp_server_slots {
    struct tddp_server_slots *_Atomic next;
    atomic_int fds[256]; /* descriptor + 1, or 0 */
} tddp_server_slots;

/* `localhost` has two addresses. */
enum { TDDP_SERVER_LISTENERS = 2 };

/* Of lines about clients. */
typedef struct tddp_server_lines {
    int64_t since_ns; /* the moment from which lines may be written, or would have been */
    uint64_t left_out;
    char last[256]; /* of those that were left out */
} tddp_server_lines;

struct tddp_store_server {
    pthread_t thread;
    pid_t pid;
    int port;
    char address[TDDP_NET_TEXT_BYTES];     /* where this host reaches it */
    int listen_fds[TDDP_SERVER_LISTENERS]; /* -1: none */
    int epoll_fd;
    int wake_fd;
    atomic_bool stopping;
    pthread_mutex_t departures_mutex; /* guards the list and what is in it */
    tddp_waiter *departures;          /* threads that wait for the clients to leave */
    atomic_bool departures_awaited;   /* the list is not empty */
    tddp_wire_limits limits;
    uint64_t most_bytes;
    uint64_t most_clients;
    uint64_t most_pending;
    uint64_t most_buffered;
    int64_t client_timeout_ms;
    char *secret;            /* NULL: none */
    int64_t accept_again_ns; /* 0, or accepting rests until then */
    int64_t accept_logged_ns;
    tddp_server_lines lines;
    LIST_HEAD(, tddp_server_client) clients;
    uint64_t client_count;
    uint64_t pending_count; /* of those, not admitted yet */
    uint64_t in_bytes;      /* the clients' buffers */
    uint64_t out_bytes;
    uint64_t held_at; /* out_bytes when a request was held back last; 0: none is */
    TAILQ_HEAD(, tddp_server_client) late; /* the longest first */
    STAILQ_HEAD(, tddp_server_client) unsent;
    tddp_server_client *dropped;
    tddp_store_map values;   /* data: NULL, or its tddp_server_ephemeral */
    tddp_store_map queues;   /* see queue.h */
    tddp_store_map waits;    /* data: first tddp_server_wait */
    tddp_store_map barriers; /* the same */
    LIST_HEAD(, tddp_server_client) watching;
    bool changed;         /* for at least one of them */
    int64_t expire_ns;    /* 0, or no ephemeral key may have expired before */
    uint64_t old_clients; /* admitted, of PyTorch 1.13 */
    tddp_server_slots slots;
    struct tddp_store_server *next_abandoned;
    char scratch[64 << 10]; /* what was read last */
};

/* --- server.c -------------------------------------------------------------------------------- */

/* Frees values and waits, which are no longer used. */
void tddp_server_clear(tddp_store_server *server);

/* Any thread: the server's thread has something to look at. */
void tddp_server_poke(tddp_store_server *server);

/* --- listen.c -------------------------------------------------------------------------------- */

/* Listens where a server of that host does; sets `fds` (-1: none) on success. */
TDDP_NODISCARD tddp_status tddp_server_listen(const char *host, int port,
                                              int fds[TDDP_SERVER_LISTENERS]);

/* --- settings.c ------------------------------------------------------------------------------ */

/* Sets limits, time limit and secret from the options, the environment and the defaults. */
TDDP_NODISCARD tddp_status tddp_server_configure(tddp_store_server *server,
                                                 const tddp_store_server_opts *opts);

/* --- admit.c --------------------------------------------------------------------------------- */

/* Before a request of a client that is not admitted is read: whether it may send one such. */
TDDP_NODISCARD tddp_status tddp_server_may_send(tddp_store_server *server,
                                                tddp_server_client *client, unsigned char opcode);

/* Carries out a request of authentication; a failure's answer stays in client->out. */
TDDP_NODISCARD tddp_status tddp_server_authenticate(tddp_store_server *server,
                                                    tddp_server_client *client,
                                                    const tddp_wire_request *request);

/* After a request of a client that is not admitted was carried out: lets it in if that is enough.
 */
void tddp_server_admit(tddp_store_server *server, tddp_server_client *client, tddp_wire_kind kind);

/* From now on (again) the client owes something; until it is given up, or has paid. */
void tddp_server_late(tddp_store_server *server, tddp_server_client *client);
void tddp_server_in_time(tddp_store_server *server, tddp_server_client *client);

/* Drops the clients whose period is over. */
void tddp_server_late_drop(tddp_store_server *server);

/* Removes a dropped client from lists and sums. */
void tddp_server_forget(tddp_store_server *server, tddp_server_client *client);

/* Drops the oldest connection that has not sent its first message; false if there is none. */
bool tddp_server_evict(tddp_store_server *server);

/* After something was received or sent: whether the client owes anything now. `completed`: a
 * request of it was executed. */
void tddp_server_note_progress(tddp_store_server *server, tddp_server_client *client,
                               bool completed);

/* --- lines.c --------------------------------------------------------------------------------- */

/* Logs what has become of a client; of many at once a line a second, with their number. */
void tddp_server_say(tddp_store_server *server, const char *what, const tddp_net_address *address,
                     const char *why);

/* When there is a line to write; 0: there is none. */
int64_t tddp_server_lines_due(const tddp_store_server *server);

/* Once a round: writes it; at the `end` of the server also before its time. */
void tddp_server_say_rest(tddp_store_server *server, bool end);

/* --- buffers.c ------------------------------------------------------------------------------- */

/* Brings the server's sums up to date after the client's buffers have changed. */
void tddp_server_count_buffers(tddp_store_server *server, tddp_server_client *client);

/* Drops clients that hold most of what was received, until the rest is within the limit. */
void tddp_server_limit_input(tddp_store_server *server);

/* Whether there is no room for more output at all. */
bool tddp_server_is_full(const tddp_store_server *server);

/* Whether a request has to wait until clients have read their answers; tddp_server_resume() then
 * executes it. */
bool tddp_server_holds(tddp_store_server *server, const tddp_wire_request *request);

/* Executes requests that were held back, if there is room again. */
void tddp_server_resume(tddp_store_server *server);

/* --- await_clients.c ------------------------------------------------------------------------- */

/* Blocks the caller, any thread, as tddp_store_await_clients() says. `own` counts the connections
 * of this process; keys as they are stored. */
TDDP_NODISCARD tddp_status tddp_server_await_clients(tddp_store_server *server,
                                                     const atomic_int *own, const tddp_slice *keys,
                                                     size_t count, const tddp_store_call *call);

/* Server thread, once a round: wakes those whose wait is over. */
void tddp_server_check_departures(tddp_store_server *server);

/* --- clients.c ------------------------------------------------------------------------------- */

/* Takes over a connection; closes it if that fails. */
void tddp_server_client_add(tddp_store_server *server, int fd, const tddp_net_address *from);

/* Receives from a client, once. */
void tddp_server_client_receive(tddp_store_server *server, tddp_server_client *client);

/* Sends all unsent answers, in order, and continues with requests held back. */
void tddp_server_flush_unsent(tddp_store_server *server);

/* Executes what has arrived and sends all unsent answers. */
void tddp_server_client_event(tddp_store_server *server, tddp_server_client *client,
                              uint32_t events);

/* Executes the complete requests in what a client has sent, and keeps the rest. */
void tddp_server_client_take(tddp_store_server *server, tddp_server_client *client,
                             const char *data, size_t size);

/* Ends a client with a line that says why (NULL: it left by itself). Freed later, by
 * tddp_server_clients_reap(), when nothing points to it. */
void tddp_server_client_drop(tddp_store_server *server, tddp_server_client *client,
                             const char *why);

/* Call after appending to client->out. */
void tddp_server_client_unsent(tddp_store_server *server, tddp_server_client *client);

void tddp_server_clients_reap(tddp_store_server *server);
void tddp_server_clients_drop(tddp_store_server *server); /* all of them */
void tddp_server_clients_free(tddp_store_server *server);

/* --- requests.c ------------------------------------------------------------------------------ */

/* Executes one request; a failure's text says why the client must be dropped. */
TDDP_NODISCARD tddp_status tddp_server_execute(tddp_store_server *server,
                                               tddp_server_client *client,
                                               const tddp_wire_request *request);

/* Adds a string to an answer that may be much longer than its request. */
TDDP_NODISCARD tddp_status tddp_server_put_part(const tddp_store_server *server,
                                                tddp_server_client *client, tddp_slice part);

/* Deletes a key. */
void tddp_server_delete(tddp_store_server *server, tddp_store_entry *entry);

/* --- waits.c --------------------------------------------------------------------------------- */

/* Notes that the client lacks a key of `map`. */
TDDP_NODISCARD tddp_status tddp_server_wait_for(tddp_store_map *map, tddp_server_client *client,
                                                tddp_slice key);

/* The key is there: fulfils its waits (at most `limit` of them) and answers clients that now have
 * all theirs. */
void tddp_server_wake(tddp_store_server *server, tddp_store_map *map, tddp_slice key, size_t limit);

/* Forgets what a client waits for, a change too. */
void tddp_server_wait_cancel(tddp_server_client *client);

/* --- watches.c ------------------------------------------------------------------------------- */

/* Answers a client with what begins with the prefix, now or once something of it has changed since
 * it was notified last. */
TDDP_NODISCARD tddp_status tddp_server_watch(tddp_store_server *server, tddp_server_client *client,
                                             tddp_slice prefix, bool at_once);

/* A key has got another value, or is deleted. */
void tddp_server_note_change(tddp_store_server *server, tddp_slice key);

/* Once a round: answers those whose prefix has changed, and sends the answers. */
void tddp_server_answer_watches(tddp_store_server *server);

/* Forgets what a client watches. */
void tddp_server_watch_end(tddp_server_client *client);

/* --- ephemeral.c ----------------------------------------------------------------------------- */

/* The key, which is stored, is the client's from now on, with a limit (0: none). */
TDDP_NODISCARD tddp_status tddp_server_own(tddp_store_server *server, tddp_server_client *client,
                                           tddp_store_entry *entry, int64_t limit_ms);

/* It is an ordinary key from now on, or none soon. */
void tddp_server_disown(tddp_store_server *server, tddp_store_entry *entry);

/* The client has sent something. */
void tddp_server_note_received(tddp_server_client *client);

/* Deletes the keys of clients that have sent nothing for too long, and of one that leaves. */
void tddp_server_expire(tddp_store_server *server);
void tddp_server_delete_owned(tddp_store_server *server, tddp_server_client *client);

#endif
