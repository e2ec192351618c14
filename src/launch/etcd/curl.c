/*
 * Loads libcurl once in the life of the process. Debian has it in a build for each TLS library, and
 * any of them serves.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>

#include "launch/etcd/curl.h"

static struct {
    tddp_curl functions;
    tddp_status status;
    char text[256];
} loaded;

static void *open_library(void)
{
    static const char *const names[] = {"libcurl.so.4", "libcurl-gnutls.so.4", "libcurl-nss.so.4"};
    void *library = NULL;
    for (size_t i = 0; !library && i < sizeof names / sizeof names[0]; i++) {
        library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    }
    return library;
}

static void fail(const char *why)
{
    loaded.status = TDDP_UNAVAILABLE;
    (void)snprintf(loaded.text, sizeof loaded.text,
                   "--rdzv-backend=etcd needs libcurl 7.66 or newer (Debian: apt install "
                   "libcurl4): %.120s",
                   why);
}

static void load(void)
{
    tddp_curl *to = &loaded.functions;
    const struct {
        const char *name;
        void **to;
    } wanted[] = {
        {"curl_global_init", (void **)&to->global_init},
        {"curl_easy_init", (void **)&to->easy_init},
        {"curl_easy_setopt", (void **)&to->easy_setopt},
        {"curl_easy_getinfo", (void **)&to->easy_getinfo},
        {"curl_easy_cleanup", (void **)&to->easy_cleanup},
        {"curl_easy_strerror", (void **)&to->easy_strerror},
        {"curl_slist_append", (void **)&to->slist_append},
        {"curl_slist_free_all", (void **)&to->slist_free_all},
        {"curl_multi_init", (void **)&to->multi_init},
        {"curl_multi_add_handle", (void **)&to->multi_add_handle},
        {"curl_multi_remove_handle", (void **)&to->multi_remove_handle},
        {"curl_multi_perform", (void **)&to->multi_perform},
        {"curl_multi_poll", (void **)&to->multi_poll},
        {"curl_multi_info_read", (void **)&to->multi_info_read},
        {"curl_multi_cleanup", (void **)&to->multi_cleanup},
    };
    void *library = open_library();
    if (!library) {
        const char *why = dlerror();
        fail(why ? why : "it was not found");
        return;
    }
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++) {
        *wanted[i].to = dlsym(library, wanted[i].name);
        if (!*wanted[i].to) {
            fail(wanted[i].name);
            return;
        }
    }
    if (to->global_init(TDDP_CURL_GLOBAL_DEFAULT) != TDDP_CURLE_OK) {
        fail("curl_global_init failed");
    }
}

tddp_status tddp_curl_load(const tddp_curl **out)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, load);
    if (loaded.status != TDDP_OK) {
        return tddp_fail(loaded.status, "%s", loaded.text);
    }
    *out = &loaded.functions;
    return TDDP_OK;
}
