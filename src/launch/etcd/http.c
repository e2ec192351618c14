/*
 * One transfer on a multi handle, which alone can wait for a descriptor of ours beside the
 * connection. Debian has libcurl in a build for each TLS library, and any of them serves.
 */
#include "launch/etcd/http.h"

#include <dlfcn.h>
#include <poll.h>
#include <stdio.h>

enum { CONNECT_MS = 1500, MOST_RESPONSE_BYTES = 64 << 20 };

/* Result, name without "curl_", arguments. */
#define FUNCTIONS(X)                                                                            \
    X(int, global_init, (long flags))                                                           \
    X(void *, easy_init, (void))                                                                \
    X(int, easy_setopt, (void *easy, int option, ...))                                          \
    X(void, easy_cleanup, (void *easy))                                                         \
    X(const char *, easy_strerror, (int result))                                                \
    X(void *, multi_init, (void))                                                               \
    X(int, multi_add_handle, (void *multi, void *easy))                                         \
    X(int, multi_remove_handle, (void *multi, void *easy))                                      \
    X(int, multi_perform, (void *multi, int *running))                                          \
    X(int, multi_poll, (void *multi, struct pollfd *extra, unsigned count, int ms, int *ready)) \
    X(tddp_curl_message *, multi_info_read, (void *multi, int *left))                           \
    X(int, multi_cleanup, (void *multi))

/* libcurl's functions, for the life of the process. */
#define MEMBER(result, name, arguments) result(*name) arguments;
static struct {
    FUNCTIONS(MEMBER)
} curl;

static bool loaded;

static void load(void)
{
    static const char *const files[] = {"libcurl.so.4", "libcurl-gnutls.so.4", "libcurl-nss.so.4"};
    void *library = NULL;
    for (size_t i = 0; !library && i < sizeof files / sizeof files[0]; i++) {
        library = dlopen(files[i], RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    }
    loaded = library != NULL;
#define FIND(result, name, arguments) \
    loaded = loaded && (*(void **)&curl.name = dlsym(library, "curl_" #name)) != NULL;
    FUNCTIONS(FIND)
    loaded = loaded && curl.global_init(TDDP_CURL_GLOBAL_DEFAULT) == 0;
}

/* --- life ------------------------------------------------------------------------------------ */

/* Ends the transfer by another number than `size`. */
static size_t take_data(char *data, size_t one, size_t size, void *context)
{
    tddp_http *http = context;
    bool fits = http->response.size + size <= MOST_RESPONSE_BYTES;
    (void)one; /* always 1 */
    return fits && tddp_bytes_append(&http->response, data, size) == TDDP_OK ? size : 0;
}

static void set_file(const tddp_http *http, int option, const char *file)
{
    if (file[0]) {
        (void)curl.easy_setopt(http->easy, option, file);
    }
}

tddp_status tddp_http_open(tddp_http *http, const tddp_launch_etcd_conf *conf)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, load);
    if (!loaded) {
        return tddp_fail(TDDP_UNAVAILABLE, "--rdzv-backend=etcd needs libcurl 7.66 or newer "
                                           "(Debian: apt install libcurl4)");
    }
    http->easy = curl.easy_init();
    http->multi = http->easy ? curl.multi_init() : NULL;
    if (!http->multi) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "libcurl is out of memory");
    }
    (void)curl.easy_setopt(http->easy, TDDP_CURLOPT_NOSIGNAL, 1L);
    (void)curl.easy_setopt(http->easy, TDDP_CURLOPT_CONNECTTIMEOUT_MS, (long)CONNECT_MS);
    (void)curl.easy_setopt(http->easy, TDDP_CURLOPT_WRITEFUNCTION, take_data);
    (void)curl.easy_setopt(http->easy, TDDP_CURLOPT_WRITEDATA, http);
    (void)curl.easy_setopt(http->easy, TDDP_CURLOPT_ERRORBUFFER, http->reason);
    (void)curl.easy_setopt(http->easy, TDDP_CURLOPT_NOPROXY, "*"); /* a cluster's own hosts */
    set_file(http, TDDP_CURLOPT_CAINFO, conf->cacert);
    set_file(http, TDDP_CURLOPT_SSLCERT, conf->cert);
    set_file(http, TDDP_CURLOPT_SSLKEY, conf->key);
    return TDDP_OK;
}

void tddp_http_close(tddp_http *http)
{
    if (http->easy) {
        tddp_http_end(http);
        (void)curl.multi_cleanup(http->multi);
        curl.easy_cleanup(http->easy);
    }
    tddp_bytes_free(&http->response);
}

/* --- a transfer ------------------------------------------------------------------------------ */

tddp_status tddp_http_begin(tddp_http *http, char *header, const char *body)
{
    tddp_http_end(http);
    http->response.size = 0;
    http->reason[0] = '\0';
    http->header.data = header;
    tddp_status status = tddp_bytes_reserve(&http->response, 1); /* it has an address from now on */
    if (status != TDDP_OK) {
        return status;
    }
    if (curl.easy_setopt(http->easy, TDDP_CURLOPT_URL, http->url) ||
        curl.easy_setopt(http->easy, TDDP_CURLOPT_COPYPOSTFIELDS, body) ||
        curl.easy_setopt(http->easy, TDDP_CURLOPT_HTTPHEADER, header ? &http->header : NULL) ||
        curl.multi_add_handle(http->multi, http->easy)) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "libcurl is out of memory");
    }
    http->open = true;
    return TDDP_OK;
}

/* How a transfer that is no longer running ended. */
static tddp_status finish(tddp_http *http)
{
    int left;
    const tddp_curl_message *message = curl.multi_info_read(http->multi, &left);
    int result = message ? message->result : 0;
    tddp_http_end(http);
    return result ? tddp_fail(TDDP_NETWORK, "%s: %s", http->url,
                              http->reason[0] ? http->reason : curl.easy_strerror(result))
                  : TDDP_OK;
}

tddp_status tddp_http_receive(tddp_http *http, int64_t deadline_ns, tddp_cancel *cancel)
{
    struct pollfd extra = {.fd = tddp_cancel_fd(cancel), .events = POLLIN};
    size_t before = http->response.size;
    for (;;) {
        int running = 0;
        (void)curl.multi_perform(http->multi, &running);
        if (running == 0) {
            return finish(http);
        }
        if (http->response.size > before) {
            return TDDP_OK;
        }
        if (cancel && tddp_cancel_triggered(cancel)) {
            return tddp_fail(TDDP_CANCELED, "%s: interrupted", http->url);
        }
        if (tddp_now_ns() >= deadline_ns) {
            return tddp_fail(TDDP_TIMEOUT, "%s: no answer in time", http->url);
        }
        (void)curl.multi_poll(http->multi, &extra, extra.fd >= 0,
                              tddp_deadline_poll_ms(deadline_ns), NULL);
    }
}

void tddp_http_end(tddp_http *http)
{
    if (http->open) {
        (void)curl.multi_remove_handle(http->multi, http->easy);
    }
    http->open = false;
}
