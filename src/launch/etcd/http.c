/*
 * One transfer at a time on a multi handle, which alone can wait for a descriptor of ours beside
 * the connection. Invariant: `busy` exactly while the easy handle is in the multi handle.
 */
#include <stdio.h>
#include <stdlib.h>

#include "launch/etcd/curl.h"
#include "launch/etcd/http.h"

enum { CONNECT_MS = 1500, MOST_RESPONSE_BYTES = 64 << 20 };

struct tddp_http {
    const tddp_curl *curl;
    void *easy;
    void *multi;
    tddp_curl_list *headers;
    tddp_bytes *response;
    bool busy;
    bool short_of_memory;
    char url[512]; /* of the transfer, for texts */
    char reason[TDDP_CURL_ERROR_SIZE];
};

static size_t take_data(char *data, size_t one, size_t size, void *context)
{
    tddp_http *http = context;
    (void)one; /* always 1 */
    if (http->response->size + size > MOST_RESPONSE_BYTES ||
        tddp_bytes_append(http->response, data, size) != TDDP_OK) {
        http->short_of_memory = true;
        return 0;
    }
    return size;
}

static void set_options(tddp_http *http, const tddp_http_tls *tls)
{
    const tddp_curl *curl = http->curl;
    void *easy = http->easy;
    (void)curl->easy_setopt(easy, TDDP_CURLOPT_NOSIGNAL, 1L);
    (void)curl->easy_setopt(easy, TDDP_CURLOPT_CONNECTTIMEOUT_MS, (long)CONNECT_MS);
    (void)curl->easy_setopt(easy, TDDP_CURLOPT_WRITEFUNCTION, take_data);
    (void)curl->easy_setopt(easy, TDDP_CURLOPT_WRITEDATA, http);
    (void)curl->easy_setopt(easy, TDDP_CURLOPT_ERRORBUFFER, http->reason);
    (void)curl->easy_setopt(easy, TDDP_CURLOPT_NOPROXY, "*"); /* a cluster's own hosts */
    if (tls->cacert) {
        (void)curl->easy_setopt(easy, TDDP_CURLOPT_CAINFO, tls->cacert);
    }
    if (tls->cert) {
        (void)curl->easy_setopt(easy, TDDP_CURLOPT_SSLCERT, tls->cert);
    }
    if (tls->key) {
        (void)curl->easy_setopt(easy, TDDP_CURLOPT_SSLKEY, tls->key);
    }
}

tddp_status tddp_http_create(const tddp_http_tls *tls, tddp_http **out)
{
    const tddp_curl *curl;
    tddp_status status = tddp_curl_load(&curl);
    if (status != TDDP_OK) {
        return status;
    }
    tddp_http *made = tddp_alloc(sizeof *made);
    if (!made) {
        return TDDP_OUT_OF_MEMORY;
    }
    made->curl = curl;
    made->easy = curl->easy_init();
    made->multi = curl->multi_init();
    if (!made->easy || !made->multi) {
        tddp_http_free(made);
        return tddp_fail(TDDP_OUT_OF_MEMORY, "libcurl is out of memory");
    }
    set_options(made, tls);
    *out = made;
    return TDDP_OK;
}

void tddp_http_free(tddp_http *http)
{
    if (!http) {
        return;
    }
    tddp_http_end(http, NULL);
    if (http->multi) {
        (void)http->curl->multi_cleanup(http->multi);
    }
    if (http->easy) {
        http->curl->easy_cleanup(http->easy);
    }
    free(http);
}

tddp_status tddp_http_begin(tddp_http *http, const char *url, const char *header,
                            const tddp_bytes *body, tddp_bytes *response)
{
    const tddp_curl *curl = http->curl;
    tddp_http_end(http, NULL);
    http->response = response;
    http->short_of_memory = false;
    http->reason[0] = '\0';
    (void)snprintf(http->url, sizeof http->url, "%s", url);
    http->headers = curl->slist_append(NULL, "Content-Type: application/json");
    if (header && http->headers) {
        tddp_curl_list *longer = curl->slist_append(http->headers, header);
        if (!longer) {
            curl->slist_free_all(http->headers);
        }
        http->headers = longer;
    }
    if (!http->headers) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "libcurl is out of memory");
    }
    (void)curl->easy_setopt(http->easy, TDDP_CURLOPT_HTTPHEADER, http->headers);
    (void)curl->easy_setopt(http->easy, TDDP_CURLOPT_URL, url);
    (void)curl->easy_setopt(http->easy, TDDP_CURLOPT_POSTFIELDSIZE, (long)body->size);
    (void)curl->easy_setopt(http->easy, TDDP_CURLOPT_POSTFIELDS, body->data);
    http->busy = true;
    if (curl->multi_add_handle(http->multi, http->easy) != 0) {
        tddp_http_end(http, NULL);
        return tddp_fail(TDDP_OUT_OF_MEMORY, "libcurl is out of memory");
    }
    return TDDP_OK;
}

/* How a transfer that is no longer running ended. */
static tddp_status outcome(tddp_http *http)
{
    int left;
    const tddp_curl_message *message = http->curl->multi_info_read(http->multi, &left);
    if (http->short_of_memory) {
        return tddp_fail(TDDP_OUT_OF_MEMORY, "%s: the response is too large", http->url);
    }
    if (!message || message->kind != TDDP_CURLMSG_DONE || message->data.result == TDDP_CURLE_OK) {
        return TDDP_OK;
    }
    return tddp_fail(TDDP_NETWORK, "%s: %s", http->url,
                     http->reason[0] ? http->reason
                                     : http->curl->easy_strerror(message->data.result));
}

tddp_status tddp_http_more(tddp_http *http, int64_t deadline_ns, tddp_cancel *cancel, bool *open)
{
    tddp_curl_wait extra = {.fd = tddp_cancel_fd(cancel), .events = TDDP_CURL_WAIT_POLLIN};
    size_t before = http->response->size;
    for (;;) {
        int running = 0;
        (void)http->curl->multi_perform(http->multi, &running);
        *open = running > 0;
        if (running == 0) {
            return outcome(http);
        }
        if (http->response->size > before) {
            return TDDP_OK;
        }
        if (cancel && tddp_cancel_triggered(cancel)) {
            return tddp_fail(TDDP_CANCELED, "%s: interrupted", http->url);
        }
        if (tddp_now_ns() >= deadline_ns) {
            return tddp_fail(TDDP_TIMEOUT, "%s: no answer in time", http->url);
        }
        (void)http->curl->multi_poll(http->multi, extra.fd >= 0 ? &extra : NULL, extra.fd >= 0,
                                     tddp_deadline_poll_ms(deadline_ns), NULL);
    }
}

void tddp_http_end(tddp_http *http, long *code)
{
    if (code) {
        *code = 0;
        (void)http->curl->easy_getinfo(http->easy, TDDP_CURLINFO_RESPONSE_CODE, code);
    }
    if (http->busy) {
        (void)http->curl->multi_remove_handle(http->multi, http->easy);
    }
    http->busy = false;
    http->curl->slist_free_all(http->headers);
    http->headers = NULL;
}

tddp_status tddp_http_post(tddp_http *http, const char *url, const char *header,
                           const tddp_bytes *body, int64_t deadline_ns, tddp_cancel *cancel,
                           tddp_bytes *response, long *code)
{
    tddp_status status = tddp_http_begin(http, url, header, body, response);
    bool open = status == TDDP_OK;
    while (status == TDDP_OK && open) {
        status = tddp_http_more(http, deadline_ns, cancel, &open);
    }
    tddp_http_end(http, code);
    return status;
}
