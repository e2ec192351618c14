# frozen_string_literal: true

require_relative "launch_case"

# torchrun is told to end, or is killed: nobody is left.
class SignalsTest < LaunchCase
  def waiting(name)
    shell("trap 'echo $RANK got #{name}; exit 0' #{name}; echo ready; #{IDLE}")
  end

  def ready(run, count = 2)
    run.await(/(ready\n){#{count}}/)
  end

  %w[INT TERM HUP QUIT].each do |name|
    define_method("test_#{name.downcase}_is_passed_on") do
      run = start("--nproc-per-node=2", *waiting(name))
      ready(run)
      run.signal(name)
      result = run.finish
      assert_code 128 + Signal.list[name], result
      assert_equal ["0 got #{name}\n", "1 got #{name}\n"], result.out.lines.grep(/got/).sort
      assert_match(/torchrun: SIG#{name} received: stopping workers; send it again to kill them$/, result.err)
    end
  end

  # A terminal's Ctrl-C reaches the foreground process group, which the workers are not in.
  def test_ctrl_c_for_the_process_group
    run = start("--nproc-per-node=2", *waiting("INT"), pgroup: true)
    ready(run)
    Process.kill(:INT, -run.pid)
    result = run.finish
    assert_code 130, result
    assert_equal 2, result.out.scan("got INT").size
  end

  def test_a_signal_before_there_are_workers
    run = start("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:#{free_port}", *shell("echo no"))
    eventually("the agent") { run.agent }
    run.signal(:INT)
    result = run.finish
    assert_code 130, result
    assert_equal "torchrun: SIGINT received: leaving the job\n", result.err
  end

  # --- one signal, and two

  def test_the_same_signal_again_kills_at_once
    run = start("--nproc-per-node=2", "--shutdown-timeout=3600", *shell("trap '' INT TERM; echo ready; #{IDLE}"))
    ready(run)
    run.signal(:INT)
    run.await(/stopping workers/, stream: :err)
    assert_code 130, run.insist(:INT)
  end

  # systemd sends SIGHUP after SIGTERM: that is no impatience.
  def test_another_signal_leaves_the_workers_their_time
    run = start(*shell(<<~SH))
      trap 'echo told; while [ ! -e go ]; do sleep 0.05; done; echo saved; exit 0' TERM
      trap 'echo hung up' HUP
      echo ready
      #{IDLE}
    SH
    ready(run, 1)
    run.signal(:TERM)
    run.await(/told/)
    run.signal(:HUP)
    run.await(/^torchrun: SIGHUP received: workers are being stopped already; send it again to kill them$/, stream: :err)
    run.signal(:QUIT)
    run.await(/^torchrun: SIGQUIT received: /, stream: :err)
    File.write("#{@folder}/go", "")
    result = run.finish
    assert_code 143, result
    assert_equal "ready\ntold\nsaved\n", result.out
  end

  def test_another_signal_again_kills_at_once
    run = start("--shutdown-timeout=3600", *shell("trap '' TERM; echo ready; #{IDLE}"))
    ready(run, 1)
    run.signal(:TERM)
    run.await(/SIGTERM received: stopping workers/, stream: :err)
    run.signal(:HUP)
    run.await(/SIGHUP received: /, stream: :err)
    assert_code 143, run.insist(:HUP)
  end

  def test_a_signal_has_its_shutdown_timeout
    run = start("--shutdown-timeout=0.3", *shell("trap '' TERM; echo ready; #{IDLE}"))
    ready(run, 1)
    run.signal(:TERM)
    result = run.finish
    assert_code 143, result
    assert_match(/did not end within 0\.3 s/, result.err)
  end

  # --- what workers have started

  # Its wrapper dies of SIGTERM at once; the program takes a second and looks whether it is told again.
  def test_a_program_behind_a_wrapper_has_the_whole_shutdown_timeout
    run = start(*shell(<<~SH))
      (
        told=0
        trap 'told=$((told + 1))' TERM
        echo ready
        while [ $told = 0 ]; do sleep 0.05; done
        i=0
        while [ $i -lt 20 ]; do i=$((i + 1)); sleep 0.05; done
        echo saved, told $told times
      ) &
      wait
    SH
    ready(run, 1)
    run.signal(:TERM)
    result = run.finish
    assert_code 143, result
    assert_equal "ready\nsaved, told 1 times\n", result.out
  end

  # The same where a worker has failed.
  def test_a_program_behind_a_wrapper_that_fails_has_the_whole_shutdown_timeout
    result = run_torchrun(*shell(<<~SH))
      (
        trap 'i=0; while [ $i -lt 20 ]; do i=$((i + 1)); sleep 0.05; done; echo saved; exit 0' TERM
        : > up
        #{IDLE}
      ) &
      while [ ! -e up ]; do sleep 0.05; done
      exit 3
    SH
    assert_code 1, result
    assert_equal "saved\n", result.out
    assert_match(/FAILED: rank 0, exit code 3/, result.err)
  end

  # What has left its worker's process group is told with it, not after it.
  def test_a_program_in_a_session_of_its_own_is_told_at_once
    run = start("--shutdown-timeout=3600", *shell(<<~SH))
      setsid sh -c "trap ': > told; exit 0' TERM; echo ready; #{IDLE}" &
      trap 'while [ ! -e told ]; do sleep 0.05; done; echo both told; exit 0' TERM
      echo ready
      #{IDLE}
    SH
    ready(run)
    run.signal(:TERM)
    result = run.finish
    assert_code 143, result
    assert_includes result.out, "both told\n"
  end

  # A shell's background processes ignore SIGINT.
  def test_what_ignores_the_signal_is_sent_sigterm_once_its_worker_has_ended
    run = start("--shutdown-timeout=3600", *shell(<<~SH))
      (trap 'echo the rest got TERM; exit 0' TERM; : > up; #{IDLE}) &
      while [ ! -e up ]; do sleep 0.05; done
      trap 'echo the worker got INT; exit 0' INT
      echo ready
      #{IDLE}
    SH
    ready(run, 1)
    run.signal(:INT)
    result = run.finish
    assert_code 130, result
    assert_equal "ready\nthe worker got INT\nthe rest got TERM\n", result.out
  end

  def test_what_a_worker_that_is_done_has_left_is_sent_sigterm
    result = run_torchrun("--shutdown-timeout=3600", *shell(<<~SH))
      (trap 'echo the rest got TERM; exit 0' TERM; : > up; #{IDLE}) &
      while [ ! -e up ]; do sleep 0.05; done
      exit 0
    SH
    assert_code 0, result
    assert_equal "the rest got TERM\n", result.out
  end

  def test_what_is_left_and_deaf_is_killed_when_the_time_is_up
    result = run_torchrun("--shutdown-timeout=0.2", *shell("(trap '' TERM; : > up; #{IDLE}) & while [ ! -e up ]; do sleep 0.05; done; exit 0"))
    assert_code 0, result
    assert_equal "torchrun: what workers had started did not end within 0.2 s (--shutdown-timeout): killed\n", result.err
  end

  # --- the rest

  def test_nohup_holds
    run = start("trap '' HUP; exec #{BINARY} #{shell("echo ready; while [ ! -e go ]; do sleep 0.05; done; echo done").join(" ")}", command: %w[sh -c])
    ready(run, 1)
    run.signal(:HUP)
    File.write("#{@folder}/go", "")
    result = run.finish
    assert_code 0, result
    assert_includes result.out, "done"
  end

  # At any moment: the random pauses are what is tried, nothing is waited for.
  def test_many_random_kills_leave_nobody
    random = Random.new(7)
    worker = shell("sleep 30 & (sleep 30 & exec sleep 30) & echo ready; wait")
    @leaves_files = true
    15.times do
      run = start("--nproc-per-node=2", "--shutdown-timeout=0.5", *worker)
      sleep random.rand(0.06)
      run.signal(%w[TERM INT HUP QUIT].sample(random: random))
      run.signal(:TERM) if random.rand < 0.3
      run.finish
      assert_empty marked
    end
  end

  # Ctrl-Z stops the workers with torchrun from their first moment on. (In a group of its own, whose leader has this process as
  # parent: in an orphaned one nobody stops.)
  def test_ctrl_z_as_soon_as_there_are_workers
    stop = "kill -TSTP $(sed 's/.*) . //; s/ .*//' /proc/$PPID/stat); while [ ! -e go ]; do :; done"
    runs = 10.times.map { start(*shell(stop), pgroup: true) }
    states = -> { states_beside_agents(*runs) }
    eventually(-> { "all to be stopped: #{states.call}" }) { states.call == ["T"] * 20 }
    FileUtils.touch("#{@folder}/go")
    runs.each { |run| run.signal(:CONT) }
    runs.each { |run| assert_code 0, run.finish }
  end

  def test_a_job_can_be_stopped_and_continued
    run = start("--nproc-per-node=2", *shell("echo ready; while [ ! -e go ]; do sleep 0.05; done; echo done"))
    ready(run)
    agent = run.agent
    run.signal(:STOP)
    eventually("torchrun to be stopped") { state(run.pid) == "T" }
    File.write("#{@folder}/go", "")
    eventually("the agent to end") { zombie?(agent) }
    run.signal(:CONT)
    result = run.finish
    assert_code 0, result
    assert_equal 2, result.out.scan("done").size
  end
end
