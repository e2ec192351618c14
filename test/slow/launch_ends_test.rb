# frozen_string_literal: true

require_relative "../launch/launch_case"

# Every way in which workers and torchrun end, and much output at the same time.
class LaunchEndsTest < LaunchCase
  def test_every_exit_code
    worker = shell('exit "$1"')
    (0..255).each do |code|
      result = run_torchrun(*worker, code)
      if code.zero?
        assert_code 0, result
        assert_empty result.err
      else
        assert_code 1, result
        assert_match(/FAILED: rank 0, exit code #{code}$/, result.err)
        assert_match(/^ +exitcode +: #{code} \(pid: \d+\)$/, result.err)
      end
    end
  end

  # What a signal does to who does not look after it. The names are the system's own.
  HARMLESS = %w[CHLD CLD CONT URG WINCH STOP TSTP TTIN TTOU EXIT].freeze

  def test_every_signal
    worker = shell('ulimit -c 0; kill -"$1" $$; exit 77')
    deadly = Signal.list.except(*HARMLESS, "IOT", "POLL")
    assert_operator deadly.size, :>=, 22
    [*deadly.map { |name, number| [number, "SIG#{name}"] }, [34, "SIGRTMIN+0"], [64, "SIGRTMIN+30"]].each do |number, name|
      result = run_torchrun(*worker, number)
      assert_code 1, result
      # Some numbers have two names.
      assert_match(/FAILED: rank 0, killed by #{(number == 29) ? "SIG(?:IO|POLL)" : Regexp.escape(name)}$/, result.err)
      assert_match(/^ +exitcode +: -#{number} \(pid: \d+\)$/, result.err)
    end
  end

  # Each signal that torchrun handles, then another of them: the first decides the exit status, one that comes again ends at once.
  def test_two_signals_of_any_kind
    worker = shell("trap '' INT TERM HUP QUIT; echo ready; #{IDLE}")
    %w[INT TERM HUP QUIT].repeated_permutation(2) do |first, second|
      run = start("--nproc-per-node=2", "--shutdown-timeout=3600", *worker)
      run.await(/(ready\n){2}/)
      run.signal(first)
      run.await(/SIG#{first} received: stopping workers/, stream: :err)
      unless second == first
        run.signal(second)
        run.await(/SIG#{second} received: workers are being stopped already/, stream: :err)
      end
      result = run.insist(second)
      assert_code 128 + Signal.list[first], result
      assert_empty marked
    end
  end

  # A second Ctrl-C within the same moment is one.
  def test_a_burst_of_signals
    worker = shell("trap 'sleep 0.3; echo saved; exit 0' TERM; echo ready; #{IDLE}")
    run = start(*worker)
    run.await(/ready/)
    run.signal(:TERM)
    result = run.finish
    assert_code 143, result
    assert_includes result.out, "saved"
    5.times do
      run = start(*worker)
      run.await(/ready/)
      10.times { run.signal(:TERM) }
      assert_code 143, run.finish
    end
  end

  COUNT = 5000

  # All lines are there, whole and in each worker's order.
  def assert_all_lines(text, workers)
    by_rank = text.lines(chomp: true).group_by { |line| line[/\d+/].to_i }
    assert_equal [*0...workers], by_rank.keys.sort
    by_rank.each do |rank, lines|
      assert_equal Array.new(COUNT) { |i| "#{rank} line #{i} #{"x" * (i % 97)}" }, lines.map { |line| line.sub(/\A\[default\d+\]:/, "") }
    end
  end

  LINES = <<~RUBY
    rank = ENV["RANK"]
    #{COUNT}.times do |i|
      $stdout.write("\#{rank} line \#{i} \#{"x" * (i % 97)}\\n")
      $stdout.flush if (i % 7).zero?
    end
  RUBY

  def test_thousands_of_lines_from_sixteen_workers
    result = run_torchrun("--nproc-per-node=16", *ruby(LINES))
    assert_code 0, result
    assert_all_lines(result.out, 16)
  end

  # Stopped and continued again and again: nothing is lost, and nothing is taken for dead.
  def test_thousands_of_lines_while_the_job_is_stopped_and_continued
    run = start("--nproc-per-node=16", *ruby(LINES))
    20.times do |i|
      sleep 0.05
      run.signal((i % 3 == 0) ? :TSTP : :STOP)
      sleep 0.05
      run.signal(:CONT)
    rescue Errno::ESRCH
      break
    end
    result = run.finish
    assert_code 0, result
    assert_all_lines(result.out, 16)
  end

  # With files and prefixes as well.
  def test_thousands_of_lines_into_files_and_here
    logs = File.join(@folder, "logs")
    result = run_torchrun("--nproc-per-node=16", "--tee=3", "--log-dir=#{logs}", *ruby(LINES))
    assert_code 0, result
    assert_all_lines(result.out.gsub(/^\[default\d+\]:/, ""), 16)
    files = Dir.glob(File.join(logs, "*/attempt_0/*/stdout.log"))
    assert_equal 16, files.size
    assert_all_lines(files.map { |path| File.read(path) }.join, 16)
  end

  # What Ctrl-Z does: the whole job stands still, and goes on after SIGCONT. The worker reads what it does from a FIFO and starts
  # no process: a shell whose child is stopped between vfork and exec is not stopped itself.
  def test_the_workers_stand_still_while_torchrun_does
    lines = File.join(@folder, "lines")
    File.mkfifo(lines)
    feed = File.open(lines, "r+")
    # In a group of its own, whose leader has this process as parent: in an orphaned one, which this may be in, nobody stops.
    run = start(*shell("while read word; do echo $word; done < #{lines}; echo done"), pgroup: true)
    feed.syswrite("before\n")
    run.await(/before\n/)
    run.signal(:TSTP)
    states = -> { states_beside_agents(run) }
    eventually(-> { "torchrun and its worker to be stopped: #{states.call}" }) { states.call == %w[T T] }
    feed.syswrite("after\n")
    assert_equal %w[T T], states.call
    run.signal(:CONT)
    run.await(/after\n/)
    feed.close
    result = run.finish
    assert_code 0, result
    assert_equal "before\nafter\ndone\n", result.out
  ensure
    feed&.close
  end
end
