/* What follows from what the ranks say: their lines, and who is to blame. Ranks are given hosts of
 * their own where this process could see them otherwise. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "group/failure_detector/root_cause.h"

enum { WORLD = 4 };

/* Rank 0 is this process, rank 1 a process here that has ended, the others are elsewhere. */
static tddp_peers *peers(void)
{
    char own[TDDP_PEER_RECORD_BYTES];
    char ended[TDDP_PEER_RECORD_BYTES];
    tddp_peers *table;
    CHECK_OK(tddp_peers_describe_self(0, own));
    tddp_blob words[WORLD] = {
        {own, strlen(own)},
        {ended, 0},
        {(char *)"other/1 200 17 1000 2 node-b", 28},
        {(char *)"other/1 300 17 1000 3 node-b", 28},
    };
    char host_id[128];
    long long pid;
    long long space;
    CHECK_INT(sscanf(own, "%127s %lld %lld", host_id, &pid, &space), 3);
    /* No system gives that number to a process. */
    snprintf(ended, sizeof ended, "%s 4194999 %lld 1000 1 node-a", host_id, space);
    words[1].size = strlen(ended);
    CHECK_OK(tddp_peers_create(words, WORLD, &table));
    return table;
}

static tddp_bytes journal;
static tddp_status_report accounts[WORLD];
static const tddp_op op = {.kind = TDDP_OP_ALL_REDUCE, .sequence = 7};

static tddp_recorder_op_summary moment(tddp_op_kind kind, uint64_t sequence, int64_t age_ms,
                                       const char *described)
{
    tddp_recorder_op_summary made = {.any = true,
                                     .kind = kind,
                                     .sequence = sequence,
                                     .at_ns = tddp_now_ns() - age_ms * TDDP_NS_PER_MS};
    snprintf(made.text, sizeof made.text, "%s", described);
    return made;
}

static void says(int rank, tddp_status_report_kind kind, tddp_status status, uint64_t in,
                 uint64_t last, const char *described, const char *text)
{
    tddp_recorder_position where = {0};
    if (in) {
        where.current = moment(TDDP_OP_ALL_REDUCE, in, 1500, described);
    }
    if (last) {
        where.last = moment(TDDP_OP_BARRIER, last, 2500, "");
    }
    CHECK_OK(tddp_status_report_write(&journal, kind, rank, status, &where, "", text, 500));
}

static bool judge(tddp_status own, const char *text, bool last, tddp_status *verdict)
{
    tddp_peers *table = peers();
    char *log = tddp_alloc(journal.size + 1);
    CHECK(log != NULL);
    if (journal.size > 0) {
        memcpy(log, journal.data, journal.size);
    }
    tddp_status_report_read(log, accounts, WORLD);
    tddp_failure_evidence evidence = {
        .peers = table,
        .op = own ? &op : NULL,
        .described = own ? "mine" : NULL,
        .status = own,
        .text = text,
        .accounts = accounts,
        .last = last,
    };
    bool clear = tddp_root_cause_find(&evidence, verdict);
    tddp_peers_release(table);
    free(log);
    return clear;
}

/* Everybody has told where they are, but for those that have ended. */
static void others_live(void)
{
    says(1, TDDP_REPORT_POSITION, TDDP_OK, 7, 6, "", "");
    says(2, TDDP_REPORT_POSITION, TDDP_OK, 0, 6, "", "");
    says(3, TDDP_REPORT_POSITION, TDDP_OK, 7, 6, "", "");
}

TEST(a_rank_that_ended_without_a_word_is_the_cause)
{
    tddp_status verdict;
    says(2, TDDP_REPORT_FAILURE, TDDP_PEER_LOST, 7, 6, "", "lost rank 3");
    says(3, TDDP_REPORT_FAILURE, TDDP_PEER_LOST, 7, 6, "", "lost rank 1");
    CHECK(judge(TDDP_PEER_LOST, "lost rank 2 (reset)", false, &verdict));
    CHECK_INT(verdict, TDDP_PEER_LOST);
    CHECK_TEXT(tddp_error_message(), "lost rank 1 (host node-a, pid 4194999): its process has "
                                     "ended; seen here: lost rank 2 (reset)");
    tddp_bytes_free(&journal);
}

