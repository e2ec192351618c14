/*
 * all_reduce, reduce and reduce_scatter against formulas: every dtype and operation, sizes around
 * every threshold, memory of all kinds at odd addresses, each algorithm, interrupted ranks.
 */
#include "numbers.h"
#include "ranks.h"

#include <tddp/wait.h>

/* The memory of a test's vectors. */
typedef enum location { ANYWHERE, REGISTERED, MIXED, LOCATIONS } location;
static const char *const location_names[] = {"any memory", "registered memory", "mixed memory"};

enum { MAX_BYTES = 1400 * 1024, ROOM = MAX_BYTES + 4096 };

typedef struct places {
    shm_rank *it;
    void *handles[2];
    char *registered[2];
    char *any[2];
    tddp_cancel *cancel; /* NULL: no interruptions */
} places;

static places open_places(shm_rank *it)
{
    places at = {.it = it};
    for (int i = 0; i < 2; i++) {
        void *data;
        CHECK_OK(tddp_shm_allocate(it->shm, ROOM, &at.handles[i], &data));
        at.registered[i] = data;
        at.any[i] = malloc(ROOM);
        CHECK(at.any[i]);
    }
    return at;
}

static void close_places(places *at)
{
    for (int i = 0; i < 2; i++) {
        tddp_shm_deallocate(at->handles[i]);
        free(at->any[i]);
    }
}

/* Memory at the least aligned address that the dtype allows, different on each rank. */
static char *place(const places *at, location where, int which, tddp_dtype dtype)
{
    int rank = at->it->rank;
    bool registered = where == REGISTERED || (where == MIXED && rank % 2 == 1);
    char *base = registered ? at->registered[which] : at->any[which];
    return base + (size_t)(3 * rank + 1) * tddp_dtype_size(dtype);
}

typedef tddp_status (*algorithm)(tddp_shm *shm, const tddp_op *op);

/* Runs an operation once, or until it completes although each wait is interrupted. */
static void run(const places *at, algorithm run_op, tddp_op *op)
{
    if (!at->cancel) {
        CHECK_OK(run_op(at->it->shm, op));
        return;
    }
    op->cancel = at->cancel;
    op->awaited = 0;
    /* Each rank is late in turn. */
    if ((op->sequence + (uint64_t)at->it->rank) % 3 == 0) {
        usleep(500);
    }
    tddp_status status = TDDP_CANCELED;
    for (int i = 0; status == TDDP_CANCELED && i < 1000; i++) {
        tddp_cancel_trigger(at->cancel);
        status = run_op(at->it->shm, op);
        if (status == TDDP_CANCELED) {
            usleep(50);
        }
    }
    tddp_cancel_reset(at->cancel);
    while (status == TDDP_CANCELED) {
        status = run_op(at->it->shm, op);
    }
    CHECK_OK(status);
}

static tddp_op make_op(shm_rank *it, tddp_op_kind kind, tddp_reduce_op reduce)
{
    tddp_op op = shm_op(it, kind);
    op.reduce = reduce;
    op.premul = given_factor(it->rank);
    return op;
}

static void check_all_reduce(const places *at, location where, tddp_reduce_op reduce,
                             tddp_dtype dtype, size_t count)
{
    shm_rank *it = at->it;
    char *data = place(at, where, 0, dtype);
    size_t bytes = count * tddp_dtype_size(dtype);
    fill_numbers(reduce, dtype, data, it->rank, 0, count);
    data[bytes] = 0x5a;
    tddp_op op = make_op(it, TDDP_OP_ALL_REDUCE, reduce);
    op.input = op.output = shm_buffer(count ? data : NULL, count, dtype);
    run(at, tddp_shm_all_reduce, &op);
    check_numbers(location_names[where], reduce, dtype, data, it->size, 0, count);
    CHECK_INT(data[bytes], 0x5a);
}

