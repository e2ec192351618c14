# frozen_string_literal: true

require_relative "test_helper"
require "logger"
require "stringio"

class LogTest < Minitest::Test
  # Each new group has something to say of it.
  COMPLAINT = {"TDDP_FR_BUFFER_SIZE" => "lots"}.freeze
  LINE = /\AWARN torch-ddp group: TDDP_FR_BUFFER_SIZE="lots": expected 0 to \d+; using \d+\z/
  PLAIN = /\A\[tddp\] warn group: TDDP_FR_BUFFER_SIZE="lots": expected 0 to \d+; using \d+\z/
  FORMAT = ->(severity, _, program, message) { "#{severity} #{program} #{message}\n" }

  def teardown
    Distributed.logger = nil
    refute(Thread.list.any? { |thread| thread.name == "torch-ddp log" })
  end

  def logger_into(text)
    Logger.new(text, formatter: FORMAT)
  end

  def groups(count = 1)
    with_env(COMPLAINT) { alone { (count - 1).times { Distributed.new_group([0]) } } }
  end

  def test_lines_of_the_library_and_warnings_in_ruby
    first, second = Array.new(2) { StringIO.new }
    _, rest = capture_subprocess_io do
      Distributed.logger = logger = logger_into(first)
      assert_same logger, Distributed.logger
      groups(40)
      lines = first.string.lines(chomp: true)
      assert_equal 40, lines.grep(LINE).size
      Distributed.logger = logger_into(second)
      groups
      alone { Distributed.all_reduce(Torch.ones(1), group: Distributed::GroupMember::NON_GROUP_MEMBER) }
      Distributed.logger = nil
      assert_equal lines, first.string.lines(chomp: true)
      groups
    end
    lines = second.string.lines(chomp: true)
    assert_equal 2, lines.size
    assert_match LINE, lines[0]
    assert_match(/\AWARN torch-ddp .*log_test.rb:\d+: warning: all_reduce on a group that/, lines[1])
    assert_equal 1, rest.lines(chomp: true).grep(PLAIN).size
    assert_equal 1, rest.lines.size
  end

  # Ranks that share memory have more to say than one that is alone.
  def test_levels
    code = <<~RUBY
      require "logger"
      require "stringio"
      said = Torch::Distributed.fork_world(2) do |rank|
        text = StringIO.new
        Torch::Distributed.logger = Logger.new(text, level: %i[debug warn][rank], formatter: ->(severity, *) { severity + " " })
        Torch::Distributed.init_process_group("gloo")
        Torch::Distributed.destroy_process_group
        text.string
      end
      puts said
    RUBY
    {"debug" => [%w[DEBUG WARN], %w[WARN]], "error" => [[], []]}.each do |level, expected|
      out, rest, status = ruby(code, env: COMPLAINT.merge("TDDP_LOG" => level))
      assert status.success?, rest
      assert_empty rest
      assert_equal expected, out.lines.map { |line| line.split.uniq.sort - %w[INFO] }
    end
  end

  def test_a_forked_child_has_lines_of_its_own
    text = StringIO.new
    Distributed.logger = logger_into(text)
    groups
    before = text.string.dup
    said = with_env(COMPLAINT) do
      Distributed.fork_world(2) do
        text.string = +""
        Distributed.init_process_group(BACKEND)
        Distributed.destroy_process_group
        text.string.lines(chomp: true)
      end
    end
    said.each { |lines| assert_equal [1, 1], [lines.size, lines.grep(LINE).size] }
    groups
    assert_equal before * 2, text.string
  end

  def test_nothing_waits_for_a_logger_that_is_slow
    go_on = Thread::Queue.new
    held = []
    logger = Object.new
    logger.define_singleton_method(:add) { |_, text, _| held << text && go_on.pop }
    _, rest = capture_subprocess_io do
      Distributed.logger = logger
      Distributed.instance_variable_get(:@log_pipe).last.fcntl(1031, 4096) # F_SETPIPE_SZ
      with_env(COMPLAINT) do
        Distributed.init_process_group(BACKEND, store: Distributed::HashStore.new, rank: 0, world_size: 1)
        99.times { Distributed.new_group([0]) }
      end
      go_on.close
      Distributed.destroy_process_group
    end
    lines = rest.lines(chomp: true)
    assert_equal 100, held.size + lines.size
    assert_equal lines.size, lines.grep(PLAIN).size
    assert_operator held.size, :>, 20
    assert_operator lines.size, :>, 20
  end

  def test_a_logger_that_fails_and_what_is_none
    logger = Object.new
    def logger.add(*) = raise(IOError, "disk full")
    _, said = capture_subprocess_io do
      Distributed.logger = logger
      groups(2)
    end
    assert_equal 2, said.lines.grep(/torch-ddp: the logger failed: disk full \(IOError\); group: TDDP_FR/).size
    error = assert_raises(TypeError) { Distributed.logger = $stderr }
    assert_match(/logger: expected a Logger, .* got #<IO/, error.message)
    assert_same logger, Distributed.logger
  end

  def test_lines_before_the_end_of_a_process
    out, rest, status = ruby(<<~RUBY, env: COMPLAINT)
      require "logger"
      Torch::Distributed.logger = Logger.new($stdout, formatter: ->(_, _, program, message) { program + " " + message + "\n" })
      Torch::Distributed.init_process_group("gloo", store: Torch::Distributed::HashStore.new, rank: 0, world_size: 1)
    RUBY
    assert_equal [true, ""], [status.success?, rest]
    assert_match(/\Atorch-ddp group: TDDP_FR_BUFFER_SIZE/, out)
  end
end
