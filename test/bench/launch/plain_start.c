/* What starting workers costs without a launcher: this program starts COUNT processes of one
 * command by fork and exec, waits for them and ends. It links and does nothing else, so that what
 * torchrun takes beyond it is torchrun's own.
 *
 *   bench_plain_start COUNT COMMAND [ARGUMENT...] */
#include <stdio.h>
#include <stdlib.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    int count = argc > 2 ? atoi(argv[1]) : 0;
    if (count < 1) {
        fputs("usage: bench_plain_start COUNT COMMAND [ARGUMENT...]\n", stderr);
        return 2;
    }
    for (int i = 0; i < count; i++) {
        pid_t pid = fork();
        if (pid < 0) {
            perror("fork");
            return 1;
        }
        if (pid == 0) {
            execv(argv[2], argv + 2);
            perror(argv[2]);
            _exit(127);
        }
    }
    int bad = 0;
    for (int i = 0; i < count; i++) {
        int status = 0;
        if (wait(&status) < 0 || status != 0) {
            bad = 1;
        }
    }
    return bad;
}
