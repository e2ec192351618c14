#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "check/check.h"

enum { RANKS = 4, LINKS = RANKS * (RANKS - 1) };

static const char *const hosts[RANKS] = {"a", "a", "b", "b"};

/* All links of four ranks on two hosts: 8 GB/s on a host, 1 GB/s between them. */
static void make_links(tddp_check_link links[LINKS])
{
    int count = 0;
    for (int from = 0; from < RANKS; from++) {
        for (int to = 0; to < RANKS; to++) {
            if (from != to) {
                bool between = from / 2 != to / 2;
                links[count++] = (tddp_check_link){from, to, between, between ? 1e9 : 8e9,
                                                   between ? 5e-5 : 1e-5};
            }
        }
    }
}

static tddp_check_link *find(tddp_check_link links[LINKS], int from, int to)
{
    for (int i = 0; i < LINKS; i++) {
        if (links[i].from == from && links[i].to == to) {
            return &links[i];
        }
    }
    abort();
}

static tddp_check_results judge(const tddp_check_link links[LINKS])
{
    tddp_check_results results = {.world_size = RANKS,
                                  .hosts = 2,
                                  .host_of = hosts,
                                  .links = links,
                                  .link_count = LINKS,
                                  .memory = {.median = 3e7, .most = 4e7, .rank = 2},
                                  .times = {.store = {.median = 4.2e-5, .most = 1e-4, .rank = 3},
                                            .barrier = 3e-4,
                                            .sizes = {4 << 10, 1 << 20, 16 << 20},
                                            .all_reduce = {2e-4, 1e-3, 0}}};
    CHECK_OK(tddp_check_judge(links, LINKS, false, &results.local));
    CHECK_OK(tddp_check_judge(links, LINKS, true, &results.remote));
    return results;
}

TEST(medians)
{
    double values[] = {5, 1, 3, 2};
    CHECK_DOUBLE(tddp_check_median(values, 3), 3, 0);
    CHECK_DOUBLE(tddp_check_median(values, 4), 2.5, 0);
    CHECK_DOUBLE(tddp_check_median(values, 0), 0, 0);
    double times[] = {9, 1, 4, 3, 9, 9, 9, 2};
    CHECK_DOUBLE(tddp_check_quick(times, 8), 3, 0);
    CHECK_DOUBLE(tddp_check_quick(times, 1), 1, 0);
    CHECK_DOUBLE(tddp_check_quick(times, 0), 0, 0);
}

TEST(equal_links_are_good_though_hosts_are_further_apart)
{
    tddp_check_link links[LINKS];
    char text[512];
    make_links(links);
    tddp_check_results results = judge(links);
    CHECK_INT(results.local.count, 4);
    CHECK_INT(results.remote.count, 8);
    CHECK_DOUBLE(results.local.median, 8e9, 1);
    CHECK_DOUBLE(results.remote.latency, 5e-5, 1e-9);
    CHECK(tddp_check_verdict(&results, text, sizeof text));
    CHECK_TEXT(text, "verdict: good, no link is slow");
}

TEST(a_slow_link_is_named_with_its_hosts)
{
    tddp_check_link links[LINKS];
    char text[512];
    make_links(links);
    find(links, 1, 2)->bytes_per_second = 1e8;
    tddp_check_results results = judge(links);
    CHECK_INT(results.remote.slow, 1);
    CHECK(!tddp_check_verdict(&results, text, sizeof text));
    CHECK_TEXT(text,
               "verdict: 1 slow link; the slowest is rank 1 (a) to rank 2 (b): 100 MB/s, 10.0 "
               "times slower than the median between hosts (1.00 GB/s)");
    /* The worse of two kinds is named. */
    find(links, 3, 2)->bytes_per_second = 4e8;
    results = judge(links);
    CHECK(!tddp_check_verdict(&results, text, sizeof text));
    CHECK_TEXT(text,
               "verdict: 2 slow links; the slowest is rank 3 (b) to rank 2 (b): 400 MB/s, 20.0 "
               "times slower than the median on a host (8.00 GB/s)");
}

