/*
 * Transactions, written as JSON while they are put together. Used by the client's thread.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "launch/etcd/state.h"

static void add(tddp_etcd_txn *txn, tddp_bytes *to, const char *text)
{
    txn->status = txn->status ? txn->status : tddp_bytes_append(to, text, strlen(text));
}

static void begin_item(tddp_etcd_txn *txn, tddp_bytes *to, const char *text)
{
    add(txn, to, to->size > 0 ? ",\n" : "");
    add(txn, to, text);
}

static void add_key(tddp_etcd_txn *txn, tddp_bytes *to, tddp_slice key, bool prefix)
{
    txn->status = txn->status ? txn->status : tddp_etcd_add_key(to, key, prefix);
}

void tddp_etcd_txn_created_in(tddp_etcd_txn *txn, tddp_slice key, int64_t revision)
{
    char rest[96];
    (void)snprintf(rest, sizeof rest, ", \"target\": \"CREATE\", \"create_revision\": \"%lld\"}",
                   (long long)revision);
    begin_item(txn, &txn->compares, "{");
    add_key(txn, &txn->compares, key, false);
    add(txn, &txn->compares, rest);
}

void tddp_etcd_txn_put(tddp_etcd_txn *txn, tddp_slice key, tddp_slice value, int64_t lease)
{
    char rest[64];
    tddp_bytes *to = &txn->operations;
    (void)snprintf(rest, sizeof rest, ", \"lease\": \"%lld\"}}", (long long)lease);
    begin_item(txn, to, "{\"request_put\": {");
    add_key(txn, to, key, false);
    add(txn, to, ", ");
    txn->status = txn->status ? txn->status : tddp_etcd_add_bytes(to, "value", value);
    add(txn, to, rest);
}

void tddp_etcd_txn_delete(tddp_etcd_txn *txn, tddp_slice key, bool prefix)
{
    begin_item(txn, &txn->operations, "{\"request_delete_range\": {");
    add_key(txn, &txn->operations, key, prefix);
    add(txn, &txn->operations, "}}");
}

tddp_status tddp_etcd_txn_commit(tddp_etcd *etcd, tddp_etcd_txn *txn, const tddp_wait *wait,
                                 int64_t *revision)
{
    tddp_bytes body = {0};
    tddp_etcd_answer answer = {0};
    add(txn, &body, "{\"compare\": [");
    txn->status = txn->status ? txn->status
                              : tddp_bytes_append(&body, txn->compares.data, txn->compares.size);
    add(txn, &body, "],\n\"success\": [");
    txn->status = txn->status
                      ? txn->status
                      : tddp_bytes_append(&body, txn->operations.data, txn->operations.size);
    add(txn, &body, "]}");
    tddp_status status = txn->status;
    status = status ? status : tddp_etcd_call(etcd, "/v3/kv/txn", &body, wait, &answer);
    if (status == TDDP_OK) {
        *revision = answer.succeeded ? answer.revision : 0;
    }
    tddp_etcd_answer_free(&answer);
    tddp_bytes_free(&body);
    tddp_bytes_free(&txn->compares);
    tddp_bytes_free(&txn->operations);
    *txn = (tddp_etcd_txn){0};
    return status;
}
