/* The root cause that follows from the ranks' status reports, and the reports' format. Some ranks
 * are given other hosts, so that this process cannot observe theirs. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "group/failure_detector/root_cause.h"

enum { WORLD = 4 };

/* Rank 0 is this process, rank 1 a process here that has ended, the others are on another host. */
static tddp_peers *peers(void)
{
    char own[TDDP_PEER_RECORD_BYTES];
    char ended[TDDP_PEER_RECORD_BYTES];
    tddp_peers *table;
    CHECK_OK(tddp_peers_describe_self(0, own));
    tddp_slice records[WORLD] = {
        {own, strlen(own)},
        {ended, 0},
        {"other/1 200 17 1000 2 node-b", 28},
        {"other/1 300 17 1000 3 node-b", 28},
    };
    char host_id[128];
    long long pid;
    long long space;
    CHECK_INT(sscanf(own, "%127s %lld %lld", host_id, &pid, &space), 3);
    /* No process can have that number. */
    snprintf(ended, sizeof ended, "%s 4194999 %lld 1000 1 node-a", host_id, space);
    records[1].size = strlen(ended);
    CHECK_OK(tddp_peers_create(records, WORLD, &table));
    return table;
}

static tddp_bytes log_lines;
static tddp_status_report reports[WORLD];
static tddp_observed observed;
static const tddp_op op = {.kind = TDDP_OP_ALL_REDUCE, .sequence = 7};

static tddp_recorder_op_summary summary(tddp_op_kind kind, uint64_t sequence, int64_t age_ms,
                                        const char *described)
{
    tddp_recorder_op_summary made = {.any = true,
                                     .kind = kind,
                                     .sequence = sequence,
                                     .at_ns = tddp_now_ns() - age_ms * TDDP_NS_PER_MS};
    snprintf(made.text, sizeof made.text, "%s", described);
    return made;
}

static void report(int rank, tddp_status_report_kind kind, tddp_status status, uint64_t in,
                   uint64_t last, const char *described, const char *text)
{
    tddp_recorder_position position = {0};
    if (in) {
        position.current = summary(TDDP_OP_ALL_REDUCE, in, 1500, described);
    }
    if (last) {
        position.last = summary(TDDP_OP_BARRIER, last, 2500, "");
    }
    CHECK_OK(tddp_status_report_write(&log_lines, kind, rank, status, &position, "", text, 500));
}

/* Without the store, whatever was reported. */
static bool store_lost;

static bool find_cause(tddp_status status, const char *text, bool deadline_over, tddp_status *cause)
{
    tddp_peers *table = peers();
    char *log = tddp_alloc(log_lines.size + 1);
    CHECK(log != NULL);
    if (log_lines.size > 0) {
        memcpy(log, log_lines.data, log_lines.size);
    }
    const tddp_failure failure = {.op = op, .described = "mine", .status = status, .text = text};
    const tddp_failure_evidence evidence = {
        .peers = table,
        .failure = status ? &failure : NULL,
        .observed = &observed,
        .store_lost = store_lost,
        .deadline_over = deadline_over,
    };
    bool found = tddp_root_cause_find(&evidence, store_lost ? NULL : log, cause);
    tddp_peers_release(table);
    free(log);
    return found;
}

/* All other ranks report their positions. */
static void report_positions(void)
{
    report(1, TDDP_REPORT_POSITION, TDDP_OK, 7, 6, "", "");
    report(2, TDDP_REPORT_POSITION, TDDP_OK, 0, 6, "", "");
    report(3, TDDP_REPORT_POSITION, TDDP_OK, 7, 6, "", "");
}

TEST(a_rank_that_ended_without_a_report_is_the_cause)
{
    tddp_status cause;
    report(2, TDDP_REPORT_FAILURE, TDDP_PEER_LOST, 7, 6, "", "lost rank 3");
    report(3, TDDP_REPORT_FAILURE, TDDP_PEER_LOST, 7, 6, "", "lost rank 1");
    CHECK(find_cause(TDDP_PEER_LOST, "lost rank 2 (reset)", false, &cause));
    CHECK_INT(cause, TDDP_PEER_LOST);
    CHECK_TEXT(tddp_error_message(), "lost rank 1 (host node-a, pid 4194999): its process has "
                                     "ended; seen here: lost rank 2 (reset)");
    tddp_bytes_free(&log_lines);
}

