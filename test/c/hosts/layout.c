/*
 * Made-up hosts: the linker redirects the group's query of its ranks' hosts to this file. LAYOUT
 * selects how the ranks are placed:
 *
 *     halves    0 0 1 1
 *     turns     0 1 0 1
 *     uneven    0 0 0 1
 *     middle    0 1 1 2
 *     one       0 0 0 0
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

int *__wrap_tddp_peers_hosts(const tddp_peers *peers)
{
    const char *layout = getenv("LAYOUT");
    int count = peers->count;
    int *hosts = calloc((size_t)count, sizeof *hosts);
    for (int rank = 0; hosts && rank < count; rank++) {
        hosts[rank] = host_of(layout ? layout : "halves", rank, count);
    }
    return hosts;
}

__attribute__((constructor)) static void ask_for_shared_memory(void)
{
    setenv("TDDP_SHM", "1", 0);
}
