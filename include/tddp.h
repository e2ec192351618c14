/**
 * @file tddp.h
 * @brief libtddp: process groups, collectives and gradient bucketing, for any language that speaks
 * C.
 *
 * The life of a job, on each of `world_size` processes:
 *
 *     tddp_tcp_store_opts at = TDDP_TCP_STORE_OPTS_INIT;      // where the ranks meet
 *     at.host = "127.0.0.1"; at.port = 29500;
 *     at.is_server = rank == 0; at.world_size = world_size;
 *     tddp_store *store;
 *     if (tddp_tcp_store_open(&at, NULL, &store)) die(tddp_error_message());
 *
 *     tddp_group_opts opts = TDDP_GROUP_OPTS_INIT;            // who works together, and over what
 *     opts.backend = "gloo"; opts.store = store;
 *     opts.rank = rank; opts.world_size = world_size;
 *     tddp_group *group;
 *     if (tddp_group_create(&opts, NULL, &group)) die(tddp_error_message());
 *
 *     float x[3] = {rank, rank, rank};                        // an operation, waited for
 *     tddp_buffer b = {x, 3, TDDP_FLOAT32, TDDP_CPU, 0, NULL};
 *     if (tddp_all_reduce(group, b, TDDP_REDUCE_SUM, 0, NULL)) die(tddp_error_message());
 *
 *     tddp_work *work;                                        // the same, beside other work
 *     if (tddp_all_reduce(group, b, TDDP_REDUCE_SUM, 0, &work)) die(tddp_error_message());
 *     ...
 *     if (tddp_work_wait(work, NULL)) die(tddp_error_message());
 *     tddp_work_release(work);
 *
 *     tddp_group_shutdown(group, 1000);
 *     tddp_group_release(group);
 *     tddp_store_release(store);
 *
 * Every function that can fail returns a tddp_status and leaves a text for this thread in
 * tddp_error_message(). Out-parameters are set only on success. Strings are UTF-8.
 *
 * Options structs begin with their size, which their initializer sets (TDDP_GROUP_OPTS_INIT, or
 * tddp_group_opts_init() where there are no macros). A program that was compiled against an older
 * libtddp has smaller ones: what it does not know keeps its default. Larger ones are taken as long
 * as what this libtddp does not know is zero, else refused with TDDP_INVALID_ARGUMENT. Below 1.0
 * that holds within a minor version.
 *
 * Not included here: <tddp/backend.h>, <tddp/call.h> and <tddp/cuda.h>, for those who write a
 * backend; <tddp/file.h> and <tddp/heap.h>, which programs that train may use; and
 * <tddp/torch.h> and its like, of libtddp_torch, which needs libtorch.
 */
#ifndef TDDP_H
#define TDDP_H

#include <tddp/buffer.h>
#include <tddp/comm_hook.h>
#include <tddp/flat.h>
#include <tddp/group.h>
#include <tddp/hooks.h>
#include <tddp/log.h>
#include <tddp/memory_stats.h>
#include <tddp/op.h>
#include <tddp/recorder.h>
#include <tddp/reducer.h>
#include <tddp/sharder.h>
#include <tddp/status.h>
#include <tddp/store.h>
#include <tddp/trace.h>
#include <tddp/version.h>
#include <tddp/wait.h>
#include <tddp/work.h>

#endif
