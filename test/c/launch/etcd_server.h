/*
 * A real etcd on the loopback interface, of one member, which ends with its test. Skips the test
 * where there is none.
 */
#ifndef TDDP_TEST_ETCD_SERVER_H
#define TDDP_TEST_ETCD_SERVER_H

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

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

#endif
