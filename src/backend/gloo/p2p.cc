/*
 * Sends and receives. Posted by any thread, one at a time; finished by any, several at a time.
 *
 * A message is a header with a payload of at most EAGER_BYTES, in an eager buffer of maximum size:
 * Gloo does not support receiving a message larger than the buffer. Its slot contains the tag, so
 * that messages match in order. A larger payload uses a rendezvous: it goes from the sender's
 * memory to the receiver's, with its own slot, which the header names. The receiver posts its
 * receive after it has checked the header. So the payload is never sent to memory that does not
 * fit, and two large messages at once do not wait for each other; no thread is needed but Gloo's
 * and those that finish.
 *
 * With wildcard receives and receives from one rank for the same tag, each message matches one of
 * them, but not always the one that was posted first.
 */
#include "p2p.h"

#include <cstring>

#include "partition.h"

namespace tddp_gloo
{
namespace
{

struct Message {
    uint64_t mark; /* 1: it has arrived; see Mesh::spin_until_arrival() */
    uint64_t count;
    uint32_t dtype;
    uint32_t number; /* of a large payload's slot; 0: the payload is with this header */
};
static_assert(sizeof(Message) <= HEADER_BYTES, "a header has its place");

/* Number 0 is for headers. The largest number is reserved, see HEADER_SLOT. */
uint64_t slot_of_message(uint32_t tag, uint32_t number)
{
    return (UINT64_C(1) << 63) | (static_cast<uint64_t>(number) << 32) | tag;
}

std::string describe(uint64_t count, tddp_dtype dtype)
{
    return std::to_string(count) + " elements of " + tddp_dtype_name(dtype);
}

/* Unique among the large messages in flight to one peer. */
uint32_t next_number(Link &link)
{
    link.messages = link.messages % (LARGEST_NUMBER - 1) + 1;
    return link.messages;
}

EagerBuffer take_eager_buffer(Mesh &mesh)
{
    EagerBuffer eager = mesh.eager_buffers.take();
    if (!eager.buffer) {
        constexpr size_t bytes = HEADER_BYTES + EAGER_BYTES;
        eager.memory.reset(new char[bytes]);
        eager.buffer = mesh.buffer(eager.memory.get(), bytes);
    }
    return eager;
}

/* Activates the watcher while a request is finished. */
class WaitScope
{
  public:
    explicit WaitScope(Mesh &mesh) : mesh_(mesh)
    {
        mesh_.begin_wait();
    }
    ~WaitScope()
    {
        mesh_.end_wait();
    }
    WaitScope(const WaitScope &) = delete;
    WaitScope &operator=(const WaitScope &) = delete;

  private:
    Mesh &mesh_;
};

} // namespace

struct Request {
    explicit Request(const tddp_op &it) : op(it), task(it) {}

    const tddp_op &op;
    Task task;
    EagerBuffer eager;
    std::unique_ptr<Buffer> payload; /* large payload */
    int source = TDDP_ANY_SOURCE;    /* of the message, once it has arrived */
};

namespace
{

void post_send(Mesh &mesh, Request &request)
{
    const tddp_op &op = request.op;
    const size_t bytes = bytes_of(op.input);
    const bool eager = bytes <= EAGER_BYTES;
    char *data = request.eager.memory.get();
    Message message = {1, op.input.count, static_cast<uint32_t>(op.input.dtype), 0};
    if (!eager) {
        message.number = next_number(mesh.link(op.peer));
    } else if (bytes > 0) {
        memcpy(data + HEADER_BYTES, op.input.data, bytes);
    }
    memcpy(data, &message, sizeof message);
    memset(data + sizeof message, 0, HEADER_BYTES - sizeof message);
    mesh.send(request.task, *request.eager.buffer, op.peer, slot_of_message(op.tag, 0), 0,
              HEADER_BYTES + (eager ? bytes : 0));
    if (!eager) {
        request.payload = mesh.buffer(op.input.data, bytes);
        mesh.send(request.task, *request.payload, op.peer, slot_of_message(op.tag, message.number),
                  0, bytes);
    }
}

void finish_send(Mesh &mesh, Request &request)
{
    mesh.wait_send(request.task, *request.eager.buffer, request.op.peer);
    request.task.matched = true;
    if (request.payload) {
        mesh.wait_send(request.task, *request.payload, request.op.peer);
    }
}

int await_message(Mesh &mesh, Request &request)
{
    if (!request.task.matched) {
        const auto *message = reinterpret_cast<const Message *>(request.eager.memory.get());
        mesh.spin_until_arrival(request.op, &message->mark);
        request.source = mesh.wait_recv(request.task, *request.eager.buffer, request.op.peer);
        request.task.matched = true;
    }
    return request.source;
}

int finish_recv(Mesh &mesh, Request &request)
{
    const tddp_op &op = request.op;
    const size_t bytes = bytes_of(op.output);
    const int source = await_message(mesh, request);
    Message message;
    memcpy(&message, request.eager.memory.get(), sizeof message);
    if (message.count != op.output.count ||
        message.dtype != static_cast<uint32_t>(op.output.dtype)) {
        throw Failure(TDDP_MISMATCH,
                      mesh.rank_text(source) + " sends " +
                          describe(message.count, static_cast<tddp_dtype>(message.dtype)) + ", " +
                          mesh.rank_text(mesh.rank) + " receives " +
                          describe(op.output.count, op.output.dtype) + " with tag " +
                          std::to_string(op.tag) + ": both must be the same");
    }
    if (message.number != 0) {
        request.payload = mesh.buffer(op.output.data, bytes);
        mesh.recv(request.task, *request.payload, source, slot_of_message(op.tag, message.number),
                  0, bytes);
        mesh.wait_recv(request.task, *request.payload, source);
    } else if (bytes > 0) {
        memcpy(op.output.data, request.eager.memory.get() + HEADER_BYTES, bytes);
    }
    return source;
}

} // namespace

Request *post(Mesh &mesh, const tddp_op &op)
{
    auto request = std::make_unique<Request>(op);
    if (mesh.size == 1) {
        throw Failure(TDDP_INVALID_ARGUMENT, "there is no other rank");
    }
    mesh.check_peers(request->task, op.peer);
    request->eager = take_eager_buffer(mesh);
    if (op.kind == TDDP_OP_SEND) {
        post_send(mesh, *request);
    } else {
        memset(request->eager.memory.get(), 0, HEADER_BYTES);
        mesh.recv(request->task, *request->eager.buffer, op.peer, slot_of_message(op.tag, 0), 0,
                  HEADER_BYTES + EAGER_BYTES);
    }
    return request.release();
}

int probe(Mesh &mesh, Request &request)
{
    WaitScope scope(mesh);
    return await_message(mesh, request);
}

void drop(Request *request)
{
    delete request;
}

int finish(Mesh &mesh, Request *it)
{
    std::unique_ptr<Request> request(it);
    WaitScope scope(mesh);
    if (request->task.matched) {
        request->task.deadline = deadline_after(request->op.timeout_ms); /* since the probe */
    }
    int source = mesh.rank;
    if (request->op.kind == TDDP_OP_SEND) {
        finish_send(mesh, *request);
    } else {
        source = finish_recv(mesh, *request);
    }
    mesh.eager_buffers.give_back(std::move(request->eager));
    return source;
}

} // namespace tddp_gloo
