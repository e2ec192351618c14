/*
 * What the reducing collectives share: pieces, factors, and combining what peers send.
 */
#ifndef TDDP_GLOO_REDUCTION_H
#define TDDP_GLOO_REDUCTION_H

#include <algorithm>
#include <cstring>
#include <functional>

#include "round.h"

namespace tddp_gloo
{

/*
 * Pieces are small enough to be combined while the next one arrives, large enough not to be all
 * messages. Two ranks over loopback, all_reduce of 1 to 8 MiB: pieces of 128 KiB and 256 KiB cost a
 * fifth more, 1 MiB and 2 MiB nothing less.
 */
constexpr size_t PIECE_BYTES = 512 * 1024;
/* Pieces of one peer's that may be on their way to us. */
constexpr size_t WINDOW = 4;

enum Phase : unsigned { TO_OWNER = 0, FROM_OWNER = 1, WHOLE = 2 };

/* The factor on what a rank contributes. A sum of float16 could overflow before it is divided. */
double factor_before(const Mesh &mesh, const tddp_op &op);
/* The factor on the result. */
double factor_after(const Mesh &mesh, const tddp_op &op);

void scale(tddp_dtype dtype, void *data, size_t count, double factor);

/* into = (into op from) * factor */
void combine_scaled(const tddp_op &op, char *into, const char *from, size_t bytes, double factor);

inline void copy(void *to, const void *from, size_t bytes)
{
    if (bytes > 0 && to != from) {
        memcpy(to, from, bytes);
    }
}

template <typename Visit> void each_peer(const Mesh &mesh, Visit visit)
{
    for (int peer = 0; peer < mesh.size; peer++) {
        if (peer != mesh.rank) {
            visit(peer);
        }
    }
}

template <typename Visit> void each_piece(size_t bytes, Visit visit)
{
    for (size_t at = 0; at < bytes; at += PIECE_BYTES) {
        visit(at, std::min(PIECE_BYTES, bytes - at));
    }
}

/*
 * Receives every peer's share of this rank's part and combines it into `into`, which holds this
 * rank's own share or, if `own` is given, gets it from there. `done(at, bytes)` is told of each
 * piece.
 */
void combine(Mesh &mesh, Round &round, const tddp_op &op, const char *own, char *into, size_t bytes,
             const std::function<void(size_t at, size_t bytes)> &done);

} // namespace tddp_gloo

#endif
