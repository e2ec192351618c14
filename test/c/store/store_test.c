/*
 * Every call on every kind of store, through one table: tcp, file, hash, tcp in
 * the dialect of PyTorch 1.13, and a prefix over each.
 */
#include "kinds.h"

TEST(values_are_stored_and_fetched)
{
    FOR_EACH_KIND(f)
    {
        CHECK_OK(tddp_store_set(f.store, text("k"), text("v"), NULL));
        CHECK_VALUE(f.store, "k", "v");
        CHECK_OK(tddp_store_set(f.store, text("k"), text("another"), NULL));
        CHECK_VALUE(f.store, "k", "another");
        CHECK_OK(tddp_store_set(f.store, text("e"), (tddp_slice){NULL, 0}, NULL));
        CHECK_VALUE(f.store, "e", "");
        CHECK_OK(tddp_store_set(f.store, text("cl\xc3\xa9/x y"), text("1"), NULL));
        CHECK_VALUE(f.store, "cl\xc3\xa9/x y", "1");
    }
}

TEST(values_may_be_any_bytes_and_large)
{
    FOR_EACH_KIND(f)
    {
        size_t size = 3 << 20;
        char *bytes = malloc(size);
        for (size_t i = 0; i < size; i++) {
            bytes[i] = (char)(i * 31 + i / 251);
        }
        CHECK_OK(
            tddp_store_set(f.store, (tddp_slice){"a\0b\n", 4}, (tddp_slice){bytes, size}, NULL));
        tddp_blob got;
        CHECK_OK(tddp_store_get(f.store, (tddp_slice){"a\0b\n", 4}, NULL, &got));
        CHECK_INT(got.size, size);
        CHECK_INT(memcmp(got.data, bytes, size), 0);
        tddp_blob_free(&got);
        free(bytes);
    }
}

TEST(counters_count)
{
    FOR_EACH_KIND(f)
    {
        int64_t sum;
        CHECK_OK(tddp_store_add(f.store, text("n"), 5, NULL, &sum));
        CHECK_INT(sum, 5);
        CHECK_OK(tddp_store_add(f.store, text("n"), -7, NULL, &sum));
        CHECK_INT(sum, -2);
        CHECK_VALUE(f.store, "n", "-2");
        CHECK_OK(tddp_store_set(f.store, text("n"), text("9223372036854775806"), NULL));
        CHECK_OK(tddp_store_add(f.store, text("n"), 1, NULL, &sum));
        CHECK(sum == INT64_MAX);
        CHECK_OK(tddp_store_add(f.store, text("n"), 0, NULL, &sum));
        CHECK(sum == INT64_MAX);
    }
}

TEST(adding_to_what_is_no_number_fails)
{
    FOR_EACH_KIND(f)
    {
        int64_t sum = 77;
        CHECK_OK(tddp_store_set(f.store, text("word"), text("abc"), NULL));
        CHECK_STATUS(tddp_store_add(f.store, text("word"), 1, NULL, &sum),
                     f.server ? TDDP_NETWORK : TDDP_STORE);
        CHECK_CONTAINS(tddp_error_message(), "not a number");
        CHECK_INT(sum, 77);
    }
}

static void check_swap(tddp_store *store, const char *key, const char *expected,
                       const char *desired, const char *answer)
{
    tddp_blob got;
    CHECK_OK(tddp_store_compare_set(store, text(key), text(expected), text(desired), NULL, &got));
    CHECK_TEXT(got.data, answer);
    tddp_blob_free(&got);
}

TEST(compare_set_answers_as_pytorch_does)
{
    FOR_EACH_KIND(f)
    {
        check_swap(f.store, "c", "", "x", "x");
        CHECK_VALUE(f.store, "c", "x");
        check_swap(f.store, "c", "x", "y", "y");
        check_swap(f.store, "c", "bad", "z", "y");
        CHECK_VALUE(f.store, "c", "y");
        check_swap(f.store, "missing", "old", "new", "old");
        int there;
        tddp_slice key = text("missing");
        CHECK_OK(tddp_store_check(f.store, &key, 1, NULL, &there));
        CHECK_INT(there, 0);
    }
}

