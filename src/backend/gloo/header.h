/*
 * What two ranks tell each other of an operation before they trust each other's data, and how a
 * disagreement is put into words.
 */
#ifndef TDDP_GLOO_HEADER_H
#define TDDP_GLOO_HEADER_H

#include <cstdint>
#include <string>

#include <tddp/backend.h>

namespace tddp_gloo
{

struct Header {
    uint64_t sequence;
    uint64_t gives;   /* elements for the rank that reads this */
    uint64_t expects; /* elements from that rank */
    double premul;
    uint32_t kind;
    uint32_t dtype;
    uint32_t reduce;
    int32_t root;
    uint32_t fingerprint;
    uint32_t nothing; /* in place of padding: headers are compared as bytes */
};

/* Of this rank, for one peer. What an operation does not have is 0. */
Header header_for(const tddp_op &op, int rank, int peer);

/* Whether two ranks mean the same operation and what one gives is what the other expects. */
bool agree(const Header &mine, const Header &theirs);

/* Whether two headers that one rank might send are the same call, perhaps at another time. */
bool same_call(const Header &one, const Header &other);

/* What a rank and a peer have told each other, and before, in the last operation. */
struct Told {
    Header mine;
    Header theirs;
};

/* Why they do not agree, with both sides. */
std::string disagreement(int rank, int peer, const Told &now, const Told &before);

/* Of what both ends of a transfer of `elements` know, however they are shared out: never the same
 * for two operations that disagree. Above the lowest three bits, below the highest one. */
uint64_t slot_of(const Header &header, uint64_t elements);

} // namespace tddp_gloo

#endif
