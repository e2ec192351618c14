# frozen_string_literal: true

require_relative "../ruby/test_helper"
require "json"

# A rank whose program ends by an error: the others, whose operations fail for want of it, read which one.
class LeavingTest < Minitest::Test
  # Each way in two processes of its own, forked by a program that has nothing to do with a test runner: what rank 0 reads when rank 1 leaves.
  PROGRAM = <<~'RUBY'
    require "json"
    require "tmpdir"
    require "torch/distributed"
    include Torch

    class Spoiled < StandardError
      def message = raise("no words")
    end

    def meet(rank, folder)
      Distributed.init_process_group("gloo", init_method: "file://#{folder}/store", rank: rank, world_size: 2, timeout: 60)
    end

    def destroying
      yield
    ensure
      Distributed.destroy_process_group
    end

    WAYS = {
      raised: -> { raise "bad sample in shard 17\nand more of it" },
      words_fail: -> { raise Spoiled },
      binary: -> { raise IOError, "no \0 byte \xff".b },
      exited: -> { exit 3 },
      aborted: -> { abort "no data" },
      ensured: -> { destroying { raise KeyError, "no such file" } },
      handled: -> { raise "handled" rescue destroying { sleep 0 } },
      subgroup: -> { raise "bad sample" }
    }

    def sum(way, rank)
      group = Distributed.new_group([0, 1]) if way == :subgroup
      Distributed.barrier(group: group) if group
      (rank == 1) ? WAYS.fetch(way).call : Distributed.all_reduce(Torch.ones(1), group: group)
      "nothing"
    rescue Distributed::Error => e
      raise if rank == 1
      "#{e.class} #{e.message}"
    end

    WAYS.each_key do |way|
      Dir.mktmpdir do |folder|
        reader, writer = IO.pipe
        pids = [0, 1].map do |rank|
          fork do
            $stderr.reopen(File::NULL)
            meet(rank, folder)
            text = sum(way, rank)
            writer.write(text) if rank == 0
          end
        end
        writer.close
        puts JSON.generate([way, reader.read])
        pids.each { |pid| Process.wait(pid) }
      end
    end
    # Its parent ends the others as soon as it has the message, which comes once rank 0 has read why.
    class Patient < ArgumentError
      def message
        DONE.first.read(1) if @asked
        @asked = true
        "fork_world's"
      end
    end
    DONE = IO.pipe
    reader, writer = IO.pipe
    begin
      Distributed.fork_world(2) do |rank|
        Distributed.init_process_group("gloo")
        next raise(Patient) if rank == 1
        begin
          Distributed.all_reduce(Torch.ones(1))
        rescue Distributed::Error => e
          writer.write("#{e.class} #{e.message}")
          DONE.last.write(".")
        end
      end
    rescue Distributed::WorkerError => e
      raise unless e.message.include?("fork_world's")
    end
    writer.close
    puts JSON.generate(["fork_world", reader.read])
  RUBY

  def test_the_others_read_why
    out, err, status = Open3.capture3(RbConfig.ruby, *$LOAD_PATH.flat_map { |folder| ["-I", folder] }, "-e", PROGRAM)
    assert status.success?, err
    read = out.lines.to_h { |line| JSON.parse(line) }
    expected = {
      "raised" => "RuntimeError: bad sample in shard 17", "words_fail" => "Spoiled", "binary" => "IOError: no ? byte \u{fffd}",
      "exited" => "SystemExit: exit 3", "aborted" => "SystemExit: no data", "ensured" => "KeyError: no such file",
      "subgroup" => "RuntimeError: bad sample", "fork_world" => "Patient: fork_world's"
    }
    expected.each do |way, text|
      assert_match(/\ATorch::Distributed::PeerLostError all_reduce .*rank 1 \(host .*, pid \d+\) has left the group because of an error: #{Regexp.escape(text)}(; seen here|\z)/,
        read.fetch(way), way)
    end
    assert_match(/rank 1 .* has destroyed the group: do all ranks make the same calls\?/, read.fetch("handled"))
  end
end