static void check_reduce(const places *at, location where, tddp_reduce_op reduce, tddp_dtype dtype,
                         size_t count)
{
    shm_rank *it = at->it;
    char *data = place(at, where, 0, dtype);
    char *before = at->any[1];
    size_t bytes = count * tddp_dtype_size(dtype);
    fill_numbers(reduce, dtype, data, it->rank, 0, count);
    memcpy(before, data, bytes);
    tddp_op op = make_op(it, TDDP_OP_REDUCE, reduce);
    op.input = op.output = shm_buffer(count ? data : NULL, count, dtype);
    op.root = (int)(op.sequence % (uint64_t)it->size);
    run(at, tddp_shm_reduce, &op);
    if (it->rank == op.root) {
        check_numbers(location_names[where], reduce, dtype, data, it->size, 0, count);
    } else {
        CHECK(memcmp(before, data, bytes) == 0);
    }
}

typedef enum layout { EVEN, UNEVEN, WITH_GAPS, IN_PLACE, LAYOUTS } layout;

/* Elements of a rank's part; UNEVEN: one rank has none, another most. */
static size_t part_count(layout how, int size, int rank, size_t count)
{
    size_t even = count / (size_t)size;
    return how != UNEVEN ? even : rank == 0 ? 0 : rank == 1 ? even + 3 : even / 2;
}

static void check_reduce_scatter(const places *at, location where, layout how,
                                 tddp_reduce_op reduce, tddp_dtype dtype, size_t count)
{
    shm_rank *it = at->it;
    tddp_buffer parts[SHM_MAX_RANKS];
    size_t size = tddp_dtype_size(dtype);
    size_t gap = how == WITH_GAPS ? 2 : 0;
    char *input = place(at, where, 0, dtype);
    size_t first[SHM_MAX_RANKS + 1] = {0};
    char *end = input;
    for (int rank = 0; rank < it->size; rank++) {
        size_t local_count = part_count(how, it->size, rank, count);
        fill_numbers(reduce, dtype, end, it->rank, first[rank], local_count);
        parts[rank] = shm_buffer(local_count ? end : NULL, local_count, dtype);
        first[rank + 1] = first[rank] + local_count;
        end += (local_count + gap) * size;
    }
    size_t local_count = parts[it->rank].count;
    char *result =
        how == IN_PLACE && local_count ? parts[it->rank].data : place(at, where, 1, dtype);
    tddp_op op = make_op(it, TDDP_OP_REDUCE_SCATTER, reduce);
    op.input =
        shm_buffer(how == WITH_GAPS || first[it->size] == 0 ? NULL : input, first[it->size], dtype);
    op.input_parts = parts;
    op.output = shm_buffer(local_count ? result : NULL, local_count, dtype);
    run(at, tddp_shm_reduce_scatter, &op);
    check_numbers(location_names[where], reduce, dtype, result, it->size, first[it->rank],
                  local_count);
}

static void check_all(const places *at, location where, tddp_reduce_op reduce, tddp_dtype dtype,
                      size_t count)
{
    check_all_reduce(at, where, reduce, dtype, count);
    check_reduce(at, where, reduce, dtype, count);
    for (int how = 0; how < LAYOUTS; how++) {
        check_reduce_scatter(at, where, (layout)how, reduce, dtype, count);
    }
}

/* --- every dtype and operation --------------------------------------------------------------- */

static void all_kinds(shm_rank *it)
{
    static const size_t counts[] = {0, 1, 7, 129, 9001, 40003};
    places at = open_places(it);
    for (int dtype = 0; dtype <= TDDP_BOOL; dtype++) {
        for (int reduce = 0; reduce <= TDDP_REDUCE_PREMUL_SUM; reduce++) {
            if (tddp_reduce_check((tddp_reduce_op)reduce, (tddp_dtype)dtype)) {
                continue;
            }
            for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
                location where = (location)((size_t)(dtype + reduce) + i) % LOCATIONS;
                check_all(&at, where, (tddp_reduce_op)reduce, (tddp_dtype)dtype, counts[i]);
            }
        }
    }
    close_places(&at);
}

SHM_TEST(all_dtypes_and_operations, all_kinds)

/* --- sizes ----------------------------------------------------------------------------------- */

