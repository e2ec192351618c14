# frozen_string_literal: true

require_relative "test_helper"

class WorkTest < Minitest::Test
  def test_async_operations_are_done_after_wait
    results = world(2) do |rank|
      tensors = Array.new(5) { |i| Torch.full([1000], rank + i, dtype: :float32) }
      works = tensors.map { |tensor| Distributed.all_reduce(tensor, async_op: true) }
      first = works.first
      before = first.class
      waited = works.map(&:wait)
      list = Array.new(2) { Torch.zeros(1) }
      gather = Distributed.all_gather(list, Torch.tensor([rank + 1.0]), async_op: true)
      gather.wait
      gather.wait
      barrier = Distributed.barrier(async_op: true)
      barrier.wait(10)
      [before.name, waited.uniq, tensors.map { |tensor| tensor.max.item }, list.map(&:item), first.completed?, first.success?,
        first.exception, first.operation, works.map(&:sequence).each_cons(2).map { |a, b| b - a }.uniq, barrier.inspect]
    end
    results.each do |said|
      assert_equal ["Torch::Distributed::Work", [true], [1.0, 3.0, 5.0, 7.0, 9.0], [1.0, 2.0], true, true, nil, :all_reduce, [1]], said[0..-2]
      assert_match(/barrier \d+ done/, said.last)
    end
  end

  def test_synchronize_on_the_cpu_waits
    results = world(2) do |rank|
      turned = Torch.tensor([[1.0, 2.0], [3.0, 4.0]]).mul!(rank + 1).t
      work = Distributed.all_reduce(turned, async_op: true)
      returned = work.synchronize
      combined = Distributed.coalescing_manager(async_ops: true) { Distributed.all_reduce(turned, op: :max) }
      [returned, work.completed?, work.success?, turned.to_a, combined.synchronize, combined.completed?]
    end
    assert_equal [[nil, true, true, [[3.0, 9.0], [6.0, 12.0]], nil, true]] * 2, results
    lost = without(2, within: true) { |_, _| failure { Distributed.all_reduce(Torch.ones(1), async_op: true).synchronize } }
    lost.each { |(kind, text), _| assert_match(/PeerLostError .*rank 2/, "#{kind} #{text}") }
  end

  def test_works_end_in_any_order_and_know_their_tensors
    results = world(2) do |rank|
      one = Torch.tensor([rank + 1.0])
      turned = Torch.full([2, 3], rank + 1.0).t
      list = [Torch.zeros(1), Torch.zeros(1)]
      works = [
        Distributed.all_reduce(one, async_op: true),
        Distributed.broadcast(turned, src: 1, async_op: true),
        Distributed.all_gather(list, Torch.tensor([rank + 5.0]), async_op: true),
        Distributed.barrier(async_op: true),
        Distributed.reduce(one, dst: 0, async_op: true)
      ]
      # Whoever waits finds the copy made, whichever thread makes it.
      seen = Array.new(3) { Thread.new { works[1].wait && turned.max.item } }.map(&:value)
      works.reverse.each { |work| work.wait(timeout: 20) }
      results = works.map(&:result)
      same = [results[0][0].equal?(one), results[1][0].equal?(turned), results[2].zip(list).all? { |a, b| a.equal?(b) }]
      [one.item, seen, list.map(&:item), same, results[3], works.map(&:operation), works.map(&:source_rank).uniq, works.all?(&:success?)]
    end
    results.each_with_index do |said, rank|
      assert_equal [rank.zero? ? 6.0 : 3.0, [2.0] * 3, [5.0, 6.0], [true] * 3, [], %i[all_reduce broadcast all_gather barrier reduce], [nil], true],
        said
    end
  end

  # Each waits for something that is not done yet.
  def test_works_that_were_waited_for_hold_no_descriptors
    gaveup = Event.new
    results = world(2) do |rank|
      Distributed.barrier
      before = Dir.children("/proc/self/fd").size
      gaveup.wait if rank == 1
      works = Array.new(100) { Distributed.all_reduce(Torch.ones(20_000), async_op: true) }
      failure { works.last.wait(timeout: 0.01) }
      gaveup.set
      works.each(&:wait)
      after = Dir.children("/proc/self/fd").size
      [after - before, works.all?(&:success?)]
    end
    results.each do |more, fine|
      assert_operator more, :<, 30
      assert fine
    end
  end

  def test_works_of_an_operation_that_fails
    said = world(2) do |rank|
      work = Distributed.all_reduce(Torch.ones(3 + rank), async_op: true)
      waited = Array.new(2) { failure { work.wait } }
      later = failure { Distributed.all_reduce(Torch.ones(1)) }
      [waited.map(&:first), work.completed?, work.success?, work.exception.class.name, later.first]
    end
    error = "Torch::Distributed::MismatchError"
    assert_equal [[[error] * 2, true, false, error, "Torch::Distributed::GroupError"]] * 2, said
  end

  def test_a_barrier_has_a_time_of_its_own
    failed = Event.new
    said = world(2, timeout: LIMIT) do |rank|
      next failed.wait if rank == 1

      [failure { Distributed.barrier(timeout: 0.3) }, Distributed.default_process_group.timeout].tap { failed.set }
    end
    (name, text), timeout = said[0]
    assert_equal ["Torch::Distributed::TimeoutError", LIMIT], [name, timeout]
    assert_match(/barrier/, text)
  end

  def test_the_time_of_a_wait_and_of_an_operation
    gaveup = Event.new
    said = world(2, timeout: 30) do |rank|
      if rank.zero?
        work = Distributed.all_reduce(tensor = Torch.ones(2), async_op: true)
        short = failure { work.wait(0.1) }
        running = [work.completed?, work.success?, work.exception]
        gaveup.set
        work.wait # the group's own time goes on
        [short, running, tensor.to_a]
      else
        gaveup.wait
        Distributed.all_reduce(Torch.ones(2))
        nil
      end
    end
    (name, text), running, values = said[0]
    assert_equal "Torch::Distributed::TimeoutError", name
    assert_match(/all_reduce/, text)
    assert_equal [false, false, nil], running
    assert_equal [2.0, 2.0], values
  end

  def test_an_operation_that_nobody_joins_times_out_and_fails_the_group
    timeout, first, second = interrupted do |wait|
      Distributed.default_process_group.timeout = 0.5
      [Distributed.default_process_group.timeout, failure { wait.call }, failure { Distributed.barrier }]
    end
    assert_in_delta 0.5, timeout
    assert_equal "Torch::Distributed::TimeoutError", first[0]
    assert_match(/all_reduce/, first[1])
    assert_equal "Torch::Distributed::GroupError", second[0]
    assert_match(/all_reduce/, second[1])
  end

  # What happens to a rank that waits while the other does not come before that wait is over.
  def interrupted
    ended = Event.new
    world(2) do |rank|
      Distributed.barrier
      next ended.wait if rank == 1

      value_or_failure { yield -> { Distributed.all_reduce(Torch.ones(3)) } }.tap { ended.set }
    end.first
  end

  def test_timeout_ends_a_wait
    said = interrupted { |wait| Timeout.timeout(0.3) { wait.call } }
    assert_equal ["Timeout::Error", "execution expired"], said
  end

  # The wait ends by a thread that has made a hundred turns beside it.
  def test_other_threads_run_beside_a_wait
    said = interrupted do |wait|
      when_waiting do |waiting|
        100.times { sleep 0.0001 }
        waiting.raise(IOError, "a hundred turns")
      end
      wait.call
    end
    assert_equal ["IOError", "a hundred turns"], said
  end

  def test_thread_raise_ends_a_wait
    said = interrupted do |wait|
      waiting = Thread.new(&wait)
      waiting.report_on_exception = false
      await_waiting(waiting)
      waiting.raise(IOError, "enough")
      waiting.value
    end
    assert_equal ["IOError", "enough"], said
  end

  def test_thread_kill_ends_a_wait
    said = interrupted do |wait|
      waiting = Thread.new(&wait)
      await_waiting(waiting)
      waiting.kill.join.value
    end
    assert_nil said
  end

  def test_ctrl_c_ends_a_wait
    said = interrupted do |wait|
      when_waiting { Process.kill(:INT, Process.pid) }
      begin
        wait.call
      rescue Interrupt => e
        raise "interrupted by #{e.class}"
      end
    end
    assert_equal ["RuntimeError", "interrupted by Interrupt"], said
  end

  def test_a_signal_handler_that_returns_lets_the_wait_go_on
    handled = Event.new
    results = world(2) do |rank|
      Distributed.barrier
      signals = 0
      trap("USR1") { signals += 1 }
      tensor = Torch.ones(2)
      if rank.zero?
        when_waiting do |waiting|
          (1..3).each do |count|
            await_waiting(waiting)
            Process.kill(:USR1, Process.pid)
            await("the handler") { signals == count }
          end
          handled.set
        end
      else
        handled.wait
      end
      Distributed.all_reduce(tensor)
      [signals, tensor.to_a]
    end
    assert_equal [[3, [2.0, 2.0]], [0, [2.0, 2.0]]], results
  end

  # The operation goes on after an interrupt, and its memory must not be anybody else's then.
  def test_memory_outlives_an_interrupted_operation
    forgotten = Event.new
    results = world(2) do |rank|
      Distributed.barrier
      if rank.zero?
        assert_raises(Timeout::Error) do
          Timeout.timeout(0.1) { Distributed.all_reduce(Torch.ones(100_000)) }
        end
        5.times { Distributed.all_reduce(Torch.ones(100_000), async_op: true) }
        GC.start
        others = Array.new(20) { Torch.zeros(100_000) }
        forgotten.set
      else
        forgotten.wait
        6.times { Distributed.all_reduce(Torch.ones(100_000)) }
      end
      Distributed.barrier
      GC.start
      others&.map { |tensor| tensor.abs.max.item }&.max
    end
    assert_equal [0.0, nil], results
  end

  # Such a tensor lies in a String, which only the Ruby object of the tensor holds.
  def test_memory_of_rubys_outlives_a_forgotten_operation
    bytes = 8_000_000
    start = lambda do
      storage = Torch::ByteStorage.from_buffer("\x01".b * bytes)
      Distributed.all_reduce(Torch::ByteTensor.new(storage), async_op: true)
      nil
    end
    forgotten = Event.new
    results = world(2) do |rank|
      start.call if rank.zero?
      3.times { GC.start }
      others = Array.new(20) { "\x05".b * 100_000 }
      rank.zero? ? forgotten.set : forgotten.wait
      tensor = Torch.ones(bytes, dtype: :uint8)
      Distributed.all_reduce(tensor) if rank == 1
      Distributed.barrier
      [tensor.sum.item, others.all? { |text| text.count("\x05") == 100_000 }]
    end
    assert_equal [[bytes, true], [2 * bytes, true]], results
  end

  def test_a_forked_child_drops_its_parents_operations_in_silence
    said = world(2) do
      work = Distributed.all_reduce(Torch.ones(3_000_000), async_op: true) if Distributed.get_rank.zero?
      reader, writer = IO.pipe
      child = fork { $stderr.reopen(writer) }
      writer.close
      said = reader.read
      Process.wait(child)
      Distributed.all_reduce(Torch.ones(3_000_000)) unless work
      work&.wait
      said
    end
    assert_equal ["", ""], said
  end
end
