# frozen_string_literal: true

require_relative "test_helper"

# An exception that ends what the caller is in, which is another thing than one that a `rescue` handles.
class PassingErrorTest < Minitest::Test
  def passing
    TorchDDP::PassingError.failure&.message
  end

  # What the block says, which is called within the method's own `ensure`.
  def on_the_way_out
    yield
  ensure
    @said << passing
  end

  def test_which_exceptions_pass_by
    @said = []
    on_the_way_out { nil }
    begin
      on_the_way_out { raise "a" }
    rescue => error
      @said << passing
      on_the_way_out { nil }
      begin
        on_the_way_out { raise error } # the same once more
      rescue
        [1].each { @said << passing }
      ensure
        @said << passing
      end
      (Integer("b") rescue @said << passing) # standard:disable Style/RescueModifier
    end
    @said << passing
    assert_equal [nil, "a", nil, nil, "a", nil, nil, nil, nil], @said
  end

  def test_an_exit_fails_or_does_not
    @said = []
    [0, 1].each do |status|
      on_the_way_out { exit status }
    rescue SystemExit => e
      @said << e.status
    end
    assert_equal [nil, 0, "exit", 1], @said
  end

  # Where a thread is told to exit, or a block is left, nothing fails.
  def test_what_is_left_otherwise
    @said = []
    Thread.new { on_the_way_out { Thread.current.kill } }.join
    catch(:enough) { on_the_way_out { throw :enough } }
    [1].each { on_the_way_out { break } }
    assert_equal [nil, nil, nil], @said
  end

  def test_handlers_of_the_process_exit
    code = <<~RUBY
      at_exit { puts TorchDDP::PassingError.failure.inspect }
      eval ARGV[0]
    RUBY
    {"0" => "nil", "raise 'a'" => "#<RuntimeError: a>", "exit" => "nil", "exit 3" => "#<SystemExit: exit>",
     "begin; raise 'a'; rescue; exit; end" => "nil"}.each do |last, expected|
      assert_equal "#{expected}\n", capture_ruby("-rtorch_ddp/passing_error", "-e", code, last)[0], last
    end
  end

  # The seconds that each end gives to what is under way, and to the other ranks.
  def ends
    given = []
    start = lambda do
      Distributed.init_process_group(BACKEND, store: Distributed::HashStore.new, rank: 0, world_size: 1).tap do |group|
        group.define_singleton_method(:_shutdown) { |drain, host_wait| given << [drain, host_wait].map(&:ceil) && super(drain, host_wait) }
      end
    end
    yield start
    given
  end

  def test_groups_that_end_while_an_error_is_handled
    plain = ends { |start| start.call && Distributed.destroy_process_group }
    handled = ends do |start|
      raise "no checkpoint: starting anew"
    rescue
      start.call
      Distributed.destroy_process_group
    end
    within = ends do |start|
      raise "a"
    rescue
      begin
        start.call
      ensure
        Distributed.destroy_process_group
      end
    end
    assert_equal [[[10, 10]]] * 3, [plain, handled, within]
  end

  def test_groups_that_end_because_of_an_error
    ended = ends do |start|
      begin
        start.call
        raise "a"
      ensure
        Distributed.destroy_process_group
      end
    rescue => e
      assert_equal "a", e.message
    end
    assert_equal [[1, 1]], ended
  end
end
