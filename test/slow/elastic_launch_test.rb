# frozen_string_literal: true

require_relative "../ruby/test_helper"

# Jobs under torchrun from within a program. Workers that need no Ruby are a shell's: they start in a moment.
class ElasticLaunchTest < Minitest::Test
  Elastic = Distributed::Elastic
  LaunchConfig = Elastic::LaunchConfig

  def shell(code)
    File.join(@folder, "worker.sh").tap do |path|
      File.write(path, "#!/bin/sh\n#{code}\n")
      File.chmod(0o755, path)
    end
  end

  def setup
    @folder = Dir.mktmpdir
  end

  def teardown
    FileUtils.rm_rf(@folder)
  end

  # What torchrun writes to standard error, as well.
  def failed
    error = nil
    _, report = capture_subprocess_io { error = assert_raises(Distributed::Error) { yield } }
    [error, report]
  end

  # Earlier calls give the workers what they gave here.
  def test_a_block_runs_on_every_rank
    earlier = Distributed.fork_world(1) { Process.pid }
    values = Elastic.launch(LaunchConfig.new(nproc_per_node: 2), 10) do |offset|
      Distributed.init_process_group { |group| [Distributed.all_reduce(Torch.tensor([offset + group.rank])).item, earlier] }
    end
    assert_equal({0 => [21, earlier], 1 => [21, earlier]}, values)
  end

  def answer(add)
    raise ArgumentError, "the first attempt" if ENV["TORCHELASTIC_RESTART_COUNT"] == "0"

    add + 2
  end

  def test_a_method_runs_again_after_a_failure
    value = nil
    _, report = capture_subprocess_io { value = Elastic.launch(method(:answer), LaunchConfig.new(max_restarts: 1), 40) }
    assert_equal({0 => 42}, value)
    assert_match(/ArgumentError: the first attempt/, report)
  end

  def test_a_value_that_cannot_be_sent
    error, = failed { Elastic.launch(LaunchConfig.new(max_restarts: 0)) { Torch.ones(1) } }
    assert_match(/TypeError: the block's value cannot be sent to the parent .*to_a/, error.message)
  end

  def test_a_script_and_how_it_fails
    script = shell("[ $1 = two ] && [ $RANK = 1 ] && exit 3; [ $1 = nine ] && kill -9 $$; exit 0")
    config = LaunchConfig.new(nproc_per_node: 2, max_restarts: 0, role: "trainer")
    assert_equal({0 => nil, 1 => nil}, Elastic.launch(script, config, :one))
    error, = failed { Elastic.launch(script, config, :two) }
    assert_equal [1, [1], 3, nil, script], [error.rank, error.failures.keys, error.failures[1].exitcode, error.failures[1].signal, error.name]
    assert_equal [1, error.failures[1]], error.first_failure
    error, = failed { Elastic.launch(script, config, :nine) }
    assert_equal [-9, "SIGKILL"], error.first_failure.last.to_h.values_at(:exitcode, :signal)
    assert_match(/was killed by SIGKILL\z/, error.message)
  end

  def test_the_exception_of_a_script_in_ruby
    File.write("#{@folder}/worker.rb", "raise ArgumentError, ARGV.inspect")
    error, report = failed { Elastic.launch("#{@folder}/worker.rb", LaunchConfig.new(max_restarts: 0), "--rate", 1) }
    assert_equal [Elastic::ChildFailedError, 0, "ArgumentError"], [error.class, error.rank, error.worker_class]
    assert_match(/\Arank 0 \(process \d+\) ended with status 1: ArgumentError: \["--rate", "1"\]\z/, error.message)
    assert_match(/worker\.rb:1/, error.worker_backtrace.first)
    assert_match(/ArgumentError/, report)
  end

  def test_an_exception_from_outside_ends_the_workers
    script = shell("echo $$ > #{@folder}/pid; mv #{@folder}/pid #{@folder}/started; exec sleep 600")
    waiting = Thread.current
    other = Thread.new do
      await("the worker") { File.exist?("#{@folder}/started") }
      waiting.raise(IOError, "enough")
    end
    capture_subprocess_io { assert_equal "enough", assert_raises(IOError) { Elastic.launch(script, LaunchConfig.new) }.message }
    other.join
    assert_raises(Errno::ESRCH) { Process.kill(0, File.read("#{@folder}/started").to_i) }
    assert_raises(Errno::ECHILD) { Process.wait }
  end

  # Each gets the values of its own workers; the failure of the other's is raised on both.
  def test_two_nodes
    script = shell("[ $1 = ends ] || [ $RANK != 1 ] || exit 3; [ $1 = ends ] || exec sleep 600")
    config = LaunchConfig.new(min_nodes: 2, nproc_per_node: 1, max_restarts: 0, run_id: "nodes", rdzv_endpoint: "127.0.0.1:#{held_port}")
    results = Distributed.fork_world(2) do
      $stderr.reopen(File::NULL)
      error = assert_raises(Elastic::ChildFailedError) { Elastic.launch(script, config, "fails") }
      [Elastic.launch(script, config, "ends"), error.rank, error.failures.keys, error.message]
    end
    assert_equal [[0], [1]], results.map { |values, *| values.keys }.sort
    assert_equal [[nil, []], [1, [1]]], results.map { |_, *failure, _| failure }.sort_by { |rank, _| rank.to_i }
    results.each { |*, message| assert_match(/rank 1 .*(exit code|status) 3/, message) }
  end

  def test_a_killed_program_leaves_no_worker
    script = shell("echo $$ > #{@folder}/pid; mv #{@folder}/pid #{@folder}/started; exec sleep 600")
    program = fork do
      [$stdout, $stderr].each { |io| io.reopen(File::NULL) }
      ENV["TMPDIR"] = @folder
      Elastic.launch(script, LaunchConfig.new)
    end
    await("the worker") { File.exist?("#{@folder}/started") }
    Process.kill(:KILL, program)
    Process.wait(program)
    worker = File.read("#{@folder}/started").to_i
    await("the worker's end") { !File.exist?("/proc/#{worker}") }
  end

  def test_a_job_that_ends_otherwise
    script = shell("kill -TERM $(cat /proc/$PPID/stat | cut -d' ' -f4); exec sleep 600")
    error, = failed { Elastic.launch(script, LaunchConfig.new) }
    assert_equal [Distributed::Error, "the job was ended by SIGTERM"], [error.class, error.message]
    error, report = failed { Elastic.launch("no-such-program", LaunchConfig.new) }
    assert_match(/started no worker/, error.message)
    assert_match(/program no-such-program: not found/, report)
    error, report = failed { Elastic.launch(script, LaunchConfig.new(rdzv_backend: "pigeon")) }
    assert_equal Distributed::InvalidArgumentError, error.class
    assert_match(/--rdzv-backend=pigeon: expected/, report)
  end

  def test_the_flags
    config = LaunchConfig.new(min_nodes: 1, max_nodes: 4, nproc_per_node: :gpu, rdzv_endpoint: "host:1", run_id: "job", rdzv_timeout: 1.5,
      rdzv_configs: {rank: 2, last_call_timeout: 3}, tee: 3)
    expected = %w[--nnodes=1:4 --node-rank=2 --rdzv-conf=last_call_timeout=3,join_timeout=2 --rdzv-id=job --nproc-per-node=gpu
      --max-restarts=3 --rdzv-backend=c10d --rdzv-endpoint=host:1 --role=default_role --monitor-interval=0.1 --start-method=spawn --tee=3]
    assert_equal expected, config.flags
  end

  def test_wrong_arguments_are_named
    config = LaunchConfig.new
    {
      /config: expected a LaunchConfig, got 3/ => -> { Elastic.launch("x.rb", 3) },
      /expected a block or something to call, got both/ => -> { Elastic.launch(:x, config) {} },
      /there is no script x\.rb/ => -> { Elastic.launch("x.rb", config) },
      /entry: expected a Proc, .*got 5/ => -> { Elastic.launch(5, config) },
      /no method no_such_method/ => -> { Elastic.launch(:no_such_method, config) },
      /min_nodes: expected a whole number from 1, got 0/ => -> { Elastic.launch("x.rb", LaunchConfig.new(min_nodes: 0)) },
      /max_nodes: expected a whole number from 2, got 1/ => -> { Elastic.launch("x.rb", LaunchConfig.new(min_nodes: 2, max_nodes: 1)) },
      /nproc_per_node: .*got "many"/ => -> { Elastic.launch("x.rb", LaunchConfig.new(nproc_per_node: "many")) },
      /max_restarts: .*got -1/ => -> { Elastic.launch("x.rb", LaunchConfig.new(max_restarts: -1)) },
      /rdzv_configs: .*got \[\]/ => -> { Elastic.launch("x.rb", LaunchConfig.new(rdzv_configs: [])) },
      /rdzv_timeout: .*got 0/ => -> { Elastic.launch("x.rb", LaunchConfig.new(rdzv_timeout: 0)) },
      /unknown keywords: speed/ => -> { LaunchConfig.new(speed: 1) }
    }.each { |pattern, call| assert_match(pattern, assert_raises(ArgumentError, TypeError, &call).message) }
  end
end
