/*
 * Stores of every kind against a model: random sequences of operations by several clients, of which
 * some look through prefixes, must answer as a plain list of keys and queues does. One client acts
 * at a time, so every answer is known. A sequence that fails is made shorter as long as it still
 * fails, and is printed with its seed: TDDP_TEST_SEED runs it again, TDDP_TEST_ROUNDS runs more.
 */
#include <inttypes.h>
#include <stdarg.h>
#include <unistd.h>

#include "model_acts.h"

/* --- a run ------------------------------------------------------------------------------------ */

typedef struct run {
    const char *kind;
    fixture fixture;
    tddp_store *clients[CLIENTS];
    const char *prefixes[CLIENTS];
    model model;
    int64_t own_keys; /* the store's own, which num_keys counts too */
    char why[512];
} run;

static bool differs(run *r, const char *format, ...) __attribute__((format(printf, 2, 3)));

static bool differs(run *r, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(r->why, sizeof r->why, format, arguments);
    va_end(arguments);
    return false;
}

static bool same_status(run *r, tddp_status got, tddp_status expected)
{
    return got == expected || differs(r, "%s (%s), expected %s", tddp_status_name(got),
                                      got ? tddp_error_message() : "", tddp_status_name(expected));
}

static bool same_number(run *r, tddp_status status, int64_t got, int64_t expected)
{
    return same_status(r, status, TDDP_OK) &&
           (got == expected || differs(r, "%" PRId64 ", expected %" PRId64, got, expected));
}

/* Frees the blob. */
static bool same_bytes(run *r, tddp_blob *got, tddp_slice expected)
{
    bool same = got->size == expected.size &&
                (got->size == 0 || memcmp(got->data, expected.data, got->size) == 0);
    if (!same) {
        size_t at = 0;
        while (at < got->size && at < expected.size && got->data[at] == expected.data[at]) {
            at++;
        }
        (void)differs(r, "%zu bytes, expected %zu: they differ from the byte %zu on", got->size,
                      expected.size, at);
    }
    tddp_blob_free(got);
    return same;
}

/* The keys of an operation as the model has them, and as the client names them. */
typedef struct names {
    char full[LIST][64];
    tddp_slice keys[LIST];
    tddp_slice values[LIST];
} names;

static names names_of(const run *r, const act *it)
{
    names n;
    for (int i = 0; i < LIST; i++) {
        snprintf(n.full[i], sizeof n.full[i], "%s%s", r->prefixes[it->client],
                 key_name(it->keys[i]));
        n.keys[i] = text(key_name(it->keys[i]));
        n.values[i] = value_of(i, it->values[i]);
    }
    return n;
}

static bool run_add(run *r, tddp_store *store, const act *it, const names *n)
{
    const item *present = find(&r->model, n->full[0], false);
    int64_t expected = 0;
    int64_t got = 0;
    char digits[32];
    if (present && !number_of(present, &expected)) {
        return true; /* a server of PyTorch hangs up then, and ours does as well */
    }
    expected += it->number;
    tddp_status status = tddp_store_add(store, n->keys[0], it->number, NULL, &got);
    bool same = same_number(r, status, got, expected);
    snprintf(digits, sizeof digits, "%" PRId64, expected);
    put_value(&r->model, n->full[0], text(digits), false);
    return same;
}

static bool run_compare_set(run *r, tddp_store *store, const act *it, const names *n)
{
    const item *present = find(&r->model, n->full[0], false);
    tddp_slice now = value_in(present);
    tddp_slice expected = it->number % 2 ? now : n->values[0];
    bool equal = now.size == expected.size &&
                 (now.size == 0 || memcmp(now.data, expected.data, now.size) == 0);
    bool stores = equal && (present || expected.size == 0);
    tddp_slice answer = stores ? n->values[1] : present ? now : expected;
    tddp_blob got = {0};
    tddp_status status =
        tddp_store_compare_set(store, n->keys[0], expected, n->values[1], NULL, &got);
    bool same = same_status(r, status, TDDP_OK) && same_bytes(r, &got, answer);
    if (stores) {
        put_value(&r->model, n->full[0], n->values[1], false);
    }
    return same;
}

static bool run_delete(run *r, tddp_store *store, const names *n)
{
    const item *present = find(&r->model, n->full[0], false);
    int deleted = -1;
    tddp_status status = tddp_store_delete_key(store, n->keys[0], NULL, &deleted);
    bool same = same_number(r, status, deleted, present != NULL);
    if (present) {
        take_out(&r->model, present);
    }
    return same;
}

static bool all_exist(const run *r, const act *it, const names *n)
{
    bool all = true;
    for (int i = 0; i < it->count; i++) {
        all = all && exists(&r->model, n->full[i]);
    }
    return all;
}

