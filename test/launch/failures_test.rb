# frozen_string_literal: true

require "json"
require_relative "launch_case"

# A worker fails: the others end, the report says who was first, restarts start all again.
class FailuresTest < LaunchCase
  def test_exit_codes_are_in_the_report
    [1, 2, 77, 127, 128, 255].each do |code|
      result = run_torchrun(*shell("exit #{code}"))
      assert_code 1, result
      assert_match(/FAILED: rank 0, exit code #{code}$/, result.err)
      assert_match(/^  exitcode  : #{code} \(pid: \d+\)$/, result.err)
    end
  end

  def test_signals_are_named
    %w[SEGV ABRT KILL TERM USR1 PIPE].each do |name|
      result = run_torchrun(*shell("ulimit -c 0; kill -#{name} $$"))
      assert_code 1, result
      assert_match(/FAILED: rank 0, killed by SIG#{name}$/, result.err)
      assert_match(/^  exitcode  : -#{Signal.list[name]} \(pid: \d+\)$/, result.err)
      assert_match(/^  signal    : killed by SIG#{name}$/, result.err)
    end
  end

  def test_the_first_failure_ends_the_others
    result = run_torchrun("--nproc-per-node=4", *shell(<<~SH))
      if [ $RANK = 2 ]; then sleep 0.3; exit 9; fi
      trap 'echo $RANK was told; exit 3' TERM
      sleep 60 & wait
    SH
    assert_code 1, result
    assert_operator result.seconds, :<, 3
    assert_equal ["0 was told\n", "1 was told\n", "3 was told\n"], result.out.lines.sort
    assert_match(/FAILED: rank 2, exit code 9\n-+\nRoot cause \(first failure\):\n  time      : \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\n/, result.err)
    assert_match(/^  host      : #{Regexp.escape(Socket.gethostname)}\n  rank      : 2 \(local_rank: 2\)$/, result.err)
    assert_match(/^3 other workers were then ended by torchrun\.$/, result.err)
    refute_match(/exitcode  : 3/, result.err)
  end

  def test_a_worker_that_is_done_early_ends_nobody
    result = run_torchrun("--nproc-per-node=3", *shell("sleep 0.$RANK; echo $RANK"))
    assert_code 0, result
    assert_equal "0\n1\n2\n", result.out
    assert_empty result.err
  end

  def test_workers_that_ignore_sigterm_are_killed
    result = run_torchrun("--nproc-per-node=2", "--shutdown-timeout=0.5", *shell(<<~SH))
      if [ $RANK = 1 ]; then sleep 0.3; exit 1; fi
      trap '' TERM
      while :; do sleep 1; done
    SH
    assert_code 1, result
    assert_operator result.seconds, :>, 0.7
    assert_operator result.seconds, :<, 4
    assert_match(/rank 0 \(pid \d+\) did not end within 0\.5 s \(--shutdown-timeout\): killed/, result.err)
    assert_match(/FAILED: rank 1, exit code 1/, result.err)
  end

  def test_a_stopped_worker_is_ended_too
    result = run_torchrun("--nproc-per-node=2", "--shutdown-timeout=20", *shell("if [ $RANK = 1 ]; then sleep 0.4; exit 1; fi; kill -STOP $$"))
    assert_code 1, result
    assert_operator result.seconds, :<, 5
  end

  def test_the_message_of_an_error_file_is_shown
    json = JSON.generate(message: {message: "ValueError: bad \"thing\"", extraInfo: {py_callstack: "line one\nline two", timestamp: "1795276170"}})
    result = run_torchrun(*shell("echo '#{json.gsub("\\", "\\\\\\\\")}' > $TORCHELASTIC_ERROR_FILE; exit 1"))
    assert_match(/^  message   : ValueError: bad "thing"$/, result.err)
    assert_match(/^  traceback : line one\n +line two$/, result.err)
  end

  def test_the_error_file_tells_who_was_first
    run = start("--nproc-per-node=2", *shell(<<~SH))
      if [ $RANK = 1 ]; then echo '{"message": {"message": "first", "extraInfo": {"timestamp": "1000"}}}' > $TORCHELASTIC_ERROR_FILE; fi
      echo ready
      while [ ! -e go ]; do sleep 0.02; done
      exit $((RANK + 4))
    SH
    run.await(/ready\nready/)
    # Both fail while torchrun cannot look.
    agent = run.agent
    Process.kill(:STOP, agent)
    File.write("#{@folder}/go", "")
    eventually("both workers to end") { marked.sort == [run.pid, agent].sort }
    Process.kill(:CONT, agent)
    err = run.finish.err
    assert_match(/FAILED: rank 1, exit code 5/, err)
    assert_match(/^Failed too:\n(  .*\n)*  exitcode  : 4/, err)
  end

  # Rank 0 says that it lost a peer and is out first; rank 1, whose fault it is, takes longer to end.
  def test_who_lost_a_peer_is_not_to_blame
    result = run_torchrun("--nproc-per-node=3", *shell(<<~SH))
      case $RANK in
      0) echo '{"message": {"message": "lost 1", "extraInfo": {"timestamp": "1", "consequence": "1"}}}' > $TORCHELASTIC_ERROR_FILE; exit 1;;
      1) sleep 0.3; exit 5;;
      esac
      sleep 60
    SH
    assert_code 1, result
    assert_match(/FAILED: rank 1, exit code 5/, result.err)
    assert_match(/^Failed too:\n(  .*\n)*  message   : lost 1/, result.err)
    assert_operator result.seconds, :<, 0.9
  end

  def test_a_peer_that_was_lost_elsewhere_is_not_waited_for_long
    result = run_torchrun("--nproc-per-node=2", *shell(<<~SH))
      [ $RANK = 0 ] || exec sleep 60
      echo '{"message": {"message": "lost 9", "extraInfo": {"consequence": "1"}}}' > $TORCHELASTIC_ERROR_FILE
      exit 1
    SH
    assert_match(/FAILED: rank 0, exit code 1/, result.err)
    assert_operator result.seconds, :<, 3
  end

  def test_a_ruby_workers_exception_is_in_the_report
    result = run_torchrun("--nproc-per-node=2", *ruby('sleep(ENV["RANK"] == "1" ? 0 : 30); raise ArgumentError, "böse"'),
      env: {"TDDP_RUBY_PRELOAD" => "#{ROOT}/lib/torch_ddp/torchrun_worker.rb"})
    assert_code 1, result
    assert_match(/^  message   : ArgumentError: böse$/, result.err.dup.force_encoding("UTF-8"))
    assert_match(/^  traceback : .*worker\.rb:1:in/, result.err)
  end

  def test_a_ruby_workers_last_words_are_in_the_report
    result = run_torchrun(*ruby('abort "no data in \"x\""'), env: {"TDDP_RUBY_PRELOAD" => "#{ROOT}/lib/torch_ddp/torchrun_worker.rb"})
    assert_code 1, result
    assert_match(/^  message   : SystemExit: no data in "x"$/, result.err)
  end

  def test_restarts
    result = run_torchrun("--nproc-per-node=2", "--max-restarts=3", *shell(<<~SH))
      echo "$TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS rank $RANK port $MASTER_PORT"
      if [ $RANK = 0 ]; then sleep 20 & wait; fi
      sleep 0.1
      [ $TORCHELASTIC_RESTART_COUNT = 2 ] && kill -TERM $PPID
      exit 1
    SH
    assert_equal ["0 of 3", "1 of 3", "2 of 3"], result.out.scan(/^\d of 3/).uniq
    assert_match(/starting all workers again \(restart 1 of 3\)/, result.err)
    assert_code 143, result
  end

  def test_restarts_run_out
    result = run_torchrun("--nproc-per-node=2", "--max-restarts=2", *shell('echo "$RANK $TORCHELASTIC_RESTART_COUNT"; exit 1'))
    assert_code 1, result
    assert_equal %w[0 1 2], result.out.lines.map { |line| line.split[1] }.uniq
    assert_equal 3, result.err.scan("FAILED").size
  end

  def test_a_restart_may_succeed
    port = free_port
    result = run_torchrun("--nproc-per-node=2", "--max-restarts=5", "--master-port=#{port}",
      *shell("echo $MASTER_PORT; [ $TORCHELASTIC_RESTART_COUNT = 1 ] || exit 1; sleep 0.1"))
    assert_code 0, result
    assert_equal ["#{port}\n"], result.out.lines.uniq
  end

  def test_torchrun_ends_at_once_when_workers_are_gone
    result = run_torchrun("--nproc-per-node=4", *shell("exit 1"))
    assert_operator result.seconds, :<, 1
  end
end
