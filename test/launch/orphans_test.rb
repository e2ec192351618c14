# frozen_string_literal: true

require "pty"
require_relative "launch_case"

# Workers that are hard to get rid of, and a look at what is left of them.
module StubbornWorkers
  # A child in the worker's group, one in a session of its own, one forked twice, and a daemon that ignores what it can.
  FAMILY = <<~SH
    sleep 60 &
    setsid sleep 61 > /dev/null 2>&1 &
    (setsid sh -c 'sleep 62 & exec sleep 63' > /dev/null 2>&1 &)
    setsid sh -c 'trap "" TERM INT HUP QUIT; while :; do sleep 1; done' > /dev/null 2>&1 &
    sleep 0.2
    echo ready
  SH
  CLEANING = "trap 'sleep 0.5; echo $RANK is clean; exit 0' TERM INT; echo ready; while :; do sleep 0.05; done"

  def family(ending = "wait")
    shell("#{FAMILY}#{ending}")
  end

  def ready(run, count = 2)
    run.await(/(ready\r?\n){#{count}}/)
  end

  def processes(run)
    [run.pid, run.agent]
  end

  def state(pid)
    File.read("/proc/#{pid}/stat")[/\) (\S)/, 1]
  end

  # "" of one that is gone, whose parent is 0.
  def command_name(pid)
    File.read("/proc/#{pid}/comm").chomp
  rescue SystemCallError
    ""
  end

  def parent(pid)
    File.read("/proc/#{pid}/stat")[/\) \S (\d+)/, 1].to_i
  rescue SystemCallError
    0
  end
end

