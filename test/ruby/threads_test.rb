# frozen_string_literal: true

require_relative "test_helper"

# Several threads of a process, and what the collector does meanwhile.
class ThreadsTest < Minitest::Test
  def sum(group, number)
    Distributed.all_reduce(Torch.tensor([number], dtype: :int64), group: group).item
  end

  # The values of the blocks, each run in a thread of its own.
  def threads(count)
    Array.new(count) do |index|
      Thread.new { yield index }.tap { |thread| thread.report_on_exception = false }
    end.map(&:value)
  end

  def test_each_thread_has_a_group
    said = world(3) do |rank|
      groups = [[0, 1, 2], [0, 1], [1, 2], [0, 2], [0, 1, 2]].map { |list| Distributed.new_group(list) }
      threads(groups.size) do |index|
        group = groups[index]
        next unless group.is_a?(Distributed::ProcessGroup)

        # Each at a speed of its own.
        Array.new(40) { |turn|
          sleep(0.001 * rank) if turn % 10 == index && rank != 1
          sum(group, rank + turn * (index + 1))
        }
      end
    end
    [[0, 1, 2], [0, 1], [1, 2], [0, 2], [0, 1, 2]].each_with_index do |list, index|
      expected = Array.new(40) { |turn| list.sum + list.size * turn * (index + 1) }
      said.each_with_index { |here, rank| list.include?(rank) ? assert_equal(expected, here[index]) : assert_nil(here[index]) }
    end
  end

  # The order does not matter where all operations are alike: what each thread queues is carried out whole.
  def test_several_threads_on_one_group
    said = world(2) do |rank|
      threads(4) do
        Array.new(50) { |turn| Distributed.all_reduce(Torch.full([64], (rank + 1.0) * 2)).sum.item if turn }
      end
    end
    assert_equal [[[384.0] * 50] * 4] * 2, said
  end

  # Where it does matter the ranks give the threads their turns alike.
  def test_threads_that_take_turns
    said = world(2) do |rank|
      turn = 0
      lock = Mutex.new
      turned = ConditionVariable.new
      works = threads(3) do |index|
        Array.new(20) do |round|
          tensor = Torch.tensor([rank + 10 * index + 100 * round], dtype: :int64)
          work = lock.synchronize do
            turned.wait(lock) until turn % 3 == index
            turn += 1
            turned.broadcast
            Distributed.all_reduce(tensor, op: (index == 1) ? :max : :sum, async_op: true)
          end
          work.wait
          tensor.item
        end
      end
      works
    end
    expected = Array.new(3) { |index| Array.new(20) { |round| (index == 1) ? 1 + 10 + 100 * round : 1 + 2 * (10 * index + 100 * round) } }
    assert_equal [expected] * 2, said
  end

  def test_threads_that_make_their_groups
    lists = [[0, 1], [1, 2], [0, 2], [0, 1, 2]]
    said = world(3) do |rank|
      sums = threads(lists.size) do |index|
        group = Distributed.new_group(lists[index], use_local_synchronization: true, group_desc: "thread #{index}")
        next unless group.is_a?(Distributed::ProcessGroup)

        [group.description, group.ranks, sum(group, rank + index)]
      end
      [sums, Distributed.get_pg_count]
    end
    said.each_with_index do |(sums, count), rank|
      expected = lists.each_with_index.map { |list, index| ["thread #{index}", list, list.sum + list.size * index] if list.include?(rank) }
      assert_equal expected, sums
      assert_equal 4, count
    end
  end

  def test_a_thread_waits_while_others_run_and_end_their_groups
    said = world(2) do |rank|
      waited, *others = Array.new(4) { Distributed.new_group }
      late = Thread.new { sum(waited, rank) }
      counted = 0
      counting = Thread.new { loop { counted += sleep(0.001) } }
      sums = others.map do |group|
        sum(group, 10).tap { Distributed.destroy_process_group(group) }
      end
      # Rank 1 comes to the group when the others have ended.
      [sums, late.value, others.map(&:closed?), waited.closed?, Distributed.get_pg_count]
    ensure
      counting&.kill
    end
    assert_equal [[[20] * 3, 1, [true] * 3, false, 2]] * 2, said
  end

  def test_a_group_is_destroyed_while_a_thread_waits_on_it
    ended = Event.new
    said = world(2) do |rank|
      group = Distributed.new_group
      if rank.zero?
        waiting = Thread.new { failure { sum(group, 1) } }
        await_waiting(waiting)
        begin
          raise "in a hurry"
        rescue RuntimeError
          Distributed.destroy_process_group(group)
        end
        ended.set
        [waiting.value&.first, group.closed?, sum(nil, 1)]
      else
        ended.wait
        [nil, nil, sum(nil, 2)]
      end
    end
    assert_equal ["Torch::Distributed::GroupError", true, 3, 3], [*said[0], said[1].last]
  end

  def test_interrupted_threads_leave_other_groups_alone
    said = world(2) do |rank|
      first, second = Array.new(2) { Distributed.new_group }
      if rank.zero?
        stuck = Thread.new { failure { sum(first, 1) } }
        await_waiting(stuck)
        stuck.raise(IOError, "enough")
      end
      sums = Array.new(5) { |turn| sum(second, turn) }
      [sums, stuck&.value, sum(nil, rank)]
    end
    said.each { |sums, _, last| assert_equal [[0, 2, 4, 6, 8], 1], [sums, last] }
    assert_equal %w[IOError enough], said[0][1]
  end

  # What ends the call in the handler is nothing to the one that waits below it.
  def test_a_call_in_a_signal_handler_has_a_token_of_its_own
    said = world(1) do
      store = Distributed::HashStore.new(timeout: 30)
      main = Thread.current
      inside = nil
      trap("USR1") do
        inside = :waiting
        inside = failure { store.get("never") }
      end
      Thread.new do
        threads = -> { Dir.children("/proc/self/task").size }
        before = threads.call
        await("the call below to wait on a thread of its own") { threads.call > before }
        Process.kill(:USR1, Process.pid)
        await("the handler's call to wait") { inside == :waiting && main.stop? }
        main.raise(IOError, "enough")
        await("the handler's end") { inside != :waiting }
        store.set("outer", "there")
      end
      [store.get("outer"), inside]
    end
    assert_equal [["there", %w[IOError enough]]], said
  end

  # Groups made and ended, works and tensors dropped, while the collector runs in a thread of its own.
  def test_the_collector_runs_all_the_while
    said = world(2) do |rank|
      collecting = Thread.new { loop { GC.start || sleep(0.01) } }
      sums = Array.new(6) do |turn|
        group = Distributed.new_group
        dropped = Array.new(5) { Distributed.all_reduce(Torch.full([3000], 1.0), group: group, async_op: true) }
        dropped.clear
        total = sum(group, rank + turn)
        Distributed.destroy_process_group(group) if turn.odd?
        total
      end
      [sums, Distributed.get_pg_count]
    ensure
      collecting&.kill
    end
    assert_equal [[[1, 3, 5, 7, 9, 11], 4]] * 2, said
  end

  OPERATIONS = {
    all_reduce: ->(group) { Distributed.all_reduce(Torch.ones(4), group: group) },
    all_reduce_async: ->(group) { Distributed.all_reduce(Torch.ones(4), group: group, async_op: true).wait },
    coalesced: ->(group) { Distributed.coalescing_manager(group: group) { 2.times { Distributed.all_reduce(Torch.ones(4), group: group) } } },
    barrier: ->(group) { Distributed.barrier(group: group) },
    broadcast: ->(group) { Distributed.broadcast(Torch.ones(4), src: 0, group: group) },
    isend: ->(group) { Distributed.isend(Torch.ones(4), dst: 1, group: group).wait },
    irecv: ->(group) { Distributed.irecv(Torch.ones(4), src: 1, group: group).wait },
    batch: ->(group) { Distributed.batch_isend_irecv([Distributed::P2POp.new(:irecv, Torch.ones(4), 1, group: group)]).each(&:wait) },
    monitored_barrier: ->(group) { Distributed.monitored_barrier(group: group, timeout: 1) }
  }.freeze

  # Rank 0 hosts the store, so the thread that destroys the group waits there for the other rank.
  def test_calls_while_another_thread_destroys_the_group
    [{"TDDP_SHM" => "0"}, {"TDDP_SHM" => "1"}].each do |env|
      called = Event.new
      said, = with_env(env) do
        Distributed.fork_world(2) do |rank, port|
          Distributed.init_process_group(BACKEND, init_method: "tcp://127.0.0.1:#{port}", rank: rank, world_size: 2, timeout: LIMIT / 2)
          Distributed.barrier
          group = Distributed.default_process_group
          if rank == 0
            destroying = Thread.new { Distributed.destroy_process_group }
            await("the group's end to begin") { group.closed? }
            refused = OPERATIONS.transform_values { |call| failure { call.call(group) }&.first }
            sum = Distributed.empty_shared(4, group: group).sum.item
            called.set
            destroying.join
            [refused, sum]
          else
            called.wait
          end
        ensure
          Distributed.destroy_process_group
        end
      end
      assert_equal [OPERATIONS.transform_values { "Torch::Distributed::GroupError" }, 0.0], said
    end
  end

  # At any moment: a call succeeds, or is refused.
  def test_calls_until_another_thread_has_destroyed_the_group
    alone_operations = OPERATIONS.except(:isend, :irecv, :batch)
    random = Random.new(17)
    40.times do
      group = Distributed.init_process_group(BACKEND, store: Distributed::HashStore.new, rank: 0, world_size: 1)
      calling = Thread.new do
        until group.closed?
          alone_operations.each_value { |call| call.call(group) }
          Distributed.empty_shared(4, group: group)
        end
        nil
      rescue Distributed::GroupError
        nil
      end
      Thread.pass until calling.stop? || random.rand(20).zero?
      Distributed.destroy_process_group
      assert_nil calling.value
    end
  end

  def test_nothing_is_left_open
    alone { 3.times { Distributed.new_group } }
    GC.start
    before = Dir.children("/proc/self/fd").size
    10.times { alone { Distributed.init_device_mesh(:cpu, [1, 1, 1]) && 3.times { Distributed.new_group } } }
    GC.start
    assert_operator Dir.children("/proc/self/fd").size, :<=, before + 1
    # Those that were lent to a call end a moment later.
    await("the library's threads to end") do
      Dir.children("/proc/self/task").none? { |task| File.read("/proc/self/task/#{task}/comm").start_with?("tddp") }
    rescue SystemCallError # it just ends
      false
    end
  end
end