/* Rank 0 is lost, and has not reported that yet. */
TEST(the_rank_that_lost_a_peer_explains_it_to_the_others)
{
    tddp_status cause;
    char who[16];
    snprintf(who, sizeof who, "pid %d", (int)getpid());
    report(1, TDDP_REPORT_POSITION, TDDP_OK, 7, 6, "", "");
    report(2, TDDP_REPORT_FAILURE, TDDP_PEER_LOST, 7, 6, "", "lost rank 0, which gave up");
    report(3, TDDP_REPORT_FAILURE, TDDP_PEER_LOST, 7, 6, "", "lost rank 1");
    CHECK(find_cause(TDDP_OK, "", false, &cause));
    CHECK_INT(cause, TDDP_PEER_LOST);
    CHECK_CONTAINS(tddp_error_message(),
                   "rank 2 (host node-b, pid 200) failed first, in all_reduce "
                   "7: lost rank 0, which gave up (TDDP_PEER_LOST); rank 0 is");
    CHECK_CONTAINS(tddp_error_message(), who);
    tddp_bytes_free(&log_lines);
}

TEST(the_first_that_failed_by_itself_is_the_cause)
{
    tddp_status cause;
    report_positions();
    report(3, TDDP_REPORT_FAILURE, TDDP_PEER_LOST, 7, 6, "", "lost rank 2");
    report(2, TDDP_REPORT_FAILURE, TDDP_SYSTEM, 5, 4, "", "no\tfiles\nleft");
    report(1, TDDP_REPORT_FAILURE, TDDP_TIMEOUT, 7, 6, "", "too slow");
    CHECK(find_cause(TDDP_OK, "", false, &cause));
    CHECK_INT(cause, TDDP_PEER_LOST);
    CHECK_TEXT(tddp_error_message(), "rank 2 (host node-b, pid 200) failed first, in all_reduce 5: "
                                     "no files left (TDDP_SYSTEM)");
    tddp_bytes_free(&log_lines);
}

TEST(a_rank_without_a_report_is_waited_for)
{
    tddp_status cause;
    report(1, TDDP_REPORT_POSITION, TDDP_OK, 7, 6, "", "");
    report(3, TDDP_REPORT_FAILURE, TDDP_PEER_LOST, 7, 6, "", "lost rank 2");
    CHECK(!find_cause(TDDP_PEER_LOST, "lost rank 3", false, &cause));
    CHECK(find_cause(TDDP_PEER_LOST, "lost rank 3", true, &cause));
    CHECK_TEXT(tddp_error_message(),
               "no sign of life from rank 2 (host node-b, pid 200); seen here: lost rank 3");
    tddp_bytes_free(&log_lines);
}

TEST(where_all_are_alive_the_backends_error_is_the_text)
{
    tddp_status cause;
    report_positions();
    CHECK(find_cause(TDDP_PEER_LOST, "lost rank 3 (reset), lost rank 3", false, &cause));
    CHECK_TEXT(tddp_error_message(),
               "lost rank 3 (reset), lost rank 3; rank 3 is pid 300 on host node-b");
    tddp_bytes_free(&log_lines);
}

TEST(a_rank_that_left_before_the_operation_is_the_cause)
{
    tddp_status cause;
    report_positions();
    report(2, TDDP_REPORT_LEFT, TDDP_OK, 0, 6, "", "");
    report(3, TDDP_REPORT_LEFT, TDDP_OK, 0, 7, "", "");
    CHECK(find_cause(TDDP_PEER_LOST, "lost rank 3", false, &cause));
    CHECK_CONTAINS(tddp_error_message(), "rank 2 (host node-b, pid 200) has destroyed the group");
    CHECK(strstr(tddp_error_message(), "pid 300") == NULL);
    tddp_bytes_free(&log_lines);
}

TEST(why_a_rank_left_is_said_and_precedes_those_that_merely_left)
{
    tddp_status cause;
    report_positions();
    report(1, TDDP_REPORT_LEFT, TDDP_OK, 0, 6, "", "");
    report(2, TDDP_REPORT_LEFT, TDDP_OK, 0, 6, "", "RuntimeError: bad sample in shard 17");
    CHECK(find_cause(TDDP_PEER_LOST, "lost rank 3", false, &cause));
    CHECK_INT(cause, TDDP_PEER_LOST);
    CHECK_CONTAINS(tddp_error_message(),
                   "rank 2 (host node-b, pid 200) has left the group because of an error: "
                   "RuntimeError: bad sample in shard 17");
    CHECK(strstr(tddp_error_message(), "do all ranks make the same calls") == NULL);
    CHECK(strstr(tddp_error_message(), "pid 100") == NULL);
    tddp_bytes_free(&log_lines);
}

