/*
 * libcurl, found when it is first needed: torchrun starts without it. The declarations are ours, so
 * nothing is needed to build; test/c/launch/etcd_curl_test.c holds them against <curl/curl.h>.
 */
#ifndef TDDP_ETCD_CURL_H
#define TDDP_ETCD_CURL_H

#include <tddp/status.h>

typedef struct tddp_curl_list tddp_curl_list; /* struct curl_slist */

/* struct CURLMsg */
typedef struct tddp_curl_message {
    int kind;
    void *easy;
    union {
        void *whatever;
        int result;
    } data;
} tddp_curl_message;

/* struct curl_waitfd */
typedef struct tddp_curl_wait {
    int fd;
    short events;
    short revents;
} tddp_curl_wait;

/* Options, by libcurl's names; their numbers are part of its ABI. */
enum {
    TDDP_CURL_GLOBAL_DEFAULT = 3,
    TDDP_CURLMSG_DONE = 1,
    TDDP_CURL_WAIT_POLLIN = 1,
    TDDP_CURLE_OK = 0,
    TDDP_CURLINFO_RESPONSE_CODE = 0x200000 + 2,
    TDDP_CURLOPT_POSTFIELDSIZE = 60,
    TDDP_CURLOPT_NOSIGNAL = 99,
    TDDP_CURLOPT_CONNECTTIMEOUT_MS = 156,
    TDDP_CURLOPT_WRITEDATA = 10001,
    TDDP_CURLOPT_URL = 10002,
    TDDP_CURLOPT_ERRORBUFFER = 10010,
    TDDP_CURLOPT_POSTFIELDS = 10015,
    TDDP_CURLOPT_HTTPHEADER = 10023,
    TDDP_CURLOPT_SSLCERT = 10025,
    TDDP_CURLOPT_CAINFO = 10065,
    TDDP_CURLOPT_SSLKEY = 10087,
    TDDP_CURLOPT_NOPROXY = 10177,
    TDDP_CURLOPT_WRITEFUNCTION = 20011,
    TDDP_CURL_ERROR_SIZE = 256
};

typedef struct tddp_curl {
    int (*global_init)(long flags);
    void *(*easy_init)(void);
    int (*easy_setopt)(void *easy, int option, ...);
    int (*easy_getinfo)(void *easy, int info, ...);
    void (*easy_cleanup)(void *easy);
    const char *(*easy_strerror)(int result);
    tddp_curl_list *(*slist_append)(tddp_curl_list *list, const char *text);
    void (*slist_free_all)(tddp_curl_list *list);
    void *(*multi_init)(void);
    int (*multi_add_handle)(void *multi, void *easy);
    int (*multi_remove_handle)(void *multi, void *easy);
    int (*multi_perform)(void *multi, int *running);
    int (*multi_poll)(void *multi, tddp_curl_wait *extra, unsigned count, int timeout_ms,
                      int *ready);
    tddp_curl_message *(*multi_info_read)(void *multi, int *left);
    int (*multi_cleanup)(void *multi);
} tddp_curl;

/* The functions, which stay for the life of the process. Errors: TDDP_UNAVAILABLE (the text says
 * what to install). Any thread. */
TDDP_NODISCARD tddp_status tddp_curl_load(const tddp_curl **out);

#endif
