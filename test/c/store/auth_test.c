/*
 * The shared secret: clients that know it, know another or none, on servers with and without one;
 * proofs played again; a handshake in pieces, halved, or out of turn.
 */
#include <sys/stat.h>

#include "store/auth.h"
#include "store_fixture.h"

#define SECRET "open sesame, and shut again"
#define MAGIC "00 cef7853c"
#define NONCE "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"

/* One that hangs up on who has not proved the secret for so long. */
static tddp_store_server *server_with_timeout(const char *secret, int64_t client_timeout_ms)
{
    tddp_log_set_sink(keep_log, NULL);
    tddp_store_server_opts opts = TDDP_STORE_SERVER_OPTS_INIT;
    opts.host = "127.0.0.1";
    opts.secret = secret;
    opts.client_timeout_ms = client_timeout_ms;
    tddp_store_server *server;
    CHECK_OK(tddp_store_server_start(&opts, &server));
    return server;
}

static tddp_store_server *server_with(const char *secret)
{
    return server_with_timeout(secret, 60000);
}

static tddp_status open_client(tddp_store_server *server, tddp_store **out)
{
    tddp_tcp_store_opts opts = TDDP_TCP_STORE_OPTS_INIT;
    opts.host = "127.0.0.1";
    opts.port = tddp_store_server_port(server);
    opts.timeout_ms = 10000;
    return tddp_tcp_store_open(&opts, NULL, out);
}

static void check_refused(tddp_store_server *server, const char *text_of_client,
                          const char *line_of_server)
{
    tddp_store *store;
    int before = log_lines();
    CHECK_STATUS(open_client(server, &store), TDDP_STORE);
    CHECK_CONTAINS(tddp_error_message(), text_of_client);
    CHECK_CONTAINS(tddp_error_message(), "store 127.0.0.1:");
    CHECK_CONTAINS(tddp_error_message(), "TDDP_STORE_SECRET");
    CHECK_LOG_LINES(before + 1);
    CHECK_LOG(line_of_server);
    CHECK_LOG("dropped client 127.0.0.1:");
}

TEST(who_knows_the_secret_is_served)
{
    setenv("TDDP_STORE_SECRET", SECRET, 1);
    tddp_store_server *server = server_with_timeout(NULL, 1000);
    tddp_store *store;
    tddp_store *clone;
    CHECK_OK(open_client(server, &store));
    CHECK_OK(tddp_store_set(store, text("k"), text("v"), NULL));
    CHECK_OK(tddp_store_clone(store, NULL, &clone));
    CHECK_VALUE(clone, "k", "v");
    /* The server's timeout is over once a connection that is younger than theirs is dropped for it:
     * there is nothing left to prove. */
    CHECK_LOG_LINES(0);
    int silent = raw_connect(tddp_store_server_port(server));
    CHECK_HUNG_UP(silent);
    close(silent);
    CHECK_VALUE(store, "k", "v");
    CHECK_VALUE(clone, "k", "v");
    CHECK_LOG_LINES(1);
    CHECK_LOG("it sent nothing for 1 s");
    tddp_store_release(clone);
    tddp_store_release(store);
    tddp_store_server_stop(server);
}

TEST(who_knows_another_secret_or_none_is_not)
{
    tddp_store_server *server = server_with(SECRET);
    check_refused(server, "serves only clients that know its secret: set TDDP_STORE_SECRET",
                  "did not prove that it knows the secret that is set here (TDDP_STORE_SECRET)");
    setenv("TDDP_STORE_SECRET", "open barley, and shut again", 1);
    check_refused(server, "the server's secret is another than TDDP_STORE_SECRET here",
                  "its secret is not the one that is set here (TDDP_STORE_SECRET)");
    setenv("TDDP_STORE_SECRET", "open sesame, and shut agai", 1);
    check_refused(server, "is another than", "is not the one that is set here");
    setenv("TDDP_STORE_SECRET", SECRET, 1);
    tddp_store *store;
    CHECK_OK(open_client(server, &store));
    tddp_store_release(store);
    tddp_store_server_stop(server);
}

