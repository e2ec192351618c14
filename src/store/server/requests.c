/*
 * Executes requests: what each does to the server's values, and its answer. The table at the end
 * has one row per kind. Server thread only. The answer to a request is appended before other
 * clients are woken by it. wire.c parses requests, clients.c sends answers.
 */
#include <stdint.h>

#include "store/queue.h"
#include "store/server/server.h"
#include "store/values.h"

/* The most that may wait to be sent to a client, in times the largest request. */
enum { ANSWER_REQUESTS = 2 };

typedef struct context {
    tddp_store_server *server;
    tddp_server_client *client;
    const tddp_wire_request *request;
} context;

static tddp_bytes *out(const context *c)
{
    return &c->client->out;
}

/* A key counts as present also while its queue holds something. */
static bool present(const context *c, tddp_slice key)
{
    return tddp_store_map_find(&c->server->values, key) ||
           tddp_store_map_find(&c->server->queues, key);
}

static tddp_status run_validate(const context *c)
{
    if (c->client->validated) {
        return tddp_fail(TDDP_PROTOCOL, "a second VALIDATE");
    }
    c->client->validated = true;
    return TDDP_OK;
}

static tddp_status run_ping(const context *c)
{
    return tddp_wire_put_u32(out(c), (uint32_t)c->request->number);
}

/* Refuses what would make all that is stored too large; what makes it smaller is welcome. `entry`:
 * whose value would be replaced, or NULL. */
static tddp_status check_total(const tddp_store_server *server, const tddp_store_entry *entry,
                               tddp_slice key, size_t bytes)
{
    uint64_t total = server->values.bytes + server->queues.bytes;
    uint64_t more = entry ? bytes : TDDP_STORE_ENTRY_BYTES + key.size + bytes;
    uint64_t less = entry ? entry->value.size : 0;
    if (more <= less || total - less + more <= server->most_bytes) {
        return TDDP_OK;
    }
    return tddp_fail(TDDP_STORE,
                     "a value of %zu bytes, where %llu of at most %llu are stored already "
                     "(TDDP_STORE_MAX_TOTAL_BYTES)",
                     bytes, (unsigned long long)total, (unsigned long long)server->most_bytes);
}

/* The key has got this value: it belongs to no client, and is what others wait for. */
static void note_stored(const context *c, tddp_store_entry *entry)
{
    tddp_server_disown(c->server, entry);
    tddp_server_wake(c->server, &c->server->waits, tddp_store_entry_key(entry), SIZE_MAX);
    tddp_server_note_change(c->server, tddp_store_entry_key(entry));
}

void tddp_server_delete(tddp_store_server *server, tddp_store_entry *entry)
{
    tddp_server_disown(server, entry);
    tddp_server_note_change(server, tddp_store_entry_key(entry));
    tddp_store_map_remove(&server->values, entry);
}

static tddp_store_entry *find(const context *c, tddp_slice key)
{
    return tddp_store_map_find(&c->server->values, key);
}

static tddp_status set_value(const context *c, tddp_slice key, tddp_slice value)
{
    tddp_store_entry *entry = find(c, key);
    if (entry &&
        tddp_slices_equal(tddp_store_entry_value(entry), value)) { /* no change to anybody */
        tddp_server_disown(c->server, entry);
        return TDDP_OK;
    }
    tddp_status status = check_total(c->server, entry, key, value.size);
    status = status ? status : tddp_store_values_set(&c->server->values, key, value);
    if (status == TDDP_OK) {
        note_stored(c, find(c, key));
    }
    return status;
}

static tddp_status run_set(const context *c)
{
    return set_value(c, c->request->key, c->request->values[0]);
}

static tddp_status run_append(const context *c)
{
    const tddp_wire_request *r = c->request;
    const tddp_store_entry *entry = find(c, r->key);
    tddp_slice more = r->values[0];
    size_t present = entry ? entry->value.size : 0;
    if (present == 0 || more.size == 0) {
        return set_value(c, r->key, present ? tddp_store_entry_value(entry) : more);
    }
    if (present > c->server->limits.value_bytes - more.size) {
        return tddp_fail(TDDP_STORE,
                         "APPEND would make a value of more than %llu bytes "
                         "(TDDP_STORE_MAX_VALUE_BYTES)",
                         (unsigned long long)c->server->limits.value_bytes);
    }
    tddp_status status = check_total(c->server, entry, r->key, present + more.size);
    status = status ? status : tddp_store_values_append(&c->server->values, r->key, more);
    if (status == TDDP_OK) {
        note_stored(c, find(c, r->key));
    }
    return status;
}

