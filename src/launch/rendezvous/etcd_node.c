/*
 * A node's side of the rendezvous backend etcd (text.h has the keys). Signs of life are renewals of
 * the node's lease; messages come by a watch, which also shows the end of the term: all messages
 * are deleted then, the first one of them. A node that finds no coordinator tries to become it.
 * Runs on the rendezvous thread.
 */
#include <stdlib.h>
#include <string.h>

#include "launch/rendezvous/backend.h"
#include "launch/rendezvous/etcd_keys.h"
#include "store/store_impl.h"

/* What lasts as long as the node. */
typedef struct kept {
    tddp_etcd *etcd;
    int64_t lease; /* 0: none */
    int64_t events;
} kept;

/* What lasts as long as the term of a coordinator. */
typedef struct connection {
    int64_t lease; /* the coordinator's */
    tddp_etcd_watch *messages;
    tddp_etcd_pair message; /* the next one; without a key: not known yet */
} connection;

/* Half of the time for which etcd may be silent; several endpoints share it. */
static tddp_wait answer_wait(const tddp_launch_node *node, tddp_cancel *cancel)
{
    return (tddp_wait){node->times.silence_ms / 2, cancel};
}

static tddp_status lead_is_over(void)
{
    return tddp_fail(TDDP_NETWORK, "it leads no more");
}

static tddp_slice term_key(const tddp_launch_node *node, char text[TDDP_LAUNCH_KEY_BYTES],
                           const char *name)
{
    return tddp_launch_etcd_term_key(node->run_id, node->leader.term, text, "%s", name);
}

/* Executes what makes sense only while the coordinator leads. */
static tddp_status commit(tddp_launch_node *node, tddp_etcd_txn *txn)
{
    const kept *k = node->backend_state;
    int64_t revision = 0;
    tddp_wait wait = answer_wait(node, NULL);
    tddp_status status = tddp_etcd_txn_commit(k->etcd, txn, &wait, &revision);
    return status == TDDP_OK && revision == 0 ? lead_is_over() : status;
}

static tddp_etcd_txn begin(const tddp_launch_node *node)
{
    tddp_etcd_txn txn = {0};
    tddp_launch_etcd_while_leading(&txn, node->run_id, node->leader.term);
    return txn;
}

/* --- life ------------------------------------------------------------------------------------ */

static tddp_status open_client(tddp_launch_node *node)
{
    kept *made = tddp_alloc(sizeof *made);
    node->backend_state = made;
    return made ? tddp_launch_etcd_open(node->options, &made->etcd) : TDDP_OUT_OF_MEMORY;
}

static void close_client(tddp_launch_node *node)
{
    kept *k = node->backend_state;
    tddp_wait wait = {node->times.beat_ms, NULL};
    if (k && k->lease) {
        (void)!tddp_etcd_lease_revoke(k->etcd, k->lease, &wait); /* else it runs out */
    }
    if (k) {
        tddp_etcd_close(k->etcd);
        free(k);
    }
    node->backend_state = NULL;
}

static void forget_messages(connection *c)
{
    tddp_etcd_watch_close(c->messages);
    c->messages = NULL;
    tddp_etcd_pair_free(&c->message);
}

static void disconnect(void *data)
{
    connection *c = data;
    if (c) {
        forget_messages(c);
        free(c);
    }
}

static void name_leader(const tddp_launch_node *node, char *text, size_t size)
{
    char endpoint[TDDP_LAUNCH_HOST_BYTES + 16];
    tddp_launch_endpoint_text(&node->options->endpoints[0], endpoint, sizeof endpoint);
    (void)snprintf(text, size, "the coordinator in etcd at %s", endpoint);
}

/* --- the coordinator ------------------------------------------------------------------------- */

/* What `ended` and `coordinator` say, as far as they are there. */
static tddp_status examine(tddp_launch_node *node, const tddp_etcd_pair *ended,
                           const tddp_etcd_pair *leader, tddp_launch_look *look)
{
    /* An end that was written before this node's last term is that of another job. */
    if (ended && node->was_in && ended->mod_revision > node->last_term) {
        return tddp_launch_message_decode(ended->value.data, ended->value.size, look->end);
    }
    if (!leader) {
        look->gone = true;
        (void)snprintf(look->why, sizeof look->why, "no torchrun coordinates there yet");
        return TDDP_OK;
    }
    if (ended && ended->mod_revision > leader->create_revision) {
        look->gone = true;
        (void)snprintf(look->why, sizeof look->why, "the job \"%.80s\" has just ended there",
                       node->run_id);
        return TDDP_OK;
    }
    tddp_status status = tddp_launch_check_job(node, leader->value.data);
    connection *made = status == TDDP_OK ? tddp_alloc(sizeof *made) : NULL;
    if (!made) {
        return status ? status : TDDP_OUT_OF_MEMORY;
    }
    made->lease = leader->lease;
    look->leader = (tddp_launch_leader){
        .term = leader->create_revision,
        .own = node->host && tddp_launch_host_term(node->host) == leader->create_revision,
        .connection = made,
    };
    return TDDP_OK;
}

