/*
 * Pieces of files: the checksum against known values and against itself in any division, what is
 * written is read, a full disk and a short file are reported, and a canceled call continues.
 */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include <tddp/file.h>

#include "check.h"

enum { SIZE = 3 * (1 << 20) + 12345 };

static int temporary(void)
{
    char path[] = "/tmp/tddp_file_XXXXXX";
    const int fd = mkstemp(path);
    unlink(path);
    return fd;
}

static unsigned char *pattern(void)
{
    unsigned char *data = malloc(SIZE);
    uint32_t state = 1;
    for (size_t i = 0; i < SIZE; i++) {
        state = state * 1664525u + 1013904223u;
        data[i] = (unsigned char)(state >> 24);
    }
    return data;
}

TEST(crc32_of_known_texts)
{
    CHECK_INT(tddp_crc32(0, "", 0), 0);
    CHECK_INT(tddp_crc32(0, "123456789", 9), 0xcbf43926);
    CHECK_INT(tddp_crc32(0, "The quick brown fox jumps over the lazy dog", 43), 0x414fa339);
}

TEST(crc32_is_the_same_however_the_bytes_come)
{
    unsigned char *data = pattern();
    for (size_t size = 0; size < 40; size++) {
        const uint32_t whole = tddp_crc32(0, data, size);
        for (size_t cut = 0; cut <= size; cut++) {
            const uint32_t first = tddp_crc32(0, data, cut);
            CHECK_INT(tddp_crc32(first, data + cut, size - cut), whole);
        }
    }
    free(data);
}

/* Bit by bit, as the checksum is defined. */
static uint32_t slow_crc32(const unsigned char *data, size_t size)
{
    uint32_t crc = UINT32_MAX;
    for (size_t i = 0; i < size; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++) {
            crc = (crc >> 1) ^ ((crc & 1) ? UINT32_C(0xedb88320) : 0);
        }
    }
    return ~crc;
}

TEST(crc32_of_any_length_and_alignment)
{
    unsigned char *data = pattern();
    for (size_t size = 0; size < 700; size++) {
        const size_t from = size % 17;
        CHECK_INT(tddp_crc32(0, data + from, size), slow_crc32(data + from, size));
    }
    const uint32_t first = tddp_crc32(0, data, 1001);
    CHECK_INT(tddp_crc32(first, data + 1001, SIZE - 1001), slow_crc32(data, SIZE));
    free(data);
}

TEST(what_is_written_is_read)
{
    unsigned char *data = pattern();
    unsigned char *back = calloc(1, SIZE);
    const int fd = temporary();
    tddp_file_piece out = {.fd = fd, .name = "f", .offset = 7, .data = data, .size = SIZE};
    CHECK_OK(tddp_file_write(&out, NULL));
    CHECK_INT(out.done, SIZE);
    CHECK_INT(out.crc, tddp_crc32(0, data, SIZE));
    tddp_file_piece in = {.fd = fd, .name = "f", .offset = 7, .data = back, .size = SIZE};
    CHECK_OK(tddp_file_read(&in, NULL));
    CHECK_INT(in.crc, out.crc);
    CHECK(memcmp(data, back, SIZE) == 0);
    tddp_file_piece sum = {.fd = fd, .name = "f", .offset = 7, .size = SIZE};
    CHECK_OK(tddp_file_read(&sum, NULL));
    CHECK_INT(sum.crc, out.crc);
    tddp_file_piece empty = {.fd = fd, .name = "f", .offset = 7};
    CHECK_OK(tddp_file_write(&empty, NULL));
    CHECK_OK(tddp_file_read(&empty, NULL));
    CHECK_INT(empty.crc, 0);
    close(fd);
    free(back);
    free(data);
}

TEST(a_file_that_ends_too_early_is_reported)
{
    const int fd = temporary();
    tddp_file_piece out = {.fd = fd, .name = "part.safetensors", .data = "12345", .size = 5};
    CHECK_OK(tddp_file_write(&out, NULL));
    char back[9];
    tddp_file_piece in = {
        .fd = fd, .name = "part.safetensors", .offset = 2, .data = back, .size = 9};
    CHECK_STATUS(tddp_file_read(&in, NULL), TDDP_NOT_FOUND);
    CHECK_CONTAINS(tddp_error_message(), "part.safetensors ends at byte 5, but the 9 bytes from 2");
    close(fd);
}

TEST(a_full_disk_is_reported)
{
    unsigned char *data = pattern();
    signal(SIGXFSZ, SIG_IGN);
    struct rlimit before;
    CHECK(getrlimit(RLIMIT_FSIZE, &before) == 0);
    const struct rlimit small = {1 << 20, before.rlim_max};
    const int fd = temporary();
    CHECK(setrlimit(RLIMIT_FSIZE, &small) == 0);
    tddp_file_piece out = {.fd = fd, .name = "big", .data = data, .size = SIZE};
    const tddp_status status = tddp_file_write(&out, NULL);
    CHECK(setrlimit(RLIMIT_FSIZE, &before) == 0);
    CHECK_STATUS(status, TDDP_SYSTEM);
    CHECK_CONTAINS(tddp_error_message(), "cannot write big: File too large, after 1048576 of");
    close(fd);
    free(data);
}

TEST(a_canceled_call_goes_on)
{
    unsigned char *data = pattern();
    const int fd = temporary();
    tddp_cancel *cancel = NULL;
    CHECK_OK(tddp_cancel_create(&cancel));
    tddp_cancel_trigger(cancel);
    const tddp_wait wait = {-1, cancel};
    tddp_file_piece out = {.fd = fd, .name = "f", .data = data, .size = SIZE};
    CHECK_STATUS(tddp_file_write(&out, &wait), TDDP_CANCELED);
    CHECK_INT(out.done, 0);
    tddp_cancel_reset(cancel);
    CHECK_OK(tddp_file_write(&out, &wait));
    CHECK_INT(out.crc, tddp_crc32(0, data, SIZE));
    tddp_cancel_trigger(cancel);
    tddp_file_piece in = {.fd = fd, .name = "f", .size = SIZE};
    CHECK_STATUS(tddp_file_read(&in, &wait), TDDP_CANCELED);
    tddp_cancel_free(cancel);
    close(fd);
    free(data);
}