TEST(a_mismatch_precedes_all_other_causes)
{
    tddp_status cause;
    report(3, TDDP_REPORT_FAILURE, TDDP_TIMEOUT, 7, 6, "", "too slow");
    report(2, TDDP_REPORT_FAILURE, TDDP_MISMATCH, 7, 6, "theirs", "rank 2 runs this, rank 3 that");
    CHECK(find_cause(TDDP_PEER_LOST, "lost rank 2", false, &cause));
    CHECK_INT(cause, TDDP_MISMATCH);
    CHECK_TEXT(
        tddp_error_message(),
        "ranks disagree, which rank 2 (host node-b, pid 200) found in all_reduce 7: rank 2 "
        "runs this, rank 3 that; rank 2 described it as \"theirs\", rank 0 as \"mine\"; rank "
        "3 is pid 300 on host node-b");
    tddp_bytes_free(&log_lines);
}

TEST(a_local_mismatch_waits_for_the_other_description)
{
    tddp_status cause;
    CHECK(!find_cause(TDDP_MISMATCH, "rank 0 runs this, rank 2 that", false, &cause));
    CHECK(find_cause(TDDP_MISMATCH, "rank 0 runs this, rank 2 that", true, &cause));
    CHECK_TEXT(tddp_error_message(), "rank 0 runs this, rank 2 that; rank 0 described it as "
                                     "\"mine\"; rank 2 is pid 200 on host node-b");
    report(2, TDDP_REPORT_POSITION, TDDP_OK, 7, 6, "theirs", "");
    CHECK(find_cause(TDDP_MISMATCH, "rank 0 runs this, rank 2 that", false, &cause));
    CHECK_CONTAINS(tddp_error_message(), "rank 0 described it as \"mine\", rank 2 as \"theirs\"");
    CHECK_INT(cause, TDDP_MISMATCH);
    tddp_bytes_free(&log_lines);
}

TEST(a_timeout_lists_the_ranks)
{
    tddp_status cause;
    report(3, TDDP_REPORT_POSITION, TDDP_OK, 7, 6, "", "");
    CHECK(!find_cause(TDDP_TIMEOUT, "not done", false, &cause));
    CHECK(find_cause(TDDP_TIMEOUT, "not done", true, &cause));
    CHECK_INT(cause, TDDP_TIMEOUT);
    CHECK_TEXT(tddp_error_message(),
               "not done; not arrived: rank 1 (host node-a, pid 4194999): its process has ended; "
               "rank 2 (host node-b, pid 200): gives no sign of life; arrived: rank(s) 0, 3");
    report(2, TDDP_REPORT_POSITION, TDDP_OK, 6, 5, "weights", "");
    CHECK(find_cause(TDDP_TIMEOUT, "not done", false, &cause));
    CHECK_CONTAINS(tddp_error_message(),
                   "rank 2 (host node-b, pid 200): in all_reduce 6 (\"weights\") for 1.5 s; "
                   "arrived: rank(s) 0, 3");
    tddp_bytes_free(&log_lines);
}

/* --- what this rank's backend has seen ------------------------------------------------------- */

static void see(tddp_observation_kind kind, int rank, uint64_t sequence, tddp_status status,
                const char *text)
{
    const tddp_observation seen = {
        .kind = kind, .rank = rank, .sequence = sequence, .status = status, .text = text};
    tddp_observed_add(&observed, &seen);
}

static void forget(void)
{
    tddp_observed_free(&observed, false);
    tddp_bytes_free(&log_lines);
    store_lost = false;
}

