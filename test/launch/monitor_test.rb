# frozen_string_literal: true

require_relative "launch_case"
require_relative "terminal"

# --monitor, on a terminal and without one.
class MonitorTest < LaunchCase
  # torchrun on a terminal of its own, whose screen is followed.
  class Session
    attr_reader :terminal, :pid

    def initialize(command, env:, chdir:, rows:, columns:)
      @terminal = Terminal.new(rows, columns)
      @master, slave = PTY.open
      @master.winsize = [rows, columns]
      @pid = Process.spawn(env, *command, in: slave, out: slave, err: slave, chdir: chdir)
      slave.close
      @lock = Mutex.new
      @reader = Thread.new { read }
    end

    def read
      loop { @master.readpartial(65_536).then { |bytes| @lock.synchronize { @terminal.feed(bytes) } } }
    rescue Errno::EIO, EOFError
      nil
    end

    # Waits until what the block sees of the screen is true, and returns that.
    def await(what, limit: LaunchCase::LIMIT, &block)
      LaunchCase.eventually(limit, -> { "#{what}; the screen:\n#{@terminal.lines.join("\n")}" }) { look(&block) }
    end

    def look
      @lock.synchronize { yield @terminal }
    end

    def resize(rows, columns)
      @master.winsize = [rows, columns]
    end

    def finish(limit: LaunchCase::LIMIT)
      status = LaunchCase.eventually(limit, -> { "torchrun to end; the screen:\n#{@terminal.lines.join("\n")}" }) do
        Process.wait2(@pid, Process::WNOHANG)&.last
      end
      @pid = nil
      @reader.join(LaunchCase::LIMIT) or raise "the terminal is still open"
      @master.close
      status.exitstatus || (128 + status.termsig)
    end

    def abandon
      return unless @pid

      Process.kill(:KILL, @pid)
      Process.wait(@pid)
    end
  end

  def open_terminal(*arguments, env: {}, rows: 24, columns: 100)
    Session.new([BINARY, *arguments.map(&:to_s)], env: environment({"TERM" => "xterm", "NO_COLOR" => "1"}.merge(env)), chdir: @folder,
      rows: rows, columns: columns).tap { |session| @runs << session }
  end

  # Workers go on once this file is there.
  def gate
    "#{@folder}/go"
  end

  def waiting(code)
    "while [ ! -e #{gate} ]; do sleep 0.02; done; #{code}"
  end

  def block_of(terminal)
    terminal.shown.drop_while { |line| !line.start_with?("torchrun ") }
  end

  def test_the_block_stands_below_the_output
    session = open_terminal("--monitor", "--nproc-per-node=2", "--rdzv-id=job7", *shell("echo hello $RANK; #{waiting("echo bye $RANK")}"))
    block = session.await("both lines in the block") do |terminal|
      lines = block_of(terminal)
      lines if lines.size == 4 && lines[2].end_with?("hello 0") && lines[3].end_with?("hello 1")
    end
    assert_match(/\Atorchrun job7: running, 0:\d\d:\d\d, round 0, restart 0 of 0\z/, block[0])
    assert_match(/\A rank      pid  state                cpu    memory  last line\z/, block[1])
    assert_match(/\A    0  +\d+  running +(-|\d+%) +\d+ MiB  hello 0\z/, block[2])
    assert_match(/\A    1  +\d+  running /, block[3])
    session.look { |terminal| assert_equal ["[default0]:hello 0", "[default1]:hello 1"], terminal.lines.take(2).sort }
    File.write(gate, "")
    assert_equal 0, session.finish
    # Nothing of the block is left, and no line is torn.
    expected = %w[hello bye].flat_map { |word| 2.times.map { |rank| "[default#{rank}]:#{word} #{rank}" } }
    assert_equal expected.sort, session.terminal.shown.sort
  end

  def test_a_line_that_is_not_finished_goes_on_where_it_was
    session = open_terminal("--monitor", *shell("printf abc; #{waiting("printf 'def\\rX'; echo")}"))
    session.await("the block below the unfinished line") do |terminal|
      terminal.lines.first == "abc" && block_of(terminal).last&.end_with?("abc") && terminal.cursor == [0, 3]
    end
    File.write(gate, "")
    assert_equal 0, session.finish
    assert_equal ["Xbcdef"], session.terminal.shown
  end

  def test_output_scrolls_and_nothing_of_it_is_lost
    count = 300
    session = open_terminal("--monitor", "--nproc-per-node=2", *shell("i=0; while [ $i -lt #{count} ]; do i=$((i+1)); echo line $i; done"), rows: 10)
    assert_equal 0, session.finish
    lines = session.terminal.shown
    2.times do |rank|
      assert_equal((1..count).map { |i| "[default#{rank}]:line #{i}" }, lines.grep(/\A\[default#{rank}\]/))
    end
    assert_equal 2 * count, lines.size
  end

  def test_lines_are_cut_to_the_screen_and_follow_its_size
    session = open_terminal("--monitor", *shell("echo #{"0123456789" * 12}; #{waiting(":")}"), columns: 80)
    session.await("a line cut at 79") { |terminal| block_of(terminal).last&.size == 79 }
    session.resize(24, 70)
    session.await("a line cut at 69") { |terminal| block_of(terminal).last&.size == 69 }
    File.write(gate, "")
    assert_equal 0, session.finish
  end

  def test_a_screen_with_few_lines
    session = open_terminal("--monitor", "--nproc-per-node=9", *shell(waiting(":")), rows: 8)
    block = session.await("a block of five lines") { |terminal| block_of(terminal).then { |lines| lines if lines.last&.match?(/and \d+ more/) } }
    assert_equal 5, block.size
    assert_match(/and 7 more\z/, block.last)
    File.write(gate, "")
    assert_equal 0, session.finish
    assert_empty session.terminal.shown
  end

  def test_restarts_and_ends_of_workers_are_shown
    code = "[ $TORCHELASTIC_RESTART_COUNT = 0 ] && [ $RANK = 1 ] && exit 3; #{waiting(":")}"
    session = open_terminal("--monitor", "--nproc-per-node=2", "--max-restarts=2", *shell(code))
    session.await("the restart") { |terminal| block_of(terminal).first&.include?("round 1, restart 1 of 2") }
    File.write(gate, "")
    assert_equal 0, session.finish
    shown = session.terminal.shown.join("\n")
    assert_match(/starting all workers again \(restart 1 of 2\)/, shown)
    refute_match(/last line/, shown)
  end

  def test_nodes_are_waited_for
    port = free_port
    flags = ["--monitor", "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:#{port}", "--rdzv-id=job7"]
    first = open_terminal(*flags, *shell(waiting(":")))
    block = first.await("the first node to wait") { |terminal| block_of(terminal).then { |lines| lines if lines.any? { |line| line.start_with?("waits: ") } } }
    assert_match(/\Atorchrun job7: waiting for nodes, 0:\d\d:\d\d, --nnodes=2:2, round 0, restart 0 of 0\z/, block[0])
    assert_equal "waits: the job's nodes, at 127.0.0.1 port #{port}", block[1]
    assert_equal 2, block.size
    second = open_terminal(*flags, *shell(waiting(":")))
    heads = [first, second].map do |session|
      session.await("both nodes to run") { |terminal| block_of(terminal).first[/running, .*/] if block_of(terminal).size == 3 }
    end
    assert_equal [0, 1], heads.map { |head| head[/node (\d) of 2 \(--nnodes=2:2\), world size 2, round 0/, 1].to_i }.sort
    File.write(gate, "")
    assert_equal [0, 0], [first, second].map(&:finish)
    [first, second].each { |session| refute_match(/last line/, session.terminal.shown.join) }
  end

  def test_a_node_that_comes_is_seen
    flags = ["--monitor", "--nnodes=1:2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:#{free_port}", "--rdzv-conf=last_call_timeout=1", "--max-restarts=3"]
    first = open_terminal(*flags, *shell(waiting(":")), columns: 120)
    first.await("the first node to run alone") { |terminal| block_of(terminal).first&.match?(/running, .*, node 0 of 1 \(--nnodes=1:2\), world size 1, round 0, restart 0 of 3/) }
    second = open_terminal(*flags, *shell(waiting(":")), columns: 120)
    first.await("two nodes") { |terminal| block_of(terminal).first&.match?(/running, .*, node 0 of 2 \(--nnodes=1:2\), world size 2, round 1, restart 0 of 3/) }
    second.await("two nodes") { |terminal| block_of(terminal).first&.match?(/running, .*, node 1 of 2 \(--nnodes=1:2\), world size 2, round 1, restart 0 of 3/) }
    File.write(gate, "")
    assert_equal [0, 0], [first, second].map(&:finish)
  end

  def test_the_report_is_the_last_to_be_seen
    session = open_terminal("--monitor", "--nproc-per-node=2", *shell("echo out; #{waiting("exit $RANK")}"))
    session.await("the block") { |terminal| block_of(terminal).size == 4 }
    File.write(gate, "")
    assert_equal 1, session.finish
    shown = session.terminal.shown.join("\n")
    assert_match(/FAILED/, shown)
    refute_match(/last line/, shown)
  end

  def test_cpu_and_memory_are_of_all_that_a_worker_started
    code = "ruby -e 'text = %q(x) * 100_000_000; fork { loop {} }; File.write(%q(#{@folder}/busy), %q()); sleep 0.05 until File.exist?(%q(#{gate})); exit!(0)' & wait"
    session = open_terminal("--monitor", *shell(code))
    found = session.await("a worker that is busy and has 100 MB") do |terminal|
      block_of(terminal).last&.match(/running +(\d+)% +(\d+) MiB/)&.captures&.map(&:to_i)&.then { |cpu, memory| [cpu, memory] if cpu > 5 && memory > 90 }
    end
    assert_operator found[0], :<=, 250
    File.write(gate, "")
    assert_equal 0, session.finish
  end

  def test_a_dumb_terminal_gets_no_sequences
    session = open_terminal("--monitor", *shell("echo hello"), env: {"TERM" => "dumb"})
    assert_equal 0, session.finish
    assert_equal "hello\r\n", session.terminal.text
  end

  # A line every ten seconds, which test/slow waits for; nothing else.
  def test_without_a_terminal
    result = run_torchrun("--monitor", *shell("echo hello"))
    assert_code 0, result
    assert_equal "hello\n", result.out
    assert_empty result.err.lines.grep_v(/^torchrun: \S+: running, /)
  end

  def test_without_the_flag_nothing_is_drawn
    session = open_terminal(*shell("echo hello"))
    assert_equal 0, session.finish
    assert_equal "hello\r\n", session.terminal.text
  end
end
