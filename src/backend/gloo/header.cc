/*
 * The facts that ranks compare. Pure functions; used on the group's progress thread.
 *
 * Invariant: a header holds nothing that may differ between ranks that make the same call, except
 * what each gives and expects, which mirror each other.
 */
#include "header.h"

#include <cstring>

namespace tddp_gloo
{
namespace
{

bool reduces(tddp_op_kind kind)
{
    return kind == TDDP_OP_ALL_REDUCE || kind == TDDP_OP_REDUCE || kind == TDDP_OP_REDUCE_SCATTER;
}

bool is_rooted(tddp_op_kind kind)
{
    return kind == TDDP_OP_BROADCAST || kind == TDDP_OP_REDUCE || kind == TDDP_OP_GATHER ||
           kind == TDDP_OP_SCATTER;
}

/* Whether all ranks have buffers of one size, rather than a part for each other. */
bool is_whole(tddp_op_kind kind)
{
    return kind == TDDP_OP_ALL_REDUCE || kind == TDDP_OP_REDUCE || kind == TDDP_OP_BROADCAST;
}

struct Share {
    size_t gives;
    size_t expects;
};

Share share_of(const tddp_op &op, int rank, int peer)
{
    auto part = [&](const tddp_buffer *parts) { return parts[peer].count; };
    switch (op.kind) {
    case TDDP_OP_ALL_REDUCE:
    case TDDP_OP_REDUCE:
    case TDDP_OP_BROADCAST:
        return {op.input.count, op.input.count};
    case TDDP_OP_ALL_GATHER:
        return {op.input.count, part(op.output_parts)};
    case TDDP_OP_REDUCE_SCATTER:
        return {part(op.input_parts), op.output.count};
    case TDDP_OP_ALL_TO_ALL:
        return {part(op.input_parts), part(op.output_parts)};
    case TDDP_OP_GATHER:
        return {op.root == peer ? op.input.count : 0, op.root == rank ? part(op.output_parts) : 0};
    case TDDP_OP_SCATTER:
        return {op.root == rank ? part(op.input_parts) : 0, op.root == peer ? op.output.count : 0};
    default:
        return {0, 0};
    }
}

/* The header that a peer would have sent if it agreed. */
Header mirrored(const Header &header)
{
    Header mirror = header;
    mirror.gives = header.expects;
    mirror.expects = header.gives;
    return mirror;
}

std::string counted(uint64_t elements, const Header &header)
{
    return std::to_string(elements) + " elements of " +
           tddp_dtype_name(static_cast<tddp_dtype>(header.dtype));
}

/* The buffers and settings of a call. */
std::string settings(const Header &header)
{
    auto kind = static_cast<tddp_op_kind>(header.kind);
    std::string text;
    if (is_whole(kind)) {
        text += ", " + counted(header.gives, header);
    } else if (kind != TDDP_OP_BARRIER) {
        text += ", gives " + std::to_string(header.gives) + " and expects " +
                counted(header.expects, header);
    }
    if (reduces(kind)) {
        auto op = static_cast<tddp_reduce_op>(header.reduce);
        text += std::string(", ") + tddp_reduce_op_name(op);
        if (op == TDDP_REDUCE_PREMUL_SUM) {
            text += " by " + std::to_string(header.premul);
        }
    }
    if (is_rooted(kind)) {
        text += ", root " + std::to_string(header.root);
    }
    return text;
}

std::string kind_of(const Header &header)
{
    return tddp_op_name(static_cast<tddp_op_kind>(header.kind));
}

std::string describe(const Header &header)
{
    return kind_of(header) + " (operation " + std::to_string(header.sequence) + settings(header) +
           ")";
}

std::string name(int rank)
{
    return "rank " + std::to_string(rank);
}

/* "rank 0 sends 3 elements of float32, rank 1 expects 4"; empty if that is not so. */
std::string unequal(int from, const Header &sender, int to, const Header &receiver)
{
    if (sender.gives == receiver.expects) {
        return {};
    }
    return name(from) + " sends " + counted(sender.gives, sender) + ", " + name(to) + " expects " +
           std::to_string(receiver.expects);
}

/* Who calls again what both called in the operation before, which the other does not; empty if
 * nobody. */
std::string hint(int rank, int peer, const Told &now, const Told &before)
{
    bool peer_again = same_call(now.theirs, mirrored(before.mine));
    bool own_again = same_call(now.mine, mirrored(before.theirs));
    if (before.mine.sequence == 0 || peer_again == own_again) {
        return {};
    }
    return "; " + name(peer_again ? peer : rank) + " calls what both called in operation " +
           std::to_string(before.mine.sequence) +
           ": it has left out a call, or made that one twice";
}

} // namespace

Header header_for(const tddp_op &op, int rank, int peer)
{
    Share share = share_of(op, rank, peer);
    Header header = {};
    header.sequence = op.sequence;
    header.gives = share.gives;
    header.expects = share.expects;
    header.kind = op.kind;
    if (op.kind != TDDP_OP_BARRIER) {
        /* Only the root has an input in scatter. */
        header.dtype = op.kind == TDDP_OP_SCATTER ? op.output.dtype : op.input.dtype;
    }
    if (reduces(op.kind)) {
        header.reduce = op.reduce;
        header.premul = op.reduce == TDDP_REDUCE_PREMUL_SUM ? op.premul : 0;
    }
    header.root = is_rooted(op.kind) ? op.root : 0;
    header.fingerprint = op.fingerprint;
    return header;
}

bool agree(const Header &mine, const Header &theirs)
{
    Header expected = mirrored(mine);
    /* Each rank may weigh its own share as it likes. */
    expected.premul = theirs.premul;
    if (mine.fingerprint == 0 || theirs.fingerprint == 0) {
        expected.fingerprint = theirs.fingerprint;
    }
    return memcmp(&expected, &theirs, sizeof expected) == 0;
}

bool same_call(const Header &one, const Header &other)
{
    Header later = other;
    later.sequence = one.sequence;
    return memcmp(&one, &later, sizeof one) == 0;
}

std::string disagreement(int rank, int peer, const Told &now, const Told &before)
{
    const Header &mine = now.mine;
    const Header &theirs = now.theirs;
    const char *cure = ": all ranks must make the same calls in the same order";
    if (mine.sequence != theirs.sequence) {
        auto at = [](int who, const Header &header) {
            return name(who) + " is at operation " + std::to_string(header.sequence) + ", " +
                   kind_of(header) + settings(header);
        };
        return at(rank, mine) + "; " + at(peer, theirs) + cure;
    }
    /* Differences that come from sizes alone, or from names alone, are told as such. */
    Header alike = theirs;
    alike.fingerprint = mine.fingerprint;
    if (agree(mine, alike)) {
        return "shapes or names differ between " + name(rank) + " and " + name(peer) + " in " +
               describe(mine) + ": all ranks must describe the same call";
    }
    alike.gives = mine.expects;
    alike.expects = mine.gives;
    if (agree(mine, alike) && !is_whole(static_cast<tddp_op_kind>(mine.kind))) {
        std::string there = unequal(rank, mine, peer, theirs);
        std::string back = unequal(peer, theirs, rank, mine);
        return kind_of(mine) + " (operation " + std::to_string(mine.sequence) + "): " + there +
               (there.empty() || back.empty() ? "" : "; ") + back +
               ": a part must be as large as its receiver expects";
    }
    return name(rank) + " runs " + describe(mine) + ", " + name(peer) + " runs " +
           describe(theirs) + hint(rank, peer, now, before) + cure;
}

/* 30 bits of what both ends know (FNV-1a), below the sequence number's lowest 30. The fingerprint
 * is not among it: a rank without one agrees with all; nor are factors, which may differ. */
uint64_t slot_of(const Header &header, uint64_t elements)
{
    Header facts = header;
    facts.gives = elements;
    facts.expects = elements;
    facts.fingerprint = 0;
    facts.premul = 0;
    const auto *bytes = reinterpret_cast<const unsigned char *>(&facts);
    uint64_t hash = UINT64_C(14695981039346656037);
    for (size_t i = 0; i < sizeof facts; i++) {
        hash = (hash ^ bytes[i]) * UINT64_C(1099511628211);
    }
    return ((header.sequence & 0x3fffffffu) << 33) | ((hash >> 34) << 3);
}

} // namespace tddp_gloo