TEST(a_server_without_a_secret_says_so)
{
    setenv("TDDP_STORE_SECRET", SECRET, 1);
    tddp_store_server *server = server_with("");
    check_refused(server, "is set here, but not for the server",
                  "it knows a secret, and none is set here (TDDP_STORE_SECRET)");
    unsetenv("TDDP_STORE_SECRET");
    tddp_store *store;
    CHECK_OK(open_client(server, &store));
    tddp_store_release(store);
    tddp_store_server_stop(server);
}

/* How many lines are logged when a server starts with this secret in a file of that mode. */
static int lines_of(const char *secret, unsigned mode)
{
    char path[] = "/tmp/tddp_secret.XXXXXX";
    int fd = mkstemp(path);
    CHECK_INT(write(fd, secret, strlen(secret)), strlen(secret));
    CHECK_INT(fchmod(fd, mode), 0);
    setenv("TDDP_STORE_SECRET_FILE", path, 1);
    int before = log_lines();
    tddp_store_server_stop(server_with(NULL));
    unlink(path);
    close(fd);
    return log_lines() - before;
}

TEST(a_secret_of_sixteen_bytes_that_its_owner_alone_can_read_is_fine)
{
    CHECK_INT(lines_of("0123456789abcdef", 0600), 0);
    CHECK_INT(lines_of("0123456789abcdef", 0400), 0);
}

TEST(a_short_secret_is_warned_of_once)
{
    CHECK_INT(lines_of("0123456789abcde", 0600), 1);
    CHECK_LOG("TDDP_STORE_SECRET has 15 bytes");
    CHECK_LOG("take a random one of 16 or more");
    CHECK_INT(lines_of("0123456789abcde", 0600), 0);
    CHECK_INT(lines_of("0123456789abcdef", 0640), 1);
    CHECK_LOG("has mode 0640, so others than its owner can read the secret: chmod 600");
    CHECK_INT(lines_of("0123456789abcdef", 0604), 0);
}

TEST(a_worker_of_torchrun_does_not_tell_again_of_a_secret)
{
    setenv("TORCHELASTIC_USE_AGENT_STORE", "True", 1);
    CHECK_INT(lines_of("0123", 0666), 0);
}

TEST(the_secret_may_be_in_a_file)
{
    char path[] = "/tmp/tddp_secret.XXXXXX";
    char expected[200];
    int fd = mkstemp(path);
    CHECK_INT(write(fd, SECRET "\nand more\n", sizeof SECRET + 9), sizeof SECRET + 9);
    setenv("TDDP_STORE_SECRET_FILE", path, 1);
    tddp_store_server *server = server_with(SECRET);
    tddp_store *store;
    CHECK_OK(open_client(server, &store));
    tddp_store_release(store);
    setenv("TDDP_STORE_SECRET", "open barley, and shut again", 1); /* the variable wins */
    CHECK_STATUS(open_client(server, &store), TDDP_STORE);
    setenv("TDDP_STORE_SECRET", "", 1);
    CHECK_STATUS(open_client(server, &store), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "TDDP_STORE_SECRET is empty: expected a secret");
    unsetenv("TDDP_STORE_SECRET");
    CHECK_INT(ftruncate(fd, 0), 0);
    CHECK_STATUS(open_client(server, &store), TDDP_INVALID_ARGUMENT);
    snprintf(expected, sizeof expected, "the first line of %s is empty", path);
    CHECK_CONTAINS(tddp_error_message(), expected);
    unlink(path);
    CHECK_STATUS(open_client(server, &store), TDDP_INVALID_ARGUMENT);
    snprintf(expected, sizeof expected,
             "TDDP_STORE_SECRET_FILE: cannot read %s: No such file or directory", path);
    CHECK_CONTAINS(tddp_error_message(), expected);
    tddp_store_server *second;
    tddp_store_server_opts opts = TDDP_STORE_SERVER_OPTS_INIT;
    CHECK_STATUS(tddp_store_server_start(&opts, &second), TDDP_INVALID_ARGUMENT);
    char *long_one = calloc(1, TDDP_AUTH_MOST_BYTES + 2);
    memset(long_one, 'x', TDDP_AUTH_MOST_BYTES + 1);
    opts.secret = long_one;
    CHECK_STATUS(tddp_store_server_start(&opts, &second), TDDP_INVALID_ARGUMENT);
    CHECK_CONTAINS(tddp_error_message(), "has 4097 bytes: expected at most 4096");
    free(long_one);
    close(fd);
    tddp_store_server_stop(server);
}

