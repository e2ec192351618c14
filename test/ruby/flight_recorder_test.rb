# frozen_string_literal: true

require_relative "test_helper"
require "stringio"
require "tmpdir"
require "torch_ddp/flight_trace"

# The flight recorder from Ruby: on request, on a signal, on a failure; and torchfrtrace on what it wrote.
class FlightRecorderTest < Minitest::Test
  def trace(folder)
    out = StringIO.new
    status = TorchDDP::FlightTrace::Command.new(out: out, err: out).run([folder])
    [status, out.string]
  end

  def test_on_request
    Dir.mktmpdir do |folder|
      files = Distributed.fork_world(2) do
        Distributed.init_process_group("gloo")
        Distributed.all_reduce(Torch.ones(3))
        Distributed.broadcast(Torch.ones(2), src: 1)
        Distributed.barrier
        Distributed.dump_flight_recorder("#{folder}/")
      end
      assert_equal [1, 1], files
      status, text = trace(folder)
      assert_equal 0, status, text
      assert_includes text, "2 of the job's ranks wrote: 0, 1"
      assert_includes text, "barrier 3 is done"
    end
  end

  # In a process of its own: a group that is destroyed is known until its object is collected.
  def test_without_a_group_or_a_place
    out, err, status = ruby("p Torch::Distributed.dump_flight_recorder('/dev/null/'), Torch::Distributed.dump_flight_recorder")
    assert status.success?, err
    assert_equal "0\n0\n", out
  end

  def test_a_place_that_cannot_be_written
    message = Distributed.fork_world(1) do
      Distributed.init_process_group("gloo")
      Distributed.dump_flight_recorder("/dev/null/folder/")
    rescue Distributed::SystemError => e
      e.message
    end.first
    assert_includes message, "/dev/null/folder/"
  end

  # As torchrun does it when another worker has failed.
  def test_a_process_that_is_terminated
    Dir.mktmpdir do |folder|
      _, errors, status = ruby(<<~RUBY, env: {"TDDP_FR_DUMP" => "#{folder}/", "RANK" => "0", "WORLD_SIZE" => "1", "MASTER_PORT" => "0"})
        Torch::Distributed.init_process_group("gloo", store: Torch::Distributed::HashStore.new, rank: 0, world_size: 1)
        Torch::Distributed.all_reduce(Torch.ones(3))
        Process.kill(:TERM, Process.pid)
        sleep 10
      RUBY
      assert_equal Signal.list["TERM"], status.termsig, errors
      assert_includes trace(folder).last, "all_reduce 1 (3 float32 elements, sum) is done"
    end
  end

  def test_on_a_signal_while_waiting
    dumped = Event.new
    Dir.mktmpdir do |folder|
      with_env("TDDP_FR_DUMP" => "#{folder}/") do
        called = Distributed.fork_world(2) do |rank|
          called = false
          trap("USR1") { called = true }
          Distributed.init_process_group("gloo")
          if rank.zero?
            when_waiting do
              Process.kill("USR1", Process.pid)
              # What was there before is called after the recorder has written.
              await("the handler") { called }
              dumped.set
            end
          else
            dumped.wait
          end
          Distributed.all_reduce(Torch.ones(1))
          Process.kill("USR1", Process.pid) if rank == 1
          await("the handler") { called }
        end
        assert_equal [true, true], called
        status, text = trace(folder)
        assert_equal 1, status, text
        assert_match(/rank 0 .* in all_reduce 1/, text)
      end
    end
  end

  def test_a_folder_is_made_and_one_that_cannot_be_hides_no_failure
    Dir.mktmpdir do |folder|
      said = ["#{folder}/new/", "#{folder}/not/there/"].map do |place|
        with_env("TDDP_FR_DUMP" => place) do
          Distributed.fork_world(2) do |rank|
            $stderr.reopen(File::NULL) # where the recorder says that it cannot write
            Distributed.init_process_group("gloo")
            Distributed.all_reduce(Torch.ones(rank + 1))
          rescue Distributed::MismatchError => e
            e.message
          end
        end
      end
      said.flatten.each { |message| assert_match(/1 elements? of float32.*2 elements of float32|2 elements of float32.*1 elements? of float32/, message) }
      assert_equal %w[tddp_trace_rank_0 tddp_trace_rank_1], Dir.children("#{folder}/new").sort
    end
  end

  def test_on_a_failure
    Dir.mktmpdir do |folder|
      with_env("TDDP_FR_DUMP" => "#{folder}/") do
        errors = Distributed.fork_world(2) do |rank|
          Distributed.init_process_group("gloo")
          Distributed.barrier
          Distributed.all_reduce(Torch.ones(rank + 1))
        rescue Distributed::Error => e
          e.class.name
        end
        assert_equal ["Torch::Distributed::MismatchError"], errors.uniq
        status, text = trace(folder)
        assert_equal 1, status, text
        assert_includes text, "mismatch: operation 2 differs"
        assert_includes text, "all_reduce 2 (2 float32 elements, sum"
      end
    end
  end
end