static bool run_wait(run *r, tddp_store *store, const act *it, const names *n)
{
    bool all = all_exist(r, it, n);
    tddp_wait wait = within_ms(all ? 20000 : it->number % 2 + 1);
    tddp_status status = tddp_store_wait(store, n->keys, (size_t)it->count, &wait);
    return same_status(r, status, all ? TDDP_OK : TDDP_TIMEOUT);
}

static bool run_get(run *r, tddp_store *store, const act *it, const names *n)
{
    tddp_blob got[LIST] = {{0}};
    size_t count = it->kind == GET ? 1 : (size_t)it->count;
    const act asked = {.count = (int)count};
    bool all = all_exist(r, &asked, n);
    tddp_wait wait = within_ms(all ? 20000 : 1);
    tddp_status status = it->kind == GET ? tddp_store_get(store, n->keys[0], &wait, got)
                                         : tddp_store_multi_get(store, n->keys, count, &wait, got);
    bool same = same_status(r, status, all ? TDDP_OK : TDDP_TIMEOUT);
    for (size_t i = 0; i < count && status == TDDP_OK; i++) {
        same = same_bytes(r, &got[i], value_in(find(&r->model, n->full[i], false))) && same;
    }
    return same;
}

static bool run_multi_set(run *r, tddp_store *store, const act *it, const names *n)
{
    for (int i = 0; i < it->count; i++) {
        put_value(&r->model, n->full[i], n->values[i], false);
    }
    return same_status(r, tddp_store_multi_set(store, n->keys, n->values, (size_t)it->count, NULL),
                       TDDP_OK);
}

static bool run_list(run *r, tddp_store *store, const act *it)
{
    const char *prefix = r->prefixes[it->client];
    tddp_blob_list got = {0};
    if (!same_status(r, tddp_store_list_keys(store, NULL, &got), TDDP_OK)) {
        return false;
    }
    size_t expected = 0;
    for (size_t i = 0; i < r->model.count; i++) {
        const item *each = &r->model.items[i];
        bool listed = !each->queued && strncmp(each->key, prefix, strlen(prefix)) == 0;
        bool found = !listed;
        for (size_t j = 0; j < got.count && !found; j++) {
            found = strcmp(got.blobs[j].data, each->key + strlen(prefix)) == 0;
        }
        expected += listed;
        if (!found) {
            tddp_blob_list_free(&got);
            return differs(r, "the key \"%s\" is not listed", each->key);
        }
    }
    size_t count = got.count;
    tddp_blob_list_free(&got);
    return count == expected || differs(r, "%zu keys are listed, expected %zu", count, expected);
}

static bool run_pop(run *r, tddp_store *store, const act *it, const names *n)
{
    const item *oldest = find(&r->model, n->full[0], true);
    bool block = it->number % 2 == 0;
    tddp_blob got = {0};
    tddp_wait wait = within_ms(block && !oldest ? 1 : 20000);
    tddp_status status = tddp_store_queue_pop(store, n->keys[0], block, &wait, &got);
    if (!oldest) {
        return same_status(r, status, block ? TDDP_TIMEOUT : TDDP_NOT_FOUND);
    }
    bool same = same_status(r, status, TDDP_OK) && same_bytes(r, &got, value_in(oldest));
    take_out(&r->model, oldest);
    return same;
}

/* Only a server knows who is connected. */
static bool run_ephemeral(run *r, tddp_store *store, const act *it, const names *n)
{
    const item *present = find(&r->model, n->full[0], false);
    bool if_absent = it->number % 2;
    bool loses = if_absent && present && present->owner != it->client;
    int set = -1;
    tddp_blob now = {0};
    tddp_status status =
        tddp_store_set_ephemeral(store, n->keys[0], n->values[0], 0, if_absent, NULL, &set, &now);
    if (strcmp(r->kind, "tcp") != 0) {
        return same_status(r, status, TDDP_UNSUPPORTED);
    }
    bool same = same_number(r, status, set, !loses) &&
                same_bytes(r, &now, loses ? value_in(present) : n->values[0]);
    if (!loses) {
        put_value(&r->model, n->full[0], n->values[0], false);
        find(&r->model, n->full[0], false)->owner = it->client;
    }
    return same;
}

