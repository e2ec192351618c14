/**
 * @file torch_collectives.h
 * @brief Collectives as functions with a gradient (libtddp_torch).
 *
 * A function is a pair of maps, of which the second computes the gradient from the result's
 * gradient. A map takes a tensor of each rank to a tensor of each rank; those with parts divide the
 * first dimension, in the order of the ranks. Every rank calls the same functions in the same
 * order, and its backward runs all of them, or none: a rank whose loss does not depend on a
 * result would leave the others waiting in theirs.
 */
#ifndef TDDP_TORCH_COLLECTIVES_H
#define TDDP_TORCH_COLLECTIVES_H

#include <tddp/torch.h>

#ifdef __cplusplus
extern "C" {
#endif

/** What a rank gets of the tensors of all ranks. */
typedef enum tddp_map {
    TDDP_MAP_IDENTITY,       /**< the same tensor */
    TDDP_MAP_SLICE,          /**< this rank's part of it */
    TDDP_MAP_ALL_REDUCE,     /**< the sum over all ranks */
    TDDP_MAP_REDUCE,         /**< the same at the root; elsewhere zeros */
    TDDP_MAP_BROADCAST,      /**< the root's; the others' give only the shape */
    TDDP_MAP_ALL_GATHER,     /**< the tensors of all ranks, one after another */
    TDDP_MAP_GATHER,         /**< the same at the root; elsewhere zeros */
    TDDP_MAP_REDUCE_SCATTER, /**< this rank's part of the sum over all ranks */
    TDDP_MAP_SCATTER,        /**< this rank's part of the root's; the others' give only the shape */
    TDDP_MAP_ALL_TO_ALL,     /**< its parts for all ranks become all ranks' parts for it */
    TDDP_MAP_COUNT
} tddp_map;

/** "all_reduce" and so on; NULL: there is no such map. */
TDDP_API const char *tddp_map_name(tddp_map map);

/** A collective and its gradient. Begin with TDDP_COLLECTIVE_OPTS_INIT. */
typedef struct tddp_collective_opts {
    size_t size; /**< sizeof(tddp_collective_opts) */
    tddp_map map;
    /** Of the result's gradient. The sum of all ranks' losses has the transposed map's: all_reduce
     * for all_reduce, reduce for broadcast, reduce_scatter for all_gather, gather for scatter, and
     * the other way round. */
    tddp_map gradient;
    int root;     /**< for maps with one: a rank of the group */
    double scale; /**< by which both results are multiplied: 1 / world size for means */
    /** For all_to_all: how much of the first dimension goes to each rank, and comes from it;
     * world_size numbers each. NULL: equal parts. Copied. */
    const int64_t *sends;
    const int64_t *receives;
    tddp_blocking_region blocking_region;          /**< for waits in this call; NULL: none */
    tddp_blocking_region backward_blocking_region; /**< for waits in backward; NULL: none */
} tddp_collective_opts;

/** The defaults: all_reduce, both ways. */
#define TDDP_COLLECTIVE_OPTS_INIT                                                             \
    {                                                                                         \
        sizeof(tddp_collective_opts), TDDP_MAP_ALL_REDUCE, TDDP_MAP_ALL_REDUCE, 0, 1.0, NULL, \
            NULL, NULL, NULL                                                                  \
    }

/**
 * Applies the map to `input`, which stays as it is, and assigns `output`, a new handle of the
 * caller's, with the graph that computes the gradient; that has a graph as well if backward makes
 * one (create_graph). The graph retains the group. A tensor that is not contiguous is copied.
 * Errors: TDDP_INVALID_ARGUMENT (no dimension to divide, one that the ranks do not divide evenly,
 * parts that are not `sends`; a scale on integers), TDDP_CANCELED (`blocking_region` was
 * interrupted), those of the group's operations; backward throws an exception with their text.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_collective(tddp_group *group, const tddp_tensor *input,
                                                    const tddp_collective_opts *opts,
                                                    tddp_tensor *output);

/**
 * From now on backward stores in `leaf`'s gradient the sum over the ranks of what it computed
 * there, divided by `divisor`: a blocking operation for each tensor and backward, in autograd's
 * order, which is the same on ranks with the same graph. Retains the group. `*number` is the
 * hook's. Errors: TDDP_INVALID_ARGUMENT (the tensor requires no gradient); backward throws an
 * exception with the text of the group's.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_average_gradient(tddp_group *group,
                                                          const tddp_tensor *leaf, double divisor,
                                                          tddp_blocking_region backward_region,
                                                          uint32_t *number);

#ifdef __cplusplus
}
#endif

#endif
