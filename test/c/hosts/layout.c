/*
 * Made-up hosts: the linker redirects the group's query of its ranks' hosts to this file. LAYOUT
 * selects how the ranks are placed:
 *
 *     halves    0 0 1 1
 *     turns     0 1 0 1
 *     uneven    0 0 0 1
 *     middle    0 1 1 2
 *     one       0 0 0 0
 *
 * or, for groups of some ranks too, by the rank in the first group:
 *
 *     pairs     0 0 1 1 2 2
 *     thirds    0 1 2 0 1 2
 */
#include <stdlib.h>
#include <string.h>

#include "group/peers.h"

int *__wrap_tddp_peers_hosts(const tddp_peers *peers);

static int host_of(const char *layout, int rank, int count)
{
    if (strcmp(layout, "one") == 0) {
        return 0;
    }
    if (strcmp(layout, "turns") == 0) {
        return rank % 2;
    }
    if (strcmp(layout, "uneven") == 0) {
        return rank == count - 1 && count > 1;
    }
    if (strcmp(layout, "middle") == 0) {
        return rank == 0 ? 0 : rank == count - 1 ? 2 : 1;
    }
    return rank >= (count + 1) / 2;
}

static int fixed_host_of(const char *layout, const tddp_peer_entry *entry)
{
    return strcmp(layout, "pairs") == 0 ? entry->root_rank / 2 : entry->root_rank % 3;
}

/* Numbers the hosts in the order in which they appear. */
static void place(const tddp_peers *peers, const char *layout, int *hosts)
{
    int known = 0;
    for (int rank = 0; rank < peers->count; rank++) {
        const int host = fixed_host_of(layout, &peers->entries[rank]);
        int before = 0;
        while (before < rank && fixed_host_of(layout, &peers->entries[before]) != host) {
            before++;
        }
        hosts[rank] = before < rank ? hosts[before] : known++;
    }
}

int *__wrap_tddp_peers_hosts(const tddp_peers *peers)
{
    const char *layout = getenv("LAYOUT");
    int count = peers->count;
    int *hosts = calloc((size_t)count, sizeof *hosts);
    if (hosts && layout && (strcmp(layout, "pairs") == 0 || strcmp(layout, "thirds") == 0)) {
        place(peers, layout, hosts);
        return hosts;
    }
    for (int rank = 0; hosts && rank < count; rank++) {
        hosts[rank] = host_of(layout ? layout : "halves", rank, count);
    }
    return hosts;
}

__attribute__((constructor)) static void ask_for_shared_memory(void)
{
    setenv("TDDP_SHM", "1", 0);
}
