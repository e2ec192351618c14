/*
 * A partner of the collectives benchmark: waits at its FIFO, times what it is told, answers.
 *
 * Entered by the one thread of each rank. Between measurements a rank sleeps in read(). The ranks
 * meet before each timed call in a file that they share (meeting.c), the same for all partners, so
 * that nothing but the call differs. An alarm ends a rank whose measurement does not end.
 */
#include "measure.h"

#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "meeting.h"
#include "values.h"

enum { LOOP = 32, LOOP_BYTES = 16384, LEAST = 3, RATHER_SMALL = 4096 };

typedef struct request {
    bench_call call;
    char operation[24];
    char dtype[16];
    size_t bytes;
    size_t iterations; /* at most, and at most about so long */
    double microseconds;
    bool fresh; /* each rank writes its input anew before each call */
    bool check;
} request;

typedef struct times {
    size_t calls;
    double median, p10, p90, p99, least, mean, loop;
} times;

void bench_fail(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    fflush(NULL);
    _exit(1);
}

int bench_environment(const char *name)
{
    const char *text = getenv(name);
    if (!text || !*text) {
        bench_fail("%s is not set: the driver starts this program", name);
    }
    return atoi(text);
}

void bench_allocate_plain(bench_memory *memory, bool registered, int which)
{
    (void)registered;
    (void)which;
    if (posix_memalign(&memory->data, 64, memory->bytes)) {
        bench_fail("%zu bytes: out of memory", memory->bytes);
    }
}

void bench_release_plain(bench_memory *memory, bool registered)
{
    (void)registered;
    free(memory->data);
}

static double now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

/* --- requests -------------------------------------------------------------------------------- */

static bool find_operation(const char *word, bench_operation *out)
{
    static const char *const words[] = {
#define WORD(name, word) word,
        BENCH_OPERATIONS(WORD)
#undef WORD
    };
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        if (strcmp(words[i], word) == 0) {
            *out = (bench_operation)i;
            return true;
        }
    }
    return false;
}

static bool find_dtype(const char *word, bench_dtype *out, size_t *size)
{
    static const struct {
        const char *word;
        size_t size;
    } dtypes[] = {
#define ROW(name, word, size) {word, size},
        BENCH_DTYPES(ROW)
#undef ROW
    };
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++) {
        if (strcmp(dtypes[i].word, word) == 0) {
            *out = (bench_dtype)i;
            *size = dtypes[i].size;
            return true;
        }
    }
    return false;
}

static bool in_parts(bench_operation operation)
{
    return operation == BENCH_ALL_GATHER || operation == BENCH_REDUCE_SCATTER ||
           operation == BENCH_ALL_TO_ALL || operation == BENCH_GATHER || operation == BENCH_SCATTER;
}

static request read_request(const char *line, int ranks)
{
    request r = {0};
    char memory[16];
    char input[16];
    char check[16];
    if (sscanf(line, "%23s %15s %zu %zu %lf %15s %15s %15s", r.operation, r.dtype, &r.bytes,
               &r.iterations, &r.microseconds, memory, input, check) != 8 ||
        !find_operation(r.operation, &r.call.operation) ||
        !find_dtype(r.dtype, &r.call.dtype, &r.call.element) || r.iterations < LEAST ||
        r.iterations > MEETING_MOST) {
        bench_fail("%s: expected OPERATION DTYPE BYTES ITERATIONS MICROSECONDS MEMORY INPUT CHECK",
                   line);
    }
    r.call.registered = strcmp(memory, "registered") == 0;
    r.fresh = strcmp(input, "fresh") == 0;
    r.check = strcmp(check, "check") == 0;
    size_t count = r.bytes / r.call.element;
    count = count ? count : 1;
    r.call.part = count;
    if (in_parts(r.call.operation)) {
        r.call.part = count / (size_t)ranks ? count / (size_t)ranks : 1;
        count = r.call.part * (size_t)ranks;
    }
    r.call.count = count;
    return r;
}

/* Memory stays for the next request if it is large enough. */
static void take_memory(const bench_partner *partner, bench_call *call)
{
    static bench_memory pieces[2][2];
    void *found[2];
    for (int which = 0; which < 2; which++) {
        bench_memory *piece = &pieces[call->registered][which];
        size_t bytes = call->count * call->element;
        if (piece->bytes < bytes) {
            if (piece->bytes) {
                partner->release(piece, call->registered);
            }
            piece->bytes = bytes < RATHER_SMALL ? RATHER_SMALL : bytes;
            partner->allocate(piece, call->registered, which);
            memset(piece->data, 0, piece->bytes);
        }
        found[which] = piece->data;
    }
    call->input = found[0];
    call->output = found[1];
}

