/*
 * NCCL as a table of functions, beside the CUDA runtime's, and its errors as statuses with texts.
 * Any thread; a lock guards the table.
 */
#include "backend/nccl/libraries.h"

#include <pthread.h>
#include <stdio.h>

#include <tddp/log.h>

#include "backend/cuda/library.h"

static const char *const names[] = {"libnccl.so.2", NULL};
static const char *const folders[] = {"libnccl.so.2", "../../nvidia/nccl/lib/libnccl.so.2", NULL};

#define NAME(result, name, arguments) #name,
static const char *const symbols[] = {TDDP_NCCL_CALLS(NAME) NULL};
#undef NAME

static const tddp_library_spec spec = {
    .title = "NCCL",
    .expected = "NCCL 2.18 or newer",
    .variable = "TDDP_NCCL_LIBRARY",
    .prefix = "libnccl.so",
    .names = names,
    .folders = folders,
    .symbols = symbols,
    .hint = "install libnccl2, use a libtorch for CUDA, which brings it along, or name the file "
            "with TDDP_NCCL_LIBRARY",
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static tddp_nccl_libraries found;
static bool is_found;

static tddp_status find(tddp_nccl_libraries *out)
{
    char version[TDDP_NCCL_VERSION_TEXT];
    tddp_library library;
    tddp_status status = tddp_cuda_get(&out->cuda);
    status = status ? status : tddp_library_load(&spec, &library, &out->nccl);
    if (status) {
        return status;
    }
    if (out->nccl.ncclGetVersion(&out->nccl_version)) {
        return tddp_fail(TDDP_UNAVAILABLE, "%s does not report its version: expected NCCL",
                         library.path);
    }
    if (out->nccl_version < TDDP_NCCL_LEAST_VERSION) {
        return tddp_fail(TDDP_UNAVAILABLE, "%s is NCCL %s: expected 2.18 or newer; %s",
                         library.path, tddp_nccl_version_text(out->nccl_version, version),
                         spec.hint);
    }
    tddp_log(TDDP_LOG_INFO, "nccl", "NCCL %s: %s",
             tddp_nccl_version_text(out->nccl_version, version), library.path);
    return TDDP_OK;
}

tddp_status tddp_nccl_libraries_get(const tddp_nccl_libraries **out)
{
    pthread_mutex_lock(&lock);
    tddp_status status = is_found ? TDDP_OK : find(&found);
    is_found = status == TDDP_OK;
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

/* --- errors ---------------------------------------------------------------------------------- */

static tddp_status status_of(tddp_nccl_result result)
{
    switch (result) {
    case TDDP_NCCL_SUCCESS:
    case TDDP_NCCL_IN_PROGRESS:
        return TDDP_OK;
    case TDDP_NCCL_REMOTE_ERROR:
        return TDDP_PEER_LOST;
    case TDDP_NCCL_SYSTEM_ERROR:
        return TDDP_NETWORK;
    case TDDP_NCCL_INVALID_ARGUMENT:
    case TDDP_NCCL_INVALID_USAGE:
        return TDDP_INVALID_ARGUMENT;
    default:
        return TDDP_SYSTEM;
    }
}

tddp_status tddp_nccl_fail(const tddp_nccl_libraries *libraries, tddp_nccl_comm comm,
                           tddp_nccl_result result, const char *what)
{
    const tddp_nccl *nccl = &libraries->nccl;
    const char *more = comm ? nccl->ncclGetLastError(comm) : NULL;
    return tddp_fail(status_of(result), "%s: %s%s%s", what, nccl->ncclGetErrorString(result),
                     more && *more ? ": " : "", more && *more ? more : "");
}

tddp_status tddp_nccl_fail_aborted(const char *what)
{
    return tddp_fail(TDDP_GROUP_FAILED, "%s: aborted", what);
}