TEST(what_says_most_of_a_rank_is_kept)
{
    tddp_observed_init(&observed, WORLD);
    CHECK_INT(tddp_observed_of(&observed, 2).kind, TDDP_OBSERVED_NOTHING);
    see(TDDP_OBSERVED_LEFT, 2, 6, TDDP_OK, NULL);
    see(TDDP_OBSERVED_NOT_ENTERED, 2, 5, TDDP_OK, "barrier");
    see(TDDP_OBSERVED_FAILED, -1, 0, TDDP_OK, "no rank");
    see(TDDP_OBSERVED_FAILED, WORLD, 0, TDDP_OK, "no rank");
    CHECK_INT(tddp_observed_of(&observed, 2).kind, TDDP_OBSERVED_LEFT);
    CHECK_INT(tddp_observed_of(&observed, 2).sequence, 6);
    char text[] = "lost rank 1";
    see(TDDP_OBSERVED_FAILED, 2, 0, TDDP_PEER_LOST, text);
    text[0] = 'L';
    CHECK_TEXT(tddp_observed_of(&observed, 2).text, "lost rank 1");
    see(TDDP_OBSERVED_FAILED, 2, 0, TDDP_TIMEOUT, "too slow");
    CHECK_INT(tddp_observed_of(&observed, 2).status, TDDP_TIMEOUT);
    see(TDDP_OBSERVED_ENDED, 2, 0, TDDP_OK, NULL);
    see(TDDP_OBSERVED_FAILED, 2, 0, TDDP_TIMEOUT, "too slow");
    CHECK_INT(tddp_observed_of(&observed, 2).kind, TDDP_OBSERVED_ENDED);
    CHECK_INT(tddp_observed_of(&observed, -1).kind, TDDP_OBSERVED_NOTHING);
    CHECK_INT(tddp_observed_of(&observed, WORLD).kind, TDDP_OBSERVED_NOTHING);
    forget();
}

/* It is on another host, where only its connection shows that. */
TEST(a_process_whose_end_was_seen_is_the_cause)
{
    tddp_status cause;
    tddp_observed_init(&observed, WORLD);
    report(1, TDDP_REPORT_POSITION, TDDP_OK, 7, 6, "", "");
    report(3, TDDP_REPORT_FAILURE, TDDP_PEER_LOST, 7, 6, "", "lost rank 2");
    see(TDDP_OBSERVED_ENDED, 2, 0, TDDP_OK, NULL);
    see(TDDP_OBSERVED_FAILED, 3, 0, TDDP_PEER_LOST, "lost rank 2");
    CHECK(find_cause(TDDP_PEER_LOST, "lost rank 2 (its process has ended)", false, &cause));
    CHECK_INT(cause, TDDP_PEER_LOST);
    CHECK_TEXT(tddp_error_message(),
               "lost rank 2 (host node-b, pid 200): its process has ended; seen here: lost rank 2 "
               "(its process has ended); lost rank 3, which gave up: lost rank 2");
    forget();
}

TEST(a_rank_that_was_seen_leaving_is_the_cause_where_it_does_not_say_why)
{
    tddp_status cause;
    tddp_observed_init(&observed, WORLD);
    report(1, TDDP_REPORT_POSITION, TDDP_OK, 7, 6, "", "");
    report(3, TDDP_REPORT_POSITION, TDDP_OK, 7, 6, "", "");
    see(TDDP_OBSERVED_LEFT, 2, 6, TDDP_OK, NULL);
    CHECK(!find_cause(TDDP_PEER_LOST, "rank 2 has left the group", false, &cause));
    CHECK(find_cause(TDDP_PEER_LOST, "rank 2 has left the group", true, &cause));
    CHECK_TEXT(tddp_error_message(),
               "rank 2 (host node-b, pid 200) has destroyed the group: do all ranks make the same "
               "calls?; seen here: rank 2 has left the group");
    report(2, TDDP_REPORT_LEFT, TDDP_OK, 0, 6, "", "KeyError: weights");
    CHECK(find_cause(TDDP_PEER_LOST, "rank 2 has left the group", false, &cause));
    CHECK_CONTAINS(tddp_error_message(), "has left the group because of an error: KeyError: weigh");
    forget();
}

/* After the operation that fails here. */
TEST(a_rank_that_left_later_is_not_the_cause)
{
    tddp_status cause;
    tddp_observed_init(&observed, WORLD);
    store_lost = true;
    see(TDDP_OBSERVED_LEFT, 2, 7, TDDP_OK, NULL);
    see(TDDP_OBSERVED_FAILED, 3, 0, TDDP_SYSTEM, "no files left");
    CHECK(find_cause(TDDP_PEER_LOST, "lost rank 3, which gave up: no files left", true, &cause));
    CHECK(strstr(tddp_error_message(), "destroyed") == NULL);
    forget();
}

TEST(without_the_store_a_timeout_says_who_has_entered)
{
    tddp_status cause;
    tddp_observed_init(&observed, WORLD);
    store_lost = true;
    see(TDDP_OBSERVED_ENTERED, 1, 0, TDDP_OK, NULL);
    see(TDDP_OBSERVED_NOT_ENTERED, 2, 6, TDDP_OK, "barrier");
    see(TDDP_OBSERVED_ENTERED, 3, 0, TDDP_OK, NULL);
    CHECK(find_cause(TDDP_TIMEOUT, "not done; rank 2 has not done its part", true, &cause));
    CHECK_INT(cause, TDDP_TIMEOUT);
    CHECK_CONTAINS(tddp_error_message(),
                   "not done; rank 2 has not done its part; entered: rank 1, rank 3; not entered: "
                   "rank 2 (last in barrier, operation 6): slow, stuck, or in another operation?");
    CHECK_CONTAINS(tddp_error_message(), "rank 2 is pid 200 on host node-b");
    forget();
}

