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
    store.timeout = Worlds::LIMIT
    elapsed = seconds { assert_raises(Torch::Distributed::TimeoutError) { store.wait(["neither_this"], 0.05) } }
    assert_sooner elapsed, Worlds::LIMIT
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

  # --- barriers, lists

  def test_a_barrier_waits_for_all
    clones = Array.new(3) { store.clone }
    came = Queue.new
    threads = []
    clones.each_with_index do |clone, i|
      # One after the other, each while those before it wait.
      await_waiting(threads.last) if i.positive?
      threads << Thread.new do
        came << i
        clone.barrier("all_here", 3)
        came.size
      end
    end
    assert_equal [3, 3, 3], threads.map(&:value)
    assert_equal "3", store.get("all_here")
  ensure
    clones&.each(&:close)
  end

  def test_a_barrier_tells_who_is_missing
    error = assert_raises(Torch::Distributed::TimeoutError) { store.barrier("b", 3, 0.05) }
    assert_match(/at the barrier "(view\/)?b": 1 of 3 arrived/, error.message)
    assert_match(/world size 0/, assert_raises(Torch::Distributed::InvalidArgumentError) { store.barrier("b", 0) }.message)
  end

  def test_list_keys
    assert_equal [], store.list_keys
    store.multi_set(["a", "b/c", "clé", "\xFF".b], %w[1 2 3 4])
    store.set("gone", "")
    store.delete_key("gone")
    assert_equal ["a", "b/c", "clé", "\xFF".b].map(&:b).sort, store.list_keys.map(&:b).sort
    assert_includes store.list_keys, "clé"
  end

  # --- clones

  def test_a_clone_sees_the_same
    store.set("a", "1")
    copy = store.clone
    assert_instance_of store.class, copy
    assert_equal "1", copy.get("a")
    copy.set("b", "2")
    copy.close
    assert copy.closed?
    refute store.closed?
    assert_equal "2", store.get("b")
  end

  def test_has_extended_api
    assert_equal true, store.has_extended_api?
  end
end

# Of stores that have queues: all but those in a file.
module QueueBehaviour
  def test_a_queue_gives_back_in_order
    assert_equal 0, store.queue_len("q")
    assert_nil store.queue_push("q", "one")
    store.queue_push(:q, "\xFF\0".b)
    store.queue_push("q", "")
    assert_equal 3, store.queue_len("q")
    assert_equal ["one", "\xFF\0".b, ""], Array.new(3) { store.queue_pop("q") }
    store.queue_push("q", "x")
    assert_equal Encoding::BINARY, store.queue_pop("q").encoding
    assert_equal 0, store.queue_len("q")
  end

  def test_an_empty_queue_says_so
    error = assert_raises(Torch::Distributed::QueueEmptyError) { store.queue_pop("q", block: false) }
    assert_match(/the queue "(view\/)?q" is empty/, error.message)
    assert_equal :TDDP_NOT_FOUND, error.status
    store.timeout = Worlds::LIMIT
    elapsed = seconds do
      error = assert_raises(Torch::Distributed::TimeoutError) { store.queue_pop("q", timeout: 0.05) }
    end
    assert_match(/timed out after \d+ ms waiting for the key "(view\/)?q"/, error.message)
    assert_sooner elapsed, Worlds::LIMIT
    assert_raises(ArgumentError) { store.queue_pop("q", blok: true) }
    assert_match(/key: expected a String, got nil/, assert_raises(TypeError) { store.queue_pop(nil) }.message)
  end

  def test_a_queue_counts_as_a_key_to_waits
    refute store.check(["q"])
    store.queue_push("q", "x")
    assert store.check(["q"])
    store.wait(["q"], 1)
    assert_equal [], store.list_keys
  end

  def test_a_pop_waits_for_another_threads_push
    other = store.clone
    popping = Thread.new { Array.new(3) { store.queue_pop("q") } }
    await_waiting(popping)
    %w[a b c].each { |value| other.queue_push("q", value) }
    assert_equal %w[a b c], popping.value
  ensure
    other&.close
  end

  # The store is open before: opening it blocks as well, and Dir.tmpdir rescues what is raised within it.
  def test_an_interrupted_pop_takes_nothing
    popping = Thread.new(store) { |opened| opened.queue_pop("q") }
    popping.report_on_exception = false
    await_waiting(popping)
    popping.raise(IOError, "enough")
    assert_raises(IOError) { popping.value }
    store.queue_push("q", "still here")
    assert_equal 1, store.queue_len("q")
    assert_equal "still here", store.queue_pop("q")
  end

  # However close an interrupt and a value come together. (Ruby may raise between any two steps of a thread, also when
  # a value has been returned and not been kept yet; unless it is told to do so only where a thread blocks.)
  def test_interrupts_lose_no_value
    other = store.clone
    Thread.report_on_exception = false
    8.times do |turn|
      got = []
      popping = Thread.new { Thread.handle_interrupt(IOError => :on_blocking) { got << store.queue_pop("q") } }
      await_waiting(popping)
      sleep 0.0002 * turn
      pushing = Thread.new { other.queue_push("q", turn.to_s) }
      popping.raise(IOError, "enough")
      begin
        popping.join
      rescue IOError
        # It came before the thread was through.
      end
      pushing.join
      got << store.queue_pop("q", timeout: 5) if got.empty?
      assert_equal [turn.to_s], got
    end
    assert_equal 0, store.queue_len("q")
  ensure
    Thread.report_on_exception = true
    other&.close
  end
end
