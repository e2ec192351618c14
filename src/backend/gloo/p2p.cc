/*
 * Sends and receives. Posted by any thread, one at a time; finished by any, several at a time.
 *
 * A message is a header, with a payload of at most EAGER_BYTES, in a parcel: memory of our own that
 * takes the largest of them, for Gloo cannot bear a message that is larger than the memory which it
 * goes to. Parcels go under a slot made of the tag, so that they match in their order. A larger
 * payload goes from the sender's memory to the receiver's, under a slot of its own that the header
 * names: the receiver asks for it when it has read the header and found that it expects the same.
 * So the payload never leaves for memory that does not fit, and two large messages at once do not
 * wait for each other; nothing here runs but Gloo's thread and those that finish.
 *
 * Receives from any source and from one rank with the same tag: each message is matched by one of
 * them, but not always the one that was posted first.
 */
#include "p2p.h"

#include <cstring>

namespace tddp_gloo
{
namespace
{

struct Message {
    uint64_t count;
    uint32_t dtype;
    uint32_t number; /* of the slot where a large payload is; 0: it is with this header */
};
static_assert(sizeof(Message) <= HEADER_BYTES, "a header has its place");

/* Number 0 is for the messages themselves; the largest is kept from all of them, see HEADER_SLOT.
 */
uint64_t slot_of_message(uint32_t tag, uint32_t number)
{
    return (UINT64_C(1) << 63) | (static_cast<uint64_t>(number) << 32) | tag;
}

size_t bytes_of_buffer(const tddp_buffer &buffer)
{
    return buffer.count * tddp_dtype_size(buffer.dtype);
}

std::string describe(uint64_t count, tddp_dtype dtype)
{
    return std::to_string(count) + " elements of " + tddp_dtype_name(dtype);
}

/* Unique among a pair's large messages under way in one direction. */
uint32_t next_number(Link &link)
{
    link.messages = link.messages % (LARGEST_NUMBER - 1) + 1;
    return link.messages;
}

Parcel take_parcel(Mesh &mesh)
{
    Parcel parcel = mesh.parcels.take();
    if (!parcel.buffer) {
        constexpr size_t bytes = HEADER_BYTES + EAGER_BYTES;
        parcel.memory.reset(new char[bytes]);
        parcel.buffer = mesh.buffer(parcel.memory.get(), bytes);
    }
    return parcel;
}

/* The watch looks at waits only while an operation runs. */
class Entered
{
  public:
    explicit Entered(Mesh &mesh) : mesh_(mesh)
    {
        mesh_.enter();
    }
    ~Entered()
    {
        mesh_.leave();
    }
    Entered(const Entered &) = delete;
    Entered &operator=(const Entered &) = delete;

  private:
    Mesh &mesh_;
};

} // namespace

struct Request {
    explicit Request(const tddp_op &it) : op(it), task(it) {}

    const tddp_op &op;
    Task task;
    Parcel parcel;
    std::unique_ptr<Buffer> payload; /* a large one */
};

namespace
{

void post_send(Mesh &mesh, Request &request)
{
    const tddp_op &op = request.op;
    const size_t bytes = bytes_of_buffer(op.input);
    const bool eager = bytes <= EAGER_BYTES;
    char *data = request.parcel.memory.get();
    Message message = {op.input.count, static_cast<uint32_t>(op.input.dtype), 0};
    if (!eager) {
        message.number = next_number(mesh.link(op.peer));
    } else if (bytes > 0) {
        memcpy(data + HEADER_BYTES, op.input.data, bytes);
    }
    memcpy(data, &message, sizeof message);
    memset(data + sizeof message, 0, HEADER_BYTES - sizeof message);
    mesh.send(request.task, *request.parcel.buffer, op.peer, slot_of_message(op.tag, 0), 0,
              HEADER_BYTES + (eager ? bytes : 0));
    if (!eager) {
        request.payload = mesh.buffer(op.input.data, bytes);
        mesh.send(request.task, *request.payload, op.peer, slot_of_message(op.tag, message.number),
                  0, bytes);
    }
}

void finish_send(Mesh &mesh, Request &request)
{
    mesh.wait_send(request.task, *request.parcel.buffer, request.op.peer);
    request.task.matched = true;
    if (request.payload) {
        mesh.wait_send(request.task, *request.payload, request.op.peer);
    }
}

int finish_recv(Mesh &mesh, Request &request)
{
    const tddp_op &op = request.op;
    const size_t bytes = bytes_of_buffer(op.output);
    const int source = mesh.wait_recv(request.task, *request.parcel.buffer, op.peer);
    request.task.matched = true;
    Message message;
    memcpy(&message, request.parcel.memory.get(), sizeof message);
    if (message.count != op.output.count ||
        message.dtype != static_cast<uint32_t>(op.output.dtype)) {
        throw Failure(TDDP_MISMATCH,
                      mesh.called(source) + " sends " +
                          describe(message.count, static_cast<tddp_dtype>(message.dtype)) + ", " +
                          mesh.called(mesh.rank) + " receives " +
                          describe(op.output.count, op.output.dtype) + " with tag " +
                          std::to_string(op.tag) + ": both must be the same");
    }
    if (message.number != 0) {
        request.payload = mesh.buffer(op.output.data, bytes);
        mesh.recv(request.task, *request.payload, source, slot_of_message(op.tag, message.number),
                  0, bytes);
        mesh.wait_recv(request.task, *request.payload, source);
    } else if (bytes > 0) {
        memcpy(op.output.data, request.parcel.memory.get() + HEADER_BYTES, bytes);
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
    request->parcel = take_parcel(mesh);
    if (op.kind == TDDP_OP_SEND) {
        post_send(mesh, *request);
    } else {
        mesh.recv(request->task, *request->parcel.buffer, op.peer, slot_of_message(op.tag, 0), 0,
                  HEADER_BYTES + EAGER_BYTES);
    }
    return request.release();
}

int finish(Mesh &mesh, Request *it)
{
    std::unique_ptr<Request> request(it);
    Entered entered(mesh);
    int source = mesh.rank;
    if (request->op.kind == TDDP_OP_SEND) {
        finish_send(mesh, *request);
    } else {
        source = finish_recv(mesh, *request);
    }
    mesh.parcels.give_back(std::move(request->parcel));
    return source;
}

} // namespace tddp_gloo
