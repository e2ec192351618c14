/*
 * Addresses, sockets, exact sends and receives, and this host's names. Every wait takes a deadline
 * (base's) and a descriptor whose readability ends it early (tddp_cancel_fd(), or -1). Statuses:
 * TDDP_TIMEOUT, TDDP_CANCELED, TDDP_NETWORK, TDDP_SYSTEM, TDDP_INVALID_ARGUMENT. All sockets made
 * here are CLOEXEC and non-blocking, and no send raises SIGPIPE.
 */
#ifndef TDDP_NET_H
#define TDDP_NET_H

#include <netinet/in.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

#include <tddp/status.h>

/* --- address.c ------------------------------------------------------------------------------- */

typedef struct tddp_net_address {
    socklen_t length;
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } of;
} tddp_net_address;

/* Room for any text that the functions below write. */
enum { TDDP_NET_TEXT_BYTES = 96 };

/* Reads a numeric IPv4 or IPv6 address ("fe80::1%eth0" and "[::1]" too); false if it is none. */
bool tddp_net_parse(const char *host, int port, tddp_net_address *out);

/* Writes "127.0.0.1" or "::1"; returns `text`. */
const char *tddp_net_host_text(const tddp_net_address *address, char text[TDDP_NET_TEXT_BYTES]);

/* Writes "127.0.0.1:29500" or "[::1]:29500"; returns `text`. */
const char *tddp_net_text(const tddp_net_address *address, char text[TDDP_NET_TEXT_BYTES]);

int tddp_net_port(const tddp_net_address *address);
bool tddp_net_is_loopback(const tddp_net_address *address);

/* Refuses a port outside min to 65535 with a text that names it. */
TDDP_NODISCARD tddp_status tddp_net_check_port(int64_t port, int min);

/*
 * Splits "host", "host:port", "[v6]:port" or a bare IPv6 address. `*port` becomes `default_port` if
 * the text has none (a negative default makes that an error). free() the host.
 */
TDDP_NODISCARD tddp_status tddp_net_split_endpoint(const char *text, int default_port, char **host,
                                                   int *port);

/* --- resolve.c ------------------------------------------------------------------------------- */

/* More of them than any host of a job has. */
enum { TDDP_NET_MAX_ADDRESSES = 16 };

/* The addresses of a host, at most `capacity`, in the system's order. A numeric host needs no
 * lookup; a name is looked up on a helper thread, so that the deadline and the cancel descriptor
 * count. */
TDDP_NODISCARD tddp_status tddp_net_resolve(const char *host, int port, int64_t deadline_ns,
                                            int cancel_fd, tddp_net_address *out, size_t capacity,
                                            size_t *count);

/* --- socket.c -------------------------------------------------------------------------------- */

/* Waits until `fd` has one of `events` (or has failed: the next call on it reports that). */
TDDP_NODISCARD tddp_status tddp_net_poll(int fd, short events, int64_t deadline_ns, int cancel_fd);

/* Sleeps until the deadline; TDDP_OK at its end, TDDP_CANCELED before. */
TDDP_NODISCARD tddp_status tddp_net_sleep(int64_t deadline_ns, int cancel_fd);

/* Tries each address once, sharing the time out among them. TDDP_NETWORK's text is "cannot connect
 * to ADDRESS: reason", of the last one, and errno is that reason. */
TDDP_NODISCARD tddp_status tddp_net_connect_any(const tddp_net_address *to, size_t count,
                                                int64_t deadline_ns, int cancel_fd, int *out);

/* Resolves and tries each address once. */
TDDP_NODISCARD tddp_status tddp_net_connect_host(const char *host, int port, int64_t deadline_ns,
                                                 int cancel_fd, int *out);

/* Listens on a numeric address, or (NULL) on every address: IPv6 and IPv4 together where the system
 * has IPv6, else IPv4. Port 0: the system chooses. TDDP_ADDRESS_IN_USE names address and port. */
TDDP_NODISCARD tddp_status tddp_net_listen(const char *host, int port, int *out);

/* Accepts one connection without waiting; false with errno set if there is none or it failed. */
bool tddp_net_accept(int listen_fd, int *out, tddp_net_address *from);

/* Makes an inherited descriptor CLOEXEC and non-blocking. */
TDDP_NODISCARD tddp_status tddp_net_adopt(int fd);

/* This end's and the other end's address. */
TDDP_NODISCARD tddp_status tddp_net_local(int fd, tddp_net_address *out);
TDDP_NODISCARD tddp_status tddp_net_peer(int fd, tddp_net_address *out);

/* --- transfer.c ------------------------------------------------------------------------------ */

/*
 * Send or receive exactly `size` bytes. `*done` counts those moved: it starts at 0 and, after
 * TDDP_TIMEOUT or TDDP_CANCELED, the same call continues from there. TDDP_NETWORK: the connection
 * is gone.
 */
TDDP_NODISCARD tddp_status tddp_net_send(int fd, const void *data, size_t size, size_t *done,
                                         int64_t deadline_ns, int cancel_fd);
TDDP_NODISCARD tddp_status tddp_net_recv(int fd, void *data, size_t size, size_t *done,
                                         int64_t deadline_ns, int cancel_fd);

/* Ends a connection for both sides, also when a forked child still holds the descriptor. */
void tddp_net_close(int fd);

/* --- host.c ---------------------------------------------------------------------------------- */

enum { TDDP_NET_HOST_ID_BYTES = 17 };

/* A text that is equal in two processes if and only if they reach each other over loopback: the
 * kernel's boot id and the network namespace, as a short hash: a world has many of them. */
TDDP_NODISCARD tddp_status tddp_net_host_id(char text[TDDP_NET_HOST_ID_BYTES]);

/* The address by which processes of this host reach each other: "127.0.0.1", or "::1" where the
 * loopback interface has no IPv4. */
const char *tddp_net_loopback(void);

/* The address of a network interface, IPv4 before IPv6; the text of a failure names those there
 * are. Its port is 0. */
TDDP_NODISCARD tddp_status tddp_net_interface_address(const char *name, tddp_net_address *out);

/* This host's address on the way to a peer. Sends nothing. Its port is 0. */
TDDP_NODISCARD tddp_status tddp_net_address_towards(const char *host, int port, int64_t deadline_ns,
                                                    int cancel_fd, tddp_net_address *out);

#endif
