/*
 * The file store's bytes on disk, its users' counts, and files that are not as they should be.
 */
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/file.h>
#include <sys/wait.h>

#include "store_fixture.h"

static char *fresh_path(void)
{
    static char path[64];
    snprintf(path, sizeof path, "/tmp/tddp_file_test_%d", (int)getpid());
    unlink(path);
    return path;
}

static void check_file(const char *path, const char *hex)
{
    char expected[1024];
    char got[1024];
    size_t size = from_hex(hex, expected);
    int fd = open(path, O_RDONLY);
    CHECK_INT(read(fd, got, sizeof got), size);
    CHECK_INT(memcmp(got, expected, size), 0);
    close(fd);
}

static void write_file(const char *path, const char *hex)
{
    char bytes[1024];
    size_t size = from_hex(hex, bytes);
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND, 0644);
    CHECK_INT(write(fd, bytes, size), size);
    close(fd);
}

#define REFCOUNT_1 "09000000 726566636f756e742f 01000000 31"
#define REFCOUNT_0 "09000000 726566636f756e742f 01000000 30"
#define CLEANUP_1 "08000000 636c65616e75702f 01000000 31"
#define SET_K "02000000 2f6b 01000000 76"
#define RECORDS                                                                \
    SET_K "02000000 2f6e 01000000 35 02000000 2f6e 01000000 37 02000000 2f63 " \
          "01000000 78 03000000 2d2f6b 00000000"

/* Its owner alone writes; who may read follows the umask, as for any file. */
TEST(the_file_s_mode_says_who_may_read_it)
{
    static const mode_t umasks[] = {022, 077, 0};
    static const mode_t modes[] = {0644, 0600, 0644};
    for (int i = 0; i < 3; i++) {
        const char *path = fresh_path();
        tddp_store *store;
        struct stat entry;
        (void)umask(umasks[i]);
        CHECK_OK(tddp_file_store_open(path, 0, 5000, &store));
        CHECK_INT(stat(path, &entry), 0);
        CHECK_INT(entry.st_mode & 0777, modes[i]);
        tddp_store_release(store);
        unlink(path);
    }
}

TEST(records_are_pytorchs_byte_for_byte)
{
    const char *path = fresh_path();
    tddp_store *store;
    int64_t sum;
    int deleted;
    tddp_blob blob;
    CHECK_OK(tddp_file_store_open(path, 0, 5000, &store));
    check_file(path, REFCOUNT_1);
    CHECK_OK(tddp_store_set(store, text("k"), text("v"), NULL));
    CHECK_OK(tddp_store_add(store, text("n"), 5, NULL, &sum));
    CHECK_OK(tddp_store_add(store, text("n"), 2, NULL, &sum));
    CHECK_OK(tddp_store_compare_set(store, text("c"), text(""), text("x"), NULL, &blob));
    tddp_blob_free(&blob);
    CHECK_OK(tddp_store_delete_key(store, text("k"), NULL, &deleted));
    check_file(path, REFCOUNT_1 RECORDS);
    CHECK_OK(tddp_store_num_keys(store, NULL, &sum));
    CHECK_INT(sum, 3);
    tddp_store_release(store);
    check_file(path, REFCOUNT_1 RECORDS CLEANUP_1 REFCOUNT_0);
    unlink(path);
}

/* PyTorch passes over what has no slash in front. */
TEST(barriers_are_records_that_pytorch_passes_over)
{
    const char *path = fresh_path();
    tddp_store *store;
    int64_t count;
    CHECK_OK(tddp_file_store_open(path, 0, 5000, &store));
    CHECK_OK(tddp_store_barrier(store, text("b"), 1, NULL));
    /* /b = 1, barrier/b = 1 */
    check_file(path,
               REFCOUNT_1 "02000000 2f62 01000000 31 09000000 626172726965722f62 01000000 31");
    CHECK_OK(tddp_store_num_keys(store, NULL, &count));
    CHECK_INT(count, 2);
    tddp_store_release(store);
    unlink(path);
}

