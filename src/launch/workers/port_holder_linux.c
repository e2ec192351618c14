/*
 * Finds who listens on a port: the socket's inode from /proc/net/tcp and tcp6, the process from the
 * descriptors under /proc that lead to the inode. Only reads; any thread. What other users'
 * processes have open is hidden from all but root: then the socket's owner is all there is to tell.
 */
#include <dirent.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#include "base/base.h"
#include "launch/workers/port_holder.h"

enum { LISTENING = 0x0A, LINE_BYTES = 512, COMMAND_BYTES = 160, MOST_SOCKETS = 8 };

/* The sockets that listen on the port: on several addresses there may be several. */
typedef struct listeners {
    unsigned long inodes[MOST_SOCKETS];
    size_t count;
    unsigned user; /* of the first */
} listeners;

static void find_listeners(const char *path, int port, listeners *found)
{
    char line[LINE_BYTES];
    FILE *file = fopen(path, "re");
    while (file && fgets(line, sizeof line, file)) {
        unsigned local;
        unsigned state;
        unsigned user;
        unsigned long inode;
        /* "  0: 0100007F:7531 00000000:0000 0A 0:0 0:0 0 USER 0 INODE ...", all but USER and INODE
         * in hexadecimal. The heading does not fit the pattern. */
        int got = sscanf(line, " %*d: %*[0-9A-Fa-f]:%x %*[0-9A-Fa-f]:%*x %x %*s %*s %*s %u %*d %lu",
                         &local, &state, &user, &inode);
        if (got == 4 && local == (unsigned)port && state == LISTENING &&
            found->count < MOST_SOCKETS) {
            found->user = found->count == 0 ? user : found->user;
            found->inodes[found->count++] = inode;
        }
    }
    if (file) {
        fclose(file);
    }
}

/* Whether descriptor `name` in the open folder is one of the sockets. */
static bool is_listener(int folder, const char *name, const listeners *sockets)
{
    char target[64];
    unsigned long inode;
    ssize_t size = readlinkat(folder, name, target, sizeof target - 1);
    target[size > 0 ? size : 0] = '\0';
    if (sscanf(target, "socket:[%lu]", &inode) != 1) {
        return false;
    }
    for (size_t i = 0; i < sockets->count; i++) {
        if (sockets->inodes[i] == inode) {
            return true;
        }
    }
    return false;
}

static bool has_listener(int64_t pid, const listeners *sockets)
{
    char path[64];
    (void)snprintf(path, sizeof path, "/proc/%lld/fd", (long long)pid);
    DIR *folder = opendir(path);
    bool has = false;
    struct dirent *entry;
    while (!has && folder && (entry = readdir(folder))) {
        has = is_listener(dirfd(folder), entry->d_name, sockets);
    }
    if (folder) {
        closedir(folder);
    }
    return has;
}

static ssize_t read_process_file(int64_t pid, const char *name, char *text, size_t size)
{
    char path[64];
    (void)snprintf(path, sizeof path, "/proc/%lld/%s", (long long)pid, name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return 0;
    }
    ssize_t got = read(fd, text, size);
    tddp_close(fd);
    return got > 0 ? got : 0;
}

/* The command line with blanks for NULs, cut where it gets long; else the process's name. */
static void describe(int64_t pid, char *text, size_t size)
{
    char command[COMMAND_BYTES];
    ssize_t got = read_process_file(pid, "cmdline", command, sizeof command - 1);
    bool cut = got == (ssize_t)sizeof command - 1;
    if (got == 0) {
        got = read_process_file(pid, "comm", command, sizeof command - 1);
    }
    while (got > 0 && (command[got - 1] == '\0' || command[got - 1] == '\n')) {
        got--;
    }
    for (ssize_t i = 0; i < got; i++) {
        /* A command line may hold anything; a terminal must not act on it. */
        unsigned char byte = (unsigned char)command[i];
        command[i] = byte == '\0' ? ' ' : byte < ' ' || byte == 0x7f ? '?' : command[i];
    }
    (void)snprintf(text, size, "%.*s%s (pid %lld)", (int)got, command, cut ? "..." : "",
                   (long long)pid);
}

bool tddp_launch_port_holder(int port, char *text, size_t size)
{
    listeners sockets = {{0}, 0, 0};
    text[0] = '\0';
    find_listeners("/proc/net/tcp", port, &sockets);
    find_listeners("/proc/net/tcp6", port, &sockets);
    if (sockets.count == 0) {
        return false;
    }
    (void)snprintf(text, size, "a process of user %u", sockets.user);
    DIR *processes = opendir("/proc");
    struct dirent *entry;
    while (processes && (entry = readdir(processes))) {
        int64_t pid;
        if (tddp_parse_int(entry->d_name, 1, INT32_MAX, &pid) && has_listener(pid, &sockets)) {
            describe(pid, text, size);
            break;
        }
    }
    if (processes) {
        closedir(processes);
    }
    return true;
}
