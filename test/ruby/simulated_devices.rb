# frozen_string_literal: true

require "minitest/mock"
require "torch/distributed"
require "torch/distributed/pipelining"

# The ranks of a pipeline on devices that are as strict as NCCL allows them to be: each runs one kernel at a time, in the order of
# their launches, a message is through when it is at the head on both of its ranks, and there are no tags. Each rank is a fiber.
class SimulatedDevices
  Distributed = Torch::Distributed
  Pipelining = Distributed::Pipelining
  Link = Pipelining::Link

  # All ranks wait, or one got what it should not.
  Error = Class.new(StandardError)

  Group = Struct.new(:rank, :backend)

  # What was launched: a message, or the computing of an action.
  Kernel = Struct.new(:devices, :rank, :op, :peer, :tag, :tensor, :done) do
    def wait
      Fiber.yield until completed?
      true
    end

    def completed?
      devices.progress
      done
    end
  end

  # @return [Integer] the most receives on a rank that had begun ahead of the one that it needed next
  attr_reader :ahead

  def initialize(ranks)
    @queues = Array.new(ranks) { [] }
    @ahead = 0
  end

  # Runs the steps of a plan, with activations of the given shapes.
  #
  # @param plans [Array<Array<Array<Action>>>] of each step
  # @param shapes [#call] gives the shape for the step, stage and micro-batch
  # @raise [Error]
  def run(plans, &shapes)
    Distributed.stub(:isend, ->(tensor, group_dst:, group:, tag:) { launch(group.rank, :isend, group_dst, tag, tensor) }) do
      Distributed.stub(:irecv, ->(tensor, group_src:, group:, tag:) { launch(group.rank, :irecv, group_src, tag, tensor) }) do
        fibers = @queues.each_index.map { |rank| Fiber.new { rank_of(rank, plans, shapes) } }
        resume(fibers) until fibers.none?(&:alive?)
      end
    end
    self
  end

  # Completes what is at the head of its queues, as long as there is something.
  def progress
    @progressed |= pass while @queues.any? { |queue| passable?(queue.first) }
  end

  private

  def resume(fibers)
    @progressed = false
    fibers.each { |fiber| fiber.resume if fiber.alive? }
    return if @progressed || fibers.none?(&:alive?)

    heads = @queues.map { |queue| queue.first(3).map { |each| [*each.op, *each.peer].join(" ") }.join(", ") }
    raise Error, "all wait: #{heads.each_with_index.map { |text, rank| "rank #{rank}: #{text}" }.join("; ")}"
  end

  def launch(rank, op, peer = nil, tag = nil, tensor = nil)
    @progressed = true
    @queues[rank] << (kernel = Kernel.new(self, rank, op, peer, tag, tensor, false))
    kernel
  end

  def other(kernel)
    head = @queues[kernel.peer].first
    head if head && head.peer == kernel.rank && head.op != kernel.op
  end

  def passable?(kernel)
    kernel && (kernel.peer.nil? || other(kernel))
  end

  def pass
    kernel = @queues.map(&:first).find { |each| passable?(each) }
    both = [kernel, kernel.peer && other(kernel)].compact
    both.each { |each| @queues[each.rank].shift.done = true }
    return true if both.size == 1

    from, into = both.sort_by(&:op).reverse
    raise Error, "#{from.tag} is received as #{into.tag}" unless from.tag == into.tag

    into.tensor.copy!(from.tensor)
    true
  end

  # As {Pipelining::Execution} does it.
  def rank_of(rank, plans, shapes)
    link = Link.new(Group.new(rank, "nccl"), "cpu")
    plans.each_with_index do |plan, step|
      link.begin(Pipelining::MessageOrder.for_rank(plan, rank))
      last = plan.flatten.map(&:stage).max
      trains = plan.flatten.any?(&:backward?)
      plan[rank].each do |action|
        link.advance(action)
        act(link, plan.size, action, last, trains) { |stage| activation(step, stage, action.micro_batch, shapes) }
      end
      link.finish
      share(link, rank, last % plan.size, step)
    end
  end

  # As {Pipelining::Results} does it.
  def share(link, rank, from, step)
    results = activation(step, 0, 0, ->(*) { [5] })
    return (@queues.each_index.to_a - [rank]).each { |to| link.send_plain(to, 0, [results]) } if rank == from

    check("results", results, link.receive_plain(from, 0))
  end

  def check(what, expected, found)
    same = found.map(&:shape) == [expected.shape] && (found[0].detach - expected).abs.sum.item.zero?
    raise Error, "#{what}: expected #{expected.inspect}, got #{found.inspect}" unless same
  end

  def activation(step, stage, micro_batch, shapes)
    Torch.full(shapes.call(step, stage, micro_batch), step * 10000 + stage * 100 + micro_batch, dtype: :float64)
  end

  def act(link, ranks, action, last, trains)
    stage, kind, i = action.to_a
    from, to = (kind == :F) ? [stage - 1, stage + 1] : [stage + 1, stage - 1]
    away = ->(other) { kind != :W && other.between?(0, last) && other % ranks != stage % ranks }
    if away.call(from)
      note_ahead(link)
      found = link.fetch((kind == :F) ? Link::FORWARD : Link::BACKWARD, stage, i)
      expected = (kind == :F) ? yield(from) : yield(stage) * -1
      check(action, expected, found)
    end
    launch(stage % ranks, :compute)
    return unless away.call(to)
    return link.send_backward(to % ranks, to, i, [yield(to) * -1]) unless kind == :F

    link.send_forward(to % ranks, to, i, [yield(stage)])
    link.expect_gradients(stage, i, [yield(stage)]) if trains
  end

  def note_ahead(link)
    @ahead = [@ahead, link.instance_variable_get(:@receives).size - 1].max
  end
end
