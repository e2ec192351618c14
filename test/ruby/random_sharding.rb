# frozen_string_literal: true

require_relative "sharded_training"

# Random models, sharded in random ways, and random sequences of what training does with them, beside one process that
# has the data of all. A case is made of a seed alone.
module RandomSharding
  WIDTH = 5

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

    def forward(x, path)
      raise ArgumentError, "a bad batch" if path.nil?

      path.reduce(x) { |hidden, (index, again)| again ? Torch::Utils::Checkpoint.checkpoint(@blocks[index], hidden) : @blocks[index].call(hidden) }
    end

    private

    def block(kind)
      case kind
      when :linear, :shared then Torch::NN::Linear.new(WIDTH, WIDTH)
      when :tall then Torch::NN::Sequential.new(Torch::NN::Linear.new(WIDTH, 13), Torch::NN::Tanh.new, Torch::NN::Linear.new(13, WIDTH, bias: false))
      when :norm then Torch::NN::Sequential.new(Torch::NN::LayerNorm.new([WIDTH]), Torch::NN::Tanh.new)
      when :nested then Torch::NN::Sequential.new(block(:linear), block(:tall), block(:norm))
      end
    end
  end

  Case = Struct.new(:seed, :size, :kinds, :units, :inner, :frozen, :strategy, :path, :actions, keyword_init: true) do
    def to_s
      "seed #{seed}, #{size} ranks, blocks #{kinds.inspect}, units #{units.inspect}, units within them #{inner.inspect}, frozen #{frozen.inspect}, " \
        "#{strategy}, path #{path.inspect}:\n  #{actions.map(&:inspect).join("\n  ")}"
    end
  end

  ACTIONS = {round: 6, between: 3, several: 2, evaluate: 2, step: 4, zero: 2, fail: 1, freeze: 1, left: 1, load: 1}
    .flat_map { |kind, weight| [kind] * weight }.freeze

  class << self
    def cases(seed, count, size)
      Array.new(count) { |index| generate(seed + index, size) }
    end

    def generate(seed, size)
      random = Random.new(seed)
      pick = ->(list) { list[random.rand(list.size)] }
      kinds = [:linear] + Array.new(random.rand(1..4)) { pick.call(%i[linear tall norm nested shared]) }
      indices = kinds.each_index.to_a
      units = indices.select { random.rand < 0.7 }
      inner = indices.select { |index| kinds[index] == :nested && random.rand < 0.5 }
      used = (indices.drop(1).select { random.rand < 0.8 } + indices.sample(1, random: random)).shuffle(random: random)
      path = [0, *used].map { |index| [index, random.rand < 0.2] }
      frozen = (random.rand < 0.3) ? [pick.call(indices.drop(1))] : []
      Case.new(seed: seed, size: size, kinds: kinds, units: units, inner: inner, frozen: frozen, strategy: pick.call(%i[full keep mixed]),
        path: path, actions: Array.new(random.rand(5..14)) { [pick.call(ACTIONS), random.rand(1 << 20)] } + [[:zero, 0], [:round, seed], [:step, 0]])
    end
  end

  # A case on one rank.
  class Trial
    include ShardedTraining

    FSDP = Torch::Distributed::FSDP

    def initialize(trial, rank)
      @case = trial
      @rank = rank
      @plain, @model = Array.new(2) { build }
      groups = groups_of(@model) if @case.seed.even? # before it is sharded
      shard
      @optimizers = [groups_of(@plain), groups || groups_of(@model)].map { |each| Torch::Optim::SGD.new(each, lr: 0.02, momentum: 0.9) }
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

    # By their dimensions, as programs that let only matrices decay.
    def groups_of(model)
      model.parameters.uniq(&:object_id).group_by(&:dim).sort.map { |dim, list| {params: list, weight_decay: (dim >= 2) ? 0.01 : 0.0} }
    end

    # But for the first block's, so that every loss depends on something.
    def own(model, index)
      model.blocks[index].parameters.reject { |parameter| parameter.equal?(model.blocks[0].weight) }
    end

    def shard
      reshard = ->(index) { {full: nil, keep: false, mixed: index.even?}.fetch(@case.strategy) }
      @case.units.each do |index|
        block = @model.blocks[index]
        block.children.first(2).each { |child| FSDP.fully_shard(child) } if @case.inner.include?(index)
        FSDP.fully_shard(block, reshard_after_forward: reshard.call(index))
      end
      FSDP.fully_shard(@model)
    end

    def input(seed, rank)
      (Torch.arange(0, 3 * WIDTH, dtype: :float64) * 0.61 + seed % 997 + 0.3 * rank).sin.view(3, WIDTH)
    end

    def outputs(seed)
      expected = Array.new(@case.size) { |rank| @plain.call(input(seed, rank), @case.path) }
      [expected.map { |output| output.pow(2).mean }.inject(:+) / @case.size, @model.call(input(seed, @rank), @case.path).pow(2).mean]
    end

    # --- actions ---

    def round(seed)
      outputs(seed).each(&:backward)
    end

    def between(seed)
      @model.set_requires_gradient_sync(false)
      round(seed)
      @model.set_requires_gradient_sync(true)
      round(seed + 1)
    end

    def several(seed)
      first, second = outputs(seed), outputs(seed + 1)
      return first.zip(second) { |one, other| (one + other).backward } if seed.even?

      [*second, *first].each(&:backward)
    end

    def evaluate(seed)
      found = Torch.no_grad { outputs(seed) }
      mean = Torch::Distributed.all_reduce(found[1].clone, op: :avg).item
      raise "evaluated to #{mean}, expected #{found[0].item}" if (mean - found[0].item).abs > 1e-9 * found[0].item.abs
    end

    def left(seed)
      outputs(seed)
    end

    def step(_seed)
      @optimizers.each(&:step)
    end

    def zero(_seed)
      @optimizers.each(&:zero_grad)
    end

    def fail(seed)
      @model.call(input(seed, @rank), nil)
    rescue ArgumentError => e
      raise unless e.message == "a bad batch"
    end

    def freeze(seed)
      index = 1 + seed % (@case.kinds.size - 1)
      [@plain, @model].each { |of| own(of, index).each { |parameter| parameter.requires_grad!(seed.odd?) } }
    end

    def load(seed)
      state = make(seed: seed) { Network.new(@case.kinds) }.state_dict
      @plain.load_state_dict(state)
      FSDP.load_full_state_dict(@model, state)
    end

    # --- comparing ---

    def compare
      full = FSDP.full_state_dict(@model)
      grads = pieces
      @plain.named_parameters.each do |name, parameter|
        return "#{name} is #{full[name].flatten.to_a}, expected #{parameter.flatten.to_a}" if apart?(parameter.detach, full[name])

        grad = parameter.grad
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
      FSDP.units_of(@model).each { |unit| unit.each_piece { |_, parameter, _, start, _| found[parameter] = parameter.grad && [start, parameter.grad] } }
      @model.named_parameters.transform_values { |parameter| found[parameter] }
    end

    def apart?(expected, actual)
      (expected - actual).abs.max.item > 1e-9 * [expected.abs.max.item, 1e-3].max
    end
  end

  # @param world [#call] runs a block on the ranks of a world
  # @return [String, nil] the first case that fails
  def self.failure(world, cases)
    found = world.call(cases.first.size) do |rank|
      cases.each_with_index.filter_map { |each, index| Trial.new(each, rank).difference&.then { |text| [index, text] } }.first
    end
    index, text = found.compact.min
    index && "#{text}\n#{cases[index]}"
  end
end
