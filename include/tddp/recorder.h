/**
 * @file recorder.h
 * @brief The flight recorder: each group's last operations, as JSON for people and tools.
 *
 * Every group remembers its last 2,000 operations. TDDP_FR_BUFFER_SIZE (or PyTorch's
 * TORCH_FR_BUFFER_SIZE, TORCH_NCCL_TRACE_BUFFER_SIZE) sets another number; 0 turns it off. With
 * TDDP_FR_DUMP set, a group that fails or whose operation times out has everything written at once,
 * one file a rank:
 *
 *     TDDP_FR_DUMP=/var/tmp/traces     an existing folder, or a name that ends in a slash, which is
 *                                      made in its folder if it is not there:
 *                                      /var/tmp/traces/tddp_trace_rank_3
 *     TDDP_FR_DUMP=/var/tmp/run7_      anything else is what the file's name begins with:
 *                                      /var/tmp/run7_3
 *
 * PyTorch's TORCH_FR_DUMP_TEMP_FILE and TORCH_NCCL_DEBUG_INFO_TEMP_FILE mean the same where
 * TDDP_FR_DUMP is not set, as such a beginning.
 *
 * A file is a JSON object with the fields of PyTorch's flight recorder where it has them; those
 * marked + are ours:
 *
 *     version          "2.10": PyTorch's number for this form
 *     rank, world_size + this process's place in the group that the others were made from
 *     host, pid        +
 *     written_ns       + when, in nanoseconds since 1970, as all times here
 *     pg_config        by group ("0", "1"...): name, desc, ranks ("[0, 1]": places in the first
 *                      group), and + backend, rank, size, members: for each rank of the group its
 *                      rank, global_rank, host, pid
 *     pg_status        by group: last_enqueued_collective, last_started_collective,
 *                      last_completed_collective (their numbers, -1: none), and + failure: the text
 *                      of the last operation that failed, or null; dropped: how many operations are
 *                      no longer in the ring; messages: sends and receives under way
 *     entries          the operations, oldest first within their group, each with
 *       record_id      counts the group's operations of all kinds from 0
 *       pg_id          the group's number in pg_config
 *       process_group  [name, description]
 *       collective_seq_id, p2p_seq_id, op_id
 *                      the number as error texts have it: the first for operations of all ranks,
 *                      the second for sends and receives, else 0; op_id is whichever it is
 *       profiling_name "gloo:all_reduce", "gloo:send 0->1", "gloo:recv 0<-1" ("<-any")
 *       time_created_ns, time_discovered_started_ns, time_discovered_completed_ns
 *                      queued, started, ended; null: not yet
 *       duration_ms    from start to end; null: not both are known. Of an operation that a
 *                      device executed: how long it ran there, if TORCH_NCCL_ENABLE_TIMING is 1 or
 *                      a trace is written
 *       input_sizes, input_dtypes, output_sizes, output_dtypes
 *                      [[elements]] and ["float32"]; empty for a barrier
 *       state          "scheduled", "started", "completed" or + "failed"
 *       retired        whether it has ended
 *       timeout_ms, is_p2p, thread_id, frames (always [])
 *       + root, reduce_op, peer, tag   null where it has none
 *       + status       "TDDP_TIMEOUT" and so on; "TDDP_OK" unless it failed
 *       + description  what must be equal on all ranks, in words, or null
 *       + fingerprint  of that text; 0: none
 */
#ifndef TDDP_RECORDER_H
#define TDDP_RECORDER_H

#include <tddp/group.h>

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Writes this rank's records of one group, under a temporary name first and then renamed, so that
 * readers never find half a file. Any thread, beside running operations. Errors:
 * TDDP_INVALID_ARGUMENT, TDDP_SYSTEM (the text has the path), TDDP_OUT_OF_MEMORY, TDDP_FORKED.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_group_dump(tddp_group *group, const char *path);

/**
 * Writes the records of all groups of this process, as with TDDP_FR_DUMP set to `prefix`; NULL uses
 * the environment's value. `*files` (may be NULL) is the number of files: 0 if there is no group,
 * or no value is set. Errors as above.
 */
TDDP_API TDDP_NODISCARD tddp_status tddp_recorder_dump_all(const char *prefix, int *files);

#ifdef __cplusplus
}
#endif

#endif