/* --- results --------------------------------------------------------------------------------- */

static bool check_sum_or_parts(const bench_call *c, int rank, int ranks)
{
    size_t part = c->part;
    size_t mine = (size_t)rank * part;
    switch (c->operation) {
    case BENCH_ALL_REDUCE:
    case BENCH_REDUCE:
        return (c->operation == BENCH_REDUCE && rank != 0) ||
               bench_equals(c->input, c->count, c->dtype, BENCH_SUM, ranks, 0);
    case BENCH_BROADCAST:
        return bench_equals(c->input, c->count, c->dtype, 0, ranks, 0);
    case BENCH_REDUCE_SCATTER:
        return bench_equals(c->output, part, c->dtype, BENCH_SUM, ranks, mine);
    case BENCH_SCATTER:
        return bench_equals(c->output, part, c->dtype, 0, ranks, mine);
    case BENCH_PING_PONG: /* what rank 0 sent comes back */
        return rank > 1 || bench_equals(c->output, c->count, c->dtype, 0, ranks, 0);
    default:
        return true;
    }
}

static bool results_hold(const bench_call *c, int rank, int ranks)
{
    bool gathers = c->operation == BENCH_ALL_GATHER || c->operation == BENCH_ALL_TO_ALL ||
                   (c->operation == BENCH_GATHER && rank == 0);
    if (!gathers) {
        return check_sum_or_parts(c, rank, ranks);
    }
    for (int from = 0; from < ranks; from++) {
        size_t first = c->operation == BENCH_ALL_TO_ALL ? (size_t)rank * c->part : 0;
        const char *at = (const char *)c->output + (size_t)from * c->part * c->element;
        if (!bench_equals(at, c->part, c->dtype, from, ranks, first)) {
            return false;
        }
    }
    return true;
}

/* One call with values; afterwards both pieces are zero. */
static bool run_checked(const bench_partner *p, const bench_call *c)
{
    bench_fill(c->input, c->count, c->dtype, p->rank, p->ranks, 0);
    memset(c->output, 0xff, c->count * c->element);
    p->run(c);
    bool holds = results_hold(c, p->rank, p->ranks);
    meeting_come(); /* others may read this rank's memory still */
    memset(c->input, 0, c->count * c->element);
    memset(c->output, 0, c->count * c->element);
    meeting_come();
    return holds;
}

/* --- times ----------------------------------------------------------------------------------- */

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a;
    double y = *(const double *)b;
    return (x > y) - (x < y);
}

static double part_of(const double *sorted, size_t count, double part)
{
    return sorted[(size_t)((double)(count - 1) * part + 0.5)];
}

/* Back to back is a latency only where every rank needs every other's part. */
static bool symmetric(bench_operation operation)
{
    return operation == BENCH_ALL_REDUCE || operation == BENCH_ALL_GATHER ||
           operation == BENCH_REDUCE_SCATTER || operation == BENCH_ALL_TO_ALL ||
           operation == BENCH_BARRIER;
}

/* Median over blocks of LOOP calls back to back, or -1. */
static double time_loops(const bench_partner *p, const request *r)
{
    if (!symmetric(r->call.operation) || r->call.count * r->call.element > LOOP_BYTES) {
        return -1;
    }
    double *mine = meeting_times(p->rank);
    double until = now_us() + r->microseconds / 2;
    size_t loops = 0;
    bool last = false;
    meeting_begin();
    while (!last && loops < r->iterations) {
        meeting_come();
        double start = now_us();
        for (int k = 0; k < LOOP; k++) {
            p->run(&r->call);
        }
        double end = now_us();
        mine[loops] = (end - start) / LOOP;
        last = meeting_ends(loops, loops + 2 >= LEAST && end > until);
        loops++;
    }
    double *worst = meeting_worst(loops);
    qsort(worst, loops, sizeof *worst, ascending);
    return part_of(worst, loops, 0.5);
}

/* Each call's time; returns how many there were. */
static size_t run_calls(const bench_partner *p, const request *r, double *mine)
{
    bool round_trip = r->call.operation == BENCH_PING_PONG;
    double until = now_us() + r->microseconds / 2;
    size_t calls = 0;
    bool last = false;
    meeting_begin();
    while (!last && calls < r->iterations) {
        if (r->fresh) {
            memset(r->call.input, 0, r->call.count * r->call.element);
        }
        meeting_come();
        double start = now_us();
        p->run(&r->call);
        double end = now_us();
        /* Half of rank 0's round trip is the way of one message. */
        mine[calls] = !round_trip ? end - start : p->rank == 0 ? (end - start) / 2 : 0;
        last = meeting_ends(calls, calls + 2 >= LEAST && end > until);
        calls++;
    }
    return calls;
}

