# frozen_string_literal: true

require "minitest/autorun"
require "json"
require "open3"
require "rbconfig"
require "stringio"
require "tmpdir"
require "torch_ddp/flight_trace"

# torchfrtrace on files as include/tddp/recorder.h describes them.
class FlightTraceTest < Minitest::Test
  SECOND = 1_000_000_000

  def operation(number, state = "completed", kind: "all_reduce", size: 4, p2p: false, peer: nil, **fields)
    {"pg_id" => 0, "process_group" => ["default_pg", ""], "is_p2p" => p2p, "state" => state,
     "collective_seq_id" => p2p ? 0 : number, "p2p_seq_id" => p2p ? number : 0, "op_id" => number,
     "profiling_name" => "gloo:#{kind}", "input_sizes" => [[size]], "input_dtypes" => ["float32"],
     "output_sizes" => [[size]], "output_dtypes" => ["float32"], "reduce_op" => (kind == "all_reduce") ? "sum" : nil,
     "peer" => peer, "tag" => p2p ? 0 : nil, "fingerprint" => 0, "status" => "TDDP_OK",
     "time_created_ns" => number * SECOND, "time_discovered_completed_ns" => number * SECOND + 5}.merge(fields.transform_keys(&:to_s))
  end

  def write(folder, rank, entries, size: 2, failure: nil)
    members = (0...size).map { |each| {"rank" => each, "global_rank" => each, "host" => "b12", "pid" => 100 + each} }
    File.write(File.join(folder, "tddp_trace_rank_#{rank}"), JSON.generate(
      "version" => "2.10", "rank" => rank, "world_size" => size, "host" => "b12", "pid" => 100 + rank, "written_ns" => 99 * SECOND,
      "pg_config" => {"0" => {"name" => "default_pg", "desc" => "", "ranks" => (0...size).to_a.to_s, "rank" => rank, "size" => size, "members" => members}},
      "pg_status" => {"0" => {"failure" => failure}}, "entries" => entries
    ))
  end

  def trace(*arguments)
    out = StringIO.new
    err = StringIO.new
    status = TorchDDP::FlightTrace::Command.new(out: out, err: err).run(arguments)
    [status, out.string, err.string]
  end

  def in_folder(&block)
    Dir.mktmpdir(&block)
  end

  def test_ranks_that_agree
    in_folder do |folder|
      2.times { |rank| write(folder, rank, [operation(1), operation(2, kind: "broadcast", root: 0)]) }
      status, out, = trace(folder)
      assert_equal 0, status
      assert_includes out, "2 of the job's ranks wrote: 0, 1"
      assert_includes out, "nothing is wrong"
      assert_includes out, "rank 1 (host b12, pid 101): broadcast 2 (4 float32 elements, root 0) is done; in no operation"
    end
  end

  # Files may be another host's: what is printed of them does not act on the terminal.
  def test_names_with_control_characters
    in_folder do |folder|
      write(folder, 0, [operation(1, "started", kind: "\e]0;owned\a\u009b31mred")], size: 1)
      _, out, = trace(folder, "-n", "1")
      assert_includes out, "?]0;owned??31mred"
      refute_match(/[[:cntrl:]&&[^\n]]/, out)
    end
    assert_equal "a\nb\t?é?", TorchDDP.printable("a\r\nb\t\r\u00e9\x7f".b)
  end

  def test_a_rank_that_has_not_come
    in_folder do |folder|
      write(folder, 0, [operation(1), operation(2, "started")])
      write(folder, 1, [operation(1)])
      status, out, = trace(folder)
      assert_equal 1, status
      assert_includes out, "behind: rank 1 (host b12, pid 101) has not come to all_reduce 2 (4 float32 elements, sum): " \
        "its last was all_reduce 1 (4 float32 elements, sum), completed; rank 0 waits there"
    end
  end

  def test_a_rank_that_had_not_come_when_the_others_gave_up
    in_folder do |folder|
      failed = [operation(1), operation(2, "failed", status: "TDDP_TIMEOUT"), operation(3, "failed", status: "TDDP_GROUP_FAILED")]
      2.times { |rank| write(folder, rank, failed, size: 3, failure: "not done after 3000 ms") }
      write(folder, 2, [operation(1)], size: 3)
      _, out, = trace(folder)
      assert_includes out, "failure: the first failure was on rank 0 (host b12, pid 100): not done after 3000 ms"
      assert_includes out, "behind: rank 2 (host b12, pid 102) has not come to all_reduce 2 (4 float32 elements, sum): " \
        "its last was all_reduce 1 (4 float32 elements, sum), completed; ranks 0, 1 failed there"
      assert_includes out, "rank 0 (host b12, pid 100): all_reduce 1 (4 float32 elements, sum) is done; all_reduce 2 (4 float32 elements, sum) failed"
    end
  end

  def test_a_rank_that_calls_something_else
    in_folder do |folder|
      3.times { |rank| write(folder, rank, [operation(1), operation(2, "started", size: (rank == 2) ? 5 : 4)], size: 3) }
      status, out, = trace("--json", folder)
      assert_equal 1, status
      finding = JSON.parse(out)["groups"][0]["findings"].find { |each| each["kind"] == "mismatch" }
      assert_equal [2], finding["ranks"]
      assert_equal "operation 2 differs: ranks 0, 1 ran all_reduce 2 (4 float32 elements, sum); " \
        "rank 2 ran all_reduce 2 (5 float32 elements, sum)", finding["text"]
    end
  end

  def test_uneven_parts_are_no_mismatch
    in_folder do |folder|
      2.times { |rank| write(folder, rank, [operation(1, kind: "all_gather", size: rank)]) }
      assert_equal 0, trace(folder).first
    end
  end

  def test_the_first_failure_is_the_cause
    in_folder do |folder|
      write(folder, 0, [operation(1, "failed", status: "TDDP_PEER_LOST", time_discovered_completed_ns: 9 * SECOND)], failure: "lost rank 1")
      write(folder, 1, [operation(1, "failed", status: "TDDP_SYSTEM", time_discovered_completed_ns: 8 * SECOND)], failure: "disk full")
      _, out, = trace(folder)
      assert_includes out, "failure: the first failure was on rank 1 (host b12, pid 101): disk full"
    end
  end

  def test_a_message_without_a_partner_and_a_silent_rank
    in_folder do |folder|
      write(folder, 0, [operation(1, "started", kind: "recv 0<-1", p2p: true, peer: 1, input_sizes: [], input_dtypes: [])])
      status, out, = trace(folder)
      assert_equal 1, status
      assert_includes out, "message: rank 0 (host b12, pid 100) waits in recv 1 (4 float32 elements) from rank 1 (host b12, pid 101)"
      assert_includes out, "silent: nothing was written by rank 1 (host b12, pid 101): dead, or not asked"
    end
  end

  def test_all_ranks_in_one_operation
    in_folder do |folder|
      2.times { |rank| write(folder, rank, [operation(3, "started")]) }
      _, out, = trace(folder, "--entries", "1")
      assert_includes out, "stuck: all ranks are in all_reduce 3 (4 float32 elements, sum)"
      assert_includes out, "    started   all_reduce 3"
    end
  end

  def test_wrong_use
    in_folder do |folder|
      assert_equal 2, trace.first
      assert_equal 2, trace("--nonsense", folder).first
      assert_match(/no flight recorder's file/, trace(folder).last)
      assert_match(/No such file/, trace(File.join(folder, "absent")).last)
      File.write(File.join(folder, "cut"), "{\"pg_config\"")
      assert_match(/cut: not JSON/, trace(folder).last)
      File.write(File.join(folder, "cut"), "{}")
      assert_match(/cut: expected a flight recorder's JSON/, trace(folder).last)
      File.delete(File.join(folder, "cut"))
      write(folder, 0, [operation(1)])
      assert_match(/rank 0 of group default_pg wrote two/, trace(folder, File.join(folder, "tddp_trace_rank_0")).last)
    end
  end

  def test_help
    status, out, = trace("--help")
    assert_equal 0, status
    assert_includes out, "Usage: torchfrtrace"
  end

  # Both programs, as they are installed.
  def test_the_programs
    %w[torchfrtrace torchtrace].each do |name|
      out, status = Open3.capture2e(RbConfig.ruby, File.expand_path("../../bin/#{name}", __dir__), "--help")
      assert_equal 0, status.exitstatus, out
      assert_includes out, "Usage: #{name}"
    end
  end
end
