# frozen_string_literal: true

require "json"
require_relative "launch_case"

# A worker fails: the others end, the report says who was first, restarts start all again.
class FailuresTest < LaunchCase
  # Workers that all end while torchrun's agent cannot look, so that each is a failure of its own.
  # @return [Hash] what the JSON report has of each rank
  def fail_together(count, code)
    run = start("--nproc-per-node=#{count}", "--report-file=#{@folder}/report.json", *shell(<<~SH))
      ulimit -c 0
      echo ready
      while [ ! -e #{@folder}/go ]; do sleep 0.05; done
      #{code}
    SH
    run.await(/(ready\n){#{count}}/)
    agent = run.agent
    Process.kill(:STOP, agent)
    File.write("#{@folder}/go", "")
    await_zombies(agent)
    Process.kill(:CONT, agent)
    assert_code 1, result = run.finish
    File.delete("#{@folder}/go")
    failures = report["attempts"].first["failures"]
    assert_equal 1, failures.count { |failure| failure["root_cause"] }
    assert failures.first["root_cause"]
    assert_equal failures.size, result.err.scan(/^  exitcode  : /).size
    [failures.to_h { |failure| [failure["rank"], failure] }, result.err]
  end

  # Until all children have ended and nobody has looked.
  def await_zombies(agent)
    eventually("all workers to end") do
      File.read("/proc/#{agent}/task/#{agent}/children").split.all? { |pid| File.read("/proc/#{pid}/stat")[/\) (\S)/, 1] == "Z" }
    end
  end

  def report
    JSON.parse(File.read("#{@folder}/report.json"))
  end

  def test_every_exit_code
    4.times do |quarter|
      failures, err = fail_together(64, "exit $((RANK + #{quarter * 64}))")
      expected = (0...64).map { |rank| [rank, rank + quarter * 64] }.reject { |_, code| code.zero? }
      assert_equal expected, failures.sort.map { |rank, failure| [rank, failure["exitcode"]] }
      assert_equal [nil], failures.values.map { |failure| failure["signal"] }.uniq
      expected.each { |rank, code| assert_match(/^  rank      : #{rank} \(local_rank: #{rank}\)\n  exitcode  : #{code} \(pid: #{failures[rank]["pid"]}\)$/, err) }
    end
  end

  # All but those that stop or continue a process, or that it does not mind.
  def test_every_signal
    harmless = %w[CHLD CONT STOP TSTP TTIN TTOU URG WINCH].map { |name| Signal.list[name] }
    failures, err = fail_together(65, "case $RANK in 0 | #{harmless.join(" | ")}) ;; *) kill -$RANK $$ ;; esac; exit 0")
    deadly = (1..64).to_a - harmless
    assert_equal deadly, failures.keys.sort
    failures.each do |number, failure|
      assert_equal(-number, failure["exitcode"])
      name = Signal.signame(number) || {16 => "STKFLT"}[number]
      name &&= "SIG#{name}"
      name = (number < 34) ? "signal #{number}" : "SIGRTMIN#{"+#{number - 34}"}" if number > 31
      assert_equal name.sub("IOT", "ABRT").sub("SIGIO", "SIGPOLL"), failure["signal"], number
      assert_match(/^  exitcode  : -#{number} \(pid: #{failure["pid"]}\)\n  signal    : killed by #{Regexp.escape(failure["signal"])}$/, err)
    end
  end

  # Whatever ends torchrun, its status is 0, 1, 2 or 128 and the signal.
  def test_torchruns_own_exit_status
    assert_code 0, run_torchrun(*shell("exit 0"))
    assert_code 1, run_torchrun(*shell("exit 77"))
    assert_code 1, run_torchrun("--no-ruby", "/nowhere/to/be/found")
    assert_code 2, run_torchrun("--no-such-flag", *shell("exit 0"))
    %w[INT TERM HUP QUIT].each do |name|
      run = start(*shell("echo ready; exec sleep 60"))
      run.await(/ready/)
      run.signal(name)
      assert_code 128 + Signal.list[name], run.finish
    end
  end

  def test_the_report_as_json
    result = run_torchrun("--nproc-per-node=2", "--max-restarts=1", "--report-file=#{@folder}/report.json", "--log-dir=#{@folder}/logs", "--tee=3",
      "--role=trainer", "--rdzv-id=j1", *shell(<<~SH))
        [ $RANK = 1 ] || exec sleep 600
        echo '{"message": {"message": "bad \\"x\\"", "extraInfo": {"py_callstack": "one\\ntwo", "timestamp": "1795276170"}}}' > $TORCHELASTIC_ERROR_FILE
        exit $((3 + TORCHELASTIC_RESTART_COUNT))
      SH
    assert_code 1, result
    folder = Dir["#{@folder}/logs/j1_*"].first
    refute_path_exists "#{folder}/report.json"
    job = report
    expected = {"state" => "failed", "exitcode" => 1, "signal" => nil, "cause" => nil, "run_id" => "j1", "role" => "trainer",
                "host" => Socket.gethostname, "log_folder" => folder, "restarts" => 1, "max_restarts" => 1, "ranks" => [0, 1], "attempts_omitted" => 0}
    assert_equal expected, job.slice(*expected.keys)
    assert_equal [0, 1], job["attempts"].map { |attempt| attempt["restart"] }
    job["attempts"].each_with_index do |attempt, at|
      assert_equal [2, 1, nil], attempt.values_at("world_size", "ended_by_torchrun", "elsewhere")
      failure = attempt["failures"].fetch(0)
      expected = {"rank" => 1, "local_rank" => 1, "exitcode" => 3 + at, "signal" => nil, "message" => 'bad "x"', "traceback" => "one\ntwo",
                  "timestamp" => 1_795_276_170, "error_file" => "#{folder}/attempt_#{at}/1/error.json", "error_file_missing" => nil,
                  "stdout" => "#{folder}/attempt_#{at}/1/stdout.log", "stderr" => "#{folder}/attempt_#{at}/1/stderr.log"}
      assert_equal expected, failure.slice(*expected.keys)
      assert_match(/\A\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z\z/, failure["time"])
      assert_match(%r{^  error_file: #{folder}/attempt_#{at}/1/error.json\n  message   : bad "x"\n  traceback : one\n +two\n  stdout    : #{folder}/attempt_#{at}/1/stdout.log$}, result.err)
    end
  end

  def test_the_report_of_other_ends
    run_torchrun("--report-file=#{@folder}/report.json", *shell("exit 0"))
    assert_equal ["succeeded", 0, [0], []], report.values_at("state", "exitcode", "ranks", "attempts")
    run = start("--report-file=#{@folder}/report.json", *shell("echo ready; exec sleep 60"))
    run.await(/ready/)
    run.signal(:INT)
    assert_code 130, run.finish
    assert_equal ["stopped", 130, "SIGINT"], report.values_at("state", "exitcode", "signal")
    result = run_torchrun("--report-file=/nowhere/report.json", *shell("exit 0"))
    assert_code 0, result
    assert_match(%r{torchrun: no report: cannot write /nowhere/report.json: No such file or directory}, result.err)
  end

  def test_other_nodes_show_the_cause_with_its_traceback
    port = free_port
    worker = shell(<<~SH)
      [ $RANK = 1 ] || exec sleep 600
      echo '{"message": {"message": "ValueError: deep", "extraInfo": {"py_callstack": "one\\ntwo", "timestamp": "1000"}}}' > $TORCHELASTIC_ERROR_FILE
      exit 6
    SH
    results = [0, 1].map do |node|
      start("--nnodes=2", "--node-rank=#{node}", "--master-addr=127.0.0.1", "--master-port=#{port}", "--report-file=#{@folder}/report#{node}.json", *worker)
    end.map { |run| run.finish }
    results.each { |result| assert_code 1, result }
    host = Regexp.escape(Socket.gethostname)
    assert_match(/FAILED elsewhere: rank 1 on node 1: exit code 6 \(pid \d+ on #{host}\)\n +ValueError: deep\n +one\n +two$/,
      results[0].err)
    told = [0, 1].map { |node| JSON.parse(File.read("#{@folder}/report#{node}.json"))["attempts"].first }
    assert_match(/\Arank 1 on node 1: exit code 6 .*\nValueError: deep\none\ntwo\z/, told[0]["elsewhere"])
    assert_equal [nil, 1], [told[1]["elsewhere"], told[1]["failures"].first["rank"]]
  end

  # torchrun as the worker of another launcher, which looks where PyTorch's look.
  def test_the_root_cause_is_handed_up
    up = "#{@folder}/up.json"
    env = {"TORCHELASTIC_ERROR_FILE" => up}
    json = JSON.generate(message: {message: "ValueError: x", extraInfo: {py_callstack: "trace", timestamp: "1000"}})
    run_torchrun("--nproc-per-node=2", *shell("[ $RANK = 1 ] || exec sleep 600; echo '#{json}' > $TORCHELASTIC_ERROR_FILE; kill -9 $$"), env: env)
    assert_equal({"message" => {"message" => "ValueError: x", "extraInfo" => {"py_callstack" => "trace", "timestamp" => "1000"}, "errorCode" => -9}}, JSON.parse(File.read(up)))
    run_torchrun(*shell("exit 5"), env: env)
    told = JSON.parse(File.read(up))["message"]
    assert_equal 5, told["errorCode"]
    assert_match(/\Arank 0 on node 0: exit code 5 \(pid \d+ on #{Regexp.escape(Socket.gethostname)}\)\z/, told["message"])
    assert_in_delta Time.now.to_i, Integer(told["extraInfo"]["timestamp"]), 60
    # A torchrun within a torchrun.
    result = run_torchrun("--no-ruby", BINARY, "--nproc-per-node=1", *shell("echo '#{json}' > $TORCHELASTIC_ERROR_FILE; exit 4"))
    assert_code 1, result
    assert_equal 2, result.err.scan(/^  message   : ValueError: x$/).size
    File.delete(up)
    run_torchrun(*shell("exit 0"), env: env)
    refute_path_exists up
  end

  def test_error_files_that_are_none
    {"mkfifo $F" => "not read", "ln -s /dev/zero $F" => "not read", "mkdir $F" => "not read", "echo garbage > $F" => "not understood",
     "printf '{\"message\": ' > $F" => "not understood", "truncate -s 1T $F" => "not read", "head -c 3000000 /dev/zero > $F" => "not read",
     "head -c 900000 /dev/urandom > $F" => "not understood", ":" => "none: the worker wrote none", "kill -9 $$" => "none: a signal leaves no time"}.each do |doing, said|
      result = run_torchrun(*shell("F=$TORCHELASTIC_ERROR_FILE; #{doing}; exit 1"))
      assert_code 1, result
      assert_match(/^  error_file: #{said}/, result.err, doing)
    end
  end

  def test_an_error_file_of_somebody_else
    skip "only root may give files away" unless Process.uid.zero?
    json = JSON.generate(message: "theirs", timestamp: 5)
    result = run_torchrun(*shell("echo '#{json}' > $TORCHELASTIC_ERROR_FILE; chown 12345:12345 $TORCHELASTIC_ERROR_FILE; chmod 0 $TORCHELASTIC_ERROR_FILE; exit 1"))
    assert_match(/^  message   : theirs$/, result.err)
  end

  # A memory cgroup of this test's own, of version 1 or 2, with the file that limits it.
  def memory_group
    name = "torchrun-test-#{SecureRandom.hex(8)}"
    {"/sys/fs/cgroup/memory/#{name}" => "memory.limit_in_bytes", "/sys/fs/cgroup/#{name}" => "memory.max"}.each do |group, limit|
      Dir.mkdir(group)
      return yield(group) if File.exist?("#{group}/#{limit}") && File.write("#{group}/#{limit}", "100M")
    rescue SystemCallError
      next
    ensure
      eventually("the group to be empty") { !File.exist?("#{group}/cgroup.procs") || File.read("#{group}/cgroup.procs").empty? }
      Dir.rmdir(group) if Dir.exist?(group)
    end
    skip "no memory cgroup may be made here"
  end

  def test_a_worker_that_the_out_of_memory_killer_ended
    memory_group do |group|
      result = run_torchrun("echo $$ > #{group}/cgroup.procs && exec \"$@\"", "sh", BINARY, "--nproc-per-node=2", "--report-file=#{@folder}/report.json",
        *shell("[ $RANK = 1 ] || exec sleep 600; exec dd if=/dev/zero of=/dev/null bs=400M count=1"), command: %w[sh -c])
      assert_code 1, result
      assert_match(/FAILED: rank 1, killed by SIGKILL \(the kernel's out-of-memory killer\)$/, result.err)
      assert_equal [1, true], report["attempts"][0]["failures"][0].values_at("rank", "out_of_memory")
    end
    result = run_torchrun("--report-file=#{@folder}/report.json", *shell("kill -9 $$"))
    assert_match(/FAILED: rank 0, killed by SIGKILL$/, result.err)
    assert_equal false, report["attempts"][0]["failures"][0]["out_of_memory"]
  end

  # Workers go to another folder before they fail.
  def test_error_files_below_a_relative_temporary_folder
    worker = shell('cd /; echo \'{"message": "boom", "timestamp": 1}\' > $TORCHELASTIC_ERROR_FILE; exit 3')
    result = run_torchrun(*worker, env: {"TMPDIR" => "tmp"})
    assert_code 1, result
    assert_match(/^  message   : boom$/, result.err)
  end

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
      if [ $RANK = 2 ]; then
        until [ -e up0 -a -e up1 -a -e up3 ]; do sleep 0.05; done
        exit 9
      fi
      trap 'echo $RANK was told; exit 3' TERM
      : > up$RANK
      #{IDLE}
    SH
    assert_code 1, result
    assert_equal ["0 was told\n", "1 was told\n", "3 was told\n"], result.out.lines.sort
    assert_match(/FAILED: rank 2, exit code 9\n-+\nRoot cause \(first failure\):\n  time      : \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\n/, result.err)
    assert_match(/^  host      : #{Regexp.escape(Socket.gethostname)}\n  rank      : 2 \(local_rank: 2\)$/, result.err)
    assert_match(/^3 other workers were then ended by torchrun\.$/, result.err)
    refute_match(/exitcode  : 3/, result.err)
  end

  def test_a_worker_that_is_done_early_ends_nobody
    result = run_torchrun("--nproc-per-node=3", *shell("until [ $RANK = 0 -o -e out$((RANK - 1)) ]; do sleep 0.05; done; echo $RANK; : > out$RANK"))
    assert_code 0, result
    assert_equal "0\n1\n2\n", result.out
    assert_empty result.err
  end

  def test_workers_that_ignore_sigterm_are_killed
    result = run_torchrun("--nproc-per-node=2", "--shutdown-timeout=0.2", *shell(<<~SH))
      if [ $RANK = 1 ]; then
        until [ -e deaf ]; do sleep 0.05; done
        exit 1
      fi
      trap '' TERM
      : > deaf
      #{IDLE}
    SH
    assert_code 1, result
    assert_match(/rank 0 \(pid \d+\) did not end within 0\.2 s \(--shutdown-timeout\): killed/, result.err)
    assert_match(/FAILED: rank 1, exit code 1/, result.err)
  end

  def test_a_stopped_worker_is_ended_too
    result = run_torchrun("--nproc-per-node=2", "--shutdown-timeout=3600", *shell(<<~SH))
      if [ $RANK = 1 ]; then
        until grep -q '^State:.T' /proc/$(cat pid)/status; do sleep 0.05; done
        exit 1
      fi
      echo $$ > pid
      kill -STOP $$
    SH
    assert_code 1, result
    assert_match(/FAILED: rank 1, exit code 1/, result.err)
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
    await_zombies(agent)
    Process.kill(:CONT, agent)
    err = run.finish.err
    assert_match(/FAILED: rank 1, exit code 5/, err)
    assert_match(/^Failed too:\n(  .*\n)*  exitcode  : 4/, err)
  end

  # Rank 0 says that it lost a peer and is out first; rank 1, whose fault it is, ends once torchrun has taken note of that.
  def test_who_lost_a_peer_is_not_to_blame
    result = run_torchrun("--nproc-per-node=3", *shell(<<~SH))
      case $RANK in
      0) echo '{"message": {"message": "lost 1", "extraInfo": {"timestamp": "1", "consequence": "1"}}}' > $TORCHELASTIC_ERROR_FILE
         echo $$ > pid
         until [ -e watched ]; do sleep 0.05; done
         exit 1;;
      1) until [ -s pid ]; do sleep 0.05; done
         zero=$(cat pid)
         : > watched
         while kill -0 $zero; do :; done
         exit 5;;
      esac
      exec sleep 600
    SH
    assert_code 1, result
    assert_match(/FAILED: rank 1, exit code 5/, result.err)
    assert_match(/^Failed too:\n(  .*\n)*  message   : lost 1/, result.err)
  end

  def test_a_peer_that_was_lost_elsewhere_is_not_waited_for
    result = run_torchrun("--nproc-per-node=2", *shell(<<~SH))
      [ $RANK = 0 ] || exec sleep 600
      echo '{"message": {"message": "lost 9", "extraInfo": {"consequence": "1"}}}' > $TORCHELASTIC_ERROR_FILE
      exit 1
    SH
    assert_match(/FAILED: rank 0, exit code 1/, result.err)
  end

  def test_a_ruby_workers_exception_is_in_the_report
    result = run_torchrun("--nproc-per-node=2", *ruby('sleep(ENV["RANK"] == "1" ? 0 : 30); raise ArgumentError, "böse"'),
      env: {"TDDP_RUBY_PRELOAD" => "#{ROOT}/lib/torch_ddp/torchrun_worker.rb"})
    assert_code 1, result
    assert_match(/^  message   : ArgumentError: böse$/, result.err.dup.force_encoding("UTF-8"))
    assert_match(/^  traceback : .*worker-\h+\.rb:1:in/, result.err)
  end

  def test_a_ruby_workers_last_words_are_in_the_report
    result = run_torchrun(*ruby('abort "no data in \"x\""'), env: {"TDDP_RUBY_PRELOAD" => "#{ROOT}/lib/torch_ddp/torchrun_worker.rb"})
    assert_code 1, result
    assert_match(/^  message   : SystemExit: no data in "x"$/, result.err)
  end

  def test_restarts
    result = run_torchrun("--nproc-per-node=2", "--max-restarts=3", *shell(<<~SH))
      echo "$TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS rank $RANK port $MASTER_PORT"
      if [ $RANK = 0 ]; then #{IDLE}; fi
      [ $TORCHELASTIC_RESTART_COUNT = 2 ] && kill -TERM $PPID
      exit 1
    SH
    assert_equal ["0 of 3", "1 of 3", "2 of 3"], result.out.scan(/^\d of 3/).uniq
    assert_match(/restarting workers \(restart 1 of 3\)/, result.err)
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
      *shell("echo $MASTER_PORT; [ $TORCHELASTIC_RESTART_COUNT = 1 ] || exit 1"))
    assert_code 0, result
    assert_equal ["#{port}\n"], result.out.lines.uniq
  end
end