static bool same_entries(run *r, const tddp_store_entries *got, const char *whole, size_t strip)
{
    size_t expected = 0;
    for (size_t i = 0; i < r->model.count; i++) {
        const item *each = &r->model.items[i];
        if (each->queued || strncmp(each->key, whole, strlen(whole)) != 0) {
            continue;
        }
        bool found = false;
        for (size_t j = 0; j < got->keys.count && !found; j++) {
            const tddp_blob *value = &got->values.blobs[j];
            found = strcmp(got->keys.blobs[j].data, each->key + strip) == 0 &&
                    value->size == each->value.size &&
                    (value->size == 0 || memcmp(value->data, each->value.data, value->size) == 0);
        }
        if (!found) {
            return differs(r, "the key \"%s\" is not there with its value", each->key);
        }
        expected++;
    }
    return got->keys.count == expected ||
           differs(r, "%zu keys, expected %zu", got->keys.count, expected);
}

static bool run_watch(run *r, tddp_store *store, const act *it)
{
    static const char *const prefixes[] = {"", "a", "p/"};
    const char *own = r->prefixes[it->client];
    const char *prefix = prefixes[it->keys[0] % 3];
    view *v = &r->model.views[it->client];
    char whole[64];
    snprintf(whole, sizeof whole, "%s%s", own, prefix);
    bool at_once = !v->on || v->changed || strcmp(v->prefix, whole) != 0;
    tddp_store_entries got = {0};
    tddp_wait wait = within_ms(at_once ? 20000 : it->number % 2 + 1);
    tddp_status status = tddp_store_watch(store, text(prefix), &wait, &got);
    if (strcmp(r->kind, "tcp") != 0) {
        return same_status(r, status, TDDP_UNSUPPORTED);
    }
    bool same = same_status(r, status, at_once ? TDDP_OK : TDDP_TIMEOUT) &&
                (!at_once || same_entries(r, &got, whole, strlen(own)));
    tddp_store_entries_free(&got);
    *v = (view){.on = true};
    snprintf(v->prefix, sizeof v->prefix, "%s", whole);
    return same;
}

static bool run_queue(run *r, tddp_store *store, const act *it, const names *n)
{
    int64_t number = -1;
    if (strcmp(r->kind, "file") == 0) {
        return same_status(r, tddp_store_queue_len(store, n->keys[0], NULL, &number),
                           TDDP_UNSUPPORTED);
    }
    if (it->kind == POP) {
        return run_pop(r, store, it, n);
    }
    if (it->kind == PUSH) {
        CHECK_OK(tddp_bytes_append(&put_in(&r->model, n->full[0], true)->value, n->values[0].data,
                                   n->values[0].size));
        return same_status(r, tddp_store_queue_push(store, n->keys[0], n->values[0], NULL),
                           TDDP_OK);
    }
    tddp_status status = tddp_store_queue_len(store, n->keys[0], NULL, &number);
    return same_number(r, status, number, count_of(&r->model, n->full[0], true));
}

static void open_client(run *r, int i);

static bool run_end(run *r, const act *it)
{
    if (it->client && strcmp(r->kind, "tcp") == 0) { /* the first is the fixture's */
        tddp_store_release(r->clients[it->client]);
        end_connection(&r->model, it->client);
        open_client(r, it->client);
    }
    return true;
}

static bool run_act(run *r, const act *it)
{
    tddp_store *store = r->clients[it->client];
    model *m = &r->model;
    const names n = names_of(r, it);
    int64_t number = -1;
    int flag = -1;
    tddp_status status;
    switch (it->kind) {
    case SET:
        put_value(m, n.full[0], n.values[0], false);
        return same_status(r, tddp_store_set(store, n.keys[0], n.values[0], NULL), TDDP_OK);
    case APPEND:
        put_value(m, n.full[0], n.values[0], true);
        return same_status(r, tddp_store_append(store, n.keys[0], n.values[0], NULL), TDDP_OK);
    case ADD:
        return run_add(r, store, it, &n);
    case COMPARE_SET:
        return run_compare_set(r, store, it, &n);
    case DELETE:
        return run_delete(r, store, &n);
    case CHECK_KEYS:
        status = tddp_store_check(store, n.keys, (size_t)it->count, NULL, &flag);
        return same_number(r, status, flag, all_exist(r, it, &n));
    case WAIT:
        return run_wait(r, store, it, &n);
    case NUM_KEYS:
        status = tddp_store_num_keys(store, NULL, &number);
        return same_number(r, status, number, r->own_keys + count_of(m, NULL, false));
    case GET:
    case MULTI_GET:
        return run_get(r, store, it, &n);
    case MULTI_SET:
        return run_multi_set(r, store, it, &n);
    case LIST_KEYS:
        return run_list(r, store, it);
    case SET_EPHEMERAL:
        return run_ephemeral(r, store, it, &n);
    case WATCH:
        return run_watch(r, store, it);
    case END_CONNECTION:
        return run_end(r, it);
    default:
        return run_queue(r, store, it, &n);
    }
}

