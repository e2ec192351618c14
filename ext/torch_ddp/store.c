/*
 * Torch::Distributed::Store over <tddp/store.h>. One table has a row for each operation: its
 * arguments, and what it returns. Entered by Ruby threads that hold the GVL; every operation
 * releases it through nogvl.c. Keys and values are frozen copies (which share memory), or
 * concatenated in one String, so they don't change meanwhile. C keeps no Ruby object. store_open.c
 * opens stores.
 */
#include "torch_ddp.h"

#include <ruby/encoding.h>

static void store_free(void *store)
{
    tddp_store_release(store);
}

static const rb_data_type_t store_type = {
    .wrap_struct_name = "Torch::Distributed::Store",
    .function = {.dfree = store_free},
    .flags = RUBY_TYPED_FREE_IMMEDIATELY | RUBY_TYPED_WB_PROTECTED,
};

static VALUE store_allocate(VALUE class)
{
    return TypedData_Wrap_Struct(class, &store_type, NULL);
}

tddp_store *tddp_rb_store(VALUE object)
{
    if (!rb_typeddata_is_kind_of(object, &store_type))
        rb_raise(rb_eTypeError, "expected a Torch::Distributed::Store, got %" PRIsVALUE,
                 rb_inspect(object));
    tddp_store *store = RTYPEDDATA_DATA(object);
    if (store == NULL)
        rb_raise(rb_eTypeError, "this store is closed, or was never opened");
    return store;
}

void tddp_rb_adopt_store(VALUE object, tddp_store *store)
{
    rb_check_typeddata(object, &store_type);
    tddp_store_release(RTYPEDDATA_DATA(object));
    RTYPEDDATA_DATA(object) = store;
}

VALUE tddp_rb_wrap_store(tddp_store *store)
{
    VALUE class = rb_const_get(tddp_rb_distributed, rb_intern("Store"));
    VALUE self = store_allocate(class);
    RTYPEDDATA_DATA(self) = tddp_store_retain(store);
    return self;
}

static VALUE store_closed(VALUE self)
{
    rb_check_typeddata(self, &store_type);
    return RTYPEDDATA_DATA(self) == NULL ? Qtrue : Qfalse;
}

/* Releases the connection now, not at the next garbage collection. */
static VALUE store_close(VALUE self)
{
    tddp_rb_adopt_store(self, NULL);
    return Qnil;
}

/* --- the operations -------------------------------------------------------------------------- */

typedef enum operation {
    SET,
    APPEND,
    GET,
    ADD,
    COMPARE_SET,
    DELETE_KEY,
    NUM_KEYS,
    LIST_KEYS,
    WAIT,
    CHECK,
    MULTI_GET,
    MULTI_SET,
    QUEUE_PUSH,
    QUEUE_POP,
    QUEUE_LEN,
    BARRIER
} operation;

/* SHORT: the store answers at once (tddp_rb_blocking_brief()). ONCE: it isn't restarted. */
typedef enum way { SHORT, WAITS, ONCE } way;

typedef enum result { NOTHING, NUMBER, FLAG, VALUE_OF, VALUES, KEYS } result;

/*
 * `arguments` has a letter for each:
 *   k v d  a key, a value, the one to set instead    n  a number
 *   l K V  one key or an Array of them, an Array of keys, of as many values
 *   t      a timeout in seconds; nil, or nothing: the store's
 */
typedef struct method {
    const char *name;
    operation operation;
    const char *arguments;
    way way;
    result result;
    ID id;
} method;

static method methods[] = {
    {"set", SET, "kv", SHORT, NOTHING, 0},
    {"append", APPEND, "kv", SHORT, NOTHING, 0},
    {"get", GET, "k", WAITS, VALUE_OF, 0},
    {"add", ADD, "kn", SHORT, NUMBER, 0},
    {"compare_set", COMPARE_SET, "kvd", SHORT, VALUE_OF, 0},
    {"delete_key", DELETE_KEY, "k", SHORT, FLAG, 0},
    {"num_keys", NUM_KEYS, "", WAITS, NUMBER, 0},
    {"list_keys", LIST_KEYS, "", WAITS, KEYS, 0},
    {"wait", WAIT, "lt", WAITS, NOTHING, 0},
    {"check", CHECK, "l", WAITS, FLAG, 0},
    {"multi_get", MULTI_GET, "K", WAITS, VALUES, 0},
    {"multi_set", MULTI_SET, "KV", WAITS, NOTHING, 0},
    {"queue_push", QUEUE_PUSH, "kv", SHORT, NOTHING, 0},
    {"queue_len", QUEUE_LEN, "k", WAITS, NUMBER, 0},
    {"barrier", BARRIER, "knt", ONCE, NOTHING, 0},
};

enum { METHODS = sizeof methods / sizeof methods[0] };

