/* The CUDA runtime as a table of functions. Any thread; a lock guards the table. */
#include <tddp/cuda.h>

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>

#include "backend/cuda/library.h"
#include "base/base.h"

static const char *const names[] = {"libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0",
                                    NULL};
static const char *const folders[] = {"../../nvidia/cu13/lib/libcudart.so.13",
                                      "../../nvidia/cuda_runtime/lib/libcudart.so.12", NULL};

#define NAME(result, name, arguments) #name,
static const char *const symbols[] = {TDDP_CUDA_CALLS(NAME) NULL};
#undef NAME

static const tddp_library_spec spec = {
    .title = "the CUDA runtime",
    .expected = "the CUDA runtime from 11.2",
    .variable = "TDDP_CUDART_LIBRARY",
    .prefix = "libcudart",
    .names = names,
    .folders = folders,
    .symbols = symbols,
    .hint = "install libcudart, use a libtorch for CUDA, which brings it along, or name the file "
            "with TDDP_CUDART_LIBRARY",
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static tddp_cuda found;
static bool is_found;

/* The driver's, which the runtime has loaded; a stand-in may have it itself. */
static void find_driver(const tddp_library *runtime, tddp_cuda *out)
{
    static const char name[] = "cuDevicePrimaryCtxGetState";
    tddp_library driver = {.handle = NULL};
    if (!tddp_library_symbol(runtime, name, &out->context_state)) {
        driver.handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
        if (!driver.handle || !tddp_library_symbol(&driver, name, &out->context_state)) {
            out->context_state = NULL;
        }
    }
}

static tddp_status find(tddp_cuda *out)
{
    tddp_library library;
    tddp_status status = tddp_library_load(&spec, &library, out);
    if (status) {
        return status;
    }
    tddp_cuda_error error = out->cudaRuntimeGetVersion(&out->version);
    if (error) {
        return tddp_fail(TDDP_UNAVAILABLE, "%s does not report its version: %s", library.path,
                         out->cudaGetErrorString(error));
    }
    find_driver(&library, out);
    tddp_log(TDDP_LOG_DEBUG, "cuda", "CUDA runtime %d.%d: %s", out->version / 1000,
             out->version % 1000 / 10, library.path);
    return TDDP_OK;
}

tddp_status tddp_cuda_get(const tddp_cuda **out)
{
    pthread_mutex_lock(&lock);
    tddp_status status = is_found ? TDDP_OK : find(&found);
    is_found = status == TDDP_OK;
    pthread_mutex_unlock(&lock);
    if (status == TDDP_OK) {
        *out = &found;
    }
    return status;
}

tddp_status tddp_cuda_check(const tddp_cuda *cuda, tddp_cuda_error error, const char *what)
{
    if (error == TDDP_CUDA_SUCCESS) {
        return TDDP_OK;
    }
    (void)cuda->cudaGetLastError();
    return tddp_fail(TDDP_SYSTEM, "%s: %s (CUDA error %d)", what, cuda->cudaGetErrorString(error),
                     error);
}

/* --- the current device of a thread ---------------------------------------------------------- */

static _Thread_local bool keeps_device;

void tddp_cuda_keep_device(void)
{
    keeps_device = true;
}

static void restore_device(const tddp_cuda *cuda, const tddp_cuda_place *place)
{
    if (place->device >= 0) {
        (void)cuda->cudaSetDevice(place->device);
    }
}

/* Without a driver's answer it is taken for granted. */
static bool has_context(const tddp_cuda *cuda, int device)
{
    unsigned flags = 0;
    int active = 1;
    return !cuda->context_state || cuda->context_state(device, &flags, &active) || active;
}

tddp_status tddp_cuda_enter(const tddp_cuda *cuda, int device, tddp_cuda_place *place)
{
    tddp_cuda_place before = {.device = device, .capture_mode = TDDP_CUDA_CAPTURE_RELAXED};
    tddp_status status =
        tddp_cuda_check(cuda, cuda->cudaGetDevice(&before.device), "cudaGetDevice");
    if (status == TDDP_OK && before.device != device &&
        (keeps_device || !has_context(cuda, before.device))) {
        before.device = -1;
    }
    /* Before any call that would make a context on the device that is current so far. */
    status = status ? status : tddp_cuda_check(cuda, cuda->cudaSetDevice(device), "cudaSetDevice");
    if (status) {
        return status;
    }
    before.device = before.device == device ? -1 : before.device;
    /* Returns the mode that it replaces. */
    status = tddp_cuda_check(cuda, cuda->cudaThreadExchangeStreamCaptureMode(&before.capture_mode),
                             "cudaThreadExchangeStreamCaptureMode");
    if (status) {
        restore_device(cuda, &before);
        return status;
    }
    *place = before;
    return TDDP_OK;
}

void tddp_cuda_leave(const tddp_cuda *cuda, const tddp_cuda_place *place)
{
    int mode = place->capture_mode;
    (void)cuda->cudaThreadExchangeStreamCaptureMode(&mode);
    restore_device(cuda, place);
    (void)cuda->cudaGetLastError();
}

/* --- memory for a moment --------------------------------------------------------------------- */

static const tddp_cuda_allocator *_Atomic allocator;

void tddp_cuda_set_allocator(const tddp_cuda_allocator *replacement)
{
    atomic_store(&allocator, replacement);
}

tddp_status tddp_cuda_allocate(const tddp_cuda *cuda, size_t bytes, tddp_cuda_stream stream,
                               tddp_cuda_memory *out)
{
    *out = (tddp_cuda_memory){.allocator = atomic_load(&allocator)};
    return out->allocator ? out->allocator->allocate(bytes, stream, &out->data)
                          : tddp_cuda_check(cuda, cuda->cudaMallocAsync(&out->data, bytes, stream),
                                            "cudaMallocAsync");
}

tddp_status tddp_cuda_release(const tddp_cuda *cuda, tddp_cuda_stream stream,
                              const tddp_cuda_memory *memory)
{
    if (memory->allocator) {
        memory->allocator->release(memory->data);
        return TDDP_OK;
    }
    return tddp_cuda_check(cuda, cuda->cudaFreeAsync(memory->data, stream), "cudaFreeAsync");
}

tddp_status tddp_cuda_follow(const tddp_cuda *cuda, tddp_cuda_event event, tddp_cuda_stream stream,
                             tddp_cuda_stream earlier)
{
    tddp_status status =
        tddp_cuda_check(cuda, cuda->cudaEventRecord(event, earlier), "cudaEventRecord");
    return status ? status
                  : tddp_cuda_check(cuda, cuda->cudaStreamWaitEvent(stream, event, 0),
                                    "cudaStreamWaitEvent");
}
