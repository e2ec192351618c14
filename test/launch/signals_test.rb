# frozen_string_literal: true

require_relative "launch_case"

# torchrun is told to end, or is killed: nobody is left.
class SignalsTest < LaunchCase
  WAITING = "trap 'echo $RANK got %s; exit 0' %s; echo ready; sleep 60 & wait"

  def waiting(name)
    shell(format(WAITING, name, name))
  end

  def ready(run, count = 2)
    run.await(/(ready\n){#{count}}/)
  end

  %w[INT TERM HUP QUIT].each do |name|
    define_method("test_#{name.downcase}_is_passed_on") do
      run = start("--nproc-per-node=2", *waiting(name))
      ready(run)
      run.signal(name)
      result = run.finish(limit: 5)
      assert_code 128 + Signal.list[name], result
      assert_equal ["0 got #{name}\n", "1 got #{name}\n"], result.out.lines.grep(/got/).sort
      assert_match(/torchrun: SIG#{name}: ending the workers/, result.err)
    end
  end

  # A terminal's Ctrl-C reaches the foreground process group, which the workers are not in.
  def test_ctrl_c_for_the_process_group
    run = start("--nproc-per-node=2", *waiting("INT"), pgroup: true)
    ready(run)
    Process.kill(:INT, -run.pid)
    result = run.finish(limit: 5)
    assert_code 130, result
    assert_equal 2, result.out.scan("got INT").size
  end

  def test_a_signal_before_there_are_workers
    run = start("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:#{free_port}", *shell("echo no"))
    sleep 0.3
    run.signal(:INT)
    result = run.finish(limit: 5)
    assert_code 130, result
    assert_equal "torchrun: SIGINT: leaving the job; once more: at once\n", result.err
  end

  def test_a_second_signal_kills_at_once
    run = start("--nproc-per-node=2", *shell("trap '' INT TERM; echo ready; while :; do sleep 1; done"))
    ready(run)
    run.signal(:INT)
    run.await(/ending the workers/, stream: :err)
    sleep 0.2
    started = Process.clock_gettime(Process::CLOCK_MONOTONIC)
    run.signal(:INT)
    assert_code 130, run.finish(limit: 5)
    assert_operator Process.clock_gettime(Process::CLOCK_MONOTONIC) - started, :<, 1
  end

  def test_a_signal_has_its_shutdown_timeout
    run = start("--shutdown-timeout=0.3", *shell("trap '' TERM; echo ready; while :; do sleep 1; done"))
    ready(run, 1)
    run.signal(:TERM)
    result = run.finish(limit: 5)
    assert_code 143, result
    assert_match(/did not end within 0\.3 s/, result.err)
  end

  def test_nohup_holds
    run = start("trap '' HUP; exec #{BINARY} #{shell("echo ready; sleep 0.5; echo done").join(" ")}", command: %w[sh -c])
    ready(run, 1)
    run.signal(:HUP)
    result = run.finish
    assert_code 0, result
    assert_includes result.out, "done"
  end

  def test_many_random_kills_leave_nobody
    random = Random.new(7)
    worker = shell("sleep 30 & (sleep 30 & exec sleep 30) & echo ready; wait")
    @leaves_files = true
    15.times do
      run = start("--nproc-per-node=2", "--shutdown-timeout=1", *worker)
      sleep random.rand(0.06)
      run.signal(%w[TERM INT HUP QUIT].sample(random: random))
      run.signal(:TERM) if random.rand < 0.3
      run.finish(limit: 6)
      assert_empty marked
    end
  end

  def test_a_job_can_be_stopped_and_continued
    run = start("--nproc-per-node=2", *shell("echo ready; sleep 0.5; echo done"))
    ready(run)
    run.signal(:STOP)
    sleep 0.7
    run.signal(:CONT)
    result = run.finish
    assert_code 0, result
    assert_equal 2, result.out.scan("done").size
  end
end
