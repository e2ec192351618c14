/*
 * CPU time and memory of workers and their descendants, from /proc/PID/stat. All processes of the
 * machine are read every few seconds, to learn who descends from whom; in between only those that
 * are known to be ours. Main thread.
 */
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "launch/output/monitor_usage.h"

enum { SEARCH_EVERY_S = 3, MOST_GENERATIONS = 64 };

/* False if there is no such process, or none any more. */
static bool read_process(pid_t pid, tddp_launch_seen *out)
{
    char path[64];
    char text[1024];
    char state;
    unsigned long long user;
    unsigned long long system;
    long long pages;
    (void)snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return false;
    }
    ssize_t got = read(fd, text, sizeof text - 1);
    tddp_close(fd);
    text[got > 0 ? got : 0] = '\0';
    /* The name in brackets may hold anything. */
    const char *bracket = strrchr(text, ')');
    *out = (tddp_launch_seen){.pid = pid, .worker = -1};
    if (!bracket || sscanf(bracket + 1,
                           " %c %d %*d %*d %*d %*d %*u %*u %*u %*u %*u %llu %llu %*d %*d %*d %*d "
                           "%*d %*d %llu %*u %lld",
                           &state, &out->parent, &user, &system, &out->started, &pages) != 6) {
        return false;
    }
    out->ticks = user + system;
    out->memory = pages > 0 ? (uint64_t)pages * (uint64_t)sysconf(_SC_PAGESIZE) : 0;
    return state != 'Z' && state != 'X';
}

static tddp_status add(tddp_launch_usage *usage, size_t *capacity, const tddp_launch_seen *one)
{
    if (usage->count == *capacity) {
        size_t larger = *capacity ? *capacity * 2 : 64;
        tddp_launch_seen *list = tddp_resize(usage->list, larger * sizeof *list);
        if (!list) {
            return TDDP_OUT_OF_MEMORY;
        }
        usage->list = list;
        *capacity = larger;
    }
    usage->list[usage->count++] = *one;
    return TDDP_OK;
}

static int by_pid(const void *a, const void *b)
{
    const tddp_launch_seen *x = a;
    const tddp_launch_seen *y = b;
    return (x->pid > y->pid) - (x->pid < y->pid);
}

static tddp_launch_seen *find(const tddp_launch_usage *usage, pid_t pid)
{
    tddp_launch_seen key = {.pid = pid};
    return usage->count == 0 ? NULL : bsearch(&key, usage->list, usage->count, sizeof key, by_pid);
}

static tddp_status read_all(tddp_launch_usage *now)
{
    DIR *folder = opendir("/proc");
    size_t capacity = 0;
    tddp_status status = TDDP_OK;
    struct dirent *entry;
    while (status == TDDP_OK && folder && (entry = readdir(folder))) {
        int64_t pid;
        tddp_launch_seen one;
        if (tddp_parse_int(entry->d_name, 1, INT32_MAX, &pid) && read_process((pid_t)pid, &one)) {
            status = add(now, &capacity, &one);
        }
    }
    if (folder) {
        closedir(folder);
    }
    if (now->count > 0) {
        qsort(now->list, now->count, sizeof *now->list, by_pid);
    }
    return status;
}

/* Whose each process is: that of the first worker among it, its parent, its parent's parent... */
static void find_owners(tddp_launch_usage *now, const tddp_launch_view_worker *workers, int count)
{
    for (int i = 0; i < count; i++) {
        tddp_launch_seen *own = workers[i].alive ? find(now, workers[i].pid) : NULL;
        if (own) {
            own->worker = i;
        }
    }
    for (size_t i = 0; i < now->count; i++) {
        const tddp_launch_seen *at = &now->list[i];
        for (int step = 0; at && at->worker < 0 && step < MOST_GENERATIONS; step++) {
            at = find(now, at->parent);
        }
        now->list[i].worker = at ? at->worker : -1;
    }
}

static void keep_ours(tddp_launch_usage *now)
{
    size_t kept = 0;
    for (size_t i = 0; i < now->count; i++) {
        if (now->list[i].worker >= 0) {
            now->list[kept++] = now->list[i];
        }
    }
    now->count = kept;
}

/* Those seen before, as they are now. */
static tddp_status read_known(const tddp_launch_usage *before, tddp_launch_usage *now)
{
    size_t capacity = 0;
    tddp_status status = TDDP_OK;
    for (size_t i = 0; i < before->count && status == TDDP_OK; i++) {
        tddp_launch_seen one;
        if (read_process(before->list[i].pid, &one) && one.started == before->list[i].started) {
            one.worker = before->list[i].worker;
            status = add(now, &capacity, &one);
        }
    }
    return status;
}

/* Whether each worker that lives is among what was seen, and as the same worker. */
static bool all_known(const tddp_launch_usage *before, const tddp_launch_view_worker *workers,
                      int count)
{
    for (int i = 0; i < count; i++) {
        const tddp_launch_seen *own = find(before, workers[i].pid);
        if (workers[i].alive && (!own || own->worker != i)) {
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
    for (size_t i = 0; i < now->count; i++) {
        const tddp_launch_seen *one = &now->list[i];
        const tddp_launch_seen *old = find(before, one->pid);
        tddp_launch_view_worker *worker = &workers[one->worker];
        worker->memory += one->memory;
        if (old && old->started == one->started && old->worker == one->worker && passed > 0) {
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
        status = read_known(usage, &now);
    } else {
        now.found = now.at;
        status = read_all(&now);
        find_owners(&now, workers, count);
        keep_ours(&now);
    }
    tddp_launch_used *told = tddp_alloc_array((size_t)count + 1, sizeof *told);
    if (status != TDDP_OK || !told) {
        free(now.list);
        free(told);
        return TDDP_OUT_OF_MEMORY;
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
    free(usage->list);
    free(usage->told);
    *usage = (tddp_launch_usage){0};
}