/* A call: what its operation takes and returns, and the objects that own what it takes. */
typedef struct store_call {
    operation operation;
    tddp_store *store;
    tddp_slice key, value, desired;
    tddp_slice *keys, *values;
    size_t count;
    int64_t number;
    int flag;
    tddp_blob blob;
    tddp_blob *blobs;
    tddp_blob_list list;
    bool done; /* the results are there */
    int64_t timeout_ms;
    VALUE strings[3];
    volatile VALUE key_memory, value_memory, blob_memory;
} store_call;

static tddp_status request(store_call *call, const tddp_wait *wait)
{
    tddp_store *store = call->store;
    switch (call->operation) {
    case SET:
        return tddp_store_set(store, call->key, call->value, wait);
    case APPEND:
        return tddp_store_append(store, call->key, call->value, wait);
    case GET:
        return tddp_store_get(store, call->key, wait, &call->blob);
    case ADD:
        return tddp_store_add(store, call->key, call->number, wait, &call->number);
    case COMPARE_SET:
        return tddp_store_compare_set(store, call->key, call->value, call->desired, wait,
                                      &call->blob);
    case DELETE_KEY:
        return tddp_store_delete_key(store, call->key, wait, &call->flag);
    case NUM_KEYS:
        return tddp_store_num_keys(store, wait, &call->number);
    case LIST_KEYS:
        return tddp_store_list_keys(store, wait, &call->list);
    case WAIT:
        return tddp_store_wait(store, call->keys, call->count, wait);
    case CHECK:
        return tddp_store_check(store, call->keys, call->count, wait, &call->flag);
    case MULTI_GET:
        return tddp_store_multi_get(store, call->keys, call->count, wait, call->blobs);
    case MULTI_SET:
        return tddp_store_multi_set(store, call->keys, call->values, call->count, wait);
    case QUEUE_PUSH:
        return tddp_store_queue_push(store, call->key, call->value, wait);
    case QUEUE_POP:
        return tddp_store_queue_pop(store, call->key, call->flag, wait, &call->blob);
    case QUEUE_LEN:
        return tddp_store_queue_len(store, call->key, wait, &call->number);
    case BARRIER:
        return tddp_store_barrier(store, call->key, (int)call->number, wait);
    }
    return tddp_fail(TDDP_INTERNAL, "no operation of a store has number %d", call->operation);
}

static tddp_status body_request(void *data, const tddp_wait *wait)
{
    store_call *call = data;
    tddp_status status = request(call, wait);
    call->done = status == TDDP_OK;
    return status;
}

/* --- arguments ------------------------------------------------------------------------------- */

static tddp_slice read_string(store_call *call, int at, VALUE argument, const char *name)
{
    call->strings[at] = tddp_rb_bytes(argument, name);
    return tddp_rb_slice(call->strings[at]);
}

static tddp_slice *read_strings(store_call *call, int at, VALUE list, const char *name,
                                volatile VALUE *memory)
{
    size_t count;
    tddp_slice *slices = tddp_rb_scratch_for(list, sizeof(*slices), memory, &count);
    if (at > 0 && count != call->count)
        rb_raise(rb_eArgError, "multi_set: %zu keys, but %zu values", call->count, count);
    call->count = count;
    call->strings[at] = tddp_rb_concatenate(list, name, slices);
    return slices;
}

static void read_argument(store_call *call, char letter, VALUE argument)
{
    switch (letter) {
    case 'k':
        call->key = read_string(call, 0, argument, "key");
        break;
    case 'v':
        call->value =
            read_string(call, 1, argument, call->operation == COMPARE_SET ? "expected" : "value");
        break;
    case 'd':
        call->desired = read_string(call, 2, argument, "desired");
        break;
    case 'n':
        call->number = call->operation == BARRIER ? NUM2INT(argument) : NUM2LL(argument);
        break;
    case 'l':
        argument = rb_Array(argument); /* and as K */
        /* fall through */
    case 'K':
        call->keys = read_strings(call, 0, argument, "key", &call->key_memory);
        break;
    case 'V':
        call->values = read_strings(call, 1, argument, "value", &call->value_memory);
        break;
    default: /* t */
        call->timeout_ms = tddp_rb_milliseconds(argument);
        break;
    }
}

/* --- results --------------------------------------------------------------------------------- */

static VALUE value_of(tddp_blob *blob)
{
    VALUE string = rb_str_new(blob->data, (long)blob->size);
    tddp_blob_free(blob);
    return string;
}

/* In UTF-8 if it is valid, else binary. */
static VALUE key_of(const tddp_blob *key)
{
    VALUE string = rb_utf8_str_new(key->data, (long)key->size);
    if (rb_enc_str_coderange(string) == ENC_CODERANGE_BROKEN)
        rb_enc_associate(string, rb_ascii8bit_encoding());
    return string;
}