/* NULL: the key is not among those that were read. */
static const tddp_etcd_pair *find_pair(const tddp_etcd_answer *answer, const char *key)
{
    size_t size = strlen(key);
    for (size_t i = 0; i < answer->count; i++) {
        const tddp_blob *each = &answer->pairs[i].key;
        if (each->size == size && memcmp(each->data, key, size) == 0) {
            return &answer->pairs[i];
        }
    }
    return NULL;
}

static tddp_status look(tddp_launch_node *node, tddp_launch_look *seen)
{
    const kept *k = node->backend_state;
    char ended_key[TDDP_LAUNCH_KEY_BYTES];
    char leader_key[TDDP_LAUNCH_KEY_BYTES];
    tddp_etcd_txn txn = {0};
    tddp_etcd_answer answer = {0};
    tddp_wait wait = {seen->limit_ms, node->cancel};
    tddp_etcd_txn_get(&txn, tddp_launch_etcd_key(node->run_id, ended_key, "ended"));
    tddp_etcd_txn_get(&txn, tddp_launch_etcd_key(node->run_id, leader_key, "coordinator"));
    tddp_status status = tddp_etcd_txn_execute(k->etcd, &txn, &wait, &answer);
    const tddp_etcd_pair *leader = find_pair(&answer, leader_key);
    if (status == TDDP_OK) {
        status = examine(node, find_pair(&answer, ended_key), leader, seen);
    }
    bool vacant = !leader && seen->end->kind != TDDP_LAUNCH_MESSAGE_END;
    if (status == TDDP_OK && vacant) {
        status = tddp_launch_host_campaign(node);
    }
    if (status != TDDP_OK && !seen->why[0]) {
        (void)snprintf(seen->why, sizeof seen->why, "%s", tddp_error_message());
    }
    tddp_etcd_answer_free(&answer);
    return status;
}

/* --- events ---------------------------------------------------------------------------------- */

static tddp_status grant_lease(tddp_launch_node *node)
{
    kept *k = node->backend_state;
    tddp_wait wait = answer_wait(node, NULL);
    return tddp_etcd_lease_grant(k->etcd, tddp_launch_node_lease_s(&node->times), &wait, &k->lease);
}

/* Shows by a key under this node's lease that the node at this slot lives; no more at `last`. */
static tddp_status put_node_key(tddp_launch_node *node, int slot, int last)
{
    const kept *k = node->backend_state;
    char key[TDDP_LAUNCH_KEY_BYTES];
    tddp_etcd_txn txn = begin(node);
    tddp_etcd_txn_put(
        &txn, tddp_launch_etcd_term_key(node->run_id, node->leader.term, key, "nodes/%d", slot),
        (tddp_slice){"", 0}, k->lease);
    if (last > 0) {
        tddp_etcd_txn_delete(
            &txn, tddp_launch_etcd_term_key(node->run_id, node->leader.term, key, "nodes/%d", last),
            false);
    }
    return commit(node, &txn);
}

/* The same, with a new lease if the last one has run out. */
static tddp_status show_life(tddp_launch_node *node, int slot, int last)
{
    kept *k = node->backend_state;
    tddp_status status = k->lease ? put_node_key(node, slot, last) : TDDP_NOT_FOUND;
    if (status == TDDP_NOT_FOUND) {
        status = grant_lease(node);
        status = status ? status : put_node_key(node, slot, last);
    }
    return status;
}

/* One more than the last node's slot: how often the key `slots` was written. */
static tddp_status next_slot(tddp_launch_node *node, int *slot)
{
    const kept *k = node->backend_state;
    const connection *c = node->leader.connection;
    char key[TDDP_LAUNCH_KEY_BYTES];
    tddp_etcd_answer answer = {0};
    tddp_wait wait = answer_wait(node, NULL);
    tddp_etcd_txn txn = begin(node);
    tddp_slice slots = term_key(node, key, "slots");
    tddp_etcd_txn_put(&txn, slots, (tddp_slice){"", 0}, c->lease);
    tddp_etcd_txn_get(&txn, slots);
    tddp_status status = tddp_etcd_txn_execute(k->etcd, &txn, &wait, &answer);
    if (status == TDDP_NOT_FOUND || (status == TDDP_OK && !answer.succeeded)) {
        status = lead_is_over(); /* its lease is no more, or another one's is there */
    } else if (status == TDDP_OK && (answer.count != 1 || answer.pairs[0].version < 1 ||
                                     answer.pairs[0].version > INT32_MAX)) {
        status = tddp_fail(TDDP_PROTOCOL, "etcd: the transaction's answer has no version");
    } else if (status == TDDP_OK) {
        *slot = (int)answer.pairs[0].version;
    }
    tddp_etcd_answer_free(&answer);
    return status;
}

