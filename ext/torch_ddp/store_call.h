/*
 * The shared part of a store's operations: store.c (one key), store_keys.c (several keys, lists)
 * and store_queue.c (queues, barriers).
 */
#ifndef TORCH_DDP_STORE_CALL_H
#define TORCH_DDP_STORE_CALL_H

#include "torch_ddp.h"

/* The arguments and results of all calls. */
typedef struct store_call {
    tddp_store *store;
    tddp_slice key, value, desired;
    const tddp_slice *keys, *values;
    size_t count;
    int64_t number;
    int flag;
    tddp_blob blob;
    tddp_blob *blobs;
    tddp_blob_list list;
} store_call;

/* A key or value as bytes: a frozen string that shares the memory of the one given. */
VALUE tddp_rb_bytes(VALUE object, const char *what);

static inline tddp_slice tddp_rb_slice(VALUE string)
{
    return (tddp_slice){RSTRING_PTR(string), (size_t)RSTRING_LEN(string)};
}

/* A call with a key and a value, and no result. */
VALUE tddp_rb_put(VALUE self, VALUE key, VALUE value, tddp_rb_body body);

/* tddp_rb_raise_outcome() for a call that may have returned a blob, which it frees before. */
void tddp_rb_raise_outcome_blob(tddp_rb_outcome outcome, store_call *call);

VALUE tddp_rb_blob_to_string(tddp_blob *blob);

void tddp_rb_init_store_keys(VALUE store);
void tddp_rb_init_store_queues(VALUE store);

#endif
