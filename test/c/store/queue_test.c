/*
 * Queues on every kind of store that has them, with threads.
 */
#include "kinds.h"

TEST(a_queue_gives_back_in_order_what_was_pushed)
{
    FOR_EACH_KIND_WITH_QUEUES(f)
    {
        CHECK_INT(length(f.store, "q"), 0);
        CHECK_OK(tddp_store_queue_push(f.store, text("q"), text("one"), NULL));
        CHECK_OK(tddp_store_queue_push(f.store, text("q"), text(""), NULL));
        CHECK_OK(tddp_store_queue_push(f.store, text("q"), text("three"), NULL));
        CHECK_OK(tddp_store_queue_push(f.store, text("other"), text("4"), NULL));
        CHECK_INT(length(f.store, "q"), 3);
        check_pop(f.store, "q", "one");
        check_pop(f.store, "q", "");
        CHECK_OK(tddp_store_queue_push(f.store, text("q"), text("five"), NULL));
        check_pop(f.store, "q", "three");
        check_pop(f.store, "q", "five");
        CHECK_INT(length(f.store, "q"), 0);
        CHECK_INT(length(f.store, "other"), 1);
        /* It starts anew. */
        CHECK_OK(tddp_store_queue_push(f.store, text("q"), text("again"), NULL));
        check_pop(f.store, "q", "again");
    }
}

TEST(values_of_a_queue_may_be_any_bytes_and_large)
{
    FOR_EACH_KIND_WITH_QUEUES(f)
    {
        size_t size = (1 << 20) + 3;
        char *bytes = malloc(size);
        for (size_t i = 0; i < size; i++) {
            bytes[i] = (char)(i * 31 + i / 251);
        }
        tddp_slice key = {"a\0b/\n", 5};
        tddp_blob got;
        CHECK_OK(tddp_store_queue_push(f.store, key, (tddp_slice){bytes, size}, NULL));
        CHECK_OK(tddp_store_queue_pop(f.store, key, 0, NULL, &got));
        CHECK_INT(got.size, size);
        CHECK_INT(memcmp(got.data, bytes, size), 0);
        tddp_blob_free(&got);
        free(bytes);
    }
}

TEST(an_empty_queue_is_not_found_without_waiting)
{
    FOR_EACH_KIND_WITH_QUEUES(f)
    {
        tddp_blob got = {.size = 77};
        for (int i = 0; i < 3; i++) {
            CHECK_STATUS(tddp_store_queue_pop(f.store, text("q"), 0, NULL, &got), TDDP_NOT_FOUND);
            CHECK_TEXT(tddp_error_message(),
                       "the queue \"q\" is empty, and the pop was not to wait");
        }
        CHECK_INT(got.size, 77);
        tddp_wait soon = within_ms(60);
        int64_t start = tddp_now_ns();
        CHECK_STATUS(tddp_store_queue_pop(f.store, text("q"), 1, &soon, &got), TDDP_TIMEOUT);
        int64_t took_ms = (tddp_now_ns() - start) / TDDP_NS_PER_MS;
        CHECK(took_ms >= 60);
        CHECK_CONTAINS(tddp_error_message(), "timed out after 60 ms waiting for the key \"");
        tddp_wait now = within_ms(0);
        CHECK_STATUS(tddp_store_queue_pop(f.store, text("q"), 1, &now, &got), TDDP_TIMEOUT);
        CHECK_OK(tddp_store_queue_push(f.store, text("q"), text("v"), NULL));
        CHECK_OK(tddp_store_queue_pop(f.store, text("q"), 1, &now, &got));
        CHECK_TEXT(got.data, "v");
        tddp_blob_free(&got);
    }
}

