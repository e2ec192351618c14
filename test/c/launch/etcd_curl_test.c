/*
 * Holds the declarations of launch/etcd/http.h against libcurl's own header, and loads the library.
 */
#include <poll.h>
#include <stddef.h>

#include "check.h"
#include "launch/etcd/http.h"

#if defined(__has_include)
#if __has_include(<curl/curl.h>)
#define HAS_CURL 1
#include <curl/curl.h>
#endif
#endif

#ifdef HAS_CURL

#define SAME(name) _Static_assert((int)TDDP_##name == (int)name, #name)

SAME(CURL_GLOBAL_DEFAULT);
SAME(CURLOPT_NOSIGNAL);
SAME(CURLOPT_CONNECTTIMEOUT_MS);
SAME(CURLOPT_WRITEDATA);
SAME(CURLOPT_URL);
SAME(CURLOPT_ERRORBUFFER);
SAME(CURLOPT_COPYPOSTFIELDS);
SAME(CURLOPT_HTTPHEADER);
SAME(CURLOPT_SSLCERT);
SAME(CURLOPT_CAINFO);
SAME(CURLOPT_SSLKEY);
SAME(CURLOPT_NOPROXY);
SAME(CURLOPT_WRITEFUNCTION);
SAME(CURL_ERROR_SIZE);

_Static_assert(CURLE_OK == 0 && CURLM_OK == 0 && CURL_WAIT_POLLIN == POLLIN, "plain numbers");
_Static_assert(sizeof(tddp_curl_list) == sizeof(struct curl_slist), "curl_slist");
_Static_assert(offsetof(tddp_curl_list, data) == offsetof(struct curl_slist, data), "curl_slist");
_Static_assert(offsetof(tddp_curl_list, next) == offsetof(struct curl_slist, next), "curl_slist");
_Static_assert(sizeof(tddp_curl_message) == sizeof(CURLMsg), "CURLMsg");
_Static_assert(offsetof(tddp_curl_message, easy) == offsetof(CURLMsg, easy_handle), "CURLMsg");
_Static_assert(offsetof(tddp_curl_message, result) == offsetof(CURLMsg, data.result), "CURLMsg");
_Static_assert(sizeof(struct pollfd) == sizeof(struct curl_waitfd), "curl_waitfd");
_Static_assert(offsetof(struct pollfd, fd) == offsetof(struct curl_waitfd, fd), "curl_waitfd");
_Static_assert(offsetof(struct pollfd, events) == offsetof(struct curl_waitfd, events),
               "curl_waitfd");

TEST(the_declarations_are_libcurls)
{
    CHECK_INT(TDDP_CURLOPT_URL, CURLOPT_URL); /* the others are compared as this is compiled */
}

#else

TEST(the_declarations_are_libcurls)
{
    check_skip("libcurl's header is not installed (Debian: libcurl4-openssl-dev)");
}

#endif

TEST(the_library_is_found)
{
    static const tddp_launch_etcd_conf conf;
    tddp_http first = {0};
    tddp_http second = {0};
    tddp_status status = tddp_http_open(&first, &conf);
    if (status == TDDP_UNAVAILABLE) {
        CHECK_CONTAINS(tddp_error_message(), "apt install libcurl4");
        check_skip("libcurl is not installed (Debian: libcurl4)");
    }
    CHECK_OK(status);
    CHECK_OK(tddp_http_open(&second, &conf));
    CHECK(first.easy != second.easy);
    tddp_http_close(&first);
    tddp_http_close(&second);
}