# However torchrun or one of its two processes dies, nobody of the job is left, and nobody else is touched.
class OrphansTest < LaunchCase
  include StubbornWorkers

  # Processes that a worker started end with it: those in its group, and those that left it.
  def test_children_end_with_their_worker
    {"exit 0" => 0, "exit 1" => 1, "kill -9 $$" => 1}.each do |ending, code_of_torchrun|
      result = run_torchrun("--nproc-per-node=2", *family(ending))
      assert_code code_of_torchrun, result
      assert_operator result.seconds, :<, 2.5
      assert_empty marked
    end
  end

  def test_the_front_is_killed
    run = start("--nproc-per-node=2", "--shutdown-timeout=1", *family)
    ready(run)
    assert_operator marked.size, :>, 10
    run.signal(:KILL)
    result = run.finish(limit: 5)
    assert_equal 9, result.status.termsig
    assert_match(/^torchrun: killed: ending the workers$/, result.err)
    eventually("all to be gone") { marked.empty? }
  end

  # What a supervisor does at last: the whole process group, which the agent is not in.
  def test_the_fronts_group_is_killed
    run = start("--nproc-per-node=2", "--shutdown-timeout=1", *family, pgroup: true)
    ready(run)
    Process.kill(:KILL, -run.pid)
    run.finish(limit: 5)
    eventually("all to be gone") { marked.empty? }
  end

  def test_a_killed_front_has_workers_end_in_order
    run = start("--nproc-per-node=2", *shell(CLEANING))
    ready(run)
    run.signal(:KILL)
    assert_equal ["0 is clean\n", "1 is clean\n"], run.finish(limit: 5).out.lines.grep(/clean/).sort
  end

  def test_the_agent_is_killed
    run = start("--nproc-per-node=2", *family)
    ready(run)
    agent = run.agent
    Process.kill(:KILL, agent)
    result = run.finish(limit: 5)
    assert_code 137, result
    assert_equal "torchrun: its agent (pid #{agent}) was killed by SIGKILL; the workers were killed with it\n", result.err
    assert_empty marked
  end

  def test_the_agent_crashes
    run = start("--nproc-per-node=2", *shell("echo ready; sleep 60"))
    ready(run)
    Process.kill(:ABRT, run.agent)
    result = run.finish(limit: 5)
    assert_code 134, result
    assert_empty marked
  end

  # Then nobody is left who could look for children of workers; the workers themselves go by the kernel's doing.
  def test_both_are_killed_at_once
    @leaves_files = true
    run = start("--nproc-per-node=3", *shell("echo ready; exec sleep 60"))
    ready(run, 3)
    assert_equal 5, marked.size
    Process.kill(:KILL, *processes(run))
    run.finish(limit: 5)
    eventually("the workers to be gone") { marked.empty? }
  end

  def test_children_from_before_are_left_alone
    # The shell starts a child and then becomes torchrun; its agent is killed in the second run.
    [:none, :agent].each do |victim|
      run = start("sleep 4 & exec #{BINARY} #{shell("sleep 60 & [ #{victim} = none ] || sleep 60; exit 0").join(" ")}",
        command: %w[sh -c], out: File::NULL, err: File::NULL)
      eventually("the agent and its worker") { run.agent && marked.size >= 4 } if victim == :agent
      Process.kill(:KILL, run.agent) if victim == :agent
      assert_code((victim == :none) ? 0 : 137, run.finish)
      left = marked
      assert_equal 1, left.size
      assert_includes command_line(left.first), "sleep 4"
      Process.kill(:KILL, left.first)
      eventually("it to be gone") { marked.empty? }
    end
  end

  def test_the_processes_have_their_names_and_groups
    run = start(*shell("echo ready; sleep 60"), close_others: true)
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
    result = run.finish(limit: 6)
    assert_code code, result
    assert_equal ["0 is clean", "1 is clean"], result.out.lines.map(&:chomp).grep(/clean/).sort
    assert_equal 1, result.err.scan("ending the workers").size
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

  # timeout(1) signals its child and then its whole group, the child again among it.
  def test_timeout
    run = start("0.7", BINARY, "--nproc-per-node=2", *shell(CLEANING), command: %w[timeout])
    result = run.finish(limit: 6)
    assert_code 124, result
    assert_equal ["0 is clean\n", "1 is clean\n"], result.out.lines.grep(/clean/).sort
  end

  def test_signals_that_are_not_handled_keep_their_effect
    run = cleaning
    run.signal(:USR1)
    result = run.finish(limit: 5)
    assert_equal Signal.list["USR1"], result.status.termsig
    assert_equal 2, result.out.scan("is clean").size
  end

  def test_signals_to_handle
    code = "trap 'echo $RANK got USR2; exit 0' USR2; trap 'echo $RANK got TERM; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    run = start("--nproc-per-node=2", "--signals-to-handle=SIGUSR2,SIGINT", *shell(code))
    ready(run)
    run.signal(:USR2)
    result = run.finish(limit: 5)
    assert_code 128 + Signal.list["USR2"], result
    assert_equal ["0 got USR2\n", "1 got USR2\n"], result.out.lines.grep(/got/).sort
    # SIGTERM is not of the list now: torchrun dies of it, and the workers are ended all the same.
    run = start("--nproc-per-node=2", "--signals-to-handle=SIGUSR2", *shell(code))
    ready(run)
    run.signal(:TERM)
    result = run.finish(limit: 5)
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
    gatherer&.join(2)
    Process.wait(pid) if pid
  end

  # Not what their children have forked and will be `sleep` soon.
  def workers_and_children
    named = marked.select { |pid| command_name(pid).start_with?("worker") }
    named.reject { |pid| named.include?(parent(parent(pid))) }
  end

  def job(code)
    "#{BINARY} --nproc-per-node=2 #{shell(code).join(" ")}; echo code $?\n"
  end

  def test_ctrl_c_once_is_one_event
    terminal do |keys, waiting, text|
      keys << job(CLEANING)
      waiting.call(/(?:ready.*){2}/m)
      keys << "\x03"
      waiting.call(/code 130/)
      assert_equal 2, text.scan("is clean").size, text
      assert_equal 1, text.scan("ending the workers").size, text
    end
  end

  def test_ctrl_c_twice_ends_at_once
    terminal do |keys, waiting, text|
      keys << job("trap '' INT TERM; echo ready; while :; do sleep 1; done")
      waiting.call(/(?:ready.*){2}/m)
      keys << "\x03"
      waiting.call(/ending the workers/)
      sleep 0.3
      started = Process.clock_gettime(Process::CLOCK_MONOTONIC)
      keys << "\x03"
      waiting.call(/code 130/)
      assert_operator Process.clock_gettime(Process::CLOCK_MONOTONIC) - started, :<, 2
      assert_equal 1, text.scan("ending the workers").size
    end
  end

  def test_ctrl_z_stops_the_workers_and_fg_continues_them
    terminal do |keys, waiting, text|
      keys << job("(trap '' TSTP; while [ ! -e #{@folder}/go ]; do sleep 0.05; done; echo child $RANK) & echo ready; wait; echo done $RANK")
      waiting.call(/(?:ready.*){2}/m)
      front = marked.find { |pid| command_name(pid) == "torchrun" }
      workers = workers_and_children
      assert_equal 4, workers.size
      keys << "\x1a"
      eventually("all to stop") { [front, *workers].all? { |pid| state(pid) == "T" } }
      File.write("#{@folder}/go", "")
      sleep 0.3
      refute_match(/done \d/, text)
      keys << "fg\n"
      waiting.call(/(?:done \d.*){2}/m)
      eventually("the front to be gone") { !File.exist?("/proc/#{front}") }
      assert_equal 2, text.scan(/child \d/).size
    end
  end

  def test_a_terminal_that_goes_ends_the_job
    terminal do |keys, waiting, _text|
      keys << job("echo ready; sleep 60")
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
end
