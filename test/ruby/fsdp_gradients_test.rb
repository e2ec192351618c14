# frozen_string_literal: true

require "weakref"
require_relative "sharded_training"

# Which gradients there are after which backward: ranks that use other parameters, synchronization that is switched off, losses that
# leave a unit beside its outputs, graphs that outlive their model.
class FsdpGradientsTest < Minitest::Test
  include ShardedTraining

  # Layers of which a call runs some.
  class Optional < Torch::NN::Module
    attr_reader :layers

    def initialize
      super
      @layers = Torch::NN::ModuleList.new(Array.new(3) { Torch::NN::Linear.new(3, 3) })
    end

    def forward(x, used)
      used.reduce(x) { |hidden, index| @layers[index].call(hidden) }
    end
  end

  # A unit of two layers, which runs one of them.
  class Either < Torch::NN::Module
    def initialize
      super
      @one, @other = Array.new(2) { Torch::NN::Linear.new(3, 3) }
    end

    def forward(x, one)
      (one ? @one : @other).call(x)
    end
  end

  class Eithers < Torch::NN::Module
    attr_reader :layers

    def initialize(depth)
      super()
      @layers = Torch::NN::ModuleList.new(Array.new(depth) { Either.new })
      @last = Torch::NN::Linear.new(3, 3)
    end

    def forward(x, which)
      @last.call(@layers.each_with_index.reduce(x) { |hidden, (layer, index)| layer.call(hidden, which[index]) })
    end
  end

  STRATEGIES = %i[full_shard shard_grad_op no_shard].freeze

  def rows(rank, part = 0)
    (Torch.arange(0, 6, dtype: :float64) * 0.7 + rank + 3 * part).sin.view(2, 3)
  end

  def wrap(net, strategy, *classes)
    policy = FSDP::WrapPolicies.module_wrap_policy(*classes) if classes.any?
    FSDP::FullyShardedDataParallel.new(net, sharding_strategy: strategy, auto_wrap_policy: policy)
  end

  # --- a window of several backwards

  # A layer runs in the first alone; another one on one rank alone; the last one never.
  [1, 2, 3].each do |size|
    define_method(:"test_sums_of_layers_that_the_last_backward_leaves_out_on_#{size}_ranks") do
      ways = [[0, 1], [0]]
      found = world(size) do |rank|
        plain = make { Optional.new }
        size.times { |other| ways.each_with_index { |way, part| (plain.call(rows(other, part), way).sum / size).backward } }
        [[], [Torch::NN::Linear]].product(STRATEGIES).map do |classes, strategy|
          net = make { Optional.new }
          model = wrap(net, strategy, *classes)
          model.no_sync { model.call(rows(rank), ways[0]).sum.backward }
          early = net.parameters.map(&:grad).compact
          model.call(rows(rank, 1), ways[1]).sum.backward
          [strategy, classes, early, gradients(net, plain)]
        end
      end
      found.flatten(1).each do |strategy, classes, early, grads|
        assert_empty early
        assert_gradients grads, "#{strategy} #{classes}"
      end
    end
  end

  # Units are reduced in one order, whichever of their parameters a rank uses.
  def test_ranks_that_use_other_parameters_of_each_unit
    which = ->(rank, part) { Array.new(4) { |index| (rank * 7 + part * 3 + index * index) % 3 == 0 } }
    found = world(3) do |rank|
      plain = make { Eithers.new(4) }
      3.times { |other| 3.times { |part| (plain.call(rows(other, part), which.call(other, part)).sum / 3).backward } }
      STRATEGIES.map do |strategy|
        net = make { Eithers.new(4) }
        model = wrap(net, strategy, Either)
        model.no_sync { model.call(rows(rank), which.call(rank, 0)).sum.backward }
        [1, 2].each { |part| model.call(rows(rank, part), which.call(rank, part)).sum.backward }
        [strategy, gradients(net, plain)]
      end
    end
    found.flatten(1).each { |strategy, grads| assert_gradients grads, strategy }
  end

  # A gradient that is to be forgotten has to be reduced before: as in PyTorch.
  def test_zero_grad_leaves_sums_that_are_not_reduced
    found = world(2) do |rank|
      plain, net = make { Optional.new }, make { Optional.new }
      2.times { |other| 2.times { |part| (plain.call(rows(other, part), [0, 1]).sum / 2).backward } }
      model = wrap(net, :full_shard)
      optimizer = Torch::Optim::SGD.new(model.parameters, lr: 0.1)
      model.no_sync { model.call(rows(rank), [0, 1]).sum.backward }
      optimizer.zero_grad
      model.call(rows(rank, 1), [0, 1]).sum.backward
      gradients(net, plain)
    end
    found.each { |grads| assert_gradients grads }
  end

  # --- synchronization that is switched off

  # Of the three backwards a part has reduced as many as it was synchronized in, and what waited before.
  def test_synchronization_of_parts
    found = world(2) do
      plain, net = make { Optional.new }, make { Optional.new }
      plain.call(rows(0), [0, 1, 2]).sum.backward
      net.layers.each { |layer| FSDP.fully_shard(layer) }
      FSDP.fully_shard(net)
      shares = lambda do
        net.call(rows(0), [0, 1, 2]).sum.backward
        grads = gradients(net, plain)
        3.times.map { |index| times(*%w[weight bias].map { |name| grads["layers.#{index}.#{name}"] }.find { |expected, _| expected.any? }) }
      end
      net.layers[0].set_requires_gradient_sync(false)
      first = shares.call
      net.set_requires_gradient_sync(false)
      net.layers[1].set_requires_gradient_sync(true)
      net.set_requires_gradient_sync(true, recurse: false)
      second = shares.call
      net.set_requires_gradient_sync(true)
      [first, second, shares.call]
    end
    assert_equal [[[nil, 1, 1], [nil, 2, 1], [3, 3, 3]]] * 2, found
  end

  # @return [Integer, nil] how many times the expected gradient it is
  def times(expected, actual)
    actual && (actual.sum / expected.sum).round(9).then { |share| (share == share.round) ? share.round : share }
  end

  def test_no_sync_within_no_sync
    found = world(2) do |rank|
      net = make { Torch::NN::Linear.new(3, 3) }
      model = FSDP::FullyShardedDataParallel.new(net)
      run = -> { model.call(rows(rank)).sum.backward }
      kept = model.no_sync do
        model.no_sync { run.call }
        run.call
        net.parameters.map(&:grad)
      end
      net.set_requires_gradient_sync(false)
      begin
        model.no_sync { raise ArgumentError, "left" }
      rescue ArgumentError
        run.call
      end
      kept += net.parameters.map(&:grad)
      net.set_requires_gradient_sync(true)
      run.call
      plain = make { Torch::NN::Linear.new(3, 3) }
      2.times { |other| (plain.call(rows(other)).sum * 2).backward } # four times their mean
      [kept, gradients(net, plain)]
    end
    found.each do |kept, grads|
      assert_equal [nil], kept.uniq
      assert_gradients grads
    end
  end

  # --- losses beside the outputs

  class Gate < Torch::NN::Module
    attr_reader :aux, :first

    def initialize(late)
      super()
      @first, @gate = Array.new(2) { Torch::NN::Linear.new(3, 3) }
      @late = late
    end

    def forward(x)
      hidden = @first.call(x)
      output = hidden.tanh if @late
      @aux = (@gate.call(hidden.tanh)**2).mean + (@first.weight**2).sum
      output || hidden.tanh
    end
  end

  class Experts < Torch::NN::Module
    attr_reader :gates, :head

    def initialize(late)
      super()
      @gates = Torch::NN::ModuleList.new(Array.new(2) { Gate.new(late) })
      @head = Torch::NN::Linear.new(3, 1)
    end

    def forward(x)
      @head.call(@gates.each.reduce(x) { |hidden, gate| gate.call(hidden) })
    end
  end

  LOSSES = {
    both: ->(net, output, _) { output.sum + net.gates[0].aux + net.gates[1].aux },
    beside: ->(net, _, _) { net.gates[0].aux + net.gates[1].aux },
    # Some ranks alone.
    some: ->(net, output, rank) { rank.zero? ? output.sum + net.gates[1].aux : output.sum }
  }.freeze

  # A backward that does not come by a unit's outputs finds its parameters nevertheless, frozen ones too.
  [false, true].each do |late|
    define_method(:"test_losses_that_bypass_outputs_#{late ? "after" : "before"}_them") do
      found = world(2) do |rank|
        LOSSES.flat_map do |name, loss|
          [[], [0]].flat_map do |frozen|
            build = -> { make { Experts.new(late) }.tap { |net| frozen.each { |index| net.gates[index].first.weight.requires_grad!(false) } } }
            plain = build.call
            2.times { |other| (loss.call(plain, plain.call(rows(other)), other) / 2).backward }
            {full: [nil, true], keep: [false, true], one: [nil, false]}.map do |strategy, (reshard, parts)|
              net = build.call
              net.gates.each { |gate| FSDP.fully_shard(gate, reshard_after_forward: reshard) } if parts
              FSDP.fully_shard(net)
              loss.call(net, net.call(rows(rank)), rank).backward
              ["#{name} #{strategy} #{frozen}", gradients(net, plain)]
            end
          end
        end
      end
      found.flatten(1).each { |message, grads| assert_gradients grads, message }
    end
  end

  # --- graphs that outlive their model

  # The graph is all that is left of the model, whose memory others would use.
  def test_a_graph_keeps_what_it_needs
    found = world(2) do |rank|
      x, y = batch(0, 2)
      plain = tower.tap { |net| loss(net.call(x), y).backward }
      run = lambda do |options|
        Thread.new do
          net = tower
          pieces = net.named_parameters
          shard(net, **options)
          [loss(net.call(mine(x, rank, 2)), mine(y, rank, 2)), pieces, WeakRef.new(net)]
        end.value
      end
      [nil, false].map do |reshard|
        # Ruby may take an old word of its stack for one of them, and its call caches keep the last model.
        outputs, pieces, models = Array.new(6) { run.call({reshard_after_forward: reshard}) }.transpose
        3.times { run.call({})[0].backward }
        await("models to be collected") { GC.start || models.count(&:weakref_alive?) < 3 }
        others = Array.new(8) { Torch.full([500], 1e9, dtype: :float64) }
        outputs.each(&:backward)
        [pieces.map { |each| each.transform_values { |piece| piece.grad&.to_a } }, plain.named_parameters.transform_values { |each| each.grad.flatten.to_a }, others.size]
      end
    end
    found.transpose.each do |ranks|
      ranks.map(&:first).transpose.each do |parts_of|
        ranks[0][1].each do |name, whole|
          parts = parts_of.flat_map { |grads| grads[name] }
          whole.zip(parts) { |expected, actual| assert_in_delta expected, actual, 1e-12, name }
        end
      end
    end
  end

  # And nothing once it has gone.
  def test_a_model_goes_with_its_last_graph
    found = world(1) do
      made = Array.new(8) do
        Thread.new do
          net = shard(tower)
          output = net.call(batch(0, 1)[0]).sum
          output.backward
          WeakRef.new(FSDP.units_of(net).first.state.model)
        end.value
      end
      await("a model to be collected") { GC.start || made.count(&:weakref_alive?) < 4 }
      true
    end
    assert_equal [true], found
  end
end
