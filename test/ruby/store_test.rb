# frozen_string_literal: true

require_relative "store_behaviour"

class HashStoreTest < Minitest::Test
  include StoreBehaviour
  include QueueBehaviour

  def open_store
    Distributed::HashStore.new
  end

  def test_another_thread_brings_the_key
    waiting = Thread.new(store) { |opened| opened.get("late") }
    await_waiting(waiting)
    store.set("late", "here")
    assert_equal "here", waiting.value
  end

  def test_timeout_ends_a_wait
    assert_raises(Timeout::Error) { Timeout.timeout(0.2) { store.get("never") } }
  end
end

class FileStoreTest < Minitest::Test
  include StoreBehaviour

  def open_store
    @folder = Dir.mktmpdir
    Distributed::FileStore.new(File.join(@folder, "store"), 1)
  end

  def teardown
    super
    FileUtils.rm_rf(@folder) if @folder
  end

  def test_a_clone_knows_the_path
    copy = store.clone
    assert_equal store.path, copy.path
  ensure
    copy&.close
  end

  def test_it_has_no_queues
    [-> { store.queue_push("q", "x") }, -> { store.queue_pop("q") }, -> { store.queue_len("q") }].each do |call|
      assert_equal "a file store has no queues", assert_raises(Distributed::UnsupportedError, &call).message
    end
    store.set("q", "x")
    assert_equal "x", store.get("q")
  end

  def test_the_last_to_close_removes_the_file
    store.set("a", "1")
    assert File.exist?(store.path)
    path = store.path
    store.close
    refute File.exist?(path)
  end
end

class TCPStoreTest < Minitest::Test
  include StoreBehaviour
  include QueueBehaviour

  def open_store
    Distributed::TCPStore.new("127.0.0.1", 0, nil, true)
  end

  def test_a_client_sees_the_masters_keys
    client = Distributed::TCPStore.new("127.0.0.1", store.port)
    store.set("a", "1")
    assert_equal "1", client.get("a")
    assert_equal ["127.0.0.1", store.port], [client.host, client.port]
  ensure
    client&.close
  end

  def test_a_closed_store_says_so
    store.close
    assert_match(/closed/, assert_raises(TypeError) { store.get("a") }.message)
    store.close
  end

  def test_nobody_answers
    port = held_port
    error = assert_raises(Torch::Error) { Distributed::TCPStore.new("127.0.0.1", port, 1, false, timeout: 0.3) }
    assert_match(/127\.0\.0\.1.*#{port}/, error.message)
  end

  def test_a_port_in_use_is_named
    error = assert_raises(Distributed::NetworkError) { Distributed::TCPStore.new("127.0.0.1", store.port, 1, true) }
    assert_match(/#{store.port}/, error.message)
  end

  def test_a_port_that_is_none
    assert_match(/70000/, assert_raises(ArgumentError) { Distributed::TCPStore.new("127.0.0.1", 70_000) }.message)
  end

  def test_missing_workers_are_counted
    error = assert_raises(Distributed::TimeoutError) { Distributed::TCPStore.new("127.0.0.1", 0, 3, true, timeout: 0.2) }
    assert_match(/1.*3/, error.message)
  end

  def test_a_listening_socket_is_taken_over
    socket = TCPServer.new("127.0.0.1", 0)
    port = socket.local_address.ip_port
    @store = Distributed::TCPStore.new("127.0.0.1", 0, nil, true, master_listen_fd: socket)
    assert_equal port, store.port
    store.set("a", "1")
    client = Distributed::TCPStore.new("127.0.0.1", port)
    assert_equal "1", client.get("a")
  ensure
    client&.close
  end

  def test_masters_of_one_port_share_a_server
    port = held_port
    make = ->(shared) { Distributed::TCPStore.new("127.0.0.1", port, 1, true, multi_tenant: shared, timeout: 5) }
    @store = make[true]
    store.set("a", "1")
    second = make[true]
    assert_equal "1", second.get("a")
    assert_raises(Distributed::NetworkError) { make[false] }
    store.close
    assert_equal "1", second.get("a")
    third = make[true]
    assert_equal "1", third.get("a")
    [second, third].each(&:close)
    @store = make[true] # the port is free again, and the server new
    refute store.check(["a"])
  end

  def test_a_clone_keeps_the_server
    copy = store.clone
    assert_equal [store.host, store.port], [copy.host, copy.port]
    store.set("a", "1")
    store.close
    assert_equal "1", copy.get("a")
  ensure
    copy&.close
  end

  # One of two connections waits, the other does not.
  def test_a_waiting_clone_holds_up_nobody
    copy = store.clone
    waiting = Thread.new { copy.get("late") }
    await_waiting(waiting)
    store.set("late", "here") # comes through, or the wait would never end
    assert_equal "here", waiting.value
  ensure
    copy&.close
  end

  def test_an_interrupt_ends_connecting
    port = held_port
    thread = Thread.new { Distributed::TCPStore.new("127.0.0.1", port, 1, false, timeout: LIMIT) }
    thread.report_on_exception = false
    await_waiting(thread)
    thread.raise(IOError, "enough")
    assert_raises(IOError) { thread.value }
  end
end

class PrefixStoreTest < Minitest::Test
  include StoreBehaviour
  include QueueBehaviour

  def open_store
    Distributed::PrefixStore.new("view", Distributed::HashStore.new)
  end

  def test_prefixes_nest
    base = Distributed::HashStore.new
    outer = Distributed::PrefixStore.new("a", Distributed::PrefixStore.new("b", base))
    outer.set("x", "1")
    assert_equal "1", base.get("b/a/x")
    assert_equal "a", outer.prefix
    assert_same base, outer.underlying_store.underlying_store
    assert_equal [["x"], ["a/x"], ["b/a/x"]], [outer, outer.underlying_store, base].map(&:list_keys)
    assert_match(/expected a Torch::Distributed::Store, got 5/,
      assert_raises(TypeError) { Distributed::PrefixStore.new("a", 5) }.message)
  end
end

# Groups that follow each other on one store, or on a clone of it, get keys of their own.
class StoreOfGroupsTest < Minitest::Test
  def test_clones_count_groups_together
    store = Distributed::HashStore.new
    assert_equal 0, store.next_group
    copy = store.clone
    assert_equal [1, 2, 3], [copy.next_group, store.next_group, copy.clone.next_group]
  end
end

class AbstractStoreTest < Minitest::Test
  def test_store_is_abstract
    assert_match(/TCPStore/, assert_raises(NotImplementedError) { Distributed::Store.new }.message)
  end

  def test_a_tcp_store_made_before_a_fork_refuses_the_child
    store = Distributed::TCPStore.new("127.0.0.1", 0, nil, true)
    store.set("a", "1")
    said = Distributed.fork_world(1) { failure { store.get("a") } }
    assert_equal "Torch::Distributed::GroupError", said[0][0]
    assert_match(/fork/, said[0][1])
    assert_equal "1", store.get("a")
  ensure
    store&.close
  end
end