static tddp_status take_slot(tddp_launch_node *node, int *slot, int *next_message)
{
    const kept *k = node->backend_state;
    connection *c = node->leader.connection;
    char key[TDDP_LAUNCH_KEY_BYTES];
    int64_t count;
    int64_t revision;
    tddp_wait wait = answer_wait(node, NULL);
    tddp_status status = next_slot(node, slot);
    status = status ? status : show_life(node, *slot, node->slot);
    tddp_slice messages = term_key(node, key, "messages/");
    status = status ? status : tddp_etcd_count(k->etcd, messages, &wait, &count, &revision);
    if (status == TDDP_OK && count == 0) {
        status = tddp_fail(TDDP_NETWORK, "it is not ready");
    }
    if (status == TDDP_OK) {
        forget_messages(c);
        *next_message = (int)count; /* the first is message 0 */
        status = tddp_etcd_watch_open(k->etcd, messages, true, revision + 1, &c->messages);
    }
    return status;
}

static tddp_status push(tddp_launch_node *node, tddp_slice event)
{
    kept *k = node->backend_state;
    const connection *c = node->leader.connection;
    char key[TDDP_LAUNCH_KEY_BYTES];
    tddp_etcd_txn txn = begin(node);
    tddp_slice name =
        tddp_launch_etcd_term_key(node->run_id, node->leader.term, key, "events/%s/%lld",
                                  node->self.id, (long long)k->events++);
    tddp_etcd_txn_put(&txn, name, event, c->lease);
    tddp_status status = commit(node, &txn);
    return status == TDDP_NOT_FOUND ? lead_is_over() : status; /* its lease is no more */
}

static tddp_status beat(tddp_launch_node *node)
{
    const kept *k = node->backend_state;
    tddp_wait wait = answer_wait(node, NULL);
    tddp_status status = tddp_etcd_lease_renew(k->etcd, k->lease, &wait);
    return status == TDDP_NOT_FOUND ? show_life(node, node->slot, 0) : status;
}

/* --- messages -------------------------------------------------------------------------------- */

/* From the first message that is there. */
static tddp_status list_messages(tddp_launch_node *node, const tddp_wait *wait)
{
    const kept *k = node->backend_state;
    connection *c = node->leader.connection;
    char key[TDDP_LAUNCH_KEY_BYTES];
    size_t count = 0;
    forget_messages(c);
    tddp_status status =
        tddp_etcd_watch_open(k->etcd, term_key(node, key, "messages/"), true, 0, &c->messages);
    status = status ? status : tddp_etcd_watch_list(c->messages, wait, &count);
    if (status == TDDP_OK && count == 0) {
        status = lead_is_over();
    }
    if (status != TDDP_OK) {
        forget_messages(c);
    }
    return status;
}

/* Fetches one more message. */
static tddp_status next_message(tddp_launch_node *node, const tddp_wait *wait)
{
    connection *c = node->leader.connection;
    tddp_wait answer = answer_wait(node, wait->cancel);
    tddp_status status = c->messages ? TDDP_OK : list_messages(node, &answer);
    if (status != TDDP_OK) {
        return status;
    }
    tddp_etcd_pair_free(&c->message);
    status = tddp_etcd_watch_next(c->messages, wait, &c->message);
    if (status == TDDP_NOT_FOUND) { /* it is too far behind */
        return list_messages(node, &answer);
    }
    return status == TDDP_OK && c->message.deleted ? lead_is_over() : status;
}

static tddp_status await_message(tddp_launch_node *node, int number, const tddp_wait *wait,
                                 tddp_blob *out)
{
    connection *c = node->leader.connection;
    int64_t deadline_ns = tddp_wait_deadline(wait, 0);
    while (!c->message.key.data || tddp_launch_etcd_number(&c->message.key) < number) {
        tddp_wait left = {tddp_deadline_poll_ms(deadline_ns), wait->cancel};
        tddp_status status = next_message(node, &left);
        if (status != TDDP_OK) {
            tddp_etcd_pair_free(&c->message);
            return status;
        }
    }
    const tddp_blob *value = &c->message.value;
    return tddp_blob_copy((tddp_slice){value->data, value->size}, out);
}

const tddp_launch_node_backend tddp_launch_etcd_node = {
    .open = open_client,
    .close = close_client,
    .look = look,
    .take_slot = take_slot,
    .push = push,
    .beat = beat,
    .await_message = await_message,
    .disconnect = disconnect,
    .name = name_leader,
    .survives = true,
    .remedy = "etcd answers there",
};