/* It is ending, and has not said so yet. */
TEST(who_met_a_loss_speaks_for_those_that_did_not)
{
    tddp_status verdict;
    char who[16];
    snprintf(who, sizeof who, "pid %d", (int)getpid());
    says(1, TDDP_REPORT_POSITION, TDDP_OK, 7, 6, "", "");
    says(2, TDDP_REPORT_FAILURE, TDDP_PEER_LOST, 7, 6, "", "lost rank 0, which gave up");
    says(3, TDDP_REPORT_FAILURE, TDDP_PEER_LOST, 7, 6, "", "lost rank 1");
    CHECK(judge(TDDP_OK, "", false, &verdict));
    CHECK_INT(verdict, TDDP_PEER_LOST);
    CHECK_CONTAINS(tddp_error_message(),
                   "rank 2 (host node-b, pid 200) failed first, in all_reduce "
                   "7: lost rank 0, which gave up (TDDP_PEER_LOST); rank 0 is");
    CHECK_CONTAINS(tddp_error_message(), who);
    tddp_bytes_free(&journal);
}

TEST(the_first_that_failed_by_itself_is_the_cause)
{
    tddp_status verdict;
    others_live();
    says(3, TDDP_REPORT_FAILURE, TDDP_PEER_LOST, 7, 6, "", "lost rank 2");
    says(2, TDDP_REPORT_FAILURE, TDDP_SYSTEM, 5, 4, "", "no\tfiles\nleft");
    says(1, TDDP_REPORT_FAILURE, TDDP_TIMEOUT, 7, 6, "", "too slow");
    CHECK(judge(TDDP_OK, "", false, &verdict));
    CHECK_INT(verdict, TDDP_PEER_LOST);
    CHECK_TEXT(tddp_error_message(), "rank 2 (host node-b, pid 200) failed first, in all_reduce 5: "
                                     "no files left (TDDP_SYSTEM)");
    tddp_bytes_free(&journal);
}

TEST(who_gives_no_sign_of_life_is_waited_for)
{
    tddp_status verdict;
    says(1, TDDP_REPORT_POSITION, TDDP_OK, 7, 6, "", "");
    says(3, TDDP_REPORT_FAILURE, TDDP_PEER_LOST, 7, 6, "", "lost rank 2");
    CHECK(!judge(TDDP_PEER_LOST, "lost rank 3", false, &verdict));
    CHECK(judge(TDDP_PEER_LOST, "lost rank 3", true, &verdict));
    CHECK_TEXT(tddp_error_message(),
               "no sign of life from rank 2 (host node-b, pid 200); seen here: lost rank 3");
    tddp_bytes_free(&journal);
}

TEST(where_all_live_the_backends_words_stand)
{
    tddp_status verdict;
    others_live();
    CHECK(judge(TDDP_PEER_LOST, "lost rank 3 (reset), lost rank 3", false, &verdict));
    CHECK_TEXT(tddp_error_message(),
               "lost rank 3 (reset), lost rank 3; rank 3 is pid 300 on host node-b");
    tddp_bytes_free(&journal);
}

TEST(a_rank_that_left_before_the_operation_is_the_cause)
{
    tddp_status verdict;
    others_live();
    says(2, TDDP_REPORT_LEFT, TDDP_OK, 0, 6, "", "");
    says(3, TDDP_REPORT_LEFT, TDDP_OK, 0, 7, "", "");
    CHECK(judge(TDDP_PEER_LOST, "lost rank 3", false, &verdict));
    CHECK_CONTAINS(tddp_error_message(), "rank 2 (host node-b, pid 200) has destroyed the group");
    CHECK(strstr(tddp_error_message(), "pid 300") == NULL);
    tddp_bytes_free(&journal);
}

TEST(a_disagreement_comes_before_all_else)
{
    tddp_status verdict;
    says(3, TDDP_REPORT_FAILURE, TDDP_TIMEOUT, 7, 6, "", "too slow");
    says(2, TDDP_REPORT_FAILURE, TDDP_MISMATCH, 7, 6, "theirs", "rank 2 runs this, rank 3 that");
    CHECK(judge(TDDP_PEER_LOST, "lost rank 2", false, &verdict));
    CHECK_INT(verdict, TDDP_MISMATCH);
    CHECK_TEXT(
        tddp_error_message(),
        "ranks disagree, which rank 2 (host node-b, pid 200) found in all_reduce 7: rank 2 "
        "runs this, rank 3 that; rank 2 described it as \"theirs\", rank 0 as \"mine\"; rank "
        "3 is pid 300 on host node-b");
    tddp_bytes_free(&journal);
}

TEST(ones_own_disagreement_waits_for_the_others_description)
{
    tddp_status verdict;
    CHECK(!judge(TDDP_MISMATCH, "rank 0 runs this, rank 2 that", false, &verdict));
    CHECK(judge(TDDP_MISMATCH, "rank 0 runs this, rank 2 that", true, &verdict));
    CHECK_TEXT(tddp_error_message(), "rank 0 runs this, rank 2 that; rank 0 described it as "
                                     "\"mine\"; rank 2 is pid 200 on host node-b");
    says(2, TDDP_REPORT_POSITION, TDDP_OK, 7, 6, "theirs", "");
    CHECK(judge(TDDP_MISMATCH, "rank 0 runs this, rank 2 that", false, &verdict));
    CHECK_CONTAINS(tddp_error_message(), "rank 0 described it as \"mine\", rank 2 as \"theirs\"");
    CHECK_INT(verdict, TDDP_MISMATCH);
    tddp_bytes_free(&journal);
}