static times time_calls(const bench_partner *p, const request *r)
{
    size_t calls = run_calls(p, r, meeting_times(p->rank));
    double *worst = meeting_worst(calls);
    times t = {.calls = calls};
    for (size_t i = 0; i < calls; i++) {
        t.mean += worst[i] / (double)calls;
    }
    qsort(worst, calls, sizeof *worst, ascending);
    t.least = worst[0];
    t.p10 = part_of(worst, calls, 0.1);
    t.median = part_of(worst, calls, 0.5);
    t.p90 = part_of(worst, calls, 0.9);
    t.p99 = part_of(worst, calls, 0.99);
    t.loop = time_loops(p, r);
    return t;
}

static void answer(FILE *answers, const request *r, const times *t, int wrong)
{
    fprintf(answers,
            "{\"bytes\":%zu,\"iterations\":%zu,\"checked\":%s,\"wrong\":%d,\"median\":%.4f,"
            "\"p10\":%.4f,\"p90\":%.4f,\"p99\":%.4f,\"min\":%.4f,\"mean\":%.4f",
            r->call.operation == BENCH_BARRIER ? 0 : r->call.count * r->call.element, t->calls,
            r->check ? "true" : "false", wrong, t->median, t->p10, t->p90, t->p99, t->least,
            t->mean);
    if (t->loop >= 0) {
        fprintf(answers, ",\"loop\":%.4f", t->loop);
    }
    fprintf(answers, "}\n");
    fflush(answers);
}

static void measure(const bench_partner *p, request *r, FILE *answers)
{
    const char *obstacle = p->obstacle ? p->obstacle(&r->call) : NULL;
    if (obstacle) {
        if (p->rank == 0) {
            fprintf(answers, "{\"skip\":\"%s\"}\n", obstacle);
            fflush(answers);
        }
        return;
    }
    take_memory(p, &r->call);
    times best = {0};
    int wrong = 0;
    for (int variant = 0; variant < (p->variants ? p->variants : 1); variant++) {
        r->call.variant = variant;
        meeting_come();
        bool holds = !r->check || run_checked(p, &r->call);
        p->run(&r->call); /* warm-up */
        times t = time_calls(p, r);
        holds = (!r->check || run_checked(p, &r->call)) && holds;
        wrong += meeting_count(!holds);
        double now = t.loop >= 0 ? t.loop : t.median;
        double then = best.loop >= 0 ? best.loop : best.median;
        if (variant == 0 || now < then) {
            best = t;
        }
    }
    if (p->rank == 0) {
        answer(answers, r, &best, wrong);
    }
}

/* This thread to a core of its own, by rank; others of the process stay free. */
static void bind_to_core(int rank)
{
    cpu_set_t allowed;
    cpu_set_t one;
    if (sched_getaffinity(0, sizeof allowed, &allowed)) {
        bench_fail("sched_getaffinity failed");
    }
    int left = rank % CPU_COUNT(&allowed);
    size_t core = 0;
    while (!CPU_ISSET(core, &allowed) || left-- > 0) {
        core++;
    }
    CPU_ZERO(&one);
    CPU_SET(core, &one);
    if (sched_setaffinity(0, sizeof one, &one)) {
        bench_fail("sched_setaffinity failed");
    }
}

int bench_serve(const bench_partner *partner)
{
    const char *folder = getenv("BENCH_FOLDER");
    char path[4096];
    char line[256];
    FILE *answers = NULL;
    if (!folder) {
        bench_fail("BENCH_FOLDER is not set: the driver starts this program");
    }
    unsigned limit = (unsigned)bench_environment("BENCH_LIMIT");
    if (bench_environment("BENCH_BIND")) {
        bind_to_core(partner->rank);
    }
    alarm(limit); /* opening waits for ever if the driver is gone */
    meeting_open(folder, partner->rank, partner->ranks);
    if (partner->rank == 0) {
        snprintf(path, sizeof path, "%s/answers", folder);
        answers = fopen(path, "we");
        if (!answers) {
            bench_fail("%s cannot be opened", path);
        }
        fprintf(answers, "{\"version\":\"%s\"}\n", partner->version);
        fflush(answers);
    }
    snprintf(path, sizeof path, "%s/requests.%d", folder, partner->rank);
    FILE *requests = fopen(path, "re");
    if (!requests) {
        bench_fail("%s cannot be opened", path);
    }
    alarm(0);
    while (fgets(line, sizeof line, requests)) {
        request r = read_request(line, partner->ranks);
        alarm(limit);
        measure(partner, &r, answers);
        alarm(0);
    }
    fclose(requests);
    if (answers) {
        fclose(answers);
    }
    return 0;
}
