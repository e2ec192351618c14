# frozen_string_literal: true

require "pty"
require_relative "launch_case"

# Workers that are hard to get rid of, and a look at what is left of them.
module StubbornWorkers
  # A child in the worker's group, one in a session of its own, one forked twice, and a daemon that ignores what it can.
  FAMILY = <<~SH
    sleep 600 &
    setsid sleep 601 > /dev/null 2>&1 &
    (setsid sh -c 'sleep 602 & exec sleep 603' > /dev/null 2>&1 &)
    setsid sh -c 'trap "" TERM INT HUP QUIT; : > deaf$RANK; while :; do sleep 1; done' > /dev/null 2>&1 &
    while [ ! -e deaf$RANK ]; do sleep 0.05; done
    echo ready
  SH
  CLEANING = "trap 'sleep 0.5; echo $RANK is clean; exit 0' TERM INT; echo ready; while :; do sleep 0.05; done"

  def family(ending = "wait")
    shell("#{FAMILY}#{ending}")
  end

  def ready(run, count = 2)
    run.await(/(ready\r?\n){#{count}}/)
  end

  # Once all of two families are the programs that they are to be.
  def family_ready(run)
    ready(run)
    eventually("both families") { (600..603).all? { |number| marked.count { |pid| command_line(pid) == "sleep #{number} " } == 2 } }
  end

  def processes(run)
    [run.pid, run.agent]
  end

  # "" of one that is gone.
  def command_name(pid)
    File.read("/proc/#{pid}/comm").chomp
  rescue SystemCallError
    ""
  end
end

# However torchrun or one of its two processes dies, nobody of the job is left, and nobody else is touched.
class OrphansTest < LaunchCase
  include StubbornWorkers

  # Processes that a worker started end with it: those in its group, and those that left it.
  def test_children_end_with_their_worker
    {"exit 0" => 0, "exit 1" => 1, "kill -9 $$" => 1}.each do |ending, code_of_torchrun|
      result = run_torchrun("--nproc-per-node=2", "--shutdown-timeout=0.3", *family(ending))
      assert_code code_of_torchrun, result
      assert_empty marked
    end
  end

  def test_the_front_is_killed
    run = start("--nproc-per-node=2", "--shutdown-timeout=0.5", *family)
    family_ready(run)
    run.signal(:KILL)
    result = run.finish
    assert_equal 9, result.status.termsig
    assert_match(/^torchrun: killed: stopping workers$/, result.err)
    eventually("all to be gone") { marked.empty? }
  end

  # Whoever kills the front does not wait for --shutdown-timeout.
  def test_the_front_is_killed_while_the_job_ends
    run = start("--shutdown-timeout=3600", *shell("trap '' TERM; echo ready; #{IDLE}"))
    ready(run, 1)
    run.signal(:TERM)
    run.await(/stopping workers/, stream: :err)
    run.signal(:KILL)
    run.finish
    eventually("all to be gone") { marked.empty? }
  end

  # What a supervisor does at last: the whole process group, which the agent is not in.
  def test_the_fronts_group_is_killed
    run = start("--nproc-per-node=2", "--shutdown-timeout=0.5", *family, pgroup: true)
    family_ready(run)
    Process.kill(:KILL, -run.pid)
    run.finish
    eventually("all to be gone") { marked.empty? }
  end

  def test_a_killed_front_has_workers_end_in_order
    run = start("--nproc-per-node=2", *shell(CLEANING))
    ready(run)
    run.signal(:KILL)
    assert_equal ["0 is clean\n", "1 is clean\n"], run.finish.out.lines.grep(/clean/).sort
  end

  def test_the_agent_is_killed
    run = start("--nproc-per-node=2", *family)
    family_ready(run)
    agent = run.agent
    Process.kill(:KILL, agent)
    result = run.finish
    assert_code 137, result
    assert_equal "torchrun: its agent (pid #{agent}) was killed by SIGKILL; the workers were killed with it\n", result.err
    assert_empty marked
  end

  def test_the_agent_crashes
    run = start("--nproc-per-node=2", *shell("echo ready; exec sleep 600"))
    ready(run)
    Process.kill(:ABRT, run.agent)
    result = run.finish
    assert_code 134, result
    assert_empty marked
  end

  # Then nobody is left who could look for what workers have started: that stays. The workers go by the kernel's own doing.
  def test_both_are_killed_at_once
    @leaves_files = true
    run = start("--nproc-per-node=3", *shell("setsid sleep 600 > /dev/null 2>&1 & echo $!; exec sleep 601"))
    started = run.await(/(\d+\n){3}/).lines.map(&:to_i)
    eventually("all programs to run") { marked.map { |pid| command_line(pid) }.tally.values_at("sleep 600 ", "sleep 601 ") == [3, 3] }
    # One of them that lives on for a moment would end what the workers have started.
    Process.kill(:STOP, run.pid)
    eventually("the front to stop") { state(run.pid) == "T" }
    Process.kill(:KILL, run.agent, run.pid)
    run.finish
    eventually("the workers to be gone") { (marked - started).empty? }
    assert_equal started.sort, marked.sort
    Process.kill(:KILL, *started)
  end

  def test_children_from_before_are_left_alone
    # The shell starts a child and then becomes torchrun; its agent is killed in the second run.
    [:none, :agent].each do |victim|
      run = start("sleep 600 & exec #{BINARY} --shutdown-timeout=0.5 #{shell("sleep 601 & [ #{victim} = none ] || sleep 602; exit 0").join(" ")}",
        command: %w[sh -c], out: File::NULL, err: File::NULL)
      eventually("the agent and its worker") { run.agent && marked.any? { |pid| command_line(pid) == "sleep 602 " } } if victim == :agent
      Process.kill(:KILL, run.agent) if victim == :agent
      assert_code((victim == :none) ? 0 : 137, run.finish)
      left = marked
      assert_equal 1, left.size
      assert_equal "sleep 600 ", command_line(left.first)
      Process.kill(:KILL, left.first)
      eventually("it to be gone") { marked.empty? }
    end
  end

  def test_the_processes_have_their_names_and_groups
    run = start(*shell("echo ready; #{IDLE}"), close_others: true)
    ready(run, 1)
    front, agent = processes(run)
    assert_equal "torchrun\n", File.read("/proc/#{front}/comm")
    refute_equal Process.getpgid(front), Process.getpgid(agent)
    # Nothing is open in the front but the standard descriptors.
    assert_equal %w[0 1 2], Dir.children("/proc/#{front}/fd").sort
    run.signal(:TERM)
    run.finish
  end

  def test_workers_inherit_standard_descriptors_only
    result = run_torchrun("--nproc-per-node=2", *shell("exec ls /proc/self/fd"), close_others: true)
    # ls has the folder itself open.
    assert_equal [%w[0 1 2 3]] * 2, result.out.split.each_slice(4).to_a.map(&:sort)
  end
end

# What one event is, and what two are, whichever of torchrun's processes a signal reaches.
class OneEventTest < LaunchCase
  include StubbornWorkers

  def assert_ended_in_order(run, code)
    result = run.finish
    assert_code code, result
    assert_equal ["0 is clean", "1 is clean"], result.out.lines.map(&:chomp).grep(/clean/).sort
    assert_equal 1, result.err.scan("stopping workers").size
  end

  def cleaning(**options)
    start("--nproc-per-node=2", *shell(CLEANING), **options).tap { |run| ready(run) }
  end

  def test_a_signal_for_the_front
    run = cleaning
    run.signal(:TERM)
    assert_ended_in_order(run, 143)
  end

  def test_a_signal_for_the_agent
    run = cleaning
    Process.kill(:TERM, run.agent)
    assert_ended_in_order(run, 143)
  end

  # As systemd and pkill do, and kill(1) of a group.
  def test_a_signal_for_all
    run = cleaning(pgroup: true)
    Process.kill(:TERM, *processes(run))
    assert_ended_in_order(run, 143)
    run = cleaning(pgroup: true)
    Process.kill(:INT, -run.pid)
    assert_ended_in_order(run, 130)
  end

  # timeout(1) passes a signal on to its child and then to its whole group, the child again among it.
  def test_timeout
    run = start("600", BINARY, "--nproc-per-node=2", *shell(CLEANING), command: %w[timeout])
    ready(run)
    run.signal(:TERM)
    result = run.finish
    assert_code 143, result
    assert_equal ["0 is clean\n", "1 is clean\n"], result.out.lines.grep(/clean/).sort
  end

  def test_signals_that_are_not_handled_keep_their_effect
    run = cleaning
    run.signal(:USR1)
    result = run.finish
    assert_equal Signal.list["USR1"], result.status.termsig
    assert_equal 2, result.out.scan("is clean").size
  end

  def test_signals_to_handle
    code = "trap 'echo $RANK got USR2; exit 0' USR2; trap 'echo $RANK got TERM; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    run = start("--nproc-per-node=2", "--signals-to-handle=SIGUSR2,SIGINT", *shell(code))
    ready(run)
    run.signal(:USR2)
    result = run.finish
    assert_code 128 + Signal.list["USR2"], result
    assert_equal ["0 got USR2\n", "1 got USR2\n"], result.out.lines.grep(/got/).sort
    # SIGTERM is not of the list now: torchrun dies of it, and the workers are ended all the same.
    run = start("--nproc-per-node=2", "--signals-to-handle=SIGUSR2", *shell(code))
    ready(run)
    run.signal(:TERM)
    result = run.finish
    assert_equal 15, result.status.termsig
    assert_equal ["0 got TERM\n", "1 got TERM\n"], result.out.lines.grep(/got/).sort
  end
end

# torchrun on a terminal, as an interactive shell's job.
class TerminalTest < LaunchCase
  include StubbornWorkers

  # A shell on a terminal of its own; the block gets what types and what reads.
  def terminal
    text = +""
    reader, writer, pid = PTY.spawn(environment("PS1" => "", "ENV" => nil), "sh", "-i", chdir: @folder)
    gatherer = Thread.new do
      loop { text << reader.readpartial(4096) }
    rescue SystemCallError, IOError
      nil # the terminal is gone
    end
    waiting = lambda { |pattern| eventually(-> { "#{pattern.inspect} in #{text}" }) { text.dup.force_encoding("UTF-8").scrub[pattern] } }
    yield writer, waiting, text
  ensure
    writer&.close
    reader&.close
    gatherer&.join(LIMIT)
    Process.wait(pid) if pid
  end

  def job(code, *flags)
    "#{BINARY} --nproc-per-node=2 #{[*flags, *shell(code)].join(" ")}; echo code $?\n"
  end

  def test_ctrl_c_once_is_one_event
    terminal do |keys, waiting, text|
      keys << job(CLEANING)
      waiting.call(/(?:ready.*){2}/m)
      keys << "\x03"
      waiting.call(/code 130/)
      assert_equal 2, text.scan("is clean").size, text
      assert_equal 1, text.scan("stopping workers").size, text
    end
  end

  def test_ctrl_c_twice_ends_at_once
    terminal do |keys, waiting, text|
      keys << job("trap '' INT TERM; echo ready; #{IDLE}", "--shutdown-timeout=3600")
      waiting.call(/(?:ready.*){2}/m)
      keys << "\x03"
      waiting.call(/stopping workers/)
      keys << "\x03"
      waiting.call(/code 130/)
      assert_equal 1, text.scan("stopping workers").size
    end
  end

  # The children wait without a process of their own: a shell whose child is stopped between vfork and exec is not
  # stopped itself, but waits for it ("D").
  def test_ctrl_z_stops_the_workers_and_fg_continues_them
    gates = Array.new(2) do |rank|
      File.mkfifo("#{@folder}/go#{rank}")
      File.open("#{@folder}/go#{rank}", "r+")
    end
    terminal do |keys, waiting, text|
      keys << job("(trap '' TSTP; read word < #{@folder}/go$RANK; echo child $RANK) & echo ready; wait; echo done $RANK")
      waiting.call(/(?:ready.*){2}/m)
      front = marked.find { |pid| command_name(pid) == "torchrun" }
      workers = marked.select { |pid| command_name(pid).start_with?("worker") }
      assert_equal 4, workers.size
      keys << "\x1a"
      eventually(-> { "all to stop: #{[front, *workers].map { |pid| state(pid) }}" }) { [front, *workers].all? { |pid| state(pid) == "T" } }
      gates.each { |gate| gate.syswrite("go\n") }
      assert_equal %w[T T T T T], [front, *workers].map { |pid| state(pid) }
      refute_match(/done \d/, text)
      keys << "fg\n"
      waiting.call(/(?:done \d.*){2}/m)
      eventually("the front to be gone") { !File.exist?("/proc/#{front}") }
      assert_equal 2, text.scan(/child \d/).size
    end
  ensure
    gates&.each(&:close)
  end

  def test_a_terminal_that_goes_ends_the_job
    terminal do |keys, waiting, _text|
      keys << job("echo ready; #{IDLE}")
      waiting.call(/(?:ready.*){2}/m)
    end
    eventually("all to be gone") { marked.empty? }
  end

  def test_worker_0_reads_the_terminal
    terminal do |keys, waiting, _text|
      keys << job("echo ready; read word; echo $RANK read \"<$word>\"")
      waiting.call(/(?:ready.*){2}/m)
      keys << "hello\n"
      waiting.call(/0 read <hello>/)
      waiting.call(/code 0/)
    end
  end

  # --- one worker alone has the terminal to itself

  def lone_job(*command)
    "#{BINARY} --shutdown-timeout=3600 #{command.join(" ")}; echo code $?\n"
  end

  # The fifth and the eighth field are the process group and the terminal's foreground group.
  def test_one_worker_alone_is_in_the_foreground
    terminal do |keys, waiting, _text|
      keys << lone_job(*shell(<<~SH))
        test -t 0 && test -t 1 && test -t 2 && echo three terminals
        set -- $(cut -d' ' -f5,8 /proc/$$/stat)
        test $1 = $2 && echo in the foreground > /dev/tty
      SH
      waiting.call(/three terminals.*in the foreground.*code 0/m)
    end
  end

  def test_an_output_that_is_kept_or_marked_is_no_terminal
    [["--tee=1", "--log-dir=#{@folder}/logs"], ["--log-line-prefix-template=x"], ["--nproc-per-node=2"]].each do |flags|
      terminal do |keys, waiting, text|
        keys << lone_job(*flags, *shell("test -t 1 || echo no terminal; echo"))
        waiting.call(/code 0/)
        assert_includes text, "no terminal"
      end
    end
  end

  # A debugger lives on Ctrl-C.
  def test_a_key_is_for_the_worker_alone
    terminal do |keys, waiting, text|
      keys << lone_job(*shell("trap 'echo interrupted' INT; echo ready; while [ ! -e go ]; do sleep 0.05; done; echo over"))
      waiting.call(/ready/)
      2.times do |count|
        keys << "\x03"
        waiting.call(/(?:interrupted.*){#{count + 1}}/m)
      end
      File.write("#{@folder}/go", "")
      waiting.call(/over.*code 0/m)
      refute_includes text, "torchrun:"
    end
  end

  def test_a_key_that_ends_the_worker_ends_the_job
    {"\x03" => 130, "\x1c" => 131}.each do |key, code|
      terminal do |keys, waiting, text|
        keys << lone_job("--max-restarts=2", *shell("ulimit -c 0; echo ready; #{IDLE}"))
        waiting.call(/ready/)
        keys << key
        waiting.call(/code #{code}/)
        refute_includes text, "FAILED"
        assert_equal 1, text.scan("ready").size
      end
    end
  end

  def test_a_signal_for_torchrun_still_ends_the_worker
    terminal do |keys, waiting, text|
      keys << lone_job(*shell("trap 'echo told; exit 0' TERM; echo ready; #{IDLE}"))
      waiting.call(/ready/)
      Process.kill(:TERM, marked.find { |pid| command_name(pid) == "torchrun" })
      waiting.call(/code 143/)
      assert_equal 1, text.scan("told").size
    end
  end

  def test_ctrl_z_and_fg_with_one_worker
    terminal do |keys, waiting, _text|
      keys << lone_job(*shell("echo ready; read word; echo read \"<$word>\""))
      waiting.call(/ready/)
      front = marked.find { |pid| command_name(pid) == "torchrun" }
      worker = marked.find { |pid| command_name(pid).start_with?("worker") }
      keys << "\x1a"
      eventually("both to stop") { [front, worker].all? { |pid| state(pid) == "T" } }
      keys << "fg\n"
      eventually("both to run") { [front, worker].none? { |pid| state(pid) == "T" } }
      keys << "hello\n"
      waiting.call(/read <hello>/)
      eventually("the front to be gone") { !File.exist?("/proc/#{front}") }
    end
  end

  # A worker that is killed within a debugger, say.
  def test_a_terminals_state_is_put_back
    terminal do |keys, waiting, _text|
      keys << lone_job(*shell("stty -echo -icanon; kill -9 $$"))
      waiting.call(/FAILED: rank 0, killed by SIGKILL.*code 1/m)
      keys << "stty -a\n"
      waiting.call(/ icanon .* echo /m)
    end
  end

  def test_a_debugger
    terminal do |keys, waiting, _text|
      # Without what asks a real terminal where its cursor is.
      File.write("#{@folder}/irbrc", "IRB.conf[:USE_MULTILINE] = IRB.conf[:USE_SINGLELINE] = false\n")
      keys << "export TERM=dumb HOME=#{@folder} IRBRC=#{@folder}/irbrc\n"
      keys << lone_job(*ruby("number = 41\nbinding.irb\nputs \"left with \#{number}\"\n"))
      waiting.call(/irb\(main\).*> /)
      keys << "puts number += 1\n"
      waiting.call(/^42\r?\n.*irb/m)
      keys << "exit\n"
      waiting.call(/left with 42.*code 0/m)
    end
  end
end
