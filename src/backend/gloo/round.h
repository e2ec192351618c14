/*
 * The messages of one operation between this rank and its peers.
 *
 * Each pair of ranks exchanges one header in every operation, also where no data go between them:
 * it says what the operation is believed to be, and a payload of at most EAGER_BYTES travels with
 * it. Larger payloads go straight between the callers' buffers, under a slot made of the same
 * facts: ranks that disagree never match each other's payloads, and learn it from the headers.
 */
#ifndef TDDP_GLOO_ROUND_H
#define TDDP_GLOO_ROUND_H

#include <memory>
#include <vector>

#include "header.h"
#include "mesh.h"

namespace tddp_gloo
{

class Round
{
  public:
    Round(Mesh &mesh, const tddp_op &op);

    /* Sends the header and up to EAGER_BYTES with it; gets ready for the peer's next one. */
    void greet(int peer, const void *data, size_t bytes);
    /* Waits for the peer's header, checks it, returns what came with it: memory of our own, until
     * the next operation. */
    char *answer(int peer);
    /* The peer's factor for PREMUL_SUM; after its answer. */
    double premul(int peer) const;

    /* A region of memory whose pieces travel to or from one peer, in order. Kept to the end. */
    Buffer &region(const void *data, size_t bytes);
    void send(Buffer &region, int peer, unsigned phase, size_t offset, size_t bytes);
    void recv(Buffer &region, int peer, unsigned phase, size_t offset, size_t bytes);

    /* Waits until the oldest piece of this region that was not waited for has left. */
    void wait_sent(Buffer &region, int peer);
    /* Waits until all that was sent has left this process's buffers. */
    void finish();

  private:
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