static VALUE result_of(store_call *call, result result)
{
    VALUE all;
    switch (result) {
    case NUMBER:
        return LL2NUM(call->number);
    case FLAG:
        return call->flag ? Qtrue : Qfalse;
    case VALUE_OF:
        return value_of(&call->blob);
    case VALUES:
        all = rb_ary_new_capa((long)call->count);
        for (size_t i = 0; i < call->count; i++)
            rb_ary_push(all, value_of(&call->blobs[i]));
        return all;
    case KEYS:
        all = rb_ary_new_capa((long)call->list.count);
        for (size_t i = 0; i < call->list.count; i++)
            rb_ary_push(all, key_of(&call->list.blobs[i]));
        tddp_blob_list_free(&call->list);
        return all;
    default:
        return Qnil;
    }
}

/* Continues the longjmp or raises the error of a call, without its results. */
static void raise_outcome(tddp_rb_outcome outcome, store_call *call)
{
    if (call->done && outcome.state != 0) {
        tddp_blob_free(&call->blob);
        tddp_blob_list_free(&call->list);
        for (size_t i = 0; call->blobs != NULL && i < call->count; i++)
            tddp_blob_free(&call->blobs[i]);
    }
    tddp_rb_raise_outcome(outcome);
}

/* --- methods --------------------------------------------------------------------------------- */

static const method *find_method(ID id)
{
    for (size_t i = 0; i < METHODS; i++)
        if (methods[i].id == id)
            return &methods[i];
    rb_bug("torch_ddp: no operation of a store is called %s", rb_id2name(id));
}

/* Every method of the table; which one, Ruby knows. */
static VALUE perform(int argc, VALUE *argv, VALUE self)
{
    const method *method = find_method(rb_frame_this_func());
    const int most = (int)strlen(method->arguments);
    store_call call = {.operation = method->operation, .timeout_ms = -1};
    rb_check_arity(argc, strchr(method->arguments, 't') ? most - 1 : most, most);
    for (int i = 0; i < argc; i++)
        read_argument(&call, method->arguments[i], argv[i]);
    if (method->result == VALUES)
        call.blobs = tddp_rb_scratch(&call.blob_memory, (long)call.count, sizeof(*call.blobs));
    call.store = tddp_rb_store(self);
    raise_outcome(method->way == SHORT
                      ? tddp_rb_blocking_brief(body_request, &call)
                      : tddp_rb_blocking(body_request, &call, call.timeout_ms, method->way == ONCE),
                  &call);
    VALUE result = result_of(&call, method->result);
    tddp_rb_scratch_end(&call.key_memory);
    tddp_rb_scratch_end(&call.value_memory);
    tddp_rb_scratch_end(&call.blob_memory);
    return result;
}

/* An interrupt comes just after a value was popped: pushes it back, to the queue's end, so that it
 * isn't lost. */
static void push_back(store_call *call)
{
    enum { PUSH_BACK_MS = 2000 };
    tddp_wait wait = {.timeout_ms = PUSH_BACK_MS};
    tddp_slice value = {call->blob.data, call->blob.size};
    if (tddp_store_queue_push(call->store, call->key, value, &wait) != TDDP_OK)
        rb_warn(
            "queue_pop: interrupted after a value was popped, which could not be pushed back: %s",
            tddp_error_message());
}

/* queue_pop(key, block: true, timeout: nil) */
static VALUE store_queue_pop(int argc, VALUE *argv, VALUE self)
{
    VALUE key, options;
    VALUE given[2] = {Qundef, Qundef};
    ID names[] = {rb_intern("block"), rb_intern("timeout")};
    rb_scan_args(argc, argv, "1:", &key, &options);
    rb_get_kwargs(options, names, 0, 2, given);
    store_call call = {.operation = QUEUE_POP, .timeout_ms = -1};
    read_argument(&call, 'k', key);
    if (given[1] != Qundef)
        read_argument(&call, 't', given[1]);
    call.flag = given[0] == Qundef || RTEST(given[0]);
    call.store = tddp_rb_store(self);
    tddp_rb_outcome outcome = tddp_rb_blocking(body_request, &call, call.timeout_ms, false);
    if (call.done && outcome.state == 0)
        outcome.state = tddp_rb_run_handlers(); /* else raised as this returns */
    if (call.done && outcome.state != 0)
        push_back(&call);
    raise_outcome(outcome, &call);
    return value_of(&call.blob);
}

void tddp_rb_init_store(void)
{
    VALUE store = rb_define_class_under(tddp_rb_distributed, "Store", rb_cObject);
    rb_define_alloc_func(store, store_allocate);
    rb_define_method(store, "close", store_close, 0);
    rb_define_method(store, "closed?", store_closed, 0);
    for (size_t i = 0; i < METHODS; i++) {
        methods[i].id = rb_intern(methods[i].name);
        rb_define_method(store, methods[i].name, perform, -1);
    }
    rb_define_method(store, "queue_pop", store_queue_pop, -1);
}
