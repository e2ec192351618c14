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
    ended = Array.new(4) { Event.new }
    results = Distributed.fork_world(4) do |rank, port|
      # The last rank ends first.
      ended[rank + 1]&.wait
      ended[rank].set
      [rank, port, Process.pid, ENV.values_at("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"), ENV["MASTER_PORT"].to_i]
    end
    assert_equal [0, 1, 2, 3], results.map(&:first)
    assert_equal 4, results.map { |result| result[2] }.uniq.size
    ports = results.map { |result| [result[1], result[4]] }.uniq
    assert_equal [1, 2], [ports.size, ports.flatten.uniq.size]
    results.each { |rank, _, _, variables| assert_equal [rank.to_s, "4", rank.to_s, "4", "127.0.0.1"], variables }
    assert_no_children
  end

  def test_the_store_listens_to_this_host_alone
    addresses = Distributed.fork_world(1) do |_rank, _port|
      Distributed.init_process_group("gloo")
      listening(Integer(ENV.fetch("MASTER_PORT")))
    end
    assert_equal [["0100007F"]], addresses
  end

  # The store is this process's: no rank takes it along.
  def test_the_store_outlives_every_rank
    open_store = -> { Distributed::TCPStore.new(ENV.fetch("MASTER_ADDR"), ENV.fetch("MASTER_PORT").to_i) }
    values = Distributed.fork_world(2) do |rank|
      Distributed.init_process_group("gloo", timeout: 30)
      Distributed.destroy_process_group
      store = open_store.call
      next store.set("rank 0", Process.pid.to_s) if rank.zero?

      ended = store.get("rank 0").to_i
      await("rank 0 to end") { gone?(ended) || zombie?(ended) }
      open_store.call.set("later", "still here")
      store.get("later")
    end
    assert_equal [nil, "still here"], values
  end

  def threads_of_ours
    Dir.children("/proc/self/task").map { |task| File.read("/proc/self/task/#{task}/comm").chomp }.grep(/tddp/)
  end

  # A fork must not meet the thread of a server.
  def test_this_process_has_no_thread_of_a_store_when_it_forks
    test = self
    2.times do
      seen = []
      hook = Module.new { define_method(:_fork) { super().tap { |pid| seen << test.threads_of_ours if pid != 0 } } }
      Process.singleton_class.prepend(hook)
      Distributed.fork_world(2) { Distributed.init_process_group("gloo") && Distributed.barrier }
      hook.send(:remove_method, :_fork)
      assert_equal [[], []], seen
      assert_equal [], threads_of_ours
    end
  end

  def test_the_reserved_port_is_free_for_a_store_of_the_blocks_own
    read = Event.new
    values = Distributed.fork_world(2) do |rank, port|
      store = Distributed::TCPStore.new("127.0.0.1", port, 2, rank.zero?)
      store.set("from#{rank}", rank.to_s)
      # It ends with rank 0.
      store.get("from#{1 - rank}").tap { rank.zero? ? read.wait : read.set }
    end
    assert_equal %w[1 0], values
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
    deaf = Event.new
    error = assert_raises(Distributed::WorkerError) do
      Distributed.fork_world(2) do |rank|
        deaf.wait || raise("now") if rank.zero?

        trap("TERM", "IGNORE")
        deaf.set
        sleep
      end
    end
    assert_match(/rank 0 .*RuntimeError: now/, error.message)
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
    await("the processes to end") { pids.all? { |pid| gone?(pid) || zombie?(pid) } }
  end

  # Orphans are reaped by the system's first process, which is not ours to hurry.
  def zombie?(pid)
    File.read("/proc/#{pid}/stat")[/\) (\w)/, 1] == "Z"
  rescue Errno::ENOENT, Errno::ESRCH
    true
  end

  def test_an_interrupted_parent_leaves_nobody
    reader, writer = IO.pipe
    here = Thread.current
    pids = nil
    Thread.new do
      pids = [reader.gets, reader.gets].map(&:to_i)
      here.raise(IOError, "enough")
    end
    assert_raises(IOError) { Distributed.fork_world(2) { writer.puts(Process.pid) || sleep } }
    assert(pids.all? { |pid| gone?(pid) })
    assert_no_children
    assert_equal [], threads_of_ours
  end

  def test_a_killed_parent_leaves_nobody
    reader, writer = IO.pipe
    parent = fork do
      Distributed.fork_world(2) { writer.puts(Process.pid) || sleep }
    end
    pids = [reader.gets, reader.gets].map(&:to_i)
    Process.kill(:KILL, parent)
    Process.wait(parent)
    await("the processes to end") { pids.all? { |pid| gone?(pid) || zombie?(pid) } }
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

  def test_spawned_processes_run_this_test_up_to_here_and_can_run_backward
    answer = 42
    results = world(2, start_method: :spawn) do |rank|
      model = Torch::NN::Parallel::DistributedDataParallel.new(Torch::NN::Linear.new(1, 1, bias: false))
      model.call(Torch.tensor([[rank + 1.0]])).sum.backward
      [rank, answer, Distributed.all_reduce(Torch.tensor([rank + 1.0])).item, ENV["RANK"], model.parameters.first.grad.sum.item, Process.pid]
    end
    assert_equal [[0, 42, 3.0, "0", 1.5], [1, 42, 3.0, "1", 1.5]], results.map { |result| result[0..4] }
    refute_includes results.map(&:last), Process.pid
    assert_no_children
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
