/*
 * Holds the declarations of launch/etcd/curl.h against libcurl's own header, and loads the library.
 */
#include <stddef.h>

#include "check.h"
#include "launch/etcd/curl.h"

#if defined(__has_include)
#if __has_include(<curl/curl.h>)
#define HAS_CURL 1
#include <curl/curl.h>
#endif
#endif

#ifdef HAS_CURL

#define SAME(name) _Static_assert((int)TDDP_##name == (int)name, #name)

SAME(CURL_GLOBAL_DEFAULT);
SAME(CURLMSG_DONE);
SAME(CURL_WAIT_POLLIN);
SAME(CURLE_OK);
SAME(CURLINFO_RESPONSE_CODE);
SAME(CURLOPT_POSTFIELDSIZE);
SAME(CURLOPT_NOSIGNAL);
SAME(CURLOPT_CONNECTTIMEOUT_MS);
SAME(CURLOPT_WRITEDATA);
SAME(CURLOPT_URL);
SAME(CURLOPT_ERRORBUFFER);
SAME(CURLOPT_POSTFIELDS);
SAME(CURLOPT_HTTPHEADER);
SAME(CURLOPT_SSLCERT);
SAME(CURLOPT_CAINFO);
SAME(CURLOPT_SSLKEY);
SAME(CURLOPT_NOPROXY);
SAME(CURLOPT_WRITEFUNCTION);
SAME(CURL_ERROR_SIZE);

_Static_assert(sizeof(tddp_curl_message) == sizeof(CURLMsg), "CURLMsg");
_Static_assert(offsetof(tddp_curl_message, easy) == offsetof(CURLMsg, easy_handle), "CURLMsg");
_Static_assert(offsetof(tddp_curl_message, data) == offsetof(CURLMsg, data), "CURLMsg");
_Static_assert(sizeof(tddp_curl_wait) == sizeof(struct curl_waitfd), "curl_waitfd");
_Static_assert(offsetof(tddp_curl_wait, events) == offsetof(struct curl_waitfd, events),
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

TEST(the_library_is_found_once)
{
    const tddp_curl *first;
    const tddp_curl *second;
    tddp_status status = tddp_curl_load(&first);
    if (status == TDDP_UNAVAILABLE) {
        CHECK_CONTAINS(tddp_error_message(), "apt install libcurl4");
        check_skip("libcurl is not installed (Debian: libcurl4)");
    }
    CHECK_OK(status);
    CHECK_OK(tddp_curl_load(&second));
    CHECK(first == second);
    CHECK(first->multi_poll != NULL);
}
