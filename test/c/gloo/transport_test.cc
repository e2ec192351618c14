/*
 * Gloo as a transport: messages between transports, without the operations above it. What is waited
 * for is an event that the transport counts.
 */
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <vector>

#include "failure.h"
#include "hosted_store.h"
#include "transport.h"

namespace
{

using tddp_gloo::Failure;
using tddp_gloo::Transfer;
using tddp_gloo::Transport;

enum { POSTED, READ, FAILED }; /* events */

constexpr size_t LARGE = 9 * 1024 * 1024 + 3;

struct World {
    World(int rank, int world_size, int port) : store(open_store(rank, world_size, port))
    {
        CHECK_OK(tddp_eventcount_create(&events));
        tddp_backend_opts opts = {};
        opts.size = sizeof opts;
        opts.rank = rank;
        opts.world_size = world_size;
        opts.store = store;
        opts.timeout_ms = 20000;
        opts.same_host = 1;
        opts.group = "transport";
        opts.address = "127.0.0.1";
        opts.events = events;
        transport = std::make_unique<Transport>(opts);
        transport->connect(opts, nullptr, [] {});
    }
    ~World()
    {
        transport.reset();
        tddp_eventcount_free(events);
        tddp_store_release(store);
    }

    uint32_t count() const
    {
        return __atomic_load_n(reinterpret_cast<const uint32_t *>(events), __ATOMIC_ACQUIRE);
    }
    /* Tests again with each event, and only then; returns the source. */
    int await(Transfer *transfer) const
    {
        int source = -1;
        uint32_t seen = count();
        while (!transport->test(*transfer, &source)) {
            while (count() == seen) {
                sched_yield();
            }
            seen = count();
        }
        return source;
    }
    int finish(Transfer *transfer) const
    {
        const int source = await(transfer);
        transport->release(transfer);
        return source;
    }
    /* When it is posted, or later. */
    template <typename Post> void check_fails(Post post, tddp_status status, const char *text) const
    {
        Transfer *transfer = nullptr;
        try {
            transfer = post();
            (void)await(transfer);
            CHECK(!"the transfer fails");
        } catch (const Failure &failure) {
            CHECK_STATUS(failure.status(), status);
            CHECK_CONTAINS(failure.what(), text);
        }
        if (transfer) {
            transport->release(transfer);
        }
    }

    tddp_store *store;
    struct tddp_eventcount *events = nullptr;
    std::unique_ptr<Transport> transport;
};

char at(int rank, size_t i)
{
    return static_cast<char>(static_cast<size_t>(rank) * 31 + i * 7 + i / 4096);
}

std::vector<char> message_of(int rank, size_t bytes)
{
    std::vector<char> data(bytes);
    for (size_t i = 0; i < bytes; i++) {
        data[i] = at(rank, i);
    }
    return data;
}

/* Both directions at once, so that all connections are full. */
void exchange_all(const World &world, size_t bytes)
{
    const Transport &it = *world.transport;
    const std::vector<char> mine = message_of(it.rank, bytes);
    std::vector<std::vector<char>> theirs(static_cast<size_t>(it.size), std::vector<char>(bytes));
    std::vector<Transfer *> transfers;
    for (int peer = 0; peer < it.size; peer++) {
        if (peer != it.rank) {
            transfers.push_back(world.transport->send(peer, 5, mine.data(), bytes));
            transfers.push_back(
                world.transport->recv(peer, 5, theirs[static_cast<size_t>(peer)].data(), bytes));
        }
    }
    for (Transfer *each : transfers) {
        const bool receives = each->receives;
        const int peer = each->peer;
        const int source = world.finish(each);
        CHECK(!receives || source == peer);
    }
    for (int peer = 0; peer < it.size; peer++) {
        CHECK(peer == it.rank || theirs[static_cast<size_t>(peer)] == message_of(peer, bytes));
    }
}

} // namespace

MULTI_TEST(messages_of_any_size_arrive, 4, 60)
{
    const World world(rank, world_size, port);
    for (size_t bytes : {size_t(0), size_t(1), size_t(65600), LARGE, size_t(8)}) {
        exchange_all(world, bytes);
    }
}

/* Messages of one tag match in the order of posting, those of others beside them; posted before or
 * after the other side. */