TEST(half_the_median_is_not_slow)
{
    tddp_check_link links[LINKS];
    char text[512];
    make_links(links);
    find(links, 0, 3)->bytes_per_second = 5e8;
    tddp_check_results results = judge(links);
    CHECK(tddp_check_verdict(&results, text, sizeof text));
    find(links, 0, 3)->bytes_per_second = 4.99e8;
    results = judge(links);
    CHECK(!tddp_check_verdict(&results, text, sizeof text));
}

TEST(no_links_at_all)
{
    tddp_check_kind kind;
    char text[512];
    CHECK_OK(tddp_check_judge(NULL, 0, true, &kind));
    CHECK_INT(kind.count, 0);
    CHECK_INT(kind.slowest, -1);
    tddp_check_results results = {.world_size = 1, .hosts = 1, .host_of = hosts};
    CHECK(tddp_check_verdict(&results, text, sizeof text));
    CHECK_TEXT(text, "verdict: good; one rank has no links to measure");
}

TEST(figures_are_short)
{
    char text[TDDP_CHECK_TEXT_BYTES];
    CHECK_TEXT(tddp_check_speed(0, text), "0.00 B/s");
    CHECK_TEXT(tddp_check_speed(1234567, text), "1.23 MB/s");
    CHECK_TEXT(tddp_check_speed(12.3e9, text), "12.3 GB/s");
    CHECK_TEXT(tddp_check_speed(999.9e6, text), "1.00 GB/s");
    CHECK_TEXT(tddp_check_bytes(999, text), "999 B");
    CHECK_TEXT(tddp_check_bytes(1 << 20, text), "1.00 MiB");
    CHECK_TEXT(tddp_check_duration(4.2e-6, text), "4.20 us");
    CHECK_TEXT(tddp_check_duration(0.0123, text), "12.3 ms");
    CHECK_TEXT(tddp_check_duration(2, text), "2.00 s");
}

TEST(the_table_marks_what_is_slow)
{
    tddp_check_link links[LINKS];
    char *text = NULL;
    size_t size;
    make_links(links);
    find(links, 1, 2)->bytes_per_second = 1e8;
    tddp_check_results results = judge(links);
    FILE *stream = open_memstream(&text, &size);
    CHECK(stream != NULL);
    tddp_check_print(stream, &results);
    fclose(stream);
    CHECK_CONTAINS(text, "4 ranks on 2 hosts");
    CHECK_CONTAINS(text, "slowest for rank 3, 100 us");
    CHECK_CONTAINS(text, "memory      28.6 MiB resident at its peak; most for rank 2, 38.1 MiB\n");
    CHECK_CONTAINS(text, "all_reduce  1 MiB in 1.00 ms, 1.05 GB/s");
    CHECK_CONTAINS(text, "all_reduce  16 MiB left out");
    CHECK_CONTAINS(text, "     1 8.00 GB/s          -   100 MB/s! 1.00 GB/s   a\n");
    CHECK_CONTAINS(text, "between hosts 8 links, median 1.00 GB/s and 50.0 us; slowest 100 MB/s, "
                         "rank 1 (a) to rank 2 (b)");
    free(text);
}

TEST(each_rank_meets_every_other_once)
{
    for (int size = 2; size <= 9; size++) {
        for (int one = 0; one < size; one++) {
            int met = 0;
            for (int round = 0; round < tddp_check_rounds(size); round++) {
                int partner = tddp_check_partner(one, round, size);
                if (partner < 0) {
                    continue;
                }
                CHECK(partner < size && partner != one && !(met & (1 << partner)));
                CHECK_INT(tddp_check_partner(partner, round, size), one);
                met |= 1 << partner;
            }
            CHECK_INT(met, ((1 << size) - 1) & ~(1 << one));
        }
    }
}