TEST(a_timeout_lists_the_ranks)
{
    tddp_status verdict;
    says(3, TDDP_REPORT_POSITION, TDDP_OK, 7, 6, "", "");
    CHECK(!judge(TDDP_TIMEOUT, "not done", false, &verdict));
    CHECK(judge(TDDP_TIMEOUT, "not done", true, &verdict));
    CHECK_INT(verdict, TDDP_TIMEOUT);
    CHECK_TEXT(tddp_error_message(),
               "not done; not arrived: rank 1 (host node-a, pid 4194999): its process has ended; "
               "rank 2 (host node-b, pid 200): gives no sign of life; arrived: rank(s) 0, 3");
    says(2, TDDP_REPORT_POSITION, TDDP_OK, 6, 5, "weights", "");
    CHECK(judge(TDDP_TIMEOUT, "not done", false, &verdict));
    CHECK_CONTAINS(tddp_error_message(),
                   "rank 2 (host node-b, pid 200): in all_reduce 6 (\"weights\") for 1.5 s; "
                   "arrived: rank(s) 0, 3");
    tddp_bytes_free(&journal);
}

TEST(what_failed_by_itself_needs_no_others)
{
    tddp_status verdict;
    CHECK(judge(TDDP_NETWORK, "cable cut", false, &verdict));
    CHECK_INT(verdict, TDDP_NETWORK);
    CHECK_TEXT(tddp_error_message(), "cable cut");
}

TEST(lines_that_make_no_sense_are_passed_over)
{
    static const char *const bad[] = {
        "",
        "x",
        "1\t2",
        "1\t99\t0\t0\t0\t0\t0\t0\t0\t0\t0\t0\t0\t0\t0\t0\t0\t0\t\t\t",
        "9\t1\t0\t0\t0\t0\t0\t0\t0\t0\t0\t0\t0\t0\t0\t0\t0\t0\t\t\t",
        "1\t1\t0\t1\t77\t0\t0\t0\t0\t0\t0\t0\t0\t0\t0\t0\t0\t0\t\t\t",
        "1\t1\t0\ta\t0\t0\t0\t0\t0\t0\t0\t0\t0\t0\t0\t0\t0\t0\t\t\t",
        "1\t1\t0\t0\t0\t0\t0\t0\t0\t0\t0\t0\t0\t0\t0\t0\t0\t0\t\t\t\t",
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        CHECK_OK(tddp_bytes_append(&journal, bad[i], strlen(bad[i])));
        CHECK_OK(tddp_bytes_append(&journal, "\n", 1));
    }
    says(3, TDDP_REPORT_POSITION, TDDP_OK, 7, 6, "", "");
    CHECK_OK(tddp_bytes_append(&journal, "1\t2", 4)); /* with its end */
    tddp_status_report_read(journal.data, accounts, WORLD);
    CHECK_INT(accounts[0].kind, TDDP_REPORT_NONE);
    CHECK_INT(accounts[1].kind, TDDP_REPORT_NONE);
    CHECK_INT(accounts[2].kind, TDDP_REPORT_NONE);
    CHECK_INT(accounts[3].kind, TDDP_REPORT_POSITION);
    CHECK_INT(accounts[3].current.sequence, 7);
    tddp_bytes_free(&journal);
}

TEST(introductions_are_checked)
{
    static const char *const bad[] = {
        "", "only-one", "id 1 2 3 4", "id x 2 3 4 host", "id 0 2 3 4 host", "id 1 2 3 4 host more"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        tddp_blob word = {(char *)bad[i], strlen(bad[i])};
        tddp_peers *table = NULL;
        CHECK_STATUS(tddp_peers_create(&word, 1, &table), TDDP_PROTOCOL);
        CHECK_CONTAINS(tddp_error_message(), "rank 0 introduced itself as");
        CHECK(table == NULL);
    }
}

TEST(processes_are_seen)
{
    tddp_peers *table = peers();
    CHECK_INT(tddp_peers_check_liveness(table, 0, 0), TDDP_PEER_ALIVE);
    CHECK_INT(tddp_peers_check_liveness(table, 0, 1), TDDP_PEER_ENDED);
    CHECK_INT(tddp_peers_check_liveness(table, 0, 2), TDDP_PEER_UNKNOWN);
    CHECK(!tddp_peers_same_host(table));
    tddp_peers_release(table);
}
