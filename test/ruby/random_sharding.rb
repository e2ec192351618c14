# frozen_string_literal: true

require_relative "carried_outputs"
require_relative "sharded_training"

# Random models, sharded in random ways, and random sequences of what training does with them, beside one process that
# has the data of all. A case is made of a seed alone.
module RandomSharding
  WIDTH = 5
  RATE, MOMENTUM, DECAY = 0.02, 0.9, 0.01

  # One of its layers, as its caller says.
  class Choice < Torch::NN::Module
    def initialize(layers)
      super()
      @layers = Torch::NN::ModuleList.new(layers)
    end

    def forward(x, choice)
      @layers[choice].call(x)
    end
  end

  # Its tensor leaves it in an object of one class or another.
  class Carrier < Torch::NN::Module
    def initialize(layer)
      super()
      @layer = layer
    end

    def forward(x, choice)
      CarriedOutputs.carry(@layer.call(x), choice)
    end
  end

  # A part of the loss leaves it beside its output.
  class Gate < Torch::NN::Module
    attr_reader :aux

    def initialize(first, gate, late)
      super()
      @first = first
      @gate = gate
      @late = late
    end

    def forward(x)
      hidden = @first.call(x)
      output = hidden.tanh if @late
      @aux = (@gate.call(hidden.tanh)**2).mean
      output || hidden.tanh
    end
  end

  # Blocks in the order that forward is given, some of which contain others.
  class Network < Torch::NN::Module
    attr_reader :blocks

    def initialize(kinds)
      super()
      @blocks = Torch::NN::ModuleList.new(kinds.map { |kind| block(kind) })
      @kinds = kinds
    end

    def tie
      @kinds.each_with_index { |kind, index| @blocks[index].instance_variable_set(:@weight, @blocks[0].weight) if kind == :shared }
    end

    # @param way [Array<Step>]
    def forward(x, way)
      raise ArgumentError, "a bad batch" if way.nil?

      way.reduce(x) do |hidden, step|
        inputs = %i[choice carrier].include?(@kinds[step.block]) ? [hidden, step.choice] : [hidden]
        output = step.again ? Torch::Utils::Checkpoint.checkpoint(@blocks[step.block], *inputs) : @blocks[step.block].call(*inputs)
        CarriedOutputs.tensor_of(output)
      end
    end

    # The output's part of the loss, and those beside it.
    def loss(x, way)
      output = call(x, way).pow(2).mean
      way.select(&:aux).reduce(output) { |sum, step| sum + @blocks[step.block].aux }
    end

    private

    def block(kind)
      case kind
      when :linear, :shared then Torch::NN::Linear.new(WIDTH, WIDTH)
      when :tall then Torch::NN::Sequential.new(Torch::NN::Linear.new(WIDTH, 13), Torch::NN::Tanh.new, Torch::NN::Linear.new(13, WIDTH, bias: false))
      when :norm then Torch::NN::Sequential.new(Torch::NN::LayerNorm.new([WIDTH]), Torch::NN::Tanh.new)
      when :nested then Torch::NN::Sequential.new(block(:linear), block(:tall), block(:norm))
      when :choice then Choice.new([block(:linear), block(:tall), block(:linear)])
      when :carrier then Carrier.new(block(:linear))
      when :early then Gate.new(block(:linear), block(:linear), false)
      when :late then Gate.new(block(:linear), block(:linear), true)
      end
    end
  end

  # One block on a rank's way through the model: which of its layers, whether it is computed again, and whether what it has beside its
  # output is part of the loss.
  Step = Struct.new(:block, :choice, :again, :aux)

  Case = Struct.new(:seed, :size, :kinds, :units, :inner, :frozen, :strategy, :wrapped, :optimizer_first, :actions, keyword_init: true) do
    # All ranks run the same blocks, in one order; another one in each micro-batch. Within them each rank goes its own way.
    #
    # @return [Array<Array<Step>>] by rank
    def ways(seed)
      random = Random.new(seed)
      others = kinds.each_index.drop(1)
      used = (others.select { random.rand < 0.7 } + others.sample(1, random: random)).shuffle(random: random)
      path = [0, *used].map { |block| [block, random.rand < 0.2] }
      Array.new(size) do
        path.map { |block, again| Step.new(block, random.rand((kinds[block] == :carrier) ? CarriedOutputs::KINDS.size : 3), again, !again && %i[early late].include?(kinds[block]) && random.rand < 0.6) }
      end
    end

    def to_s
      "seed #{seed}, #{size} ranks, blocks #{kinds.inspect}, units #{units.inspect}, units within them #{inner.inspect}, frozen #{frozen.inspect}, " \
        "#{strategy}#{", wrapped" if wrapped}#{", optimizer made first" if optimizer_first}:\n  #{actions.map(&:inspect).join("\n  ")}"
    end
  end

  ACTIONS = {round: 6, held: 3, nested: 2, part: 3, together: 3, several: 2, evaluate: 2, step: 4, zero: 2, fail: 1, freeze: 1, left: 1, load: 1, beyond: 1}
    .flat_map { |kind, weight| [kind] * weight }.freeze

  class << self
    def cases(seed, count, size)
      Array.new(count) { |index| generate(seed + index, size) }
    end

    def generate(seed, size)
      random = Random.new(seed)
      pick = ->(list) { list[random.rand(list.size)] }
      kinds = [:linear] + Array.new(random.rand(1..4)) { pick.call(%i[linear tall norm nested shared choice choice early late carrier carrier]) }
      indices = kinds.each_index.to_a
      units = indices.select { random.rand < 0.7 }
      inner = indices.select { |index| kinds[index] == :nested && random.rand < 0.5 }
      frozen = (random.rand < 0.3) ? [pick.call(indices.drop(1))] : []
      Case.new(seed: seed, size: size, kinds: kinds, units: units, inner: inner, frozen: frozen, strategy: pick.call(%i[full keep mixed none]),
        wrapped: random.rand < 0.5, optimizer_first: random.rand < 0.5,
        actions: Array.new(random.rand(5..14)) { [pick.call(ACTIONS), random.rand(1 << 20)] } + [[:together, 0], [:zero, 0], [:round, seed], [:step, 0]])
    end
  end

  # A case on one rank.
  class Trial
    include ShardedTraining

    FSDP = Torch::Distributed::FSDP

    def initialize(trial, rank)
      @case = trial
      @rank = rank
      @plain, @net = Array.new(2) { build }
      optimizer if trial.optimizer_first
      @model = shard
      optimizer
      # By the plain model's parameters, whose own gradients are those of the last backward: none of them can be taken away again.
      @grads = {}.compare_by_identity
      @held = {}.compare_by_identity # sums that wait
      @momenta = {}.compare_by_identity
    end

    # @return [String, nil] the first action after which something differs
    def difference
      said = nil
      @case.actions.each_with_index do |(kind, seed), index|
        send(kind, seed)
        found = compare # by all ranks
        said ||= found && "after action #{index + 1}, #{kind}: #{found}"
      rescue => e
        raise "#{said} in action #{index + 1}, #{kind}: #{e.class}: #{e.message}\n#{@case}"
      end
      said
    end

    private

    def build
      make(seed: @case.seed) { Network.new(@case.kinds) }.tap do |made|
        @case.frozen.each { |index| own(made, index).each { |parameter| parameter.requires_grad!(false) } }
      end
    end

    # But for the first block's, so that every loss depends on something.
    def own(model, index)
      model.blocks[index].parameters.reject { |parameter| parameter.equal?(model.blocks[0].weight) }
    end

    # Only matrices decay, as programs say it by parameters' dimensions.
    def optimizer
      groups = @net.parameters.uniq(&:object_id).group_by(&:dim).sort
      @optimizer ||= Torch::Optim::SGD.new(groups.map { |dim, list| {params: list, weight_decay: (dim >= 2) ? DECAY : 0.0} }, lr: RATE, momentum: MOMENTUM)
    end

    # @return [Object] that is called
    def shard
      return wrap if @case.wrapped || @case.strategy == :none

      reshard = ->(index) { {full: nil, keep: false, mixed: index.even?}.fetch(@case.strategy) }
      @case.units.each do |index|
        block = @net.blocks[index]
        inner(block, index).each { |child| FSDP.fully_shard(child) }
        FSDP.fully_shard(block, reshard_after_forward: reshard.call(index))
      end
      FSDP.fully_shard(@net)
    end

    def wrap
      units = @case.units.flat_map { |index| [*inner(@net.blocks[index], index), @net.blocks[index]] }
      FSDP::FullyShardedDataParallel.new(@net, auto_wrap_policy: ->(mod, _, _) { units.any? { |each| each.equal?(mod) } },
        sharding_strategy: {full: :full_shard, keep: :shard_grad_op, mixed: :full_shard, none: :no_shard}.fetch(@case.strategy))
    end

    def inner(block, index)
      @case.inner.include?(index) ? block.children.first(2) : []
    end

    def input(seed, rank)
      (Torch.arange(0, 3 * WIDTH, dtype: :float64) * 0.61 + seed % 997 + 0.3 * rank).sin.view(3, WIDTH)
    end

    # @return [Array(Torch::Tensor, Torch::Tensor)] the plain model's loss, and that of this rank
    def losses(seed)
      ways = @case.ways(seed)
      expected = ways.each_with_index.map { |way, rank| @plain.loss(input(seed, rank), way) }
      output = @model.call(input(seed, @rank), ways[@rank]).pow(2).mean
      [expected.inject(:+) / @case.size, ways[@rank].select(&:aux).reduce(output) { |sum, step| sum + @net.blocks[step.block].aux }]
    end

    # @param pairs [Array<Array(Torch::Tensor, Torch::Tensor)>] whose sum has one backward
    def backward(*pairs)
      @plain.parameters.each { |each| each.grad&.zero! }
      pairs.transpose.each { |losses| losses.inject(:+).backward }
      @plain.parameters.uniq(&:object_id).each { |each| settle(each) }
    end

    # Sums that wait are reduced by a backward that synchronizes their parameter, whether that uses it or not.
    def settle(parameter)
      used = parameter.grad && parameter.grad.abs.max.item > 0
      sum = [@held.delete(parameter), (parameter.grad.clone if used)].compact.inject(:+)
      if !synchronized?(parameter)
        @held[parameter] = sum if sum
      elsif parameter.requires_grad && sum
        @grads[parameter] = @grads[parameter] ? @grads[parameter] + sum : sum
      end
    end

    def synchronized?(parameter)
      name, = @plain.named_parameters.find { |_, each| each.equal?(parameter) }
      piece = @net.named_parameters.fetch(name)
      FSDP.units_of(@net).find { |unit| unit.parameters.any? { |each| each.equal?(piece) } }.sync
    end

    # --- actions ---

    def round(seed)
      backward(losses(seed))
    end

    def without_sync
      before = FSDP.units_of(@net).map(&:sync)
      @net.set_requires_gradient_sync(false)
      yield
    ensure
      FSDP.units_of(@net).zip(before) { |unit, sync| unit.sync = sync }
    end

    # Until another action's backward reduces it.
    def held(seed)
      without_sync { round(seed) }
    end

    def nested(seed)
      return held(seed) unless @model.respond_to?(:no_sync)

      @model.no_sync do
        @model.no_sync { round(seed) }
        round(seed + 1)
      end
    end

    # Some of the units, and what is within them or not; others later.
    def part(seed)
      blocks = @case.units.map { |index| @net.blocks[index] } + [@net]
      blocks[seed % blocks.size].set_requires_gradient_sync(seed.odd?, recurse: seed % 3 > 0)
      round(seed)
    end

    def together(seed)
      @net.set_requires_gradient_sync(true)
      round(seed)
    end

    def several(seed)
      first, second = losses(seed), losses(seed + 1)
      seed.even? ? backward(first, second) : [second, first].each { |each| backward(each) }
    end

    def evaluate(seed)
      found = Torch.no_grad { losses(seed) }
      mean = Torch::Distributed.all_reduce(found[1].clone, op: :avg).item
      raise "evaluated to #{mean}, expected #{found[0].item}" if (mean - found[0].item).abs > 1e-9 * found[0].item.abs
    end

    def left(seed)
      losses(seed)
    end

    # As torch-rb's SGD, which adds the decay to the gradient itself.
    def step(_seed)
      @optimizer.step
      Torch.no_grad do
        @grads.each do |parameter, grad|
          grad.add!(parameter * DECAY) if parameter.dim >= 2
          before = @momenta[parameter]
          @momenta[parameter] = before ? before * MOMENTUM + grad : grad.clone
          parameter.sub!(@momenta[parameter] * RATE)
        end
      end
    end

    def zero(_seed)
      @optimizer.zero_grad
      @grads.each_value(&:zero!)
    end

    def fail(seed)
      @model.call(input(seed, @rank), nil)
    rescue ArgumentError => e
      raise unless e.message == "a bad batch"
    end

    def freeze(seed)
      index = 1 + seed % (@case.kinds.size - 1)
      [@plain, @net].each { |of| own(of, index).each { |parameter| parameter.requires_grad!(seed.odd?) } }
    end

    def load(seed)
      state = make(seed: seed) { Network.new(@case.kinds) }.state_dict
      @plain.load_state_dict(state)
      FSDP.load_full_state_dict(@net, state)
    end

    # A graph that is used when nothing else of its model is there.
    def beyond(seed)
      ways = @case.ways(seed)
      net, x = build, input(seed, @rank).requires_grad!(true)
      net.loss(x, ways[@rank]).backward
      expected = x.grad.clone
      x.grad = nil
      loss = Thread.new do
        made = build
        made.blocks.each { |block| FSDP.fully_shard(block) }
        FSDP.fully_shard(made).loss(x, ways[@rank])
      end.value
      GC.start
      loss.backward
      raise "a graph beyond its model: the gradient is #{x.grad.to_a}, expected #{expected.to_a}" if apart?(expected, x.grad)
    end

    # --- comparing ---

    def compare
      full = FSDP.full_state_dict(@net)
      grads = pieces
      @plain.named_parameters.each do |name, parameter|
        return "#{name} is #{full[name].flatten.to_a}, expected #{parameter.flatten.to_a}" if apart?(parameter.detach, full[name])

        grad = @grads[parameter]
        next if grad.nil? && grads[name].nil?
        return "the gradient of #{name} is #{grads[name].inspect}, expected #{grad&.flatten.inspect}" if grad.nil? || grads[name].nil?

        start, actual = grads[name]
        expected = grad.flatten.narrow(0, start, actual.numel)
        return "the gradient of #{name} is #{actual.to_a}, expected #{expected.to_a}" if actual.numel.positive? && apart?(expected, actual)
      end
      nil
    end

    def pieces
      found = {}.compare_by_identity
      FSDP.units_of(@net).each { |unit| unit.each_piece { |_, parameter, _, start, _| found[parameter] = parameter.grad && [start, parameter.grad] } }
      @net.named_parameters.transform_values { |parameter| found[parameter] }
    end

    def apart?(expected, actual)
      (expected - actual).abs.max.item > 1e-9 * [expected.abs.max.item, 1e-3].max
    end
  end

  # That one world runs.
  TOGETHER = 15

  # @param world [#call] runs a block on the ranks of a world
  # @return [String, nil] the first case that fails
  def self.failure(world, cases)
    cases.each_slice(TOGETHER).lazy.filter_map { |some| first_failure(world, some) }.first
  end

  def self.first_failure(world, cases)
    found = world.call(cases.first.size) do |rank|
      cases.each_with_index.filter_map { |each, index| Trial.new(each, rank).difference&.then { |text| [index, text] } }.first
    end
    index, text = found.compact.min
    index && "#{text}\n#{cases[index]}"
  end
  private_class_method :first_failure
end