TEST(records_of_others_are_read)
{
    const char *path = fresh_path();
    tddp_store *store;
    CHECK_OK(tddp_file_store_open(path, 0, 5000, &store));
    write_file(path, "02000000 2f6b 01000000 31");
    CHECK_VALUE(store, "k", "1");
    write_file(path, "02000000 2f6b 01000000 32 03000000 2d2f6b 00000000 02000000 2f6a 00000000");
    CHECK_VALUE(store, "j", "");
    tddp_wait wait = within_ms(30);
    tddp_blob blob;
    CHECK_STATUS(tddp_store_get(store, text("k"), &wait, &blob), TDDP_TIMEOUT);
    CHECK_CONTAINS(tddp_error_message(), "the key \"k\"");
    tddp_store_release(store);
    unlink(path);
}

TEST(the_last_of_so_many_removes_the_file)
{
    const char *path = fresh_path();
    tddp_store *stores[3];
    for (int i = 0; i < 3; i++) {
        CHECK_OK(tddp_file_store_open(path, 3, 5000, &stores[i]));
    }
    for (int i = 0; i < 3; i++) {
        CHECK_INT(access(path, F_OK), 0);
        tddp_store_release(stores[i]);
    }
    CHECK(access(path, F_OK) != 0);
}

TEST(a_file_removed_under_its_users_is_an_empty_store)
{
    const char *path = fresh_path();
    tddp_store *store;
    CHECK_OK(tddp_file_store_open(path, 0, 5000, &store));
    CHECK_OK(tddp_store_set(store, text("k"), text("v"), NULL));
    CHECK_VALUE(store, "k", "v");
    unlink(path);
    tddp_wait wait = within_ms(30);
    tddp_blob blob;
    CHECK_STATUS(tddp_store_get(store, text("k"), &wait, &blob), TDDP_TIMEOUT);
    write_file(path, "02000000 2f6b 01000000 77");
    CHECK_VALUE(store, "k", "w");
    unlink(path);
    tddp_store_release(store);
    CHECK(access(path, F_OK) != 0);
}

TEST(a_file_that_is_no_store_is_left_alone)
{
    const char *path = fresh_path();
    write_file(path, "48656c6c6f 2c20 776f726c64 0a");
    tddp_store *store;
    CHECK_STATUS(tddp_file_store_open(path, 1, 5000, &store), TDDP_STORE);
    CHECK_CONTAINS(tddp_error_message(), path);
    CHECK_CONTAINS(tddp_error_message(), "no complete record at byte 0");
    check_file(path, "48656c6c6f 2c20 776f726c64 0a");
    unlink(path);
}

TEST(half_a_record_is_named)
{
    const char *path = fresh_path();
    tddp_store *store;
    CHECK_OK(tddp_file_store_open(path, 0, 5000, &store));
    write_file(path, "02000000 2f");
    CHECK_STATUS(tddp_store_set(store, text("k"), text("v"), NULL), TDDP_STORE);
    CHECK_CONTAINS(tddp_error_message(), "no complete record at byte 18");
    tddp_log_set_sink(keep_log, NULL);
    tddp_store_release(store);
    CHECK_LOG("cannot count out");
    check_file(path, REFCOUNT_1 "02000000 2f");
    unlink(path);
}

TEST(a_lock_held_elsewhere_is_waited_for_with_a_deadline)
{
    const char *path = fresh_path();
    tddp_store *store;
    CHECK_OK(tddp_file_store_open(path, 0, 5000, &store));
    int fd = open(path, O_RDONLY);
    CHECK_INT(flock(fd, LOCK_EX), 0);
    tddp_wait wait = within_ms(50);
    CHECK_STATUS(tddp_store_set(store, text("k"), text("v"), &wait), TDDP_TIMEOUT);
    CHECK_CONTAINS(tddp_error_message(), "another process has the lock");
    close(fd);
    CHECK_OK(tddp_store_set(store, text("k"), text("v"), &wait));
    tddp_store_release(store);
    unlink(path);
}

TEST(a_forked_child_does_not_count_out)
{
    const char *path = fresh_path();
    tddp_store *store;
    CHECK_OK(tddp_file_store_open(path, 1, 5000, &store));
    pid_t child = fork();
    if (child == 0) {
        CHECK_OK(tddp_store_set(store, text("child"), text("was here"), NULL));
        tddp_store_release(store);
        _exit(0);
    }
    int status;
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK_INT(status, 0);
    CHECK_INT(access(path, F_OK), 0);
    CHECK_VALUE(store, "child", "was here");
    tddp_store_release(store);
    CHECK(access(path, F_OK) != 0);
}
