# frozen_string_literal: true

require_relative "test_helper"

# The process that hosts the store stays for the others at its group's end; and a group that ends with a block.
class StoreHostTest < Minitest::Test
  # What the store has once rank 0 has left the default group.
  LEFT = "default_pg/left/1/0"

  # Joins a group whose store rank 0 hosts, rather than the ranks' parent.
  def join_at(port)
    ENV.delete("TORCHELASTIC_USE_AGENT_STORE")
    ENV["MASTER_PORT"] = port.to_s
    Distributed.init_process_group("gloo", timeout: 20)
  end

  # Uses the store, by a connection that is there and by a fresh one, after rank 0 has ended its group.
  def use_late(port, probe)
    probe.wait([LEFT], 20)
    counts = Array.new(20) { probe.add("uses", 1) }
    fresh = Distributed::TCPStore.new("127.0.0.1", port, timeout: 20)
    [counts.last, fresh.add("uses", 1)]
  ensure
    fresh&.close
  end

  def test_the_host_stays_while_others_use_the_store
    results = Distributed.fork_world(2) do |rank, port|
      join_at(port)
      value = use_late(port, Distributed::TCPStore.new("127.0.0.1", port, timeout: 20)) if rank == 1
      Distributed.destroy_process_group
      value
    end
    assert_equal [nil, [20, 21]], results
  end

  def test_so_does_one_that_was_given_the_store
    results = Distributed.fork_world(2) do |rank, port|
      store = Distributed::TCPStore.new("127.0.0.1", port, 2, rank.zero?, timeout: 20)
      Distributed.init_process_group("gloo", store: store, rank: rank, world_size: 2, timeout: 20)
      value = use_late(port, store) if rank == 1
      Distributed.destroy_process_group
      value
    end
    assert_equal [nil, [20, 21]], results
  end

  PROGRAM = <<~RUBY
    Torch::Distributed.init_process_group("gloo", timeout: 20)
    exit if ENV["RANK"] == "0"
    probe = Torch::Distributed::TCPStore.new("127.0.0.1", Integer(ENV["MASTER_PORT"]), timeout: 20)
    probe.wait(["#{LEFT}"])
    print Array.new(20) { probe.add("uses", 1) }.last
  RUBY

  # Bound, but not listening: the system gives it to nobody else, and rank 0 may listen on it.
  def held_port
    @hold = Socket.new(:INET, :STREAM)
    @hold.setsockopt(:SOCKET, :REUSEADDR, true)
    @hold.bind(Addrinfo.tcp("127.0.0.1", 0))
    @hold.local_address.ip_port
  end

  def teardown
    @hold&.close
    super
  end

  def test_and_one_that_ends_without_destroying
    env = {"WORLD_SIZE" => "2", "MASTER_ADDR" => "127.0.0.1", "MASTER_PORT" => held_port.to_s}
    runs = %w[0 1].map { |rank| Thread.new { ruby(PROGRAM, env: env.merge("RANK" => rank)) } }.map(&:value)
    assert_equal [["", ""], ["20", ""]], runs.map { |out, err, _| [out, err] }
    assert(runs.all? { |_, _, status| status.success? })
  end

  class Stop < StandardError
  end

  # With a limit that outlasts the test's own.
  def test_an_interrupt_ends_the_stay
    joined, stopped = Array.new(2) { Event.new }
    results = Distributed.fork_world(2) do |rank, port|
      group = join_at(port)
      if rank.zero?
        probe = Distributed::TCPStore.new("127.0.0.1", port, timeout: 30)
        main = Thread.current
        Thread.new do
          probe.wait([LEFT])
          main.raise(Stop)
        end
        joined.wait
        said = failure { group._shutdown(1, 1000) }
        stopped.set
      else
        joined.set
        stopped.wait
      end
      Distributed.destroy_process_group
      said
    end
    assert_equal "StoreHostTest::Stop", results[0][0]
    assert_nil results[1]
  end

  def joined(&block)
    Distributed.init_process_group("gloo", store: Distributed::HashStore.new, rank: 0, world_size: 1, &block)
  end

  def test_a_block_has_the_group_and_gives_its_value
    value = joined do |group|
      assert Distributed.initialized?
      [group.size, Distributed.get_rank, Distributed.new_group([0]).size]
    end
    assert_equal [1, 0, 1], value
    refute Distributed.initialized?
  end

  def test_a_block_that_raises_or_leaves_ends_the_group
    error = assert_raises(Stop) { joined { raise Stop, "in the midst" } }
    assert_equal "in the midst", error.message
    refute Distributed.initialized?
    assert_equal 7, catch(:out) { joined { throw :out, 7 } }
    refute Distributed.initialized?
    assert_equal([1, 2], [1, 2].each { joined { break } })
    refute Distributed.initialized?
  end

  def test_a_block_may_end_the_group_itself
    second = nil
    joined do |first|
      Distributed.destroy_process_group
      assert_predicate first, :closed?
      second = joined
    end
    assert_equal [true, false], [Distributed.initialized?, second.closed?]
  ensure
    Distributed.destroy_process_group
  end
end
