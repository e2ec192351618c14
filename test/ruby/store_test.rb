# frozen_string_literal: true

require_relative "test_helper"

# What every kind of store does, from Ruby.
module StoreBehaviour
  def teardown
    @store&.close
    super
  end

  def store
    @store ||= open_store
  end

  def test_set_and_get_bytes
    value = (0..255).to_a.pack("C*")
    assert_nil store.set("key", value)
    assert_equal value, store.get("key")
    assert_equal Encoding::BINARY, store.get("key").encoding
    store.set(:key, "")
    assert_equal "", store.get(:key)
  end

  def test_a_value_of_a_mebibyte
    value = Random.new(1).bytes(1 << 20)
    store.set("big", value)
    assert_equal value, store.get("big")
  end

  def test_add_counts
    assert_equal 5, store.add("n", 5)
    assert_equal(-2, store.add("n", -7))
    assert_equal "-2", store.get("n")
  end

  def test_compare_set_stores_only_over_the_expected
    assert_equal "x", store.compare_set("c", "", "x")
    assert_equal "x", store.compare_set("c", "wrong", "y")
    assert_equal "y", store.compare_set("c", "x", "y")
    assert_equal "old", store.compare_set("absent", "old", "new")
    refute store.check(["absent"])
  end

  def test_delete_key_and_num_keys
    before = store.num_keys
    store.set("a", "1")
    store.set("b", "2")
    assert_equal before + 2, store.num_keys
    assert_equal true, store.delete_key("a")
    refute store.check(["a"])
  end

  def test_check_wants_all_keys
    store.set("a", "1")
    assert_equal true, store.check(["a"])
    assert_equal false, store.check(%w[a b])
  end

  def test_append
    store.append("log", "one ")
    store.append("log", "two")
    assert_equal "one two", store.get("log")
  end

  def test_several_keys_at_once
    keys = Array.new(50) { |i| "key#{i}" }
    values = Array.new(50) { |i| "value" * i }
    store.multi_set(keys, values)
    assert_equal values.reverse, store.multi_get(keys.reverse)
    assert_equal [], store.multi_get([])
    store.wait(keys)
  end

  def test_a_key_that_does_not_come_is_named
    store.timeout = 0.1
    assert_in_delta 0.1, store.timeout
    error = assert_raises(Torch::Distributed::TimeoutError) { store.get("nobody_sets_this") }
    assert_match(/nobody_sets_this/, error.message)
    assert_equal :TDDP_TIMEOUT, error.status
    assert_kind_of Torch::Error, error
    elapsed = seconds { assert_raises(Torch::Distributed::TimeoutError) { store.wait(["neither_this"], 0.05) } }
    assert_operator elapsed, :<, 2
    store.set("nobody_sets_this", "after all")
    assert_equal "after all", store.get("nobody_sets_this")
  end

  def test_wrong_arguments_are_named
    assert_match(/key: expected a String, got 3/, assert_raises(TypeError) { store.get(3) }.message)
    assert_match(/value: expected a String, got nil/, assert_raises(TypeError) { store.set("k", nil) }.message)
    assert_match(/2 keys, but 1 values/, assert_raises(ArgumentError) { store.multi_set(%w[a b], %w[c]) }.message)
    assert_match(/timeout/, assert_raises(TypeError) { store.timeout = "soon" }.message)
    assert_raises(TypeError) { store.dup }
  end
end

class HashStoreTest < Minitest::Test
  include StoreBehaviour

  def open_store
    Distributed::HashStore.new
  end

  def test_another_thread_brings_the_key
    waiting = Thread.new { store.get("late") }
    sleep 0.05
    store.set("late", "here")
    assert_equal "here", waiting.value
  end

  def test_timeout_ends_a_wait
    elapsed = seconds do
      assert_raises(Timeout::Error) { Timeout.timeout(0.2) { store.get("never") } }
    end
    assert_operator elapsed, :<, 2
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
    port = Distributed.free_port
    error = nil
    elapsed = seconds do
      error = assert_raises(Torch::Error) { Distributed::TCPStore.new("127.0.0.1", port, 1, false, timeout: 0.3) }
    end
    assert_match(/127\.0\.0\.1.*#{port}/, error.message)
    assert_operator elapsed, :<, 3
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

  def test_an_interrupt_ends_connecting
    thread = Thread.new { Distributed::TCPStore.new("127.0.0.1", Distributed.free_port, 1, false, timeout: 60) }
    thread.report_on_exception = false
    sleep 0.1
    thread.raise(IOError, "enough")
    elapsed = seconds { assert_raises(IOError) { thread.value } }
    assert_operator elapsed, :<, 2
  end
end

class PrefixStoreTest < Minitest::Test
  include StoreBehaviour

  def open_store
    Distributed::PrefixStore.new("view", Distributed::HashStore.new)
  end

  def test_prefixes_nest
    base = Distributed::HashStore.new
    outer = Distributed::PrefixStore.new("a", Distributed::PrefixStore.new("b", base))
    outer.set("x", "1")
    assert_equal "1", base.get("b/a/x")
    assert_match(/expected a Torch::Distributed::Store, got 5/,
      assert_raises(TypeError) { Distributed::PrefixStore.new("a", 5) }.message)
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