MULTI_TEST(messages_match_in_order, 2, 20)
{
    const World world(rank, world_size, port);
    const int peer = 1 - rank;
    enum { COUNT = 50 };
    for (int first = 0; first < 2; first++) {
        int out[COUNT];
        int in[2][COUNT];
        std::vector<Transfer *> transfers;
        for (int i = 0; i < COUNT && rank == 0; i++) {
            out[i] = 100 * first + i;
            transfers.push_back(
                world.transport->send(peer, static_cast<uint64_t>(i % 2), &out[i], sizeof out[i]));
        }
        if (rank == first) { /* then the other one has posted before this one */
            check_signal(POSTED);
        }
        CHECK_AWAIT(POSTED, first + 1);
        for (int i = 0; i < COUNT / 2 && rank == 1; i++) {
            for (uint64_t tag = 0; tag < 2; tag++) {
                transfers.push_back(
                    world.transport->recv(peer, tag, &in[tag][i], sizeof in[tag][i]));
            }
        }
        for (Transfer *each : transfers) {
            (void)world.finish(each);
        }
        for (int i = 0; i < COUNT && rank == 1; i++) {
            CHECK_INT(in[i % 2][i / 2], 100 * first + i);
        }
    }
}

MULTI_TEST(a_message_from_any_source, 3, 20)
{
    const World world(rank, world_size, port);
    if (rank > 0) {
        (void)world.finish(world.transport->send(0, 9, &rank, sizeof rank));
    } else {
        int seen = 0;
        for (int i = 1; i < world_size; i++) {
            int data = 0;
            const int source =
                world.finish(world.transport->recv(TDDP_ANY_SOURCE, 9, &data, sizeof data));
            CHECK_INT(data, source);
            seen |= 1 << source;
        }
        CHECK_INT(seen, 6);
    }
    exchange_all(world, 4);
}

/* No call, and no time, tells rank 0: its connection does. */
MULTI_TEST(a_peer_dies, 3, 20)
{
    World world(rank, world_size, port);
    if (rank == 1) {
        CHECK_AWAIT(POSTED, 2);
        (void)syscall(SYS_exit_group, 0);
    }
    char data[8];
    Transfer *receive = world.transport->recv(1, 1, data, sizeof data);
    check_signal(POSTED);
    world.check_fails([=] { return receive; }, TDDP_PEER_LOST, "lost rank 1 (");
    try {
        world.transport->check_peer(1, 0);
        CHECK(!"the peer is lost");
    } catch (const Failure &failure) {
        CHECK_STATUS(failure.status(), TDDP_PEER_LOST);
    }
    /* The others go on. */
    const int peer = rank == 0 ? 2 : 0;
    Transfer *send = world.transport->send(peer, 2, &rank, sizeof rank);
    int theirs = 0;
    (void)world.finish(world.transport->recv(peer, 2, &theirs, sizeof theirs));
    (void)world.finish(send);
    CHECK_INT(theirs, peer);
    CHECK_MEET(READ, 2); /* neither leaves before */
}

/* What was sent before the peer left arrives. */
MULTI_TEST(a_peer_leaves, 2, 20)
{
    auto world = std::make_unique<World>(rank, world_size, port);
    if (rank == 1) {
        const std::vector<char> mine = message_of(1, LARGE);
        (void)world->finish(world->transport->send(0, 3, mine.data(), LARGE));
        world.reset();
        return;
    }
    std::vector<char> theirs(LARGE);
    (void)world->finish(world->transport->recv(1, 3, theirs.data(), LARGE));
    CHECK(theirs == message_of(1, LARGE));
    char data;
    world->check_fails([&] { return world->transport->recv(1, 4, &data, 1); }, TDDP_PEER_LOST,
                       "rank 1 has left the group");
}

/* The peer learns why; memory of a canceled receive is not written to. */
MULTI_TEST(a_canceled_receive_ends_the_connection, 2, 20)
{
    World world(rank, world_size, port);
    if (rank == 0) {
        auto data = std::make_unique<std::vector<char>>(LARGE);
        Transfer *receive = world.transport->recv(1, 6, data->data(), LARGE);
        world.transport->report(TDDP_TIMEOUT, "an operation that took too long");
        world.transport->release(receive);
        data.reset(); /* a sanitizer sees who writes there */
        check_signal(POSTED);
        world.check_fails([&] { return world.transport->recv(1, 7, nullptr, 0); },
                          TDDP_GROUP_FAILED,
                          "aborted, as another operation failed: an operation that took too long");
    } else {
        const std::vector<char> mine = message_of(1, LARGE);
        CHECK_AWAIT(POSTED, 1);
        world.check_fails([&] { return world.transport->send(0, 6, mine.data(), LARGE); },
                          TDDP_PEER_LOST,
                          "lost rank 0, which gave up: an operation that took too long");
    }
}

MULTI_TEST(an_abort_ends_transfers, 2, 20)
{
    World world(rank, world_size, port);
    char data;
    Transfer *receive = world.transport->recv(1 - rank, 1, &data, 1);
    CHECK_MEET(POSTED, 2);
    if (rank == 0) {
        world.transport->abort();
        world.check_fails([=] { return receive; }, TDDP_GROUP_FAILED,
                          "aborted while waiting for rank 1");
    } else {
        world.check_fails([=] { return receive; }, TDDP_PEER_LOST,
                          "lost rank 0, which gave up: its group was");
    }
}
