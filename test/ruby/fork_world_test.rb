# frozen_string_literal: true

require_relative "test_helper"

class ForkWorldTest < Minitest::Test
  def gone?(pid)
    Process.kill(0, pid)
    false
  rescue Errno::ESRCH
    true
  end

  def assert_no_children
    assert_raises(Errno::ECHILD) { Process.wait(-1, Process::WNOHANG) }
  end

  def test_results_come_by_rank
    results = Distributed.fork_world(4) do |rank, port|
      sleep 0.05 * (4 - rank)
      [rank, port, Process.pid, ENV.values_at("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"), ENV["MASTER_PORT"].to_i]
    end
    assert_equal [0, 1, 2, 3], results.map(&:first)
    assert_equal 4, results.map { |result| result[2] }.uniq.size
    assert_equal 1, results.map { |result| result[1] }.uniq.size
    results.each do |rank, port, _, variables, master_port|
      assert_equal [rank.to_s, "4", rank.to_s, "4", "127.0.0.1"], variables
      assert_equal port, master_port
    end
    assert_no_children
  end

  def test_large_and_empty_results
    results = Distributed.fork_world(3) { |rank| rank.zero? ? nil : "x" * (rank * 3_000_000) }
    assert_equal [nil, 3_000_000, 6_000_000], results.map { |result| result&.size }
  end

  def test_a_failing_process_is_told_with_its_rank_message_and_place
    error = assert_raises(Distributed::WorkerError) do
      Distributed.fork_world(3) { |rank| (rank == 1) ? raise(IOError, "the disk is full") : sleep }
    end
    assert_kind_of Torch::Error, error
    assert_equal [1, "IOError"], [error.rank, error.worker_class]
    assert_match(/\Arank 1 \(process \d+\) failed: IOError: the disk is full\n.*fork_world_test\.rb:\d+/, error.message)
    assert_match(/fork_world_test\.rb/, error.worker_backtrace.first)
    assert_no_children
  end

  def test_a_cause_is_told_rather_than_its_consequence
    error = assert_raises(Distributed::WorkerError) do
      world(3) do |rank|
        Distributed.barrier
        raise "the cause" if rank == 2
        Distributed.all_reduce(Torch.ones(1))
      end
    end
    assert_match(/rank 2 .*RuntimeError: the cause/, error.message)
  end

  def test_ends_of_processes
    {
      -> { Process.kill(:KILL, Process.pid) and sleep } => /rank 0 \(process \d+\) was killed by SIGKILL/,
      -> { exit!(7) } => /rank 0 \(process \d+\) ended with status 7 before the block's value came/,
      -> { exit(3) } => /the block called exit\(3\)/,
      -> { abort } => /the block called exit\(1\)/,
      -> { Thread.new {} } => /the block's value cannot be sent to the parent.*to_a/,
      -> { Torch.ones(1) } => /the block's value cannot be sent to the parent.*to_a/,
      -> { flunk "an assertion" } => /Minitest::Assertion: an assertion/,
      -> { throw :nobody } => /UncaughtThrowError/
    }.each do |block, text|
      error = assert_raises(Distributed::WorkerError) { Distributed.fork_world(1) { block.call } }
      assert_match text, error.message
    end
    assert_equal [nil], Distributed.fork_world(1) { exit }
    assert_no_children
  end

  def test_a_process_that_ignores_term_is_killed
    elapsed = seconds do
      assert_raises(Distributed::WorkerError) do
        Distributed.fork_world(2) do |rank|
          trap("TERM", "IGNORE")
          raise "now" if rank.zero? && sleep(0.3)
          sleep
        end
      end
    end
    assert_operator elapsed, :<, 10
    assert_no_children
  end

  def test_what_a_worker_started_ends_with_it
    reader, writer = IO.pipe
    assert_raises(Distributed::WorkerError) do
      Distributed.fork_world(1) do
        writer.puts Process.spawn("sleep 100")
        writer.puts fork { sleep 100 }
        raise "now"
      end
    end
    pids = [reader.gets, reader.gets].map(&:to_i)
    deadline = Process.clock_gettime(Process::CLOCK_MONOTONIC) + 5
    sleep 0.02 until pids.all? { |pid| gone?(pid) || zombie?(pid) } || Process.clock_gettime(Process::CLOCK_MONOTONIC) > deadline
    assert(pids.all? { |pid| gone?(pid) || zombie?(pid) })
  end

  # Orphans are reaped by the system's first process, which is not ours to hurry.
  def zombie?(pid)
    File.read("/proc/#{pid}/stat")[/\) (\w)/, 1] == "Z"
  rescue Errno::ENOENT, Errno::ESRCH
    true
  end

  def test_an_interrupted_parent_leaves_nobody
    reader, writer = IO.pipe
    elapsed = seconds do
      assert_raises(Timeout::Error) do
        Timeout.timeout(0.5) { Distributed.fork_world(2) { writer.puts(Process.pid) || sleep } }
      end
    end
    assert_operator elapsed, :<, 6
    assert [reader.gets, reader.gets].map(&:to_i).all? { |pid| gone?(pid) }
    assert_no_children
  end

  def test_a_killed_parent_leaves_nobody
    reader, writer = IO.pipe
    parent = fork do
      Distributed.fork_world(2) { writer.puts(Process.pid) || sleep }
    end
    pids = [reader.gets, reader.gets].map(&:to_i)
    Process.kill(:KILL, parent)
    Process.wait(parent)
    deadline = Process.clock_gettime(Process::CLOCK_MONOTONIC) + 5
    sleep 0.02 until pids.all? { |pid| gone?(pid) || zombie?(pid) } || Process.clock_gettime(Process::CLOCK_MONOTONIC) > deadline
    assert(pids.all? { |pid| gone?(pid) || zombie?(pid) })
  end

  def test_exit_handlers_are_the_parents
    out, err, status = ruby(<<~RUBY)
      at_exit { puts "once" }
      puts Torch::Distributed.fork_world(2) { |rank| puts "from a worker"; rank }.inspect
    RUBY
    assert_equal ["", 0], [err, status.exitstatus]
    assert_equal ["[0, 1]", "from a worker", "from a worker", "once"], out.lines(chomp: true).sort
  end

  def test_libtorchs_threads_do_not_hang_the_copies
    work = -> { Torch.ones(400, 400).matmul(Torch.ones(400, 400)).exp.sum.item.infinite? }
    work.call
    assert_equal [1, 1], Timeout.timeout(30) { Distributed.fork_world(2) { work.call } }
  end

  def test_wrong_arguments_are_named
    assert_match(/block/, assert_raises(ArgumentError) { Distributed.fork_world(2) }.message)
    [0, -1, "two"].each do |size|
      assert_match(/world_size: expected 1 or more, got #{size.inspect}/, assert_raises(ArgumentError) { Distributed.fork_world(size) {} }.message)
    end
    assert_match(/:fork or :spawn, got :thread/, assert_raises(ArgumentError) { Distributed.fork_world(1, start_method: :thread) {} }.message)
    assert_match(/192\.0\.2\.1/, assert_raises(Distributed::NetworkError) { Distributed.fork_world(1, host: "192.0.2.1") {} }.message)
  end

  def test_a_free_port
    port = Distributed.free_port
    assert_includes 1..65_535, port
    TCPServer.new("127.0.0.1", port).close
  end

  # --- spawn -----------------------------------------------------------------------------------

  def test_spawned_processes_run_this_test_up_to_here
    answer = 42
    results = world(2, start_method: :spawn) do |rank|
      [rank, answer, Distributed.all_reduce(Torch.tensor([rank + 1.0])).item, ENV["RANK"], Process.pid]
    end
    assert_equal [[0, 42, 3.0, "0"], [1, 42, 3.0, "1"]], results.map { |result| result[0..3] }
    refute_includes results.map(&:last), Process.pid
    assert_no_children
  end

  def test_backward_runs_in_spawned_processes
    gradients = world(2, start_method: :spawn) do |rank|
      model = Torch::NN::Parallel::DistributedDataParallel.new(Torch::NN::Linear.new(1, 1, bias: false))
      model.call(Torch.tensor([[rank + 1.0]])).sum.backward
      model.parameters.first.grad.sum.item
    end
    assert_equal [1.5, 1.5], gradients
  end

  def spawning(program)
    Dir.mktmpdir do |folder|
      File.write(File.join(folder, "program.rb"), "require \"torch/distributed\"\n" + program)
      paths = $LOAD_PATH.flat_map { |path| ["-I", path] }
      Timeout.timeout(60) { Open3.capture3(RbConfig.ruby, *paths, File.join(folder, "program.rb"), "argument") }
    end
  end

  def test_a_program_finds_the_turn_of_its_loop
    out, err, status = spawning(<<~RUBY)
      first = Torch::Distributed.fork_world(2) { |rank| [rank, Process.pid] }
      results = [1, 2].map do |size|
        Torch::Distributed.fork_world(size, start_method: :spawn) { |rank, _| [rank, size, ARGV, first] }
      end
      failed = begin
        Torch::Distributed.fork_world(1, start_method: :spawn) { raise "in the worker" }
      rescue Torch::Distributed::WorkerError => e
        e.message.lines.first.sub(/process \\d+/, "process N").chomp
      end
      puts [results.flatten(1).map { |result| result[0..2] }, results.flatten(1).all? { |result| result[3] == first }, failed].inspect
    RUBY
    assert_equal "", err
    assert status.success?
    assert_equal '[[[0, 1, ["argument"]], [0, 2, ["argument"]], [1, 2, ["argument"]]], true, ' \
      '"rank 0 (process N) failed: RuntimeError: in the worker"]', out.chomp
  end

  def test_a_program_that_steers_its_processes_by_the_environment
    out, err, status = spawning(<<~RUBY)
      turns = ENV["TURN"] ? [ENV["TURN"]] : %w[a b]
      results = turns.map do |turn|
        ENV["TURN"] = turn
        Torch::Distributed.fork_world(1, start_method: :spawn) { |rank, _| [turn, turns] }
      ensure
        ENV.delete("TURN")
      end
      puts results.inspect
    RUBY
    assert_equal ["", '[[["a", ["a"]]], [["b", ["b"]]]]'], [err, out.chomp]
    assert status.success?
  end

  def test_a_program_that_does_not_come_to_its_call
    _, err, status = spawning(<<~RUBY)
      exit if ENV[Torch::Distributed::SPAWN_ENV_KEY]
      Torch::Distributed.fork_world(1, start_method: :spawn) { 1 }
    RUBY
    refute status.success?
    assert_match(/rank 0 \(process \d+\) ended with status 0 before the block's value came/, err)
  end

  def test_code_on_the_command_line_cannot_be_run_again
    _, err, status = ruby("Torch::Distributed.fork_world(1, start_method: :spawn) { 1 }")
    refute status.success?
    assert_match(/-e is no file.*:fork/, err)
  end

  # What other tools that start such processes rely on: one Marshal dump in the pipe.
  def test_the_variables_of_a_spawned_process
    reader, writer = IO.pipe
    pid = fork do
      reader.close
      ENV.update(Distributed::SPAWN_ENV_KEY => "1", Distributed::SPAWN_RANK_ENV_KEY => "0", Distributed::SPAWN_WORLD_SIZE_ENV_KEY => "1",
        Distributed::SPAWN_PORT_ENV_KEY => "1234", Distributed::SPAWN_PIPE_ENV_KEY => writer.fileno.to_s)
      Distributed.fork_world(1, start_method: :spawn) { |rank, port| [rank, port] }
    end
    writer.close
    assert_equal [0, 1234], Marshal.load(reader)
    assert Process.wait2(pid)[1].success?
  end
end
