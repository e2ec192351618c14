# frozen_string_literal: true

require_relative "../ruby/test_helper"

# Processes that Torch::Distributed.run has started itself.
class StartedByRunTest < Minitest::Test
  include Worlds

  # In a process of its own.
  def ruby(*arguments, stdin: "")
    out, status = Open3.capture2e(RbConfig.ruby, *$LOAD_PATH.flat_map { |each| ["-I", each] }, *arguments, stdin_data: stdin)
    assert status.success?, out
    out
  end

  def test_run_from_irb
    program = <<~RUBY
      require "torch/distributed"
      mine = 10
      values = Torch::Distributed.run(2, device: "cpu") { |ctx| x = Torch.ones(1, requires_grad: true); (x * (ctx.rank + mine)).sum.backward; [ctx.world_size, Torch::Distributed.all_reduce(x.grad).item] }
      $stdout.puts "values: \#{values}"
    RUBY
    assert_includes ruby("-S", "irb", "-f", "--noecho", stdin: program), "values: [2, 21.0]\n"
    assert_includes ruby("-e", program), "values: [2, 21.0]\n"
  end

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
