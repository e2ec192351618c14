/*
 * The messages of one operation between this rank and its peers.
 *
 * In every operation each pair of ranks exchanges a header, even if no data go between them; in one
 * by recursive doubling (doubling.cc) only those that are partners. It contains the rank's call,
 * and a payload of at most EAGER_BYTES. Larger payloads go directly between the callers' buffers,
 * with a slot made from the call: payloads of different calls never match, and the headers report
 * the mismatch.
 */
#ifndef TDDP_GLOO_OP_MESSAGES_H
#define TDDP_GLOO_OP_MESSAGES_H

#include <memory>
#include <vector>

#include "mesh.h"
#include "slots.h"

namespace tddp_gloo
{

class OpMessages
{
  public:
    OpMessages(Mesh &mesh, const tddp_op &op);

    /* Sends the header with up to EAGER_BYTES of payload, and posts the receive of the peer's
     * next header. */
    void send_header(int peer, const void *data, size_t bytes);
    /* The same in two calls, for one who sends it after the peer's has arrived: posts the receive;
     * sends it. */
    void expect_header(int peer);
    void answer_header(int peer, const void *data, size_t bytes);
    /* Waits for the peer's header, checks it, and returns its payload, which is valid until the
     * next operation. */
    char *recv_header(int peer);
    /* Waits for all headers, sent and received: nothing else of an operation on little data waits.
     * So if it was interrupted there, it may be run again. */
    void exchange_headers();
    /* The peer's factor for PREMUL_SUM, after its header has arrived. */
    double premul(int peer) const;

    /* Registers memory of which chunks are sent to or received from one peer, in order. Kept
     * until the end. */
    Buffer &region(const void *data, size_t bytes);
    void send(Buffer &region, int peer, unsigned phase, size_t offset, size_t bytes);
    void recv(Buffer &region, int peer, unsigned phase, size_t offset, size_t bytes);

    /* Waits until all sends have completed. */
    void finish();

  private:
    void finish_headers();

    struct Sent {
        Buffer *buffer;
        int peer;
    };

    Mesh &mesh_;
    const tddp_op &op_;
    std::vector<std::unique_ptr<Buffer>> regions_;
    std::vector<Sent> sent_;
};

} // namespace tddp_gloo

#endif