TEST(a_text_is_completed_by_the_ranks_that_it_does_not_name)
{
    char text[256];
    tddp_observed_init(&observed, 20);
    see(TDDP_OBSERVED_CLOSED, 1, 0, TDDP_OK, "reset");
    see(TDDP_OBSERVED_LEFT, 12, 0, TDDP_OK, NULL);
    see(TDDP_OBSERVED_LEFT, 13, 0, TDDP_OK, NULL);
    tddp_observed_describe(&observed, "rank 12 has left the group", text, sizeof text);
    CHECK_TEXT(text, "rank 12 has left the group; lost rank 1 (reset); rank 13 has left the group");
    tddp_observed_describe(&observed, "", text, 20);
    CHECK_TEXT(text, "; lost rank 1 (rese");
    for (int each = 2; each < 12; each++) {
        see(TDDP_OBSERVED_LEFT, each, 0, TDDP_OK, NULL);
    }
    tddp_observed_describe(&observed, "lost rank 1", text, sizeof text);
    CHECK_CONTAINS(text, "; rank 7 has left the group and 6 more");
    forget();
}

TEST(a_local_failure_needs_no_reports)
{
    tddp_status cause;
    CHECK(find_cause(TDDP_NETWORK, "cable cut", false, &cause));
    CHECK_INT(cause, TDDP_NETWORK);
    CHECK_TEXT(tddp_error_message(), "cable cut");
}

TEST(malformed_lines_are_skipped)
{
    static const char *const bad[] = {
        "",
        "x",
        "1\t2",
        "1\t99\t0\t0\t0\t0\t0\tin\t\t",
        "1\t-1\t0\t0\t0\t0\t0\tin\t\t",
        "9\t1\t0\t0\t0\t0\t0\tin\t\t",
        "0\t1\t0\t0\t0\t0\t0\tin\t\t",
        "1\t1\t0\ta\t0\t0\t0\tin\t\t",
        "1\t1\t0\t0\t0\t0\t0\tin\t",
        "1\t1\t0\t0\t0\t0\t0",
        "1\t1\t0\t0\t0\t0\t0\tin\t\t\t",
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        CHECK_OK(tddp_bytes_append(&log_lines, bad[i], strlen(bad[i])));
        CHECK_OK(tddp_bytes_append(&log_lines, "\n", 1));
    }
    report(3, TDDP_REPORT_POSITION, TDDP_OK, 7, 6, "", "");
    CHECK_OK(tddp_bytes_append(&log_lines, "1\t2", 4)); /* with its end */
    tddp_status_report_read(log_lines.data, reports, WORLD);
    CHECK_INT(reports[0].kind, TDDP_REPORT_NONE);
    CHECK_INT(reports[1].kind, TDDP_REPORT_NONE);
    CHECK_INT(reports[2].kind, TDDP_REPORT_NONE);
    CHECK_INT(reports[3].kind, TDDP_REPORT_POSITION);
    CHECK_INT(reports[3].current, 7);
    tddp_bytes_free(&log_lines);
}

TEST(records_of_peers_are_checked)
{
    static const char *const bad[] = {
        "", "only-one", "id 1 2 3 4", "id x 2 3 4 host", "id 0 2 3 4 host", "id 1 2 3 4 host more"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        tddp_slice record = {bad[i], strlen(bad[i])};
        tddp_peers *table = NULL;
        CHECK_STATUS(tddp_peers_create(&record, 1, &table), TDDP_PROTOCOL);
        CHECK_CONTAINS(tddp_error_message(), "rank 0 introduced itself as");
        CHECK(table == NULL);
    }
}

TEST(the_liveness_of_processes_is_checked)
{
    tddp_peers *table = peers();
    CHECK_INT(tddp_peers_check_liveness(table, 0, 0), TDDP_PEER_ALIVE);
    CHECK_INT(tddp_peers_check_liveness(table, 0, 1), TDDP_PEER_ENDED);
    CHECK_INT(tddp_peers_check_liveness(table, 0, 2), TDDP_PEER_UNKNOWN);
    CHECK(!tddp_peers_same_host(table));
    tddp_peers_release(table);
}