/* --- on the wire ------------------------------------------------------------------------------ */

static void raw_bytes(int fd, const void *bytes, size_t size)
{
    size_t done = 0;
    CHECK_OK(tddp_net_send(fd, bytes, size, &done, tddp_deadline_after_ms(10000), -1));
}

static void receive(int fd, void *bytes, size_t size)
{
    size_t done = 0;
    CHECK_OK(tddp_net_recv(fd, bytes, size, &done, tddp_deadline_after_ms(10000), -1));
}

/* Begins by hand; the challenge is in `auth`. */
static int begin(tddp_store_server *server, tddp_auth *auth)
{
    unsigned char granted;
    int fd = raw_connect(tddp_store_server_port(server));
    raw_send(fd, MAGIC "f0" NONCE);
    for (int i = 0; i < TDDP_WIRE_AUTH_BYTES; i++) {
        auth->client[i] = (unsigned char)i;
    }
    receive(fd, &granted, 1);
    CHECK_INT(granted, TDDP_AUTH_GRANTED);
    receive(fd, auth->server, sizeof auth->server);
    return fd;
}

static void prove(int fd, const unsigned char proof[TDDP_WIRE_AUTH_BYTES])
{
    unsigned char message[1 + TDDP_WIRE_AUTH_BYTES] = {TDDP_WIRE_OWN_OPCODES + 1};
    memcpy(message + 1, proof, TDDP_WIRE_AUTH_BYTES);
    raw_bytes(fd, message, sizeof message);
}

TEST(both_ends_prove_the_secret_by_hmac)
{
    tddp_store_server *server = server_with(SECRET);
    tddp_auth auth;
    unsigned char message[3 * 32] = "tddp store 1, client's proof";
    unsigned char proof[32];
    unsigned char answer[33];
    int fd = begin(server, &auth);
    memcpy(message + 32, auth.client, 32);
    memcpy(message + 64, auth.server, 32);
    tddp_hmac_sha256(SECRET, strlen(SECRET), message, sizeof message, proof);
    prove(fd, proof);
    receive(fd, answer, sizeof answer);
    CHECK_INT(answer[0], 0);
    memcpy(message, "tddp store 1, server's proof", 28);
    tddp_hmac_sha256(SECRET, strlen(SECRET), message, sizeof message, proof);
    CHECK_INT(memcmp(answer + 1, proof, 32), 0);
    raw_send(fd, "0d d5590000 01 [2]2f6b [1]76 03 [2]2f6b");
    CHECK_RAW(fd, "d5590000 [1]76");
    CHECK_LOG_LINES(0);
    tddp_net_close(fd);
    tddp_store_server_stop(server);
}

TEST(proofs_cannot_be_played_again)
{
    tddp_store_server *server = server_with(SECRET);
    tddp_auth first;
    tddp_auth second;
    unsigned char proof[32];
    unsigned char answer[33];
    int fd = begin(server, &first);
    tddp_auth_proof(SECRET, false, &first, proof);
    prove(fd, proof);
    receive(fd, answer, sizeof answer);
    int again = begin(server, &second);
    CHECK(memcmp(first.server, second.server, 32) != 0);
    prove(again, proof);
    CHECK_RAW(again, "01");
    CHECK_HUNG_UP(again);
    CHECK_LOG("its secret is not the one that is set here");
    tddp_net_close(again);
    /* Nor can the server's own proof be given back to it. */
    again = begin(server, &second);
    tddp_auth_proof(SECRET, true, &second, proof);
    prove(again, proof);
    CHECK_RAW(again, "01");
    CHECK_HUNG_UP(again);
    CHECK_LOG_LINES(2);
    tddp_net_close(again);
    tddp_net_close(fd);
    tddp_store_server_stop(server);
}

