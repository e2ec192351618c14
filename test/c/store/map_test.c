#include "store/values.h"
#include "store_fixture.h"

TEST(many_keys_are_found_removed_and_walked)
{
    enum { MANY = 20000 };
    tddp_store_map map = {0};
    char name[32];
    for (int i = 0; i < MANY; i++) {
        snprintf(name, sizeof name, "key%d", i);
        CHECK_OK(tddp_store_values_set(&map, text(name), text(name + 3)));
    }
    CHECK_INT(map.count, MANY);
    for (int i = 0; i < MANY; i += 2) {
        snprintf(name, sizeof name, "key%d", i);
        tddp_store_map_remove(&map, tddp_store_map_find(&map, text(name)));
        CHECK(!tddp_store_map_find(&map, text(name)));
    }
    CHECK_INT(map.count, MANY / 2);
    int64_t sum = 0;
    int walked = 0;
    for (tddp_store_entry *entry = tddp_store_map_next(&map, NULL); entry;
         entry = tddp_store_map_next(&map, entry)) {
        int64_t number;
        snprintf(name, sizeof name, "%.*s", (int)entry->value.size, entry->value.data);
        CHECK(tddp_parse_int(name, 0, MANY, &number));
        CHECK_INT(number % 2, 1);
        sum += number;
        walked++;
    }
    CHECK_INT(walked, MANY / 2);
    CHECK_INT(sum, (int64_t)MANY * MANY / 4);
    tddp_store_map_clear(&map);
    CHECK(!tddp_store_map_next(&map, NULL));
    CHECK(!tddp_store_map_find(&map, text("key1")));
    tddp_store_map_clear(&map);
}

/* What the table once took for a hash: an attacker can compute its bucket. */
static uint64_t fnv(tddp_slice key)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i < key.size; i++) {
        hash = (hash ^ (unsigned char)key.data[i]) * UINT64_C(0x100000001b3);
    }
    hash ^= hash >> 32;
    hash *= UINT64_C(0x9e3779b97f4a7c15);
    return hash ^ (hash >> 29);
}

/* Keys that all went into one bucket are spread. */
TEST(keys_cannot_aim_at_a_bucket)
{
    enum { MANY = 1024 };
    tddp_store_map map = {0};
    char name[32];
    for (int i = 0, found = 0; found < MANY; i++) {
        snprintf(name, sizeof name, "key%d", i);
        if (fnv(text(name)) % MANY == 7) {
            CHECK_OK(tddp_store_values_set(&map, text(name), text("")));
            found++;
        }
    }
    CHECK_INT(map.count, MANY);
    CHECK_INT(map.bucket_count, MANY);
    for (size_t i = 0; i < map.bucket_count; i++) {
        int length = 0;
        for (const tddp_store_entry *entry = map.buckets[i]; entry; entry = entry->next) {
            length++;
        }
        CHECK(length < 32); /* at random once in 10^30 */
    }
    tddp_store_map_clear(&map);
}

TEST(a_map_survives_failing_allocations)
{
    tddp_store_map map = {0};
    int stored = 0;
    for (long nth = 1; stored < 40; nth = nth % 4 + 1) {
        char name[32];
        snprintf(name, sizeof name, "key%d", stored);
        tddp_fail_allocation(nth);
        tddp_status status = tddp_store_values_set(&map, text(name), text("a value"));
        tddp_fail_allocation(0);
        CHECK(status == TDDP_OK || status == TDDP_OUT_OF_MEMORY);
        CHECK_INT(tddp_store_map_find(&map, text(name)) != NULL, status == TDDP_OK);
        stored += status == TDDP_OK;
        CHECK_INT(map.count, stored);
    }
    tddp_store_map_clear(&map);
}

TEST(numbers_are_read_as_strtoll_does)
{
    static const struct {
        const char *value;
        int64_t sum; /* after adding 1 */
    } cases[] = {{"5", 6}, {" 12", 13}, {"12abc", 13}, {"-3", -2}, {"+4", 5}, {"007", 8}};
    static const char *const wrong[] = {"", "abc", "-", "9223372036854775808", " "};
    tddp_store_map map = {0};
    int64_t sum;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        CHECK_OK(tddp_store_values_set(&map, text("n"), text(cases[i].value)));
        CHECK_OK(tddp_store_values_sum(&map, text("n"), 1, &sum));
        CHECK_INT(sum, cases[i].sum);
    }
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        CHECK_OK(tddp_store_values_set(&map, text("n"), text(wrong[i])));
        CHECK_STATUS(tddp_store_values_sum(&map, text("n"), 1, &sum), TDDP_STORE);
    }
    CHECK_OK(tddp_store_values_set(&map, text("n"), text("9223372036854775807")));
    CHECK_OK(tddp_store_values_sum(&map, text("n"), 1, &sum));
    CHECK(sum == INT64_MIN);
    tddp_store_map_clear(&map);
}
