/*
 * The TCP client's bytes, as a scripted server sees them, and what it makes of the answers.
 */
#include "script.h"

static void answer_hello(script *s)
{
    s->fd = script_accept(s);
    uint32_t pid = (uint32_t)getpid() | 1 << 23; /* so that no server of 1.13 takes it for a SET */
    char hello[64];
    char nonce[16];
    snprintf(nonce, sizeof nonce, "%02x%02x%02x%02x", pid & 255, pid >> 8 & 255, pid >> 16 & 255,
             pid >> 24);
    snprintf(hello, sizeof hello, "00 cef7853c 0d %s", nonce);
    CHECK_RAW(s->fd, hello);
    raw_send(s->fd, nonce);
}

static void *play(void *data)
{
    script *s = data;
    answer_hello(s);
    for (size_t i = 0; i < s->count; i++) {
        if (!s->steps[i].answer) {
            CHECK_OK(tddp_net_poll(s->fd, POLLIN, tddp_deadline_after_ms(10000), -1)); /* its end */
            tddp_net_close(s->fd);
            answer_hello(s);
            continue;
        }
        CHECK_RAW(s->fd, s->steps[i].expect);
        raw_send(s->fd, s->steps[i].answer);
    }
    return NULL;
}

#define SCRIPTED(s, store, ...)              \
    static const step steps[] = __VA_ARGS__; \
    script s;                                \
    tddp_store *store = scripted(&s, play, steps, sizeof steps / sizeof *steps)

TEST(requests_are_pytorchs_byte_for_byte)
{
    SCRIPTED(s, store,
             {{"01 [2]2f6b [1]76", ""},
              {"06 [1] [2]2f6b", "00"},
              {"03 [2]2f6b", "[1]76"},
              {"04 [2]2f6e f9ffffffffffffff", "feffffffffffffff"},
              {"07", "[3]"},
              {"02 [2]2f63 [3]626164 [1]7a", "[1]79"},
              {"05 [2] [2]2f6b [5]2f6e6f7065", "01"},
              {"06 [2] [2]2f6b [2]2f6e", "00"},
              {"08 [3]2f6b32", "[1]"},
              {"09 [2]2f61 [2]3132", ""},
              {"0b [2] [3]2f6d31 [1]31 [3]2f6d32 [2]3232", ""},
              {"06 [2] [3]2f6d31 [3]2f6d32", "00"},
              {"0a [2] [3]2f6d31 [3]2f6d32", "[1]31 [2]3232"},
              {"01 [6]2f636cc3a921 [0]", ""}});
    tddp_blob blob;
    tddp_blob blobs[2];
    int64_t number;
    int flag;
    tddp_slice kn[] = {text("k"), text("n")};
    tddp_slice k_nope[] = {text("k"), text("nope")};
    tddp_slice m[] = {text("m1"), text("m2")};
    tddp_slice values[] = {text("1"), text("22")};
    CHECK_OK(tddp_store_set(store, text("k"), text("v"), NULL));
    CHECK_VALUE(store, "k", "v");
    CHECK_OK(tddp_store_add(store, text("n"), -7, NULL, &number));
    CHECK_INT(number, -2);
    CHECK_OK(tddp_store_num_keys(store, NULL, &number));
    CHECK_INT(number, 3);
    CHECK_OK(tddp_store_compare_set(store, text("c"), text("bad"), text("z"), NULL, &blob));
    CHECK_TEXT(blob.data, "y");
    tddp_blob_free(&blob);
    CHECK_OK(tddp_store_check(store, k_nope, 2, NULL, &flag));
    CHECK_INT(flag, 0);
    CHECK_OK(tddp_store_wait(store, kn, 2, NULL));
    CHECK_OK(tddp_store_delete_key(store, text("k2"), NULL, &flag));
    CHECK_INT(flag, 1);
    CHECK_OK(tddp_store_append(store, text("a"), text("12"), NULL));
    CHECK_OK(tddp_store_multi_set(store, m, values, 2, NULL));
    CHECK_OK(tddp_store_multi_get(store, m, 2, NULL, blobs));
    CHECK_TEXT(blobs[0].data, "1");
    CHECK_TEXT(blobs[1].data, "22");
    tddp_blob_free(&blobs[0]);
    tddp_blob_free(&blobs[1]);
    CHECK_OK(tddp_store_set(store, text("cl\xc3\xa9!"), text(""), NULL));
    script_end(&s, store);
}

TEST(a_wait_that_runs_out_is_cancelled_at_the_server)
{
    SCRIPTED(s, store, {{"06 [1] [5]2f6e6f7065", ""}, {"0c", "01"}, {"07", "[9]"}});
    tddp_wait wait = within_ms(50);
    tddp_slice key = text("nope");
    int64_t number;
    CHECK_STATUS(tddp_store_wait(store, &key, 1, &wait), TDDP_TIMEOUT);
    CHECK_CONTAINS(tddp_error_message(),
                   "timed out after 50 ms waiting for the key \"nope\" (store 127.0.0.1:");
    CHECK_OK(tddp_store_num_keys(store, NULL, &number));
    CHECK_INT(number, 9);
    script_end(&s, store);
}

TEST(keys_that_come_in_the_last_moment_are_there)
{
    SCRIPTED(s, store,
             {{"06 [1] [2]2f6b", ""}, {"0c", "00 01"}, {"03 [2]2f6b", "[1]76"}, {"07", "[9]"}});
    tddp_wait wait = within_ms(50);
    tddp_blob blob;
    int64_t number;
    CHECK_OK(tddp_store_get(store, text("k"), &wait, &blob));
    CHECK_TEXT(blob.data, "v");
    tddp_blob_free(&blob);
    CHECK_OK(tddp_store_num_keys(store, NULL, &number));
    CHECK_INT(number, 9);
    script_end(&s, store);
}

TEST(an_answer_under_way_is_given_a_little_grace)
{
    SCRIPTED(s, store, {{"07", "0900"}, {"", NULL}, {"07", "[9]"}});
    tddp_wait wait = within_ms(50);
    int64_t number;
    CHECK_STATUS(tddp_store_num_keys(store, &wait, &number), TDDP_TIMEOUT);
    CHECK_CONTAINS(tddp_error_message(), "did not answer num_keys within 50 ms");
    /* Half an answer was read: nothing after it could be understood, so the next call makes a new
     * connection. */
    CHECK_OK(tddp_store_num_keys(store, NULL, &number));
    CHECK_INT(number, 9);
    script_end(&s, store);
}

TEST(nonsense_from_the_server_is_named)
{
    SCRIPTED(s, store, {{"06 [1] [2]2f6b", "07"}});
    tddp_blob blob;
    CHECK_STATUS(tddp_store_get(store, text("k"), NULL, &blob), TDDP_PROTOCOL);
    CHECK_CONTAINS(tddp_error_message(), "answered get with a byte 7");
    CHECK_STATUS(tddp_store_get(store, text("k"), NULL, &blob), TDDP_NETWORK);
    script_end(&s, store);
}

TEST(a_gigantic_answer_is_named)
{
    SCRIPTED(s, store, {{"06 [1] [2]2f6b", "00"}, {"03 [2]2f6b", "ffffffffffffffff"}});
    tddp_blob blob;
    CHECK_STATUS(tddp_store_get(store, text("k"), NULL, &blob), TDDP_PROTOCOL);
    CHECK_CONTAINS(tddp_error_message(), "a value of bytes 18446744073709551615");
    script_end(&s, store);
}
