/*
 * The shared secret: where it comes from, how it is proved, and the client's side of the exchange
 * (server/admit.c has the server's). Any thread; nothing is kept between calls. Only proofs of
 * the secret leave this process, and no error text contains it.
 */
#include <endian.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "net/net.h"
#include "store/auth.h"

static const char secret_variable[] = "TDDP_STORE_SECRET";
static const char file_variable[] = "TDDP_STORE_SECRET_FILE";

/* Each warning is logged once a process, and not by workers of torchrun, which logs them itself. */
static bool is_first(atomic_flag *logged)
{
    return !getenv("TORCHELASTIC_USE_AGENT_STORE") && !atomic_flag_test_and_set(logged);
}

static void warn_of_short(const char *secret)
{
    static atomic_flag logged = ATOMIC_FLAG_INIT;
    if (strlen(secret) < TDDP_AUTH_LEAST_BYTES && is_first(&logged)) {
        tddp_log(TDDP_LOG_WARN, "store",
                 "%s has %zu bytes: an eavesdropper on one connection can find it by trying; take "
                 "a random "
                 "one of %d or more, as of `openssl rand -hex 16`",
                 secret_variable, strlen(secret), TDDP_AUTH_LEAST_BYTES);
    }
}

static void warn_of_readers(const char *path, int fd)
{
    static atomic_flag logged = ATOMIC_FLAG_INIT;
    struct stat file;
    if (fstat(fd, &file) == 0 && (file.st_mode & (S_IRGRP | S_IROTH)) && is_first(&logged)) {
        tddp_log(TDDP_LOG_WARN, "store",
                 "%s: %.500s has mode %04o, so others than its owner can read the secret: "
                 "chmod 600",
                 file_variable, path, (unsigned)file.st_mode & 07777u);
    }
}

tddp_status tddp_auth_secret_copy(const char *text, char **out)
{
    if (strlen(text) > TDDP_AUTH_MOST_BYTES) {
        return tddp_fail(TDDP_INVALID_ARGUMENT, "%s has %zu bytes: expected at most %d",
                         secret_variable, strlen(text), TDDP_AUTH_MOST_BYTES);
    }
    char *copy = *text ? tddp_copy_string(text) : NULL;
    if (*text && !copy) {
        return TDDP_OUT_OF_MEMORY;
    }
    if (copy) {
        warn_of_short(copy);
    }
    *out = copy;
    return TDDP_OK;
}

void tddp_auth_secret_free(char *secret)
{
    if (secret) {
        explicit_bzero(secret, strlen(secret));
        free(secret);
    }
}

static tddp_status read_file(const char *path, char **out)
{
    char text[TDDP_AUTH_MOST_BYTES + 2] = "";
    FILE *file = fopen(path, "re");
    if (file) {
        warn_of_readers(path, fileno(file));
        (void)setvbuf(file, NULL, _IONBF, 0); /* no copy of the secret stays */
    }
    if (!file || (!fgets(text, sizeof text, file) && ferror(file))) {
        tddp_status status = tddp_fail(TDDP_INVALID_ARGUMENT, "%s: cannot read %.500s: %s",
                                       file_variable, path, strerror(errno));
        if (file) {
            (void)fclose(file);
        }
        return status;
    }
    (void)fclose(file);
    text[strcspn(text, "\r\n")] = '\0';
    tddp_status status = *text ? tddp_auth_secret_copy(text, out)
                               : tddp_fail(TDDP_INVALID_ARGUMENT,
                                           "%s: the first line of %.500s is empty: expected the "
                                           "secret",
                                           file_variable, path);
    explicit_bzero(text, sizeof text);
    return status;
}

tddp_status tddp_auth_secret(char **out)
{
    const char *text = getenv(secret_variable);
    const char *path = getenv(file_variable);
    /* An empty one is more likely a mistake than a decision to admit every client. */
    if (text && !*text) {
        return tddp_fail(TDDP_INVALID_ARGUMENT,
                         "%s is empty: expected a secret, or no such variable", secret_variable);
    }
    if (text) {
        return tddp_auth_secret_copy(text, out);
    }
    if (path) {
        return read_file(path, out);
    }
    *out = NULL;
    return TDDP_OK;
}

bool tddp_auth_wanted(void)
{
    return getenv(secret_variable) || getenv(file_variable);
}

tddp_status tddp_auth_random(unsigned char out[TDDP_WIRE_AUTH_BYTES])
{
    ssize_t got;
    do {
        got = getrandom(out, TDDP_WIRE_AUTH_BYTES, 0);
    } while (got < 0 && errno == EINTR);
    return got == TDDP_WIRE_AUTH_BYTES ? TDDP_OK : tddp_fail_errno("getrandom");
}