TEST(a_queue_that_holds_something_is_a_key_to_waits_and_to_nothing_else)
{
    FOR_EACH_KIND_WITH_QUEUES(f)
    {
        int64_t before;
        int64_t after;
        int deleted;
        tddp_slice key = text("q");
        tddp_wait soon = within_ms(40);
        CHECK_OK(tddp_store_num_keys(f.store, NULL, &before));
        CHECK_INT(there(f.store, "q"), 0);
        CHECK_STATUS(tddp_store_wait(f.store, &key, 1, &soon), TDDP_TIMEOUT);
        CHECK_OK(tddp_store_queue_push(f.store, key, text("v"), NULL));
        CHECK_INT(there(f.store, "q"), 1);
        CHECK_OK(tddp_store_wait(f.store, &key, 1, NULL));
        CHECK_OK(tddp_store_num_keys(f.store, NULL, &after));
        CHECK_INT(after, before);
        CHECK_OK(tddp_store_delete_key(f.store, key, NULL, &deleted));
        CHECK_INT(deleted, 0);
        tddp_blob_list keys;
        CHECK_OK(tddp_store_list_keys(f.store, NULL, &keys));
        CHECK_INT(keys.count, 0);
        tddp_blob_list_free(&keys);
        /* A key of the same name is another thing. */
        CHECK_OK(tddp_store_set(f.store, key, text("value"), NULL));
        check_pop(f.store, "q", "v");
        CHECK_INT(there(f.store, "q"), 1);
        tddp_blob got;
        CHECK_STATUS(tddp_store_queue_pop(f.store, key, 1, &soon, &got), TDDP_TIMEOUT);
        CHECK_VALUE(f.store, "q", "value");
    }
}

enum { WAITS, POPS }; /* events */

typedef struct pusher {
    tddp_store *store;
    int first;
    int count;
} pusher;

static void push(const pusher *p)
{
    for (int i = 0; i < p->count; i++) {
        char number[16];
        snprintf(number, sizeof number, "%d", p->first + i);
        CHECK_OK(tddp_store_queue_push(p->store, text("q"), text(number), NULL));
    }
}

/* Once the test's first thread waits. */
static void *push_soon(void *data)
{
    CHECK_AWAIT_ASLEEP(getpid());
    push(data);
    return NULL;
}

TEST(a_pop_waits_for_a_push)
{
    FOR_EACH_KIND_WITH_QUEUES(f)
    {
        tddp_store *other;
        CHECK_OK(tddp_store_clone(f.store, NULL, &other));
        pthread_t thread;
        pusher p = {other, 5, 2};
        CHECK_INT(pthread_create(&thread, NULL, push_soon, &p), 0);
        check_pop(f.store, "q", "5");
        check_pop(f.store, "q", "6");
        pthread_join(thread, NULL);
        tddp_store_release(other);
    }
}

TEST(a_pop_is_ended_by_its_cancel_token_and_has_taken_nothing)
{
    FOR_EACH_KIND_WITH_QUEUES(f)
    {
        tddp_cancel *cancel;
        CHECK_OK(tddp_cancel_create(&cancel));
        tddp_wait wait = {.timeout_ms = 20000, .cancel = cancel};
        pthread_t thread;
        tddp_blob got;
        CHECK_INT(pthread_create(&thread, NULL, trigger_soon, cancel), 0);
        CHECK_STATUS(tddp_store_queue_pop(f.store, text("q"), 1, &wait, &got), TDDP_CANCELED);
        pthread_join(thread, NULL);
        CHECK_OK(tddp_store_queue_push(f.store, text("q"), text("v"), NULL));
        CHECK_INT(length(f.store, "q"), 1);
        check_pop(f.store, "q", "v");
        tddp_cancel_free(cancel);
    }
}

enum { POPPERS = 4, ITEMS = 40 };

typedef struct popper {
    tddp_store *store;
    int64_t sum;
} popper;

static void *pop_until_the_end(void *data)
{
    popper *p = data;
    check_will_block(POPS);
    for (;;) {
        tddp_blob got;
        CHECK_OK(tddp_store_queue_pop(p->store, text("q"), 1, NULL, &got));
        int number = atoi(got.data);
        tddp_blob_free(&got);
        if (number < 0) {
            return NULL;
        }
        p->sum += number;
    }
}

TEST(each_value_goes_to_one_of_several_poppers)
{
    FOR_EACH_KIND_WITH_QUEUES(f)
    {
        popper poppers[POPPERS] = {0};
        pthread_t threads[POPPERS];
        for (int i = 0; i < POPPERS; i++) {
            CHECK_OK(tddp_store_clone(f.store, NULL, &poppers[i].store));
            CHECK_INT(pthread_create(&threads[i], NULL, pop_until_the_end, &poppers[i]), 0);
        }
        pusher p = {f.store, 1, ITEMS};
        push(&p);
        for (int i = 0; i < POPPERS; i++) {
            CHECK_OK(tddp_store_queue_push(f.store, text("q"), text("-1"), NULL));
        }
        int64_t sum = 0;
        for (int i = 0; i < POPPERS; i++) {
            pthread_join(threads[i], NULL);
            sum += poppers[i].sum;
            tddp_store_release(poppers[i].store);
        }
        CHECK_INT(sum, ITEMS * (ITEMS + 1) / 2);
        CHECK_INT(length(f.store, "q"), 0);
    }
}

