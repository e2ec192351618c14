# frozen_string_literal: true

require_relative "launch_case"

# bin/torchrun, the few lines of Ruby that RubyGems needs.
class ShimTest < LaunchCase
  SHIM = "#{ROOT}/bin/torchrun"

  # Not `sleep` alone: Debian's sh loses a SIGINT that comes just as it starts a program.
  SLEEP = "exec sleep 60"

  def shim(*arguments, env: {}, **options)
    run_torchrun(*arguments, command: [RbConfig.ruby, SHIM], env: {"TDDP_TORCHRUN" => BINARY}.merge(env), **options)
  end

  def test_it_becomes_the_program
    result = shim("--nproc-per-node=2", *shell("echo $PPID"))
    assert_code 0, result
    assert_equal 1, result.out.lines.uniq.size
    run = start(*shell("echo $PPID; #{SLEEP}"), command: [RbConfig.ruby, SHIM], env: {"TDDP_TORCHRUN" => BINARY})
    run.await(/\d+/)
    # The shim's process is the program now, whose child has the workers.
    assert_equal run.agent.to_s, run.out[/\d+/]
    run.signal(:INT)
    assert_code 130, run.finish
  end

  # A handler of Ruby's would note a signal that comes just before the exec, and nobody would ever read the note.
  def test_ruby_takes_no_signal_when_it_becomes_the_program
    hook = File.join(@folder, "hook.rb")
    File.write(hook, 'def exec(*) = puts(File.read("/proc/self/status")[/^SigCgt:.*/])')
    result = run_torchrun("x.rb", command: [RbConfig.ruby, "-r", hook, SHIM], env: {"TDDP_TORCHRUN" => BINARY})
    assert_code 0, result
    caught = result.out[/SigCgt:\s+(\h+)/, 1].to_i(16)
    assert_empty %w[INT TERM HUP QUIT].select { |name| caught[Signal.list[name] - 1] == 1 }
  end

  # What is ignored, as under nohup, stays ignored.
  def test_what_is_ignored_stays_so
    code = "grep SigIgn /proc/$PPID/status /proc/self/status"
    run = start("trap '' HUP INT; exec #{RbConfig.ruby} #{SHIM} #{shell(code).join(" ")}", command: %w[sh -c],
      env: {"TDDP_TORCHRUN" => BINARY})
    result = run.finish
    assert_code 0, result
    masks = result.out.scan(/SigIgn:\s+(\h+)/).map { |(mask)| mask.to_i(16) & 0b111 }
    assert_equal [0b011, 0b011], masks
  end

  # As cron and some daemons start programs: /dev/null stands in for what is closed, for workers too.
  def test_closed_descriptors
    code = 'for fd in 0 1 2; do [ -e /proc/$$/fd/$fd ] || echo "no $fd"; done >> bad; echo "out $RANK"; echo "err $RANK" >&2; cat; echo $RANK >> "done.$HOW"'
    closed = ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"]
    closed.each_with_index do |how, number|
      [[BINARY], [RbConfig.ruby, SHIM]].each_with_index do |command, kind|
        mark = "#{number}.#{kind}"
        env = {"TDDP_TORCHRUN" => BINARY, "HOW" => mark}
        run = start("exec \"$@\" #{how}", "sh", *command, "--nproc-per-node=2", *shell(code), command: %w[sh -c], env: env)
        assert_code 0, run.finish
        assert_equal %W[0\n 1\n], File.readlines(File.join(@folder, "done.#{mark}")).sort, "#{command.first} #{how}"
      end
    end
    assert_empty File.read(File.join(@folder, "bad"))
  end

  def test_workers_run_the_same_ruby_and_their_lines_come_at_once
    run = start(*ruby('puts RbConfig.ruby, ENV["TDDP_RUBY_PRELOAD"].inspect, defined?(Torch).inspect, defined?(JSON).inspect; sleep 60'),
      command: [RbConfig.ruby, SHIM], env: {"TDDP_TORCHRUN" => BINARY, "TDDP_RUBY" => nil})
    run.await(/#{Regexp.escape(RbConfig.ruby)}\nnil\nnil\nnil\n/)
    run.signal(:TERM)
    run.finish
  end

  def test_an_exception_is_in_the_report
    result = shim(*ruby('raise ArgumentError, "boom"'))
    assert_code 1, result
    assert_match(/^  message   : ArgumentError: boom$/, result.err)
    quiet = shim(*ruby("exit 3"))
    refute_match(/message/, quiet.err)
  end

  # Ctrl-C is told once, and all that Ruby does at its end is done.
  def test_interrupted_workers_are_quiet
    code = <<~'RUBY'
      require "tempfile"
      $kept = Tempfile.new("kept")
      at_exit { warn "#{$!.class} at exit" }
      begin
        puts "ready"
        sleep 60
      ensure
        warn "ensured"
      end
    RUBY
    said = {nil => %w[], "-w" => %w[Interrupt]}.map do |rubyopt, names|
      run = start("--nproc-per-node=2", *ruby(code), command: [RbConfig.ruby, SHIM], env: {"TDDP_TORCHRUN" => BINARY, "RUBYOPT" => rubyopt})
      run.await(/(ready\n){2}/)
      run.signal(:INT)
      result = run.finish
      assert_code 130, result
      assert_equal ["torchrun: SIGINT received: stopping workers; send it again to kill them\n"], result.err.lines.grep(/torchrun:/)
      assert_equal 2, result.err.scan("ensured\n").size
      assert_equal 2, result.err.scan("Interrupt at exit\n").size
      rest = result.err.lines.grep_v(/torchrun:|ensured|at exit/)
      assert_equal names, rest.join.scan(/: (Interrupt)$/).flatten.uniq
      rest
    end
    assert_empty said.first
  end

  def test_an_interrupted_worker_ends_by_the_signal
    preload = File.join(ROOT, "lib/torch_ddp/torchrun_worker.rb")
    result = run_torchrun("-r", preload, "-e", "Process.kill(:INT, $$); sleep 60", command: [RbConfig.ruby])
    assert_equal [Signal.list["INT"], ""], [result.status.termsig, result.err]
  end

  def test_a_program_that_is_not_built
    result = shim("x.rb", env: {"TDDP_TORCHRUN" => "/dev/null/torchrun"})
    assert_code 1, result
    assert_match(%r{\Atorchrun: /dev/null/torchrun is not built\. In a checkout run `rake compile`}, result.err)
  end
end