void tddp_auth_proof(const char *secret, bool of_server, const tddp_auth *auth,
                     unsigned char out[TDDP_WIRE_AUTH_BYTES])
{
    struct {
        char label[32];
        tddp_auth auth;
    } message = {.auth = *auth};
    _Static_assert(sizeof message == 3 * 32, "hashed as one piece");
    strcpy(message.label,
           of_server ? "tddp store 1, server's proof" : "tddp store 1, client's proof");
    tddp_hmac_sha256(secret, strlen(secret), &message, sizeof message, out);
}

tddp_status tddp_auth_fail_wanted(void)
{
    return tddp_fail(TDDP_STORE,
                     "it serves only clients that know its secret: set %s (or %s) to the same as "
                     "where the store is hosted",
                     secret_variable, file_variable);
}

static tddp_status fail_unknown_there(const char *how)
{
    return tddp_fail(TDDP_STORE,
                     "%s is set here, but %s: set the same for the process that hosts the store, "
                     "or for none (PyTorch's own stores know no secret)",
                     secret_variable, how);
}

tddp_status tddp_auth_ask(int fd, const void *request, size_t size, void *answer,
                          size_t answer_size, int64_t deadline_ns, int cancel_fd)
{
    size_t done = 0;
    tddp_status status = tddp_net_send(fd, request, size, &done, deadline_ns, cancel_fd);
    done = 0;
    return status ? status : tddp_net_recv(fd, answer, answer_size, &done, deadline_ns, cancel_fd);
}

/* The same with a byte that grants or refuses, and 32 more only in the first case. */
static tddp_status request(int fd, const void *message, size_t size, unsigned char answer[33],
                           int64_t deadline_ns, int cancel_fd)
{
    size_t done = 0;
    tddp_status status = tddp_auth_ask(fd, message, size, answer, 1, deadline_ns, cancel_fd);
    if (status == TDDP_OK && answer[0] == TDDP_AUTH_GRANTED) {
        status = tddp_net_recv(fd, answer + 1, TDDP_WIRE_AUTH_BYTES, &done, deadline_ns, cancel_fd);
    }
    return status;
}

static tddp_status prove_each_other(int fd, const char *secret, int64_t deadline_ns, int cancel_fd)
{
    tddp_auth auth;
    unsigned char answer[1 + TDDP_WIRE_AUTH_BYTES] = {0};
    unsigned char proof[TDDP_WIRE_AUTH_BYTES];
    unsigned char begin[5 + 1 + TDDP_WIRE_AUTH_BYTES] = {
        [0] = TDDP_WIRE_VALIDATE, [5] = TDDP_WIRE_OWN_OPCODES};
    unsigned char prove[1 + TDDP_WIRE_AUTH_BYTES] = {TDDP_WIRE_OWN_OPCODES + 1};
    uint32_t magic = htole32(TDDP_WIRE_MAGIC);
    tddp_status status = tddp_auth_random(auth.client);
    if (status) {
        return status;
    }
    memcpy(begin + 1, &magic, sizeof magic);
    memcpy(begin + 6, auth.client, sizeof auth.client);
    status = request(fd, begin, sizeof begin, answer, deadline_ns, cancel_fd);
    if (status == TDDP_NETWORK) {
        return fail_unknown_there("the server hung up at the offer to prove a secret");
    }
    if (status) {
        return status;
    }
    if (answer[0] != TDDP_AUTH_GRANTED) {
        return fail_unknown_there("not for the server");
    }
    memcpy(auth.server, answer + 1, sizeof auth.server);
    tddp_auth_proof(secret, false, &auth, prove + 1);
    status = request(fd, prove, sizeof prove, answer, deadline_ns, cancel_fd);
    if (status) {
        return status;
    }
    tddp_auth_proof(secret, true, &auth, proof);
    if (answer[0] != TDDP_AUTH_GRANTED) {
        return tddp_fail(TDDP_STORE, "the server's secret is another than %s here",
                         secret_variable);
    }
    return tddp_equal_bytes(proof, answer + 1, sizeof proof)
               ? TDDP_OK
               : tddp_fail(TDDP_STORE,
                           "the server could not prove that it knows %s: it is not the "
                           "store of this job",
                           secret_variable);
}

tddp_status tddp_auth_to_server(int fd, int64_t deadline_ns, int cancel_fd, bool *validated)
{
    char *secret;
    tddp_status status = tddp_auth_secret(&secret);
    if (status) {
        return status;
    }
    bool known = secret;
    if (known) {
        status = prove_each_other(fd, secret, deadline_ns, cancel_fd);
    }
    tddp_auth_secret_free(secret);
    if (status == TDDP_OK) {
        *validated = known;
    }
    return status;
}