static tddp_status run_compare_set(const context *c)
{
    const tddp_wire_request *r = c->request;
    bool stored;
    tddp_slice answer =
        tddp_store_values_compare(&c->server->values, r->key, r->values[0], r->values[1], &stored);
    tddp_status status = tddp_wire_put_string(out(c), answer);
    return status == TDDP_OK && stored ? set_value(c, r->key, r->values[1]) : status;
}

tddp_status tddp_server_put_part(const tddp_store_server *server, tddp_server_client *client,
                                 tddp_slice part)
{
    uint64_t most = ANSWER_REQUESTS * server->limits.request_bytes;
    if (client->out.size - client->out_sent + 8 + part.size > most) {
        return tddp_fail(TDDP_STORE,
                         "more than %llu bytes of answers wait for it "
                         "(TDDP_STORE_MAX_REQUEST_BYTES)",
                         (unsigned long long)most);
    }
    return tddp_wire_put_string(&client->out, part);
}

static tddp_status put_value(const context *c, tddp_slice key)
{
    const tddp_store_entry *entry = find(c, key);
    return tddp_server_put_part(c->server, c->client,
                                entry ? tddp_store_entry_value(entry) : (tddp_slice){"", 0});
}

static tddp_status run_get(const context *c)
{
    return put_value(c, c->request->key);
}

static tddp_status sum_of(const context *c, int64_t delta, int64_t *out)
{
    return tddp_store_values_sum(&c->server->values, c->request->key, delta, out);
}

static tddp_status set_number(const context *c, int64_t number)
{
    char text[TDDP_STORE_NUMBER_BYTES];
    return set_value(c, c->request->key, tddp_store_number(number, text));
}

static tddp_status run_add(const context *c)
{
    int64_t sum;
    tddp_status status = sum_of(c, c->request->number, &sum);
    status = status ? status : tddp_wire_put_u64(out(c), (uint64_t)sum);
    return status ? status : set_number(c, sum);
}

static tddp_status run_check(const context *c)
{
    tddp_slice list = c->request->list;
    unsigned char answer = TDDP_WIRE_READY;
    for (uint64_t i = 0; i < c->request->count; i++) {
        if (!present(c, tddp_wire_next(&list))) {
            answer = TDDP_WIRE_NOT_READY;
        }
    }
    return tddp_wire_put_byte(out(c), answer);
}

static tddp_status run_wait(const context *c)
{
    /* There is one wait per connection: a client that sends another has given up the first. */
    tddp_server_wait_cancel(c->client);
    tddp_slice list = c->request->list;
    for (uint64_t i = 0; i < c->request->count; i++) {
        tddp_slice key = tddp_wire_next(&list);
        if (!present(c, key)) {
            tddp_status status = tddp_server_wait_for(&c->server->waits, c->client, key);
            if (status) {
                return status;
            }
        }
    }
    return c->client->missing ? TDDP_OK : tddp_wire_put_byte(out(c), TDDP_WIRE_STOP_WAITING);
}

static tddp_status run_cancel_wait(const context *c)
{
    tddp_server_wait_cancel(c->client);
    return tddp_wire_put_byte(out(c), TDDP_WIRE_WAIT_CANCELED);
}

static tddp_status run_num_keys(const context *c)
{
    return tddp_wire_put_u64(out(c), c->server->values.count);
}

static tddp_status run_delete_key(const context *c)
{
    tddp_store_entry *entry = find(c, c->request->key);
    if (entry) {
        tddp_server_delete(c->server, entry);
    }
    return tddp_wire_put_u64(out(c), entry != NULL);
}

static tddp_status run_multi_get(const context *c)
{
    tddp_slice list = c->request->list;
    tddp_status status = TDDP_OK;
    for (uint64_t i = 0; i < c->request->count && status == TDDP_OK; i++) {
        status = put_value(c, tddp_wire_next(&list));
    }
    return status;
}

static tddp_status run_multi_set(const context *c)
{
    tddp_slice list = c->request->list;
    for (uint64_t i = 0; i < c->request->count; i++) {
        tddp_slice key = tddp_wire_next(&list);
        tddp_status status = set_value(c, key, tddp_wire_next(&list));
        if (status) {
            return status;
        }
    }
    return TDDP_OK;
}

static tddp_status run_queue_push(const context *c)
{
    const tddp_wire_request *r = c->request;
    tddp_status status = check_total(c->server, NULL, r->key, r->values[0].size);
    status = status ? status : tddp_store_queues_push(&c->server->queues, r->key, r->values[0]);
    if (status == TDDP_OK) {
        tddp_server_wake(c->server, &c->server->waits, r->key, 1);
    }
    return status;
}

static tddp_status run_queue_len(const context *c)
{
    return tddp_wire_put_u64(out(c), tddp_store_queues_length(&c->server->queues, c->request->key));
}

