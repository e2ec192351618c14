/*
 * Runs programs, each in fresh processes, and makes one that fails small: leaves out halves,
 * quarters and so on of its operations as long as it fails all the same. What is left is printed
 * with the last run's output, and how to run it again.
 */
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "sequences/sequence.h"
#include "store_process.h"

/* A program that takes so long hangs. Longer than any wait of its ranks but where it is made small:
 * there only ends count that come sooner. */
enum { MOST_SECONDS = 90, MOST_SECONDS_TO_SHRINK = 15, MOST_RUNS_TO_SHRINK = 60 };

enum { SWEEP_PROGRAMS = 10 }; /* that take as long as one that sweeps */

typedef struct runner {
    seq_program program;
    seq_shared *shared;
    int port;
    int runs;     /* so far, in this process: each has names of its own in the store */
    FILE *output; /* of the last run */
} runner;

/* --- a run ----------------------------------------------------------------------------------- */

/* One rank's part, or that of all ranks as threads. */
typedef struct part {
    const runner *self;
    int rank;
    char name[64];
} part;

static void *run_part(void *data)
{
    const part *it = data;
    seq_run_rank(&it->self->program, it->self->shared, it->rank, it->self->port, it->name);
    return NULL;
}

static void run_threads(const part *first)
{
    part parts[SEQ_RANKS];
    pthread_t threads[SEQ_RANKS];
    for (int rank = 0; rank < first->self->program.ranks; rank++) {
        parts[rank] = *first;
        parts[rank].rank = rank;
        CHECK_INT(pthread_create(&threads[rank], NULL, run_part, &parts[rank]), 0);
    }
    for (int rank = 0; rank < first->self->program.ranks; rank++) {
        CHECK_INT(pthread_join(threads[rank], NULL), 0);
    }
}

static void set_environment(const seq_program *program)
{
    if (program->carrier->hosts) {
        CHECK_INT(setenv("LAYOUT", program->layout, 1), 0);
    }
    if (program->algorithms[0]) {
        CHECK_INT(setenv("TDDP_SHM_ALGORITHM", program->algorithms, 1), 0);
    }
}

static int processes_of(const runner *self)
{
    return self->program.carrier->threads ? 1 : self->program.ranks;
}

static pid_t start_process(const runner *self, int rank)
{
    part it = {.self = self, .rank = rank};
    (void)snprintf(it.name, sizeof it.name, "run-%d", self->runs);
    fflush(NULL);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(fileno(self->output), STDOUT_FILENO);
        dup2(fileno(self->output), STDERR_FILENO);
        set_environment(&self->program);
        if (self->program.carrier->threads) {
            run_threads(&it);
        } else {
            (void)run_part(&it);
        }
        exit(0); /* with the search for leaks, where there is one */
    }
    return pid;
}

static double now_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static void kill_ranks(const runner *self, const pid_t *pids)
{
    for (int rank = 0; rank < processes_of(self); rank++) {
        if (pids[rank] > 0) {
            (void)kill(pids[rank], SIGKILL);
        }
    }
}

static void tell_where_ranks_are(const runner *self)
{
    for (int rank = 0; rank < self->program.ranks; rank++) {
        fprintf(self->output, "rank %d came to operation %d\n", rank,
                atomic_load(&self->shared->at[rank]));
    }
}

/* Takes in one that has ended; false: none has. */
static bool reap(const runner *self, pid_t *pids, bool *failed)
{
    int status;
    for (int rank = 0; rank < processes_of(self); rank++) {
        if (pids[rank] > 0 && waitpid(pids[rank], &status, WNOHANG) == pids[rank]) {
            pids[rank] = 0;
            if (status != 0 && !*failed) {
                *failed = true;
                fprintf(self->output, "rank %d ended with status 0x%x\n", rank, (unsigned)status);
                kill_ranks(self, pids);
            }
            return true;
        }
    }
    return false;
}

/* Whether all ranks' ends were as they should be. */
static bool run_once(runner *self, double most_seconds)
{
    pid_t pids[SEQ_RANKS];
    bool failed = false;
    const double end = now_seconds() + most_seconds;
    rewind(self->output);
    CHECK_INT(ftruncate(fileno(self->output), 0), 0);
    self->runs++;
    atomic_store(&self->shared->drained, 0);
    for (int rank = 0; rank < self->program.ranks; rank++) {
        atomic_store(&self->shared->at[rank], -1);
    }
    for (int rank = 0; rank < processes_of(self); rank++) {
        pids[rank] = start_process(self, rank);
    }
    for (int left = processes_of(self); left > 0;) {
        if (reap(self, pids, &failed)) {
            left--;
        } else if (!failed && now_seconds() > end) {
            failed = true;
            fprintf(self->output, "out of time after %.0f s\n", most_seconds);
            tell_where_ranks_are(self);
            kill_ranks(self, pids);
        } else {
            nanosleep(&(struct timespec){0, 500000}, NULL);
        }
    }
    return !failed;
}

/* --- making it small ------------------------------------------------------------------------- */

