/* The errors for missing or outdated NCCL or CUDA libraries. */
#include <dlfcn.h>
#include <stdio.h>
#include <unistd.h>

#include <tddp/log.h>

#include "nccl/world.h"
#include "standin/standin.h"

static void check_without(const char *variable, const char *value, const char *expected)
{
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    tddp_group *group;
    CHECK_INT(setenv(variable, value, 1), 0);
    CHECK_OK(tddp_hash_store_create(1000, &opts.store));
    opts.backend = "nccl";
    opts.device_index = 0;
    CHECK_STATUS(tddp_group_create(&opts, NULL, &group), TDDP_UNAVAILABLE);
    CHECK_CONTAINS(tddp_error_message(), expected);
    tddp_store_release(opts.store);
}

TEST(no_nccl)
{
    check_without("TDDP_NCCL_LIBRARY", "/dev/null/libnccl.so.2", "NCCL was not found: install");
    CHECK_CONTAINS(tddp_error_message(), "/dev/null/libnccl.so.2");
}

TEST(no_cuda)
{
    check_without("TDDP_CUDART_LIBRARY", "/dev/null/libcudart.so",
                  "the CUDA runtime was not found: install");
}

TEST(an_old_nccl)
{
    check_without("STANDIN_NCCL_VERSION", "2708", "is NCCL 2.7.8: expected 2.18 or newer");
    check_without("STANDIN_NCCL_VERSION", "21605", "is NCCL 2.16.5: expected 2.18 or newer");
}

TEST(another_library)
{
    check_without("TDDP_NCCL_LIBRARY", getenv("TDDP_CUDART_LIBRARY"), "expected NCCL");
}

TEST(a_missing_device)
{
    check_no_device(8, "device 8: expected a GPU's number, 0 to 7");
}

/* --- which file is loaded --------------------------------------------------------------------- */

static void capture_path(tddp_log_level level, const char *room, const char *text, void *data)
{
    const char *colon = strstr(text, ": ");
    if (level == TDDP_LOG_INFO && strcmp(room, "nccl") == 0 && strncmp(text, "NCCL ", 5) == 0) {
        (void)snprintf(data, 256, "%s", colon ? colon + 2 : "");
    }
}

/* Creates FOLDER/libnccl.so.2, a link to the stand-in, which no variable names any more. */
static void link_standin(char folder[64], char path[128])
{
    const char *standin = getenv("TDDP_NCCL_LIBRARY");
    (void)snprintf(folder, 64, "/tmp/test-libraries-XXXXXX");
    CHECK(standin && mkdtemp(folder));
    /* The stand-in's dependencies are beside it, not beside the link. */
    CHECK(dlopen(getenv("TDDP_CUDART_LIBRARY"), RTLD_NOW) != NULL);
    (void)snprintf(path, 128, "%s/libnccl.so.2", folder);
    CHECK_INT(symlink(standin, path), 0);
    CHECK_INT(unsetenv("TDDP_NCCL_LIBRARY"), 0);
}

static void check_loaded(const char *path)
{
    char loaded[256] = "";
    tddp_store *store;
    tddp_log_set_level(TDDP_LOG_INFO);
    tddp_log_set_sink(capture_path, loaded);
    CHECK_OK(tddp_hash_store_create(1000, &store));
    tddp_group *group = open_group(store, 0, 1, 0, TIMEOUT_MS);
    tddp_log_set_sink(NULL, NULL);
    CHECK_TEXT(loaded, path);
    leave(group, store);
}

TEST(a_library_that_the_process_has_loaded)
{
    char folder[64];
    char path[128];
    link_standin(folder, path);
    CHECK(dlopen(path, RTLD_NOW) != NULL);
    check_loaded(path);
    CHECK_INT(unlink(path), 0);
    CHECK_INT(rmdir(folder), 0);
}

/* Any library can stand for libtorch: only its name matters. */
TEST(a_library_beside_libtorch)
{
    char folder[64];
    char path[128];
    char torch[128];
    link_standin(folder, path);
    (void)snprintf(torch, sizeof torch, "%s/libtorch_cuda.so", folder);
    CHECK_INT(symlink(path, torch), 0);
    CHECK(dlopen(torch, RTLD_NOW) != NULL);
    int system_has_one = dlopen("libnccl.so.2", RTLD_NOW) != NULL;
    if (!system_has_one) {
        check_loaded(path);
    }
    CHECK_INT(unlink(torch), 0);
    CHECK_INT(unlink(path), 0);
    CHECK_INT(rmdir(folder), 0);
    if (system_has_one) {
        check_skip("the system's NCCL comes before one beside libtorch");
    }
}