static void all_sizes(shm_rank *it)
{
    static const size_t edges[] = {64,         2 * 1024,   4 * 1024,    8 * 1024,
                                   16 * 1024,  32 * 1024,  64 * 1024,   128 * 1024,
                                   256 * 1024, 512 * 1024, 1024 * 1024, 1300 * 1024};
    places at = open_places(it);
    for (size_t i = 0; i < sizeof edges / sizeof *edges; i++) {
        for (size_t k = 0; k < LOCATIONS; k++) {
            location where = (location)((i + k) % LOCATIONS);
            check_all(&at, where, TDDP_REDUCE_SUM, TDDP_FLOAT32, edges[i] / sizeof(float) + k - 1);
        }
        check_all(&at, ANYWHERE, TDDP_REDUCE_MAX, TDDP_UINT8, edges[i] + 1);
        check_all(&at, REGISTERED, TDDP_REDUCE_BXOR, TDDP_UINT8, edges[i] - 1);
    }
    close_places(&at);
}

SHM_TEST(sizes_around_thresholds, all_sizes)

/* --- each algorithm -------------------------------------------------------------------------- */

static void some_sizes(shm_rank *it)
{
    static const size_t counts[] = {0, 1, 33, 1000, 4096, 20001, 150001, 300003};
    static const struct {
        tddp_reduce_op reduce;
        tddp_dtype dtype;
    } kinds[] = {{TDDP_REDUCE_SUM, TDDP_FLOAT32},
                 {TDDP_REDUCE_AVG, TDDP_BFLOAT16},
                 {TDDP_REDUCE_MIN, TDDP_INT16}};
    places at = open_places(it);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        for (int where = 0; where < LOCATIONS; where++) {
            size_t kind = (i + (size_t)where) % 3;
            check_all(&at, (location)where, kinds[kind].reduce, kinds[kind].dtype, counts[i]);
        }
    }
    close_places(&at);
}

static void run_forced(const char *algorithms, shm_body body)
{
    CHECK_INT(setenv("TDDP_SHM_ALGORITHM", algorithms, 1), 0);
    for (int size = 1; size <= 4; size++) {
        run_shm(SHM_PROCESSES, size, body, NULL);
    }
    run_shm(SHM_THREADS, 3, body, NULL);
}

#define FORCED(mode) "all_reduce=" mode ",reduce=" mode ",reduce_scatter="

TEST(inline_wherever_it_fits)
{
    run_forced(FORCED("inline") "inline", some_sizes);
}

TEST(staged_for_all)
{
    run_forced(FORCED("staged") "staged", some_sizes);
}

TEST(sliced_for_all)
{
    run_forced(FORCED("sliced") "staged", some_sizes);
}

TEST(direct_where_memory_is_registered)
{
    run_forced(FORCED("direct") "direct", some_sizes);
}

/* --- interruptions --------------------------------------------------------------------------- */

static void interrupted(shm_rank *it)
{
    static const size_t counts[] = {0, 5, 1000, 9001, 150001, 300003};
    places at = open_places(it);
    CHECK_OK(tddp_cancel_create(&at.cancel));
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        for (int where = 0; where < LOCATIONS; where++) {
            check_all(&at, (location)where, TDDP_REDUCE_SUM, TDDP_INT32, counts[i]);
            check_all(&at, (location)where, TDDP_REDUCE_PREMUL_SUM, TDDP_FLOAT32, counts[i]);
        }
    }
    tddp_cancel_free(at.cancel);
    close_places(&at);
}

SHM_TEST(interrupted_reductions_resume, interrupted)

TEST(interrupted_while_sliced)
{
    CHECK_INT(setenv("TDDP_SHM_ALGORITHM", "all_reduce=sliced,reduce=sliced", 1), 0);
    run_shm(SHM_PROCESSES, 2, interrupted, NULL);
    run_shm(SHM_PROCESSES, 4, interrupted, NULL);
}

TEST(interrupted_while_staged)
{
    CHECK_INT(setenv("TDDP_SHM_ALGORITHM", "all_reduce=staged,reduce=staged", 1), 0);
    run_shm(SHM_PROCESSES, 2, interrupted, NULL);
    run_shm(SHM_PROCESSES, 4, interrupted, NULL);
}

/* --- choosing -------------------------------------------------------------------------------- */

static void join_failing(shm_rank *it)
{
    tddp_backend_opts opts = shm_opts(it->rank, it->size, it->store);
    tddp_shm *shm;
    const char *expected = it->data;
    CHECK(tddp_shm_join(&opts, NULL, NULL, &shm) != TDDP_OK);
    CHECK_CONTAINS(tddp_error_message(), expected);
}

