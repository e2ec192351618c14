/*
 * A real etcd on the loopback interface, of one member, which ends with its test. Skips the test
 * where there is none.
 */
#ifndef TDDP_TEST_ETCD_SERVER_H
#define TDDP_TEST_ETCD_SERVER_H

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/json_read.h"
#include "check.h"
#include "launch/etcd/etcd.h"

typedef struct etcd_server {
    tddp_launch_endpoint endpoint;
    int peer_port;
    pid_t pid;
    char folder[64];
} etcd_server;

static inline void exec_etcd(const etcd_server *server)
{
    char client[64];
    char peer[64];
    char cluster[80];
    int null = open("/dev/null", O_WRONLY);
    (void)snprintf(client, sizeof client, "http://127.0.0.1:%d", server->endpoint.port);
    (void)snprintf(peer, sizeof peer, "http://127.0.0.1:%d", server->peer_port);
    (void)snprintf(cluster, sizeof cluster, "one=%s", peer);
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    (void)dup2(null, STDOUT_FILENO);
    (void)dup2(null, STDERR_FILENO);
    (void)execlp("etcd", "etcd", "--name", "one", "--data-dir", server->folder,
                 "--listen-client-urls", client, "--advertise-client-urls", client,
                 "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                 "--initial-cluster", cluster, (char *)NULL);
    _exit(127);
}

/* Starts the server, or again with what it had stored. */
static inline void start_etcd(etcd_server *server)
{
    server->pid = fork();
    CHECK(server->pid >= 0);
    if (server->pid == 0) {
        exec_etcd(server);
    }
}

static inline void kill_etcd(etcd_server *server)
{
    CHECK_INT(kill(server->pid, SIGKILL), 0);
    CHECK_INT(waitpid(server->pid, NULL, 0), server->pid);
    server->pid = 0;
}

/* Returns once all of its threads stand still. */
static inline void stop_etcd(const etcd_server *server)
{
    int status;
    CHECK_INT(kill(server->pid, SIGSTOP), 0);
    CHECK_INT(waitpid(server->pid, &status, WUNTRACED), server->pid);
    CHECK(WIFSTOPPED(status));
}

static inline void make_etcd(etcd_server *server)
{
    if (system("etcd --version >/dev/null 2>&1") != 0) {
        check_skip("etcd was not found (Debian: etcd-server)");
    }
    memset(server, 0, sizeof *server);
    (void)snprintf(server->endpoint.host, sizeof server->endpoint.host, "127.0.0.1");
    server->endpoint.port = check_free_port();
    server->peer_port = check_free_port();
    (void)snprintf(server->folder, sizeof server->folder, "/tmp/tddp-etcd-XXXXXX");
    CHECK(mkdtemp(server->folder) != NULL);
    start_etcd(server);
}

static inline void remove_etcd(etcd_server *server)
{
    char command[96];
    if (server->pid > 0) {
        kill_etcd(server);
    }
    (void)snprintf(command, sizeof command, "rm -rf '%s'", server->folder);
    CHECK_INT(system(command), 0);
}

/* --- a client of the test's ------------------------------------------------------------------ */

static const tddp_wait patient = {60000, NULL};

typedef struct etcd_client {
    tddp_etcd etcd;
    tddp_launch_options options;
} etcd_client;

static inline etcd_client *open_client(const tddp_launch_endpoint *endpoints, int count,
                                       const char *username, const char *password)
{
    etcd_client *made = calloc(1, sizeof *made);
    CHECK(made != NULL);
    made->options.endpoint_count = count;
    memcpy(made->options.endpoints, endpoints, (size_t)count * sizeof *endpoints);
    (void)snprintf(made->options.conf.etcd.username, TDDP_LAUNCH_HOST_BYTES, "%s", username);
    (void)snprintf(made->options.conf.etcd.password, TDDP_LAUNCH_HOST_BYTES, "%s", password);
    CHECK_OK(tddp_etcd_open(&made->etcd, &made->options));
    return made;
}

static inline void close_client(etcd_client *client)
{
    tddp_etcd_close(&client->etcd);
    free(client);
}

/* Bytes in base64, of at most 767 characters; for one use before the fourth call from then. */
static inline const char *base64_bytes(const char *data, size_t size)
{
    static char texts[4][768];
    static int at;
    at = (at + 1) % 4;
    CHECK(size <= 573);
    return tddp_base64((tddp_slice){data, size}, texts[at]);
}

static inline const char *base64(const char *text)
{
    return base64_bytes(text, strlen(text));
}

/* The last number of a name in the answer to a request, whatever torchrun reads of it; 0: none. */
typedef struct number_reader {
    const char *name;
    int64_t found;
} number_reader;

static inline void read_number(void *context, const char *key, const char *text)
{
    number_reader *reader = context;
    if (strcmp(key, reader->name) == 0) {
        reader->found = strtoll(text, NULL, 10);
    }
}

static inline int64_t etcd_number(const etcd_server *server, const char *path, const char *body,
                                  const char *name)
{
    static const tddp_launch_etcd_conf conf;
    tddp_http http = {0};
    number_reader reader = {.name = name};
    const tddp_json_visitor visitor = {.context = &reader, .scalar = read_number};
    CHECK_OK(tddp_http_open(&http, &conf));
    (void)snprintf(http.url, sizeof http.url, "http://127.0.0.1:%d%s", server->endpoint.port, path);
    CHECK_OK(tddp_http_begin(&http, NULL, body));
    while (http.open) {
        CHECK_OK(tddp_http_receive(&http, tddp_deadline_after_ms(patient.timeout_ms), NULL));
    }
    CHECK(tddp_json_read(http.response.data, http.response.size, &visitor));
    tddp_http_close(&http);
    return reader.found;
}

/* A number in what etcd has of a key. */
static inline int64_t key_number(const etcd_server *server, const char *key, const char *name)
{
    char *body = tddp_format("{\"key\": \"%s\"}", base64(key));
    CHECK(body != NULL);
    int64_t found = etcd_number(server, "/v3/kv/range", body, name);
    free(body);
    return found;
}

/* Executes a request that is to succeed, and frees it; returns the revision then. */
static inline int64_t execute(etcd_client *client, const char *path, char *body)
{
    tddp_etcd_answer answer = {0};
    CHECK_OK(tddp_etcd_call(&client->etcd, path, body, &patient, &answer));
    int64_t revision = answer.revision;
    tddp_etcd_answer_free(&answer);
    return revision;
}

static inline int64_t put_key(etcd_client *client, const char *key, const char *value)
{
    return execute(client, "/v3/kv/put",
                   tddp_format("{\"key\": \"%s\", \"value\": \"%s\"}", base64(key), base64(value)));
}

static inline int64_t delete_key(etcd_client *client, const char *key)
{
    return execute(client, "/v3/kv/deleterange", tddp_format("{\"key\": \"%s\"}", base64(key)));
}

/* Keys from `first` to before `end`; caller: tddp_etcd_answer_free(). */
static inline tddp_etcd_answer keys_between(etcd_client *client, const char *first, const char *end)
{
    tddp_etcd_answer answer = {0};
    char *body =
        tddp_format("{\"key\": \"%s\", \"range_end\": \"%s\"}", base64(first), base64(end));
    CHECK_OK(tddp_etcd_call(&client->etcd, "/v3/kv/range", body, &patient, &answer));
    return answer;
}

/* The same in a row: "a/1=x a/2=y". */
static inline const char *list_keys(etcd_client *client, const char *first, const char *end,
                                    char text[256])
{
    tddp_etcd_answer answer = keys_between(client, first, end);
    text[0] = '\0';
    for (size_t i = 0; i < answer.count; i++) {
        tddp_add_text(text, 256, "%s%s=%s", i > 0 ? " " : "", answer.pairs[i].key.data,
                      answer.pairs[i].value.data);
    }
    tddp_etcd_answer_free(&answer);
    return text;
}

#endif