TEST(keys_are_deleted_counted_and_checked)
{
    FOR_EACH_KIND(f)
    {
        int64_t before;
        int64_t after;
        int deleted = 7;
        int there;
        CHECK_OK(tddp_store_num_keys(f.store, NULL, &before));
        CHECK_OK(tddp_store_set(f.store, text("k1"), text("1"), NULL));
        CHECK_OK(tddp_store_set(f.store, text("k2"), text("2"), NULL));
        CHECK_OK(tddp_store_set(f.store, text("k2"), text("3"), NULL));
        CHECK_OK(tddp_store_num_keys(f.store, NULL, &after));
        CHECK_INT(after - before, 2);
        tddp_slice keys[] = {text("k1"), text("k2")};
        CHECK_OK(tddp_store_check(f.store, keys, 2, NULL, &there));
        CHECK_INT(there, 1);
        CHECK_OK(tddp_store_delete_key(f.store, text("k2"), NULL, &deleted));
        CHECK_INT(deleted, 1);
        CHECK_OK(tddp_store_delete_key(f.store, text("k2"), NULL, &deleted));
        CHECK_INT(deleted, 0);
        CHECK_OK(tddp_store_check(f.store, keys, 2, NULL, &there));
        CHECK_INT(there, 0);
        CHECK_OK(tddp_store_check(f.store, keys, 1, NULL, &there));
        CHECK_INT(there, 1);
        CHECK_OK(tddp_store_check(f.store, NULL, 0, NULL, &there));
        CHECK_INT(there, 1);
        CHECK_OK(tddp_store_num_keys(f.store, NULL, &after));
        CHECK_INT(after - before, 1);
    }
}

TEST(several_values_at_once)
{
    FOR_EACH_KIND(f)
    {
        tddp_slice keys[] = {text("m1"), text("m2"), text("m3")};
        tddp_slice values[] = {text("1"), text("22"), text("")};
        tddp_blob got[3];
        CHECK_OK(tddp_store_multi_set(f.store, keys, values, 3, NULL));
        CHECK_OK(tddp_store_multi_get(f.store, keys, 3, NULL, got));
        for (int i = 0; i < 3; i++) {
            CHECK_TEXT(got[i].data, values[i].data);
            tddp_blob_free(&got[i]);
        }
        CHECK_OK(tddp_store_multi_get(f.store, NULL, 0, NULL, NULL));
        CHECK_OK(tddp_store_multi_set(f.store, NULL, NULL, 0, NULL));
        CHECK_OK(tddp_store_wait(f.store, keys, 3, NULL));
        CHECK_OK(tddp_store_wait(f.store, NULL, 0, NULL));
        CHECK_OK(tddp_store_append(f.store, keys[1], text("xyz"), NULL));
        CHECK_VALUE(f.store, "m2", "22xyz");
        CHECK_OK(tddp_store_append(f.store, text("fresh"), text("abc"), NULL));
        CHECK_VALUE(f.store, "fresh", "abc");
    }
}

TEST(many_keys_at_once)
{
    enum { MANY = 3000 };
    FOR_EACH_KIND(f)
    {
        static char names[MANY][16];
        static tddp_slice keys[MANY];
        static tddp_blob got[MANY];
        for (int i = 0; i < MANY; i++) {
            snprintf(names[i], sizeof names[i], "key%d", i);
            keys[i] = text(names[i]);
        }
        CHECK_OK(tddp_store_multi_set(f.store, keys, keys, MANY, NULL));
        CHECK_OK(tddp_store_multi_get(f.store, keys, MANY, NULL, got));
        for (int i = 0; i < MANY; i++) {
            CHECK_TEXT(got[i].data, names[i]);
            tddp_blob_free(&got[i]);
        }
        int there;
        CHECK_OK(tddp_store_check(f.store, keys, MANY, NULL, &there));
        CHECK_INT(there, 1);
    }
}

