/*
 * The ranks of a job add up a vector, by libtddp alone:
 *
 *     cc all_reduce.c -o all_reduce $(pkg-config --cflags --libs tddp)
 *     torchrun --standalone --no-python --nproc-per-node=2 ./all_reduce
 *
 * Each rank reads what torchrun sets: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Started
 * without torchrun, rank 0 hosts the store where the ranks meet.
 */
#include <stdio.h>
#include <stdlib.h>

#include <tddp.h>

static const char *setting(const char *name)
{
    const char *text = getenv(name);
    if (!text) {
        fprintf(stderr, "%s is not set: start this program by torchrun\n", name);
        exit(2);
    }
    return text;
}

static void check(tddp_status status)
{
    if (status != TDDP_OK) {
        fprintf(stderr, "%s: %s\n", tddp_status_name(status), tddp_error_message());
        exit(1);
    }
}

int main(void)
{
    int rank = atoi(setting("RANK"));
    int world_size = atoi(setting("WORLD_SIZE"));

    tddp_store *store;
    tddp_tcp_store_opts meeting = TDDP_TCP_STORE_OPTS_INIT;
    meeting.host = setting("MASTER_ADDR");
    meeting.port = atoi(setting("MASTER_PORT"));
    meeting.world_size = world_size;
    meeting.is_server = rank == 0 && !getenv("TORCHELASTIC_USE_AGENT_STORE");
    check(tddp_tcp_store_open(&meeting, NULL, &store));

    tddp_group *group;
    tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;
    opts.backend = "gloo";
    opts.store = store;
    opts.rank = rank;
    opts.world_size = world_size;
    check(tddp_group_create(&opts, NULL, &group));

    /* Begun, and waited for when its result is needed; other work may stand between. */
    float x[4] = {1, 2, 3, (float)rank};
    tddp_buffer buffer = {x, 4, TDDP_FLOAT32, TDDP_CPU, 0, NULL};
    tddp_work *work;
    check(tddp_all_reduce(group, buffer, TDDP_REDUCE_SUM, 0, &work));
    check(tddp_work_wait(work, NULL));
    tddp_work_release(work);
    printf("rank %d of %d: %g %g %g %g\n", rank, world_size, x[0], x[1], x[2], x[3]);

    check(tddp_group_shutdown_host(group, 1000, NULL)); /* the store's host leaves last */
    tddp_group_release(group);
    tddp_store_release(store);
    return 0;
}
