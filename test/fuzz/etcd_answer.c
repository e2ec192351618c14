/*
 * Answers of etcd from arbitrary bytes: they are read or refused, and keys and values in them can
 * be sent back.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "launch/etcd/etcd.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool holds)
{
    if (!holds) {
        abort();
    }
}

/* What is read again from its base64 is the same. */
static void try_bytes(const tddp_blob *blob)
{
    char *text = malloc((blob->size + 2) / 3 * 4 + 1);
    tddp_etcd_answer again = {0};
    require(blob->data && blob->data[blob->size] == '\0' && text);
    char *body = tddp_format("{\"header\": {}, \"kvs\": [{\"key\": \"%s\"}]}",
                             tddp_base64((tddp_slice){blob->data, blob->size}, text));
    require(body && tddp_etcd_answer_read(body, strlen(body), &again) == TDDP_OK);
    require(again.count == 1 && again.pairs[0].key.size == blob->size);
    require(memcmp(again.pairs[0].key.data, blob->data, blob->size) == 0);
    tddp_etcd_answer_free(&again);
    free(body);
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    tddp_etcd_answer answer = {0};
    tddp_status status = tddp_etcd_answer_read((const char *)data, size, &answer);
    for (size_t i = 0; status == TDDP_OK && i < answer.count; i++) {
        try_bytes(&answer.pairs[i].key);
        try_bytes(&answer.pairs[i].value);
    }
    tddp_etcd_answer_free(&answer);
    return 0;
}
