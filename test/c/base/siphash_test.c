/* SipHash-2-4 against the values that its authors published, for the key 00 01 .. 0f. */
#include "base/base.h"
#include "check.h"

TEST(hashes_are_those_of_the_authors)
{
    static const struct {
        size_t size;
        uint64_t hash;
    } rows[] = {
        {0, UINT64_C(0x726fdb47dd0e0e31)}, {1, UINT64_C(0x74f839c593dc67fd)},
        {2, UINT64_C(0x0d6c8009d9a94f5a)}, {7, UINT64_C(0xab0200f58b01d137)},
        {8, UINT64_C(0x93f5f5799a932462)}, {15, UINT64_C(0xa129ca6149be45e5)},
    };
    static const uint64_t key[2] = {UINT64_C(0x0706050403020100), UINT64_C(0x0f0e0d0c0b0a0908)};
    unsigned char message[16];
    for (size_t i = 0; i < sizeof message; i++) {
        message[i] = (unsigned char)i;
    }
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        CHECK_INT(tddp_siphash(key, message, rows[i].size), rows[i].hash);
    }
}

TEST(the_key_of_a_process_stays)
{
    CHECK_INT(tddp_hash("key", 3), tddp_hash("key", 3));
    CHECK(tddp_hash("key", 3) != tddp_hash("kez", 3));
    CHECK(tddp_hash("", 0) != tddp_siphash((const uint64_t[2]){0, 0}, "", 0));
}