/* What strangers send to a server with a secret, its answer and its line; nothing is carried out.
 */
static const struct {
    const char *bytes;
    const char *answer;
    const char *line;
} strangers[] = {
    {HELLO, "c25eedfe", "did not prove that it knows"},
    {HELLO "01 [2]2f6b [1]76", "c25eedfe", "did not prove that it knows"},
    {MAGIC "01 [2]2f6b [1]76", "", "did not prove that it knows"},
    {MAGIC "01 ffffffffffffffff", "", "did not prove that it knows"},
    {MAGIC "0c", "", "did not prove that it knows"},
    {MAGIC "f2", "", "did not prove that it knows"},
    {MAGIC MAGIC, "", "a second VALIDATE"},
    {MAGIC "f1" NONCE, "", "it sent an unexpected proof of a secret"},
    {"00 [2]2f6b [1]76", "", "uses the store protocol of PyTorch 1.13, which cannot prove"},
    {"03 [5]696e69742f [1]", "", "uses the store protocol of PyTorch 1.13, which cannot prove"},
    {"f0" NONCE, "", "neither PyTorch 2.x nor 1.13"},
    {"474554202f20485454502f312e310d0a", "", "neither PyTorch 2.x nor 1.13"},
};

TEST(strangers_are_dropped_with_one_line)
{
    tddp_store_server *server = server_with(SECRET);
    for (size_t i = 0; i < sizeof strangers / sizeof *strangers; i++) {
        printf("%s\n", strangers[i].bytes);
        int before = log_lines();
        int fd = raw_connect(tddp_store_server_port(server));
        raw_send(fd, strangers[i].bytes);
        CHECK_RAW(fd, strangers[i].answer);
        CHECK_HUNG_UP(fd);
        CHECK_LOG_LINES(before + 1);
        CHECK_LOG(strangers[i].line);
        tddp_net_close(fd);
    }
    static const char *const out_of_turn[] = {"f0" NONCE, "0d d5590000", "07"};
    static const char *const lines[] = {"it began to prove its secret twice", "did not prove",
                                        "did not prove"};
    for (int i = 0; i < 3; i++) {
        tddp_auth auth;
        int fd = begin(server, &auth);
        raw_send(fd, out_of_turn[i]);
        CHECK_LOG(lines[i]);
        tddp_net_close(fd);
    }
    setenv("TDDP_STORE_SECRET", SECRET, 1);
    tddp_store *store;
    int64_t keys;
    CHECK_OK(open_client(server, &store));
    CHECK_OK(tddp_store_num_keys(store, NULL, &keys));
    CHECK_INT(keys, 0);
    tddp_store_release(store);
    tddp_store_server_stop(server);
}

TEST(a_proof_out_of_turn_ends_the_connection)
{
    tddp_store_server *server = server_with("");
    int fd = greet(tddp_store_server_port(server));
    raw_send(fd, "f0" NONCE);
    CHECK_HUNG_UP(fd);
    CHECK_LOG("it proves a secret out of turn");
    tddp_net_close(fd);
    fd = raw_connect(tddp_store_server_port(server));
    raw_send(fd, MAGIC "f0" NONCE);
    CHECK_RAW(fd, "01");
    CHECK_HUNG_UP(fd);
    tddp_net_close(fd);
    tddp_store_server_stop(server);
}

TEST(half_a_handshake_is_dropped_in_time)
{
    static const char *const halves[] = {"", MAGIC, MAGIC "f0 0001", MAGIC "f0" NONCE,
                                         MAGIC "f0" NONCE "f1 0001"};
    tddp_store_server *server = server_with_timeout(SECRET, 300);
    for (size_t i = 0; i < sizeof halves / sizeof *halves; i++) {
        int before = log_lines();
        int fd = raw_connect(tddp_store_server_port(server));
        raw_send(fd, halves[i]);
        if (i >= 3) {
            char challenge[33];
            receive(fd, challenge, sizeof challenge);
        }
        CHECK_HUNG_UP(fd);
        CHECK_LOG_LINES(before + 1);
        CHECK_LOG(i ? "its first message is not complete after 0.3 s"
                    : "it sent nothing for 0.3 s");
        tddp_net_close(fd);
    }
    tddp_store_server_stop(server);
}

