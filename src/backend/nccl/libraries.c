/* NCCL as a table of functions, beside the CUDA runtime's. Any thread; a lock guards the table. */
#include "backend/nccl/libraries.h"

#include <pthread.h>
#include <stdio.h>

#include <tddp/log.h>

#include "backend/cuda/library.h"

static const char *const names[] = {"libnccl.so.2", NULL};
static const char *const folders[] = {"libnccl.so.2", "../../nvidia/nccl/lib/libnccl.so.2", NULL};

static const tddp_library_spec spec = {
    .title = "NCCL",
    .variable = "TDDP_NCCL_LIBRARY",
    .prefix = "libnccl.so",
    .names = names,
    .folders = folders,
    .hint = "install libnccl2, use a libtorch for CUDA, which brings it along, or name the file "
            "with TDDP_NCCL_LIBRARY",
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static tddp_nccl_libraries found;
static bool is_found;

static tddp_status find_nccl(tddp_nccl_libraries *out)
{
    char version[TDDP_NCCL_VERSION_TEXT];
    tddp_library library;
    tddp_status status = tddp_library_find(&spec, &library);
    if (status) {
        return status;
    }
    /* Before the others, since an old NCCL may lack some. */
    if (!tddp_library_symbol(&library, "ncclGetVersion", &out->nccl.ncclGetVersion) ||
        out->nccl.ncclGetVersion(&out->nccl_version) != TDDP_NCCL_SUCCESS) {
        return tddp_fail(TDDP_UNAVAILABLE, "%s does not report its version: expected NCCL",
                         library.path);
    }
    if (out->nccl_version < TDDP_NCCL_LEAST_VERSION) {
        return tddp_fail(TDDP_UNAVAILABLE, "%s is NCCL %s: expected 2.18 or newer; %s",
                         library.path, tddp_nccl_version_text(out->nccl_version, version),
                         spec.hint);
    }
#define FIND(result, name, arguments)                                            \
    if (!tddp_library_symbol(&library, #name, &out->nccl.name)) {                \
        return tddp_library_fail_missing(&library, #name, "NCCL 2.18 or newer"); \
    }
    TDDP_NCCL_CALLS(FIND)
#undef FIND
    tddp_log(TDDP_LOG_INFO, "nccl", "NCCL %s: %s",
             tddp_nccl_version_text(out->nccl_version, version), library.path);
    return TDDP_OK;
}

tddp_status tddp_nccl_libraries_get(const tddp_nccl_libraries **out)
{
    tddp_status status = TDDP_OK;
    pthread_mutex_lock(&lock);
    if (!is_found) {
        tddp_nccl_libraries fresh = {0};
        status = tddp_cuda_get(&fresh.cuda);
        status = status ? status : find_nccl(&fresh);
        if (status == TDDP_OK) {
            found = fresh;
            is_found = true;
        }
    }
    pthread_mutex_unlock(&lock);
    *out = status ? NULL : &found;
    return status;
}

/* Before 2.9 the numbers had a digit less. */
const char *tddp_nccl_version_text(int version, char text[TDDP_NCCL_VERSION_TEXT])
{
    int big = version < 10000 ? 1000 : 10000;
    (void)snprintf(text, TDDP_NCCL_VERSION_TEXT, "%d.%d.%d", version / big, version % big / 100,
                   version % 100);
    return text;
}
