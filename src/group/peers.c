/*
 * The ranks of a group: their hosts and processes, and how error texts name them. Written once when
 * the ranks join, on the thread that creates the group; read by every thread afterwards.
 *
 * A rank's record: host id, pid, pid namespace, start time, its rank in the first group, the host's
 * name; separated by spaces. Other ranks' records are not trusted to be well formed.
 */
#include "group/peers.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { STAT_BYTES = 1024, ANNOTATED = 4 };

/* Reads a process's state and its start time, in ticks since boot, the fields 3 and 22; false if
 * they cannot be read. */
static bool read_process(int64_t pid, char *state, uint64_t *started)
{
    char path[48];
    char text[STAT_BYTES];
    (void)snprintf(path, sizeof path, "/proc/%" PRId64 "/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return false;
    }
    ssize_t size;
    do {
        size = read(fd, text, sizeof text - 1);
    } while (size < 0 && errno == EINTR);
    tddp_close(fd);
    if (size <= 0) {
        return false;
    }
    text[size] = '\0';
    /* The second field is a name in parentheses that may contain anything. */
    const char *at = strrchr(text, ')');
    return at && sscanf(at,
                        ") %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s "
                        "%*s %*s %" SCNu64,
                        state, started) == 2;
}

static uint64_t pid_namespace(void)
{
    struct stat entry;
    return stat("/proc/self/ns/pid", &entry) == 0 ? (uint64_t)entry.st_ino : 0;
}

tddp_status tddp_peers_describe_self(int root_rank, char text[TDDP_PEER_RECORD_BYTES])
{
    char host_id[TDDP_NET_HOST_ID_BYTES];
    tddp_status status = tddp_net_host_id(host_id);
    if (status) {
        return status;
    }
    char host[TDDP_PEER_HOST_BYTES];
    if (gethostname(host, sizeof host)) {
        (void)snprintf(host, sizeof host, "?");
    }
    host[sizeof host - 1] = '\0';
    char state;
    uint64_t started = 0; /* if it cannot be read */
    (void)!read_process(getpid(), &state, &started);
    (void)snprintf(text, TDDP_PEER_RECORD_BYTES, "%s %d %" PRIu64 " %" PRIu64 " %d %s", host_id,
                   (int)getpid(), pid_namespace(), started, root_rank, host);
    return TDDP_OK;
}

static bool parse(const tddp_slice *record, tddp_peer_entry *entry)
{
    int used = 0;
    /* The widths are one less than the fields' sizes. */
    return record->data && strlen(record->data) == record->size &&
           sscanf(record->data, "%16s %" SCNd64 " %" SCNu64 " %" SCNu64 " %d %71s%n",
                  entry->host_id, &entry->pid, &entry->pid_namespace, &entry->started,
                  &entry->root_rank, entry->host, &used) == 6 &&
           (size_t)used == record->size && entry->pid > 0 && tddp_mask_controls(entry->host);
}

tddp_status tddp_peers_create(const tddp_slice *records, int count, tddp_peers **out)
{
    tddp_peers *peers = tddp_alloc(sizeof *peers + (size_t)count * sizeof *peers->entries);
    if (!peers) {
        return TDDP_OUT_OF_MEMORY;
    }
    atomic_init(&peers->references, 1);
    peers->count = count;
    for (int rank = 0; rank < count; rank++) {
        if (!parse(&records[rank], &peers->entries[rank])) {
            tddp_status status = tddp_fail(
                TDDP_PROTOCOL,
                "rank %d introduced itself as \"%.100s\": expected host id, pid and host; "
                "do all ranks run the same version?",
                rank, records[rank].data ? records[rank].data : "");
            tddp_peers_release(peers);
            return status;
        }
    }
    *out = peers;
    return TDDP_OK;
}

tddp_peers *tddp_peers_retain(tddp_peers *peers)
{
    if (peers) {
        atomic_fetch_add(&peers->references, 1);
    }
    return peers;
}

void tddp_peers_release(tddp_peers *peers)
{
    if (peers && atomic_fetch_sub(&peers->references, 1) == 1) {
        free(peers);
    }
}

bool tddp_peers_same_host(const tddp_peers *peers)
{
    for (int rank = 1; rank < peers->count; rank++) {
        if (strcmp(peers->entries[rank].host_id, peers->entries[0].host_id) != 0) {
            return false;
        }
    }
    return true;
}

int *tddp_peers_hosts(const tddp_peers *peers)
{
    int *hosts = tddp_alloc_array((size_t)peers->count, sizeof *hosts);
    int known = 0;
    for (int rank = 0; hosts && rank < peers->count; rank++) {
        int first = 0;
        while (strcmp(peers->entries[first].host_id, peers->entries[rank].host_id) != 0) {
            first++;
        }
        hosts[rank] = first < rank ? hosts[first] : known++;
    }
    return hosts;
}

const char *tddp_peers_name(const tddp_peers *peers, int rank, char text[TDDP_PEER_NAME_BYTES])
{
    if (!peers || rank < 0 || rank >= peers->count) {
        (void)snprintf(text, TDDP_PEER_NAME_BYTES, "rank %d", rank);
    } else {
        const tddp_peer_entry *entry = &peers->entries[rank];
        (void)snprintf(text, TDDP_PEER_NAME_BYTES, "rank %d (host %s, pid %" PRId64 ")", rank,
                       entry->host, entry->pid);
    }
    return text;
}

tddp_peer_liveness tddp_peers_check_liveness(const tddp_peers *peers, int self, int rank)
{
    const tddp_peer_entry *mine = &peers->entries[self];
    const tddp_peer_entry *theirs = &peers->entries[rank];
    if (strcmp(mine->host_id, theirs->host_id) != 0 ||
        mine->pid_namespace != theirs->pid_namespace || mine->pid_namespace == 0) {
        return TDDP_PEER_UNKNOWN;
    }
    if (theirs->pid == getpid()) {
        return TDDP_PEER_ALIVE;
    }
    char state;
    uint64_t started;
    bool exists = read_process(theirs->pid, &state, &started);
    if (!exists) {
        /* It has ended, or the system hides it. */
        bool gone = kill((pid_t)theirs->pid, 0) && errno == ESRCH;
        return gone ? TDDP_PEER_ENDED : TDDP_PEER_ALIVE;
    }
    if (state == 'Z' || state == 'X' || (theirs->started && started != theirs->started)) {
        return TDDP_PEER_ENDED;
    }
    return state == 'T' || state == 't' ? TDDP_PEER_STOPPED : TDDP_PEER_ALIVE;
}

const char *tddp_peers_annotate(const tddp_peers *peers, int self, const char *text,
                                char out[TDDP_PEERS_TEXT_BYTES])
{
    int seen[ANNOTATED];
    int count = 0;
    size_t used = 0;
    out[0] = '\0';
    for (const char *at = text; peers && count < ANNOTATED && (at = strstr(at, "rank ")); at++) {
        char *end;
        long rank = strtol(at + 5, &end, 10);
        bool known = end == at + 5 || rank < 0 || rank >= peers->count || rank == self;
        for (int i = 0; i < count && !known; i++) {
            known = seen[i] == (int)rank;
        }
        if (!known) {
            const tddp_peer_entry *entry = &peers->entries[rank];
            used += (size_t)snprintf(out + used, TDDP_PEERS_TEXT_BYTES - used,
                                     "%s rank %ld is pid %" PRId64 " on host %s", count ? "," : ";",
                                     rank, entry->pid, entry->host);
            seen[count++] = (int)rank;
        }
    }
    return out;
}