static tddp_status run_queue_pop(const context *c)
{
    tddp_store_map *queues = &c->server->queues;
    tddp_slice key = c->request->key;
    tddp_slice oldest;
    tddp_status status = run_queue_len(c);
    if (status || !tddp_store_queues_first(queues, key, &oldest)) {
        return status;
    }
    status = tddp_wire_put_string(out(c), oldest);
    if (status == TDDP_OK) {
        tddp_store_queues_drop(queues, key);
    }
    return status;
}

static tddp_status run_list_keys(const context *c)
{
    const tddp_store_map *values = &c->server->values;
    tddp_status status = tddp_wire_put_u64(out(c), values->count);
    const tddp_store_entry *entry = tddp_store_map_next(values, NULL);
    while (entry && status == TDDP_OK) {
        status = tddp_server_put_part(c->server, c->client, tddp_store_entry_key(entry));
        entry = tddp_store_map_next(values, entry);
    }
    return status;
}

static tddp_status run_barrier(const context *c)
{
    const tddp_wire_request *r = c->request;
    int64_t arrived;
    tddp_server_wait_cancel(c->client);
    tddp_status status = sum_of(c, 1, &arrived);
    status = status ? status : set_number(c, arrived);
    if (status) {
        return status;
    }
    if (arrived < r->number) {
        return tddp_server_wait_for(&c->server->barriers, c->client, r->key);
    }
    status = tddp_wire_put_byte(out(c), TDDP_WIRE_STOP_WAITING);
    if (status == TDDP_OK) {
        tddp_server_wake(c->server, &c->server->barriers, r->key, SIZE_MAX);
    }
    return status;
}

static tddp_status run_set_ephemeral(const context *c)
{
    const tddp_wire_request *r = c->request;
    const tddp_store_entry *present = find(c, r->key);
    const tddp_server_ephemeral *owner = present ? present->data : NULL;
    bool lost = r->flag && present && !(owner && owner->client == c->client);
    tddp_status status = tddp_wire_put_byte(out(c), lost ? TDDP_WIRE_LOST : TDDP_WIRE_WON);
    status = status ? status
                    : tddp_server_put_part(c->server, c->client,
                                           lost ? tddp_store_entry_value(present) : r->values[0]);
    if (status || lost) {
        return status;
    }
    status = set_value(c, r->key, r->values[0]);
    if (status) {
        return status;
    }
    tddp_store_entry *entry = find(c, r->key);
    status = tddp_server_own(c->server, c->client, entry, r->number);
    if (status) {
        tddp_server_delete(c->server, entry); /* it would stay for ever */
    }
    return status;
}

static tddp_status run_watch(const context *c)
{
    return tddp_server_watch(c->server, c->client, c->request->key, c->request->flag);
}

static tddp_status (*const run[TDDP_WIRE_KINDS])(const context *) = {
    [TDDP_WIRE_VALIDATE] = run_validate,
    [TDDP_WIRE_SET] = run_set,
    [TDDP_WIRE_COMPARE_SET] = run_compare_set,
    [TDDP_WIRE_GET] = run_get,
    [TDDP_WIRE_ADD] = run_add,
    [TDDP_WIRE_CHECK] = run_check,
    [TDDP_WIRE_WAIT] = run_wait,
    [TDDP_WIRE_NUM_KEYS] = run_num_keys,
    [TDDP_WIRE_DELETE_KEY] = run_delete_key,
    [TDDP_WIRE_APPEND] = run_append,
    [TDDP_WIRE_MULTI_GET] = run_multi_get,
    [TDDP_WIRE_MULTI_SET] = run_multi_set,
    [TDDP_WIRE_CANCEL_WAIT] = run_cancel_wait,
    [TDDP_WIRE_PING] = run_ping,
    [TDDP_WIRE_QUEUE_PUSH] = run_queue_push,
    [TDDP_WIRE_QUEUE_POP] = run_queue_pop,
    [TDDP_WIRE_QUEUE_LEN] = run_queue_len,
    [TDDP_WIRE_LIST_KEYS] = run_list_keys,
    [TDDP_WIRE_BARRIER] = run_barrier,
    [TDDP_WIRE_SET_EPHEMERAL] = run_set_ephemeral,
    [TDDP_WIRE_WATCH] = run_watch,
};

tddp_status tddp_server_execute(tddp_store_server *server, tddp_server_client *client,
                                const tddp_wire_request *request)
{
    context c = {server, client, request};
    if (client->dialect == &tddp_wire_1_13) {
        /* There a wait whose time is up is just left; an answer now would be taken for another's.
         */
        tddp_server_wait_cancel(client);
    }
    /* Queued first, so that this client's answer is sent before those of clients that it wakes. */
    tddp_server_client_unsent(server, client);
    size_t before = client->out.size;
    tddp_status status = run[request->kind](&c);
    if (status) {
        client->out.size = before; /* no half answers */
    }
    return status;
}