TEST(a_wait_that_runs_out_of_time_names_the_keys)
{
    FOR_EACH_KIND(f)
    {
        tddp_wait wait = within_ms(60);
        tddp_blob got;
        int64_t start = tddp_now_ns();
        CHECK_STATUS(tddp_store_get(f.store, text("nope"), &wait, &got), TDDP_TIMEOUT);
        int64_t took_ms = (tddp_now_ns() - start) / TDDP_NS_PER_MS;
        CHECK(took_ms >= 60);
        CHECK_CONTAINS(tddp_error_message(), "timed out after 60 ms waiting for the key \"");
        CHECK_CONTAINS(tddp_error_message(), "nope\"");
        tddp_slice keys[14];
        char names[14][8];
        for (int i = 0; i < 14; i++) {
            snprintf(names[i], sizeof names[i], "%c\x01", 'a' + i);
            keys[i] = text(names[i]);
        }
        CHECK_OK(tddp_store_set(f.store, keys[0], text("x"), NULL));
        CHECK_STATUS(tddp_store_wait(f.store, keys, 14, &wait), TDDP_TIMEOUT);
        CHECK_CONTAINS(tddp_error_message(), "j\\x01\" and 4 more (");
        /* The store is as good as before. */
        CHECK_OK(tddp_store_set(f.store, text("nope"), text("now"), NULL));
        CHECK_VALUE(f.store, "nope", "now");
    }
}

TEST(a_timeout_of_zero_looks_once)
{
    FOR_EACH_KIND(f)
    {
        tddp_wait now = within_ms(0);
        tddp_blob got;
        for (int i = 0; i < 20; i++) {
            CHECK_STATUS(tddp_store_get(f.store, text("k"), &now, &got), TDDP_TIMEOUT);
        }
        CHECK_OK(tddp_store_set(f.store, text("k"), text("v"), &now));
        for (int i = 0; i < 20; i++) {
            CHECK_OK(tddp_store_get(f.store, text("k"), &now, &got));
            CHECK_TEXT(got.data, "v");
            tddp_blob_free(&got);
        }
    }
}

TEST(a_wait_is_ended_by_its_cancel_token)
{
    FOR_EACH_KIND(f)
    {
        tddp_cancel *cancel;
        CHECK_OK(tddp_cancel_create(&cancel));
        tddp_wait wait = {.timeout_ms = 20000, .cancel = cancel};
        pthread_t thread;
        CHECK_INT(pthread_create(&thread, NULL, trigger_soon, cancel), 0);
        tddp_slice key = text("nope");
        CHECK_STATUS(tddp_store_wait(f.store, &key, 1, &wait), TDDP_CANCELED);
        CHECK_CONTAINS(tddp_error_message(), "nope");
        pthread_join(thread, NULL);
        CHECK_STATUS(tddp_store_set(f.store, key, text("x"), &wait), TDDP_CANCELED);
        CHECK_OK(tddp_store_set(f.store, key, text("x"), NULL));
        CHECK_VALUE(f.store, "nope", "x");
        tddp_cancel_free(cancel);
    }
}

/* Once the test's first thread waits. */
static void *set_soon(void *store)
{
    CHECK_AWAIT_ASLEEP(getpid());
    CHECK_OK(tddp_store_set(store, text("late"), text("here"), NULL));
    tddp_blob answer;
    CHECK_OK(tddp_store_compare_set(store, text("later"), text(""), text("too"), NULL, &answer));
    tddp_blob_free(&answer);
    return NULL;
}

TEST(a_get_waits_for_the_key)
{
    FOR_EACH_KIND(f)
    {
        tddp_store *other;
        CHECK_OK(tddp_store_clone(f.store, NULL, &other));
        pthread_t thread;
        CHECK_INT(pthread_create(&thread, NULL, set_soon, other), 0);
        CHECK_VALUE(f.store, "late", "here");
        CHECK_VALUE(f.store, "later", "too");
        pthread_join(thread, NULL);
        tddp_store_release(other);
    }
}

static void *add_much(void *store)
{
    for (int i = 0; i < 100; i++) {
        int64_t sum;
        CHECK_OK(tddp_store_add(store, text("shared"), 1, NULL, &sum));
        CHECK(sum >= i + 1);
    }
    return NULL;
}

TEST(threads_share_a_store)
{
    FOR_EACH_KIND(f)
    {
        pthread_t threads[4];
        for (int i = 0; i < 4; i++) {
            CHECK_INT(pthread_create(&threads[i], NULL, add_much, f.store), 0);
        }
        for (int i = 0; i < 4; i++) {
            pthread_join(threads[i], NULL);
        }
        CHECK_VALUE(f.store, "shared", "400");
    }
}