/* Another client of the same store: by a connection of its own, or by opening the file again. */
static tddp_store *another(const run *r)
{
    tddp_store *store;
    if (r->fixture.server && !r->fixture.gate) {
        return client_of(tddp_store_server_port(r->fixture.server));
    }
    if (r->fixture.path[0]) {
        CHECK_OK(tddp_file_store_open(r->fixture.path, 0, 20000, &store));
    } else {
        CHECK_OK(tddp_store_clone(r->fixture.base, NULL, &store));
    }
    return store;
}

static void open_client(run *r, int i)
{
    static const char *const prefixes[CLIENTS] = {"", "", "p/", "p/q/"};
    tddp_store *base = i ? another(r) : tddp_store_retain(r->fixture.base);
    r->clients[i] = base;
    r->prefixes[i] = prefixes[i];
    if (i >= 2) {
        CHECK_OK(tddp_prefix_store_create("p", base, &r->clients[i]));
        tddp_store_release(base);
    }
    if (i == 3) {
        base = r->clients[i];
        CHECK_OK(tddp_prefix_store_create("q", base, &r->clients[i]));
        tddp_store_release(base);
    }
}

/* How many of the acts went well; all of them: -1. */
static int play(const char *kind, const act *acts, int count, char why[512])
{
    run r = {.kind = kind, .fixture = fixture_open(kind)};
    int failed = -1;
    for (int i = 0; i < CLIENTS; i++) {
        open_client(&r, i);
    }
    CHECK_OK(tddp_store_num_keys(r.fixture.base, NULL, &r.own_keys));
    for (int i = 0; i < count && failed < 0; i++) {
        failed = run_act(&r, &acts[i]) ? -1 : i;
        /* A server does not answer all requests, and those of several clients have no order. */
        int64_t ignored;
        CHECK_OK(tddp_store_num_keys(r.clients[acts[i].client], NULL, &ignored));
    }
    memcpy(why, r.why, sizeof r.why);
    clear(&r.model);
    for (int i = 0; i < CLIENTS; i++) {
        tddp_store_release(r.clients[i]);
    }
    fixture_close(&r.fixture);
    return failed;
}

/* --- many runs -------------------------------------------------------------------------------- */

/* Leaves out what is not needed for a failure, larger pieces first. */
static int shrink(const char *kind, act *acts, int count)
{
    char why[512];
    for (int piece = count / 2; piece > 0; piece /= 2) {
        for (int at = 0; at + piece <= count;) {
            act fewer[LENGTH];
            memcpy(fewer, acts, (size_t)at * sizeof *acts);
            memcpy(fewer + at, acts + at + piece, (size_t)(count - at - piece) * sizeof *acts);
            int failed = play(kind, fewer, count - piece, why);
            if (failed < 0) {
                at += piece;
                continue;
            }
            count = failed + 1;
            memcpy(acts, fewer, (size_t)count * sizeof *acts);
        }
    }
    return count;
}

static void fail(const char *kind, uint64_t seed, act *acts, int count)
{
    char why[512];
    count = shrink(kind, acts, count);
    (void)play(kind, acts, count, why);
    printf("TDDP_TEST_SEED=%" PRIu64 ", %s, after %d operations:\n", seed, kind, count);
    for (int i = 0; i < count; i++) {
        show(&acts[i]);
    }
    check_failed(__FILE__, __LINE__, "the last of them: %s", why);
}

static void play_by_chance(const char *kind, uint64_t seed)
{
    act acts[LENGTH];
    char why[512];
    dice = seed;
    for (int i = 0; i < LENGTH; i++) {
        acts[i] = any_act();
    }
    int failed = play(kind, acts, LENGTH, why);
    if (failed >= 0) {
        fail(kind, seed, acts, failed + 1);
    }
}

static uint64_t setting_of(const char *name, uint64_t by_default)
{
    const char *value = getenv(name);
    return value ? strtoull(value, NULL, 10) : by_default;
}

static void play_rounds(const char *kind)
{
    uint64_t fixed = setting_of("TDDP_TEST_SEED", 0);
    uint64_t rounds = fixed ? 1 : setting_of("TDDP_TEST_ROUNDS", ROUNDS);
    for (uint64_t i = 0; i < rounds; i++) {
        uint64_t seed = fixed ? fixed : (uint64_t)tddp_now_ns() + i;
        printf("seed %" PRIu64 "\n", seed);
        play_by_chance(kind, seed);
    }
}

MULTI_TEST(a_tcp_store_does_as_the_model, 1, 100)
{
    play_rounds("tcp");
}
MULTI_TEST(a_file_store_does_as_the_model, 1, 100)
{
    play_rounds("file");
}
MULTI_TEST(a_hash_store_does_as_the_model, 1, 100)
{
    play_rounds("hash");
}
