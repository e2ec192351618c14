/*
 * CPU time and memory of workers and their descendants. All processes of the machine are looked at
 * every few seconds, to learn who descends from whom; in between only those that are known to be
 * ours. Main thread.
 */
#include <stdlib.h>
#include <unistd.h>

#include "launch/output/monitor_usage.h"

enum { SEARCH_EVERY_S = 3, MOST_GENERATIONS = 64 };

/* Whose each process is: that of the first worker among it, its parent, its parent's parent... */
static void find_owners(tddp_launch_usage *now, const tddp_launch_view_worker *workers, int count)
{
    for (int i = 0; i < count; i++) {
        tddp_launch_process *own =
            workers[i].alive ? tddp_launch_process_find(&now->seen, workers[i].pid) : NULL;
        if (own) {
            own->owner = i;
        }
    }
    for (size_t i = 0; i < now->seen.count; i++) {
        const tddp_launch_process *at = &now->seen.list[i];
        for (int step = 0; at && at->owner < 0 && step < MOST_GENERATIONS; step++) {
            at = tddp_launch_process_find(&now->seen, at->parent);
        }
        now->seen.list[i].owner = at ? at->owner : -1;
    }
}

static void keep_ours(tddp_launch_process_list *seen)
{
    size_t kept = 0;
    for (size_t i = 0; i < seen->count; i++) {
        if (seen->list[i].owner >= 0 && !seen->list[i].ended) {
            seen->list[kept++] = seen->list[i];
        }
    }
    seen->count = kept;
}

/* Those seen before, as they are now; of workers beyond `count` nobody asks any more. */
static tddp_status look_again(const tddp_launch_process_list *before, int count,
                              tddp_launch_process_list *now)
{
    tddp_status status = TDDP_OK;
    for (size_t i = 0; i < before->count && status == TDDP_OK; i++) {
        const tddp_launch_process *old = &before->list[i];
        tddp_launch_process one;
        if (old->owner < count && tddp_launch_process_look(old->pid, &one) &&
            one.started == old->started && !one.ended) {
            one.owner = old->owner;
            status = tddp_launch_process_add(now, &one);
        }
    }
    return status;
}

/* Whether each worker that lives is among what was seen, and as the same worker. */
static bool all_known(const tddp_launch_usage *before, const tddp_launch_view_worker *workers,
                      int count)
{
    for (int i = 0; i < count; i++) {
        const tddp_launch_process *own = tddp_launch_process_find(&before->seen, workers[i].pid);
        if (workers[i].alive && (!own || own->owner != i)) {
            return false;
        }
    }
    return true;
}

static void sum_up(const tddp_launch_usage *before, const tddp_launch_usage *now,
                   tddp_launch_view_worker *workers, int count)
{
    double passed = (double)(now->at - before->at) / (double)TDDP_NS_PER_S;
    double per_second = (double)sysconf(_SC_CLK_TCK);
    for (int i = 0; i < count; i++) {
        workers[i].memory = 0;
        workers[i].cpu = -1;
    }
    for (size_t i = 0; i < now->seen.count; i++) {
        const tddp_launch_process *one = &now->seen.list[i];
        const tddp_launch_process *old = tddp_launch_process_find(&before->seen, one->pid);
        tddp_launch_view_worker *worker = &workers[one->owner];
        worker->memory += one->memory;
        if (old && old->started == one->started && old->owner == one->owner && passed > 0) {
            double used = (double)(one->ticks - old->ticks) / per_second / passed;
            worker->cpu = worker->cpu < 0 ? used : worker->cpu + used;
        }
    }
}

/* Whether what was told last is of these workers. */
static bool same_workers(const tddp_launch_usage *usage, const tddp_launch_view_worker *workers,
                         int count)
{
    for (int i = 0; i < count; i++) {
        if (i >= usage->workers || usage->told[i].pid != workers[i].pid) {
            return false;
        }
    }
    return true;
}

static tddp_status look(tddp_launch_usage *usage, tddp_launch_view_worker *workers, int count)
{
    tddp_launch_usage now = {.at = tddp_now_ns(), .found = usage->found};
    tddp_status status;
    if (all_known(usage, workers, count) &&
        now.at - usage->found < SEARCH_EVERY_S * TDDP_NS_PER_S) {
        status = look_again(&usage->seen, count, &now.seen);
    } else {
        now.found = now.at;
        status = tddp_launch_process_list_all(&now.seen);
        find_owners(&now, workers, count);
        keep_ours(&now.seen);
    }
    tddp_launch_used *told = tddp_alloc_array((size_t)count + 1, sizeof *told);
    if (status != TDDP_OK || !told) {
        free(now.seen.list);
        free(told);
        return status == TDDP_OK ? TDDP_OUT_OF_MEMORY : status;
    }
    sum_up(usage, &now, workers, count);
    for (int i = 0; i < count; i++) {
        told[i] = (tddp_launch_used){workers[i].pid, workers[i].cpu, workers[i].memory};
    }
    tddp_launch_usage_free(usage);
    now.told = told;
    now.workers = count;
    *usage = now;
    return TDDP_OK;
}

tddp_status tddp_launch_usage_look(tddp_launch_usage *usage, tddp_launch_view_worker *workers,
                                   int count, int64_t least_ns)
{
    if (!same_workers(usage, workers, count) || tddp_now_ns() - usage->at >= least_ns) {
        return look(usage, workers, count);
    }
    for (int i = 0; i < count; i++) {
        workers[i].cpu = usage->told[i].cpu;
        workers[i].memory = usage->told[i].memory;
    }
    return TDDP_OK;
}

void tddp_launch_usage_free(tddp_launch_usage *usage)
{
    free(usage->seen.list);
    free(usage->told);
    *usage = (tddp_launch_usage){0};
}