static double time_factor(void)
{
    const char *text = getenv("CHECK_TIME_FACTOR");
    return text ? atof(text) : 1;
}

/* Leaves out `size` operations of those that are left, from the `from`th on; false: there are none.
 */
static bool leave_out(seq_shared *shared, int count, int from, int size)
{
    int seen = 0;
    bool any = false;
    for (int i = 0; i < count; i++) {
        if (!shared->skipped[i] && seen++ >= from && seen <= from + size) {
            shared->skipped[i] = 1;
            any = true;
        }
    }
    return any;
}

static void make_small(runner *self)
{
    unsigned char kept[SEQ_OPS];
    int runs = 0;
    for (int size = (self->program.count + 1) / 2; size > 0; size = size > 1 ? (size + 1) / 2 : 0) {
        for (int from = 0; runs < MOST_RUNS_TO_SHRINK;) {
            memcpy(kept, self->shared->skipped, sizeof kept);
            if (!leave_out(self->shared, self->program.count, from, size)) {
                break;
            }
            runs++;
            if (run_once(self, MOST_SECONDS_TO_SHRINK * time_factor())) {
                memcpy(self->shared->skipped, kept, sizeof kept);
                from += size;
            }
        }
    }
    /* The output of what is left. */
    (void)run_once(self, MOST_SECONDS_TO_SHRINK * time_factor());
}

static void show_output(FILE *output)
{
    char line[4096];
    rewind(output);
    while (fgets(line, sizeof line, output)) {
        fputs(line, stderr);
    }
}

static void show_program(const runner *self)
{
    static const char *const faults[] = {"", ", then a rank dies", ", then ranks disagree"};
    const seq_program *program = &self->program;
    char text[SEQ_TEXT];
    char only[4 * SEQ_OPS] = "";
    seq_op op;
    fprintf(stderr, "seed %" PRIu64 " on %s fails: %d ranks, groups", program->seed,
            program->carrier->backend, program->ranks);
    for (int group = 0; group < program->groups; group++) {
        fprintf(stderr, " 0x%x%s", program->members[group],
                program->split[group]   ? " (split)"
                : program->child[group] ? " (child)"
                                        : "");
    }
    fprintf(stderr, ", LAYOUT=%s TDDP_SHM_ALGORITHM=%s%s\n", program->layout, program->algorithms,
            faults[program->fault]);
    for (int number = 0; number < program->count; number++) {
        if (!self->shared->skipped[number]) {
            seq_draw_op(program, number, &op);
            seq_describe_op(program, &op, text, sizeof text);
            fprintf(stderr, "    %s\n", text);
            size_t used = strlen(only);
            (void)snprintf(only + used, sizeof only - used, "%s%d", used > 0 ? "," : "", number);
        }
    }
    fprintf(stderr, "again: TDDP_SEQUENCES_SEED=%" PRIu64 " TDDP_SEQUENCES_ONLY=%s\n",
            program->seed, only[0] ? only : "none");
}

static void fail(runner *self, bool small)
{
    if (!small) {
        fprintf(stderr, "as it failed first:\n");
        show_output(self->output);
        make_small(self);
        fprintf(stderr, "made small:\n");
    }
    show_output(self->output);
    show_program(self);
    check_failed(__FILE__, __LINE__, "a random program failed, as said above");
}

/* --- all ------------------------------------------------------------------------------------- */

/* TDDP_SEQUENCES_ONLY: the operations that are run. */
static bool read_only(seq_shared *shared)
{
    const char *text = getenv("TDDP_SEQUENCES_ONLY");
    if (!text) {
        return false;
    }
    memset(shared->skipped, 1, sizeof shared->skipped);
    for (char *end; *text; text = *end == ',' ? end + 1 : end) {
        long number = strtol(text, &end, 10);
        if (end == text) {
            break;
        }
        if (number >= 0 && number < SEQ_OPS) {
            shared->skipped[number] = 0;
        }
    }
    return true;
}

void seq_run(const seq_carrier *carrier, uint64_t first, int count)
{
    const char *seed = getenv("TDDP_SEQUENCES_SEED");
    const char *wanted = getenv("TDDP_SEQUENCES");
    runner self = {.output = tmpfile()};
    pid_t store = start_store_process(&self.port);
    self.shared =
        mmap(NULL, sizeof *self.shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(self.output && self.shared != MAP_FAILED);
    bool only = read_only(self.shared);
    first = seed ? strtoull(seed, NULL, 10) : first;
    count = wanted ? atoi(wanted) : seed ? 1 : count;
    if (wanted && carrier->sweep) {
        count = (count + SWEEP_PROGRAMS - 1) / SWEEP_PROGRAMS;
    }
    for (int i = 0; i < count; i++) {
        seq_draw_program(&self.program, carrier, first + (uint64_t)i);
        CHECK(self.program.count <= SEQ_OPS);
        if (!run_once(&self, MOST_SECONDS * time_factor())) {
            fail(&self, only);
        }
    }
    end_store_process(store);
    fclose(self.output);
    (void)munmap(self.shared, sizeof *self.shared);
}