TEST(a_handshake_may_come_in_any_pieces)
{
    tddp_store_server *server = server_with(SECRET);
    int fd = raw_connect(tddp_store_server_port(server));
    char bytes[128];
    tddp_auth auth;
    unsigned char proof[32];
    unsigned char answer[33];
    size_t size = from_hex(MAGIC "f0" NONCE, bytes);
    for (size_t i = 0; i < size; i++) {
        raw_bytes(fd, bytes + i, 1);
        usleep(200);
    }
    receive(fd, answer, sizeof answer);
    for (int i = 0; i < TDDP_WIRE_AUTH_BYTES; i++) {
        auth.client[i] = (unsigned char)i;
    }
    memcpy(auth.server, answer + 1, 32);
    tddp_auth_proof(SECRET, false, &auth, proof);
    /* The proof and the first requests at once. */
    bytes[0] = (char)0xf1;
    memcpy(bytes + 1, proof, 32);
    size = 33 + from_hex("0d d5590000 07", bytes + 33);
    raw_bytes(fd, bytes, size);
    receive(fd, answer, sizeof answer);
    CHECK_INT(answer[0], 0);
    CHECK_RAW(fd, "d5590000 [0]");
    tddp_net_close(fd);
    tddp_store_server_stop(server);
}

/* --- the client meets others ------------------------------------------------------------------ */

/* What a server that is none of ours does after so many bytes of the client; none are the secret.
 */
typedef struct script {
    int listen_fd;
    size_t first; /* bytes to read */
    const char *answer;
    size_t second;
    const char *answer_to_second;
} script;

static void *play(void *data)
{
    const script *s = data;
    char bytes[256];
    int fd;
    tddp_net_address from;
    CHECK_OK(tddp_net_poll(s->listen_fd, POLLIN, tddp_deadline_after_ms(10000), -1));
    CHECK(tddp_net_accept(s->listen_fd, &fd, &from));
    receive(fd, bytes, s->first);
    CHECK(!memmem(bytes, s->first, SECRET, strlen(SECRET)));
    raw_send(fd, s->answer);
    if (s->second) {
        receive(fd, bytes, s->second);
        CHECK(!memmem(bytes, s->second, SECRET, strlen(SECRET)));
        raw_send(fd, s->answer_to_second);
    }
    tddp_net_close(fd);
    return NULL;
}

static void check_meets(script s, const char *expected)
{
    pthread_t thread;
    tddp_store *store;
    tddp_tcp_store_opts opts = TDDP_TCP_STORE_OPTS_INIT;
    tddp_net_address local;
    CHECK_OK(tddp_net_listen("127.0.0.1", 0, &s.listen_fd));
    CHECK_OK(tddp_net_local(s.listen_fd, &local));
    CHECK_INT(pthread_create(&thread, NULL, play, &s), 0);
    opts.host = "127.0.0.1";
    opts.port = tddp_net_port(&local);
    opts.timeout_ms = 10000;
    CHECK_STATUS(tddp_tcp_store_open(&opts, NULL, &store), TDDP_STORE);
    CHECK_CONTAINS(tddp_error_message(), expected);
    pthread_join(thread, NULL);
    tddp_close(s.listen_fd);
}

TEST(a_client_with_a_secret_trusts_no_stranger)
{
    setenv("TDDP_STORE_SECRET", SECRET, 1);
    /* PyTorch's own server hangs up on an opcode that it has not; there is no falling back. */
    check_meets((script){.first = 38, .answer = ""},
                "the server hung up at the offer to prove a secret");
    check_meets((script){.first = 38, .answer = "01"}, "but not for the server");
    check_meets((script){0, 38, "00" NONCE, 33, "01"}, "the server's secret is another");
    /* It grants everything, but knows nothing. */
    check_meets((script){0, 38, "00" NONCE, 33, "00" NONCE}, "the server could not prove");
}
