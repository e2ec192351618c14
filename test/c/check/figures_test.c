#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "check/check.h"

enum { RANKS = 4, LINKS = RANKS * RANKS };

static tddp_peer peers[RANKS] = {
    {"a", "1", 0, 0}, {"a", "1", 0, 1}, {"b", "2", 0, 2}, {"b", "2", 0, 3}};

/* All links of four ranks on two hosts: 8 GB/s on a host, 1 GB/s between them. */
static void make_links(tddp_check_link links[LINKS])
{
    for (int from = 0; from < RANKS; from++) {
        for (int to = 0; to < RANKS; to++) {
            bool between = from / 2 != to / 2;
            links[from * RANKS + to] =
                (tddp_check_link){between ? 1e9 : 8e9, between ? 5e-5 : 1e-5};
        }
        links[from * RANKS + from] = (tddp_check_link){0}; /* no link: not looked at */
    }
}

static tddp_check_link *find(tddp_check_link links[LINKS], int from, int to)
{
    return &links[from * RANKS + to];
}

static tddp_check_results classify(tddp_check_link links[LINKS])
{
    tddp_check_results results = {.world_size = RANKS,
                                  .peers = peers,
                                  .links = links,
                                  .memory = {.median = 3e7, .most = 4e7, .rank = 2},
                                  .store = {.median = 4.2e-5, .most = 1e-4, .rank = 3},
                                  .barrier = 3e-4,
                                  .all_reduce = {2e-4, 1e-3, 0}};
    tddp_check_classify(&results);
    return results;
}

TEST(medians)
{
    double values[] = {5, 1, 3, 2};
    CHECK_DOUBLE(tddp_check_median(values, 3), 3, 0);
    CHECK_DOUBLE(tddp_check_median(values, 4), 2.5, 0);
    CHECK_DOUBLE(tddp_check_median(values, 0), 0, 0);
    double times[] = {9, 1, 4, 3, 9, 9, 9, 2};
    CHECK_DOUBLE(tddp_check_lower_quartile(times, 8), 3, 0);
    CHECK_DOUBLE(tddp_check_lower_quartile(times, 1), 1, 0);
    CHECK_DOUBLE(tddp_check_lower_quartile(times, 0), 0, 0);
}

TEST(equal_links_are_good_though_hosts_are_further_apart)
{
    tddp_check_link links[LINKS];
    char text[512];
    make_links(links);
    tddp_check_results results = classify(links);
    CHECK_INT(results.kinds[0].count, 4);
    CHECK_INT(results.kinds[1].count, 8);
    CHECK_DOUBLE(results.kinds[0].median, 8e9, 1);
    CHECK_DOUBLE(results.kinds[1].latency, 5e-5, 1e-9);
    CHECK(tddp_check_verdict(&results, text, sizeof text));
    CHECK_TEXT(text, "verdict: good, no link is slow");
}

TEST(a_slow_link_is_named_with_its_hosts)
{
    tddp_check_link links[LINKS];
    char text[512];
    make_links(links);
    find(links, 1, 2)->bytes_per_second = 1e8;
    tddp_check_results results = classify(links);
    CHECK_INT(results.kinds[1].slow, 1);
    CHECK(!tddp_check_verdict(&results, text, sizeof text));
    CHECK_TEXT(text,
               "verdict: 1 slow link; the slowest is rank 1 (a) to rank 2 (b): 100 MB/s, 10.0 "
               "times slower than the median between hosts (1.00 GB/s)");
    /* The worse of two kinds is named. */
    find(links, 3, 2)->bytes_per_second = 4e8;
    results = classify(links);
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
    tddp_check_results results = classify(links);
    CHECK(tddp_check_verdict(&results, text, sizeof text));
    find(links, 0, 3)->bytes_per_second = 4.99e8;
    results = classify(links);
    CHECK(!tddp_check_verdict(&results, text, sizeof text));
}

TEST(no_links_at_all)
{
    char text[512];
    tddp_check_link none = {0};
    tddp_check_results results = {.world_size = 1, .peers = peers, .links = &none};
    tddp_check_classify(&results);
    for (int kind = 0; kind < 2; kind++) {
        CHECK_INT(results.kinds[kind].count, 0);
        CHECK_INT(results.kinds[kind].from, -1);
    }
    CHECK(tddp_check_verdict(&results, text, sizeof text));
    CHECK_TEXT(text, "verdict: good; one rank has no links to measure");
}

TEST(figures_are_short)
{
    char text[TDDP_CHECK_TEXT_BYTES];
    CHECK_TEXT(tddp_check_text(TDDP_CHECK_SPEED, 0, text), "0.00 B/s");
    CHECK_TEXT(tddp_check_text(TDDP_CHECK_SPEED, 1234567, text), "1.23 MB/s");
    CHECK_TEXT(tddp_check_text(TDDP_CHECK_SPEED, 12.3e9, text), "12.3 GB/s");
    CHECK_TEXT(tddp_check_text(TDDP_CHECK_SPEED, 999.9e6, text), "1.00 GB/s");
    CHECK_TEXT(tddp_check_text(TDDP_CHECK_SPEED, 1e18, text), "1000000 TB/s");
    CHECK_TEXT(tddp_check_text(TDDP_CHECK_BYTES, 999, text), "999 B");
    CHECK_TEXT(tddp_check_text(TDDP_CHECK_BYTES, 1 << 20, text), "1.00 MiB");
    CHECK_TEXT(tddp_check_text(TDDP_CHECK_SECONDS, 4.2e-6, text), "4.20 us");
    CHECK_TEXT(tddp_check_text(TDDP_CHECK_SECONDS, 0.0123, text), "12.3 ms");
    CHECK_TEXT(tddp_check_text(TDDP_CHECK_SECONDS, 2, text), "2.00 s");
    CHECK_TEXT(tddp_check_text(TDDP_CHECK_SECONDS, 3600, text), "3600 s");
}

TEST(values_within_bounds)
{
    CHECK_DOUBLE(tddp_check_clamp(2, 1, 3), 2, 0);
    CHECK_DOUBLE(tddp_check_clamp(0, 1, 3), 1, 0);
    CHECK_DOUBLE(tddp_check_clamp(1 / 0.0, 1, 3), 3, 0);
}

TEST(the_table_marks_what_is_slow)
{
    tddp_check_link links[LINKS];
    char *text = NULL;
    size_t size;
    make_links(links);
    find(links, 1, 2)->bytes_per_second = 1e8;
    tddp_check_results results = classify(links);
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
            for (int round = 0; round < size; round++) {
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