static void *wait_for_q(void *store)
{
    check_will_block(WAITS);
    tddp_slice key = text("q");
    CHECK_OK(tddp_store_wait(store, &key, 1, NULL));
    return NULL;
}

/* A push wakes one waiter of a server's, who need not be one that pops. */
TEST(who_only_waits_for_a_queue_does_not_hold_up_who_pops)
{
    FOR_EACH_KIND_WITH_QUEUES(f)
    {
        tddp_store *clones[3];
        pthread_t threads[3];
        popper p = {0};
        for (int i = 0; i < 3; i++) {
            CHECK_OK(tddp_store_clone(f.store, NULL, &clones[i]));
        }
        p.store = clones[1];
        check_events_clear();
        CHECK_INT(pthread_create(&threads[0], NULL, wait_for_q, clones[0]), 0);
        CHECK_AWAIT_BLOCKED(WAITS);
        CHECK_INT(pthread_create(&threads[1], NULL, pop_until_the_end, &p), 0);
        CHECK_AWAIT_BLOCKED(POPS);
        check_events_clear();
        CHECK_INT(pthread_create(&threads[2], NULL, wait_for_q, clones[2]), 0);
        CHECK_AWAIT_BLOCKED(WAITS);
        CHECK_OK(tddp_store_queue_push(f.store, text("q"), text("3"), NULL));
        CHECK_OK(tddp_store_queue_push(f.store, text("q"), text("4"), NULL));
        CHECK_OK(tddp_store_queue_push(f.store, text("q"), text("-1"), NULL));
        pthread_join(threads[1], NULL);
        CHECK_INT(p.sum, 7);
        CHECK_OK(
            tddp_store_set(f.store, text("q"), text(""), NULL)); /* a file's look now and then */
        pthread_join(threads[0], NULL);
        pthread_join(threads[2], NULL);
        for (int i = 0; i < 3; i++) {
            tddp_store_release(clones[i]);
        }
    }
}

TEST(arguments_are_checked)
{
    FOR_EACH_KIND_WITH_QUEUES(f)
    {
        tddp_blob got;
        tddp_slice empty = {"", 0};
        CHECK_STATUS(tddp_store_queue_push(NULL, text("k"), text("v"), NULL),
                     TDDP_INVALID_ARGUMENT);
        CHECK_STATUS(tddp_store_queue_push(f.store, empty, text("v"), NULL), TDDP_INVALID_ARGUMENT);
        CHECK_STATUS(tddp_store_queue_push(f.store, text("k"), (tddp_slice){NULL, 3}, NULL),
                     TDDP_INVALID_ARGUMENT);
        CHECK_STATUS(tddp_store_queue_pop(f.store, text("k"), 1, NULL, NULL),
                     TDDP_INVALID_ARGUMENT);
        CHECK_STATUS(tddp_store_queue_pop(f.store, empty, 1, NULL, &got), TDDP_INVALID_ARGUMENT);
        CHECK_STATUS(tddp_store_queue_len(f.store, text("k"), NULL, NULL), TDDP_INVALID_ARGUMENT);
        CHECK_STATUS(tddp_store_barrier(f.store, empty, 1, NULL), TDDP_INVALID_ARGUMENT);
        CHECK_INT(tddp_store_has_extended_api(f.store), 1);
    }
    CHECK_INT(tddp_store_has_extended_api(NULL), 0);
}

TEST(a_store_in_a_file_says_that_it_has_no_queues)
{
    static const char *const in_files[] = {"file", "prefix/file"};
    for (int i = 0; i < 2; i++) {
        fixture f = fixture_open(in_files[i]);
        tddp_blob got;
        int64_t length;
        tddp_slice key = text("q");
        CHECK_STATUS(tddp_store_queue_push(f.store, key, text("v"), NULL), TDDP_UNSUPPORTED);
        CHECK_TEXT(tddp_error_message(), "a file store has no queues");
        CHECK_STATUS(tddp_store_queue_pop(f.store, key, 1, NULL, &got), TDDP_UNSUPPORTED);
        CHECK_STATUS(tddp_store_queue_len(f.store, key, NULL, &length), TDDP_UNSUPPORTED);
        CHECK_OK(tddp_store_set(f.store, key, text("v"), NULL));
        CHECK_VALUE(f.store, "q", "v");
        fixture_close(&f);
    }
}
