# frozen_string_literal: true

require_relative "../ruby/test_helper"

# Processes that Torch::Distributed.run has started itself, and their ends.
class EndsOfRunTest < Minitest::Test
  include Worlds

  def test_a_failure_in_a_process_that_it_started
    error = assert_raises(Distributed::WorkerError) do
      Distributed.run(processes: 2, device: "cpu") { |ctx| (ctx.rank == 1) ? raise(IOError, "the disk is full") : Distributed.barrier }
    end
    assert_equal [1, "IOError"], [error.rank, error.worker_class]
    assert_match(/\Arank 1 \(process \d+\) failed: IOError: the disk is full\n.*run_test/, error.message)
  end

  def test_a_signal_leaves_no_process
    Dir.mktmpdir do |folder|
      path = File.join(folder, "program.rb")
      File.write(path, <<~RUBY)
        require "torch/distributed"
        Torch::Distributed.run(processes: 2) { $stdout.write("\#{Process.pid}\n") && $stdout.flush && sleep }
      RUBY
      reader, writer = IO.pipe
      parent = Process.spawn(RbConfig.ruby, *$LOAD_PATH.flat_map { |each| ["-I", each] }, path, out: writer, err: File::NULL)
      writer.close
      pids = Timeout.timeout(LIMIT) { Array.new(2) { reader.gets.to_i } }
      Process.kill(:TERM, parent)
      assert_equal Signal.list["TERM"], Process.wait2(parent)[1].termsig
      pids.each { |pid| assert_raises(Errno::ESRCH) { Process.kill(0, pid) } }
    end
  end
end