static void check_refused(const char *algorithms, char *expected)
{
    CHECK_INT(setenv("TDDP_SHM_ALGORITHM", algorithms, 1), 0);
    shm_run((shm_job){
        .mode = SHM_PROCESSES, .size = 2, .body = join_failing, .data = expected, .bare = true});
}

TEST(unknown_algorithms_are_rejected)
{
    check_refused("all_reduce=fast", "TDDP_SHM_ALGORITHM: all_reduce=fast: expected all_reduce to "
                                     "be one of inline, staged, sliced, direct");
    check_refused("reduce_scatter=staged,all=staged",
                  "TDDP_SHM_ALGORITHM: all=staged: expected OPERATION=ALGORITHM, with one of "
                  "all_reduce, ");
    check_refused("staged", "TDDP_SHM_ALGORITHM: staged: expected");
    check_refused("all_reduce=", "TDDP_SHM_ALGORITHM: all_reduce=: expected all_reduce to be");
    check_refused("reduce_scatter=sliced",
                  "expected reduce_scatter to be one of inline, staged, direct");
}

static void join_differently(shm_rank *it)
{
    CHECK_INT(setenv("TDDP_SHM_ALGORITHM", it->rank ? "reduce=staged" : "reduce=sliced", 1), 0);
    it->data = "TDDP_SHM_ALGORITHM is \"reduce=sliced\" on rank 0, \"reduce=staged\" on rank 1";
    join_failing(it);
}

TEST(requested_algorithms_must_be_equal)
{
    shm_run((shm_job){.mode = SHM_PROCESSES, .size = 2, .body = join_differently, .bare = true});
}

static void count_lines(tddp_log_level level, const char *room, const char *text, void *data)
{
    (void)room;
    if (level == TDDP_LOG_DEBUG && strstr(text, "all_reduce of")) {
        *(int *)data += strstr(text, " 256 bytes by 2 ranks: inline") != NULL;
        *(int *)data += strstr(text, "1048576 bytes by 2 ranks: sliced") ? 100 : 0;
        *(int *)data += strstr(text, "1048576 bytes by 2 ranks: direct") ? 10000 : 0;
    }
}

static void logs_choices(shm_rank *it)
{
    int lines = 0;
    tddp_log_set_level(TDDP_LOG_DEBUG);
    tddp_log_set_sink(count_lines, &lines);
    places at = open_places(it);
    for (int i = 0; i < 3; i++) {
        check_all_reduce(&at, ANYWHERE, TDDP_REDUCE_SUM, TDDP_FLOAT32, 64);
        check_all_reduce(&at, ANYWHERE, TDDP_REDUCE_SUM, TDDP_FLOAT32, 256 * 1024);
        check_all_reduce(&at, REGISTERED, TDDP_REDUCE_SUM, TDDP_FLOAT32, 256 * 1024);
    }
    tddp_log_set_sink(NULL, NULL);
    CHECK_INT(lines, 10101);
    close_places(&at);
}

static void count_requested(tddp_log_level level, const char *room, const char *text, void *data)
{
    (void)room;
    if (level == TDDP_LOG_DEBUG && strstr(text, "all_reduce of")) {
        *(int *)data += strstr(text, ": staged (TDDP_SHM_ALGORITHM)") ? 1 : 100;
    }
}

/* By default the first would be inline and the second sliced. */
static void uses_requested(shm_rank *it)
{
    int lines = 0;
    tddp_log_set_level(TDDP_LOG_DEBUG);
    tddp_log_set_sink(count_requested, &lines);
    places at = open_places(it);
    check_all_reduce(&at, ANYWHERE, TDDP_REDUCE_SUM, TDDP_FLOAT32, 64);
    check_all_reduce(&at, ANYWHERE, TDDP_REDUCE_SUM, TDDP_FLOAT32, 256 * 1024);
    tddp_log_set_sink(NULL, NULL);
    CHECK_INT(lines, 2);
    close_places(&at);
}

TEST(requested_algorithms_are_used)
{
    CHECK_INT(setenv("TDDP_SHM_ALGORITHM", "all_reduce=staged", 1), 0);
    shm_run((shm_job){.mode = SHM_PROCESSES, .size = 2, .body = uses_requested});
}

TEST(choices_are_logged_once)
{
    run_shm(SHM_PROCESSES, 2, logs_choices, NULL);
}