TEST(arguments_are_checked)
{
    FOR_EACH_KIND(f)
    {
        tddp_blob got;
        int64_t number;
        tddp_slice empty = {"", 0};
        CHECK_STATUS(tddp_store_set(NULL, text("k"), text("v"), NULL), TDDP_INVALID_ARGUMENT);
        CHECK_TEXT(tddp_error_message(), "the store is NULL");
        CHECK_STATUS(tddp_store_set(f.store, empty, text("v"), NULL), TDDP_INVALID_ARGUMENT);
        CHECK_TEXT(tddp_error_message(), "key 0 is empty");
        CHECK_STATUS(tddp_store_set(f.store, text("k"), (tddp_slice){NULL, 3}, NULL),
                     TDDP_INVALID_ARGUMENT);
        CHECK_STATUS(tddp_store_get(f.store, text("k"), NULL, NULL), TDDP_INVALID_ARGUMENT);
        CHECK_STATUS(tddp_store_get(f.store, (tddp_slice){NULL, 2}, NULL, &got),
                     TDDP_INVALID_ARGUMENT);
        CHECK_STATUS(tddp_store_add(f.store, empty, 1, NULL, &number), TDDP_INVALID_ARGUMENT);
        CHECK_STATUS(tddp_store_wait(f.store, NULL, 3, NULL), TDDP_INVALID_ARGUMENT);
        CHECK_STATUS(tddp_store_num_keys(f.store, NULL, NULL), TDDP_INVALID_ARGUMENT);
        CHECK_STATUS(tddp_store_set_timeout(f.store, 0), TDDP_INVALID_ARGUMENT);
        CHECK_STATUS(tddp_store_set_timeout(NULL, 5), TDDP_INVALID_ARGUMENT);
        CHECK_INT(tddp_store_timeout(f.store), 20000);
        CHECK_OK(tddp_store_set_timeout(f.store, 40));
        CHECK_INT(tddp_store_timeout(f.base), 40);
        CHECK_STATUS(tddp_store_get(f.store, text("k"), NULL, &got), TDDP_TIMEOUT);
    }
}

TEST(making_a_store_checks_its_arguments)
{
    tddp_store *store = NULL;
    CHECK_STATUS(tddp_hash_store_create(1, NULL), TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_file_store_open(NULL, 1, 1, &store), TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_file_store_open("/tmp/x", -1, 1, &store), TDDP_INVALID_ARGUMENT);
    CHECK_STATUS(tddp_file_store_open("/no/such/folder/x", 1, 1, &store), TDDP_STORE);
    CHECK_CONTAINS(tddp_error_message(), "/no/such/folder/x: open: No such file or directory");
    CHECK_STATUS(tddp_prefix_store_create("p", NULL, &store), TDDP_INVALID_ARGUMENT);
    CHECK(!store);
    CHECK_OK(tddp_hash_store_create(0, &store));
    CHECK_INT(tddp_store_timeout(store), 300000);
    CHECK(!tddp_tcp_store_host(store));
    CHECK_INT(tddp_tcp_store_port(store), -1);
    tddp_store *prefixed;
    CHECK_STATUS(tddp_prefix_store_create(NULL, store, &prefixed), TDDP_INVALID_ARGUMENT);
    tddp_store_release(store);
    tddp_store_release(NULL);
    tddp_blob_free(NULL);
}

TEST(prefixes_nest_outermost_last)
{
    tddp_store *base;
    tddp_store *inner;
    tddp_store *outer;
    CHECK_OK(tddp_hash_store_create(1000, &base));
    CHECK_OK(tddp_prefix_store_create("b", base, &inner));
    CHECK_OK(tddp_prefix_store_create("0/", inner, &outer));
    tddp_store_release(inner);
    CHECK_OK(tddp_store_set(outer, text("x"), text("1"), NULL));
    CHECK_VALUE(base, "b/0//x", "1");
    tddp_store *copy;
    CHECK_OK(tddp_store_clone(outer, NULL, &copy));
    CHECK_VALUE(copy, "x", "1");
    tddp_store_release(outer);
    tddp_store_release(copy);
    tddp_store_release(base);
}
