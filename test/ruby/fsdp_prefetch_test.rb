# frozen_string_literal: true

require "json"
require "tmpdir"
require_relative "sharded_training"

# What is on its way while something is computed, by the traces of training: the order of gathers, reductions and computing.
class FsdpPrefetchTest < Minitest::Test
  include ShardedTraining

  WIDTH = 16
  RANKS = 2
  # In full, with each parameter and shard a multiple of 16 elements.
  BYTES = {0 => 544, 1 => 1056, 2 => 1600, 3 => 2112, :own => 4384}.transform_values { |count| count * 4 }.freeze

  # Says in the trace when it computes. Each has another size.
  class Block < Torch::NN::Module
    def initialize(number)
      super()
      @number = number
      @up, @down = Torch::NN::Linear.new(WIDTH, WIDTH * (number + 1)), Torch::NN::Linear.new(WIDTH * (number + 1), WIDTH, bias: false)
    end

    def forward(x)
      Torch::Distributed.trace("block #{@number}") { @down.call(@up.call(x).tanh) }
    end
  end

  # Four blocks, and parameters of its own before or after them.
  class Net < Torch::NN::Module
    attr_reader :blocks
    attr_accessor :again

    def initialize(own)
      super()
      @blocks = Torch::NN::ModuleList.new(Array.new(4) { |number| Block.new(number) })
      @own = Torch::NN::Linear.new(WIDTH, 257) if own
      @first = own == :first
    end

    def forward(x)
      x = @own.call(x).narrow(1, 0, WIDTH) if @first
      x = @blocks.each.reduce(x) { |hidden, block| again ? Torch::Utils::Checkpoint.checkpoint(block, hidden) : block.call(hidden) }
      (@own && !@first) ? @own.call(x) : x
    end
  end

  # @yieldparam net [Net]
  # @yieldparam x [Torch::Tensor]
  # @return [String] what a rank does in the last step, in the order in which it began: g2 gathers block 2, f2 computes it, r2 reduces its
  #   gradient; gathers and reductions begin when they are submitted
  def order(steps: 3, reshard: nil, own: nil)
    Dir.mktmpdir do |folder|
      with_env("TDDP_TRACE" => folder) do
        world(RANKS) do
          net = make(dtype: :float32) { Net.new(own) }
          net.blocks.each { |block| FSDP.fully_shard(block, reshard_after_forward: reshard) }
          FSDP.fully_shard(net)
          x = Torch.randn(4, WIDTH)
          steps.times { |step| Torch::Distributed.trace("step") { block_given? ? yield(net, x, step) : net.call(x).sum.backward } }
        end
      end
      events = JSON.parse(File.read(File.join(folder, "trace_rank_0.json"))).select { |event| event["ph"] == "X" }
      last = events.select { |event| event["name"] == "step" }.map { |event| event["ts"] }.max
      events.filter_map { |event| what(event)&.then { |text| [begun(event), text] } }.select { |at, _| at >= last }.sort_by(&:first).map(&:last).join(" ")
    end
  end

  def begun(event)
    event["ts"] - (event.dig("args", "queued_us") || 0)
  end

  def what(event)
    return "f#{event["name"][/\d/]}" if event["name"].start_with?("block ")

    kind = {"all_gather" => "g", "reduce_scatter" => "r"}[event["name"]]
    kind && "#{kind}#{BYTES.key(event["args"]["bytes"]).to_s[0] || "?"}"
  end

  # The next block is on its way before this one is computed, and in backward before this one's gradient is reduced. The first
  # iteration does not know what comes next.
  def test_blocks_alone
    assert_equal "g0 f0 g1 f1 g2 f2 g3 f3 g3 g2 r3 g1 r2 g0 r1 r0", order(steps: 1)
    assert_equal "g0 g1 f0 g2 f1 g3 f2 f3 g3 g2 r3 g1 r2 g0 r1 r0", order
  end

  # Does something when backward comes to it.
  class Passed < Torch::Distributed::Function
    def self.forward(ctx, x, action)
      ctx.action = action
      x * 1
    end

    def self.backward(ctx, grad)
      ctx.action.call
      [grad, nil]
    end
  end

  # Rank 1 joins the reduction of block 3 once rank 0 is in backward of block 2.
  def test_a_reduction_runs_beside_backward_of_the_next_block
    inside = Event.new
    found = world(RANKS) do |rank|
      net = make(dtype: :float32) { Net.new(nil) }
      before = -> { inside.wait if rank == 1 }
      net.blocks[2].define_singleton_method(:forward) { |x| Passed.apply(super(x), -> { inside.set if rank.zero? }) }
      net.define_singleton_method(:forward) { |x| blocks[3].call(Passed.apply(blocks.each.first(3).reduce(x) { |hidden, block| block.call(hidden) }, before)) }
      net.blocks.each { |block| FSDP.fully_shard(block) }
      FSDP.fully_shard(net)
      net.call(Torch.ones(4, WIDTH)).sum.backward
      net.parameters.all?(&:grad)
    end
    assert_equal [true, true], found
  end

  # What the model has of its own is whole from forward to the end of backward, beside two blocks.
  def test_a_model_with_parameters_of_its_own
    %i[first last].each do |own|
      assert_equal "go g0 f0 g1 f1 g2 f2 g3 f3 g3 g2 r3 g1 r2 g0 r1 r0 ro", order(steps: 1, own: own), own
      assert_equal "go g0 g1 f0 g2 f1 g3 f2 f3 g3 g2 r3 g1 r2 g0 r1 r0 ro", order(own: own), own
    end
  end

  def test_blocks_that_stay_whole
    assert_equal "g0 g1 f0 g2 f1 g3 f2 f3 r3 r2 r1 r0", order(reshard: false)
  end

  # Whole gradients are added up without being reduced, and reduced beside the last backward.
  def test_without_synchronization
    quiet = order(steps: 1) do |net, x|
      net.set_requires_gradient_sync(false)
      net.call(x).sum.backward
    end
    assert_equal "g0 f0 g1 f1 g2 f2 g3 f3 g3 g2 g1 g0", quiet
    found = order(steps: 2) do |net, x, step|
      net.set_requires_gradient_sync(step == 1)
      net.call(x).sum.backward
    end
    assert_equal "g0 g1 f0 g2 f1 g3 f2 f3 g3 g2 r3 g1 r2 g0 r1 r0", found
  end

  # Blocks whose forward is computed again in backward.
  def test_checkpointed_blocks
    found = order do |net, x|
      net.again = true
      net.call(x.requires_grad!(true)).sum.backward
    end
    assert_equal "g0 g1 f0 g2 f1 g3 f2 f3 g3 f3 g2 r3 f2 g1 r2 f1 g0 r1 f0 r0", found
  end
end
