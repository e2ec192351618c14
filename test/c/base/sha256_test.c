/*
 * SHA-256 with the examples of FIPS 180-4 and HMAC-SHA-256 with those of RFC 4231.
 */
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "check.h"

static const char *hex(const unsigned char sum[TDDP_SHA256_BYTES])
{
    static char text[2 * TDDP_SHA256_BYTES + 1];
    for (int i = 0; i < TDDP_SHA256_BYTES; i++) {
        snprintf(text + 2 * i, 3, "%02x", sum[i]);
    }
    return text;
}

static const char *sha256_of(const char *data, size_t size)
{
    unsigned char sum[TDDP_SHA256_BYTES];
    tddp_sha256(data, size, sum);
    return hex(sum);
}

TEST(sha256_of_the_standards_examples)
{
    CHECK_TEXT(sha256_of("abc", 3),
               "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    CHECK_TEXT(sha256_of("", 0),
               "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    const char *two_blocks = "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";
    CHECK_TEXT(sha256_of(two_blocks, strlen(two_blocks)),
               "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    enum { MILLION = 1000000 };
    char *as = malloc(MILLION);
    memset(as, 'a', MILLION);
    CHECK_TEXT(sha256_of(as, MILLION),
               "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
    free(as);
}

/* Around the block's end, where the padding takes one block more. Sums from an independent
 * implementation. */
TEST(sha256_around_the_end_of_a_block)
{
    static const struct {
        size_t size;
        const char *sum;
    } rows[] = {
        {55, "9f4390f8d30c2dd92ec9f095b65e2b9ae9b0a925a5258e241c9f1e910f734318"},
        {56, "b35439a4ac6f0948b6d6f9e3c6af0f5f590ce20f1bde7090ef7970686ec6738a"},
        {63, "7d3e74a05d7db15bce4ad9ec0658ea98e3f06eeecf16b4c6fff2da457ddc2f34"},
        {64, "ffe054fe7ae0cb6dc65c3af9b61d5209f439851db43d0ba5997337df154668eb"},
        {65, "635361c48bb9eab14198e76ea8ab7f1a41685d6ad62aa9146d301d4f17eb0ae0"},
        {119, "31eba51c313a5c08226adf18d4a359cfdfd8d2e816b13f4af952f7ea6584dcfb"},
        {120, "2f3d335432c70b580af0e8e1b3674a7c020d683aa5f73aaaedfdc55af904c21c"},
        {128, "6836cf13bac400e9105071cd6af47084dfacad4e5e302c94bfed24e013afb73e"},
    };
    char as[200];
    memset(as, 'a', sizeof as);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        CHECK_TEXT(sha256_of(as, rows[i].size), rows[i].sum);
    }
}

static const char *hmac_of(const void *key, size_t key_size, const char *data, size_t size)
{
    unsigned char sum[TDDP_SHA256_BYTES];
    tddp_hmac_sha256(key, key_size, data, size, sum);
    return hex(sum);
}

TEST(hmac_of_the_rfcs_examples)
{
    char key[131];
    char data[50];
    memset(key, 0x0b, 20);
    CHECK_TEXT(hmac_of(key, 20, "Hi There", 8),
               "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
    CHECK_TEXT(hmac_of("Jefe", 4, "what do ya want for nothing?", 28),
               "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    memset(key, 0xaa, sizeof key);
    memset(data, 0xdd, sizeof data);
    CHECK_TEXT(hmac_of(key, 20, data, 50),
               "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
    for (int i = 0; i < 25; i++) {
        key[i] = (char)(i + 1);
    }
    memset(data, 0xcd, sizeof data);
    CHECK_TEXT(hmac_of(key, 25, data, 50),
               "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
    memset(key, 0xaa, sizeof key);
    const char *text = "Test Using Larger Than Block-Size Key - Hash Key First";
    CHECK_TEXT(hmac_of(key, sizeof key, text, strlen(text)),
               "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
    text = "This is a test using a larger than block-size key and a larger than block-size data. "
           "The key needs to be hashed before being used by the HMAC algorithm.";
    CHECK_TEXT(hmac_of(key, sizeof key, text, strlen(text)),
               "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST(bytes_are_equal_or_not)
{
    CHECK(tddp_equal_bytes("abc", "abc", 3));
    CHECK(!tddp_equal_bytes("abc", "abd", 3));
    CHECK(!tddp_equal_bytes("abc", "xbc", 3));
    CHECK(tddp_equal_bytes("abc", "abd", 2));
    CHECK(tddp_equal_bytes("a", "b", 0));
}
