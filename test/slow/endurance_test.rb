# frozen_string_literal: true

require_relative "../ruby/test_helper"

# What a job that runs for days does, many times over: memory, descriptors and threads stay what they were.
class EnduranceTest < Minitest::Test
  # Kilobytes resident, descriptors and threads of this process.
  def footprint
    GC.start
    [Integer(File.read("/proc/self/status")[/VmRSS:\s+(\d+)/, 1]), Dir.children("/proc/self/fd").size, Dir.children("/proc/self/task").size]
  end

  # How much each has grown since the first turns, when all that lasts was made.
  def assert_flat(turns, message)
    first, last = turns[1], turns.last
    assert_operator last[0] - first[0], :<, 8 << 10, "#{message}: kilobytes #{turns.map(&:first)}"
    assert_operator last[1] - first[1], :<, 12, "#{message}: descriptors #{turns.map { |turn| turn[1] }}"
    assert_operator last[2] - first[2], :<, 6, "#{message}: threads #{turns.map(&:last)}"
  end

  def some_operation(number, rank)
    ones = Torch.ones(5)
    other = 1 - rank
    case number % 10
    when 0 then raise "got #{ones.to_a}" unless Distributed.all_reduce(ones).to_a == [2.0] * 5
    when 1 then Distributed.broadcast(ones, src: 0)
    when 2 then Distributed.all_gather(Array.new(2) { Torch.zeros(5) }, ones)
    when 3 then Distributed.all_reduce(ones, async_op: true)
    when 4 then Distributed.barrier
    when 5 then rank.zero? ? Distributed.send(ones, dst: 1) : Distributed.recv(ones, src: 0)
    when 6 then [Distributed.irecv(ones, src: other), Distributed.isend(Torch.ones(5), dst: other)].each(&:wait)
    when 7 then Distributed.all_to_all_single(Torch.zeros(4), Torch.ones(4))
    when 8 then (number % 50 == 8) ? Distributed.all_gather_object({at: number}) : Distributed.reduce(ones, dst: 0)
    when 9 then Distributed.coalescing_manager { 2.times { Distributed.all_reduce(Torch.ones(3)) } }
    end
  end

  def test_twenty_thousand_operations
    turns = world(2) do |rank|
      Array.new(10) do |turn|
        GC.stress = true if turn == 1
        50.times { |number| some_operation(number, rank) }
        GC.stress = false
        1950.times { |number| some_operation(number, rank) }
        footprint
      end
    end
    turns.each_with_index { |each, rank| assert_flat(each, "rank #{rank}") }
  end

  def test_many_groups
    turns = world(2) do
      Array.new(6) do
        50.times do
          group = Distributed.new_group([0, 1])
          sum = Distributed.all_reduce(Torch.ones(1), group: group).item.to_i
          raise "got #{sum}" unless sum == 2

          Distributed.destroy_process_group(group)
        end
        footprint
      end
    end
    turns.each_with_index { |each, rank| assert_flat(each, "rank #{rank}") }
  end

  def test_many_default_groups_and_failures
    turns = Distributed.fork_world(2) do |rank|
      Array.new(6) do
        5.times do |round|
          Distributed.init_process_group("gloo", timeout: 20)
          Distributed.all_reduce(Torch.ones(1))
          error = failure { Distributed.all_reduce(Torch.ones(1), op: rank.zero? ? :sum : :max) } if round.odd?
          raise "got #{error.inspect}" if round.odd? && error&.first != "Torch::Distributed::MismatchError"

          Distributed.destroy_process_group
        end
        footprint
      end
    end
    turns.each_with_index { |each, rank| assert_flat(each, "rank #{rank}") }
  end

  # More handles at once than a process may have descriptors.
  def test_many_messages_and_handles_at_once
    results = world(2) do |rank|
      Process.setrlimit(:NOFILE, 256)
      messages = Array.new(1000) do |number|
        into = Torch.zeros(50)
        received = Distributed.irecv(into, src: 1 - rank, tag: number % 7)
        [into, received, Distributed.isend(Torch.full([50], number.to_f), dst: 1 - rank, tag: number % 7)]
      end
      messages.each { |_, received, sent| [received, sent].each(&:wait) }
      works = Array.new(1000) { Distributed.all_reduce(Torch.ones(3000), async_op: true) }
      works.each(&:wait)
      [messages.map { |into, _, _| into.to_a.uniq } == Array.new(1000) { |number| [number.to_f] }, works.all?(&:success?)]
    end
    assert_equal [[true, true]] * 2, results
  end
end
