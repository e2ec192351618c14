/* Messages between ranks on made-up hosts. */
#include "member.h"

static const int TURNS[] = {0, 1, 0, 1};

static void *post(member *self, tddp_op *op)
{
    void *request;
    op->timeout_ms = self->timeout_ms;
    CHECK_OK(self->table->post(self->context, op, &request));
    return request;
}

/* Every rank sends to every other, on its own host and on others. */
MULTI_TEST(messages_go_to_all_hosts, 4, 20)
{
    member self = join("gloo", TURNS, rank, world_size, port);
    int32_t out[4];
    int32_t in[4];
    tddp_op sends[4];
    tddp_op receives[4];
    void *requests[8] = {0};
    for (int peer = 0; peer < world_size; peer++) {
        if (peer == rank) {
            continue;
        }
        out[peer] = rank * 10 + peer;
        sends[peer] = (tddp_op){.kind = TDDP_OP_SEND,
                                .input = buffer_of(&out[peer], 1, TDDP_INT32),
                                .peer = peer,
                                .tag = 3};
        receives[peer] = (tddp_op){.kind = TDDP_OP_RECV,
                                   .output = buffer_of(&in[peer], 1, TDDP_INT32),
                                   .peer = peer,
                                   .tag = 3};
        requests[peer] = post(&self, &sends[peer]);
        requests[4 + peer] = post(&self, &receives[peer]);
    }
    for (int peer = 0; peer < world_size; peer++) {
        int source;
        if (peer != rank) {
            CHECK_OK(self.table->finish(self.context, requests[peer], &source));
            CHECK_OK(self.table->finish(self.context, requests[4 + peer], &source));
            CHECK_INT(source, peer);
            CHECK_INT(in[peer], peer * 10 + rank);
        }
    }
    tddp_op barrier = {.kind = TDDP_OP_BARRIER};
    CHECK_OK(run(&self, &barrier));
    part(&self);
}
