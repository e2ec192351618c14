/* Keys and the client of the rendezvous backend etcd. Pure but for making the client. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "launch/rendezvous/etcd_keys.h"

tddp_status tddp_launch_etcd_open(const tddp_launch_options *options, tddp_etcd **out)
{
    const tddp_launch_etcd_conf *conf = &options->conf.etcd;
    const tddp_etcd_opts opts = {
        .endpoints = options->endpoints,
        .endpoint_count = options->endpoint_count,
        .https = conf->https,
        .tls = {.cacert = conf->cacert[0] ? conf->cacert : NULL,
                .cert = conf->cert[0] ? conf->cert : NULL,
                .key = conf->key[0] ? conf->key : NULL},
        .username = conf->username[0] ? conf->username : NULL,
        .password = conf->password,
    };
    return tddp_etcd_open(&opts, out);
}

tddp_slice tddp_launch_etcd_key(const char *run_id, char text[TDDP_LAUNCH_KEY_BYTES],
                                const char *name)
{
    int length = snprintf(text, TDDP_LAUNCH_KEY_BYTES, "/torchrun/%s/%s", run_id, name);
    return (tddp_slice){text, (size_t)length};
}

tddp_slice tddp_launch_etcd_term_key(const char *run_id, int64_t term,
                                     char text[TDDP_LAUNCH_KEY_BYTES], const char *format, ...)
{
    int length =
        snprintf(text, TDDP_LAUNCH_KEY_BYTES, "/torchrun/%s/%lld/", run_id, (long long)term);
    va_list arguments;
    va_start(arguments, format);
    length += vsnprintf(text + length, TDDP_LAUNCH_KEY_BYTES - (size_t)length, format, arguments);
    va_end(arguments);
    return (tddp_slice){text, (size_t)length};
}

void tddp_launch_etcd_while_leading(tddp_etcd_txn *txn, const char *run_id, int64_t term)
{
    char key[TDDP_LAUNCH_KEY_BYTES];
    tddp_etcd_txn_created_in(txn, tddp_launch_etcd_key(run_id, key, "coordinator"), term);
}

int64_t tddp_launch_etcd_number(const tddp_blob *key)
{
    const char *slash = key->data ? strrchr(key->data, '/') : NULL;
    int64_t number;
    return slash && tddp_parse_int(slash + 1, 0, INT32_MAX, &number) ? number : -1;
}
