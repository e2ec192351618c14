# frozen_string_literal: true

require_relative "pipelined_training"

# What passes between stages and out of a step: several tensors, other dtypes, changing shapes, results, ties, replicas and shards.
class PipelineDataTest < Minitest::Test
  include PipelinedTraining

  # Gives its result, the tokens and a mask, from tokens; the embedding has the shape of the head.
  class Front < Torch::NN::Module
    def initialize
      super
      @embedding = Torch::NN::Embedding.new(7, 4)
    end

    def forward(tokens)
      [@embedding.call(tokens), tokens, tokens.gt(3)]
    end
  end

  # Uses the mask no more, but passes what it does not use.
  class Middle < Torch::NN::Module
    def initialize
      super
      @linear = Torch::NN::Linear.new(4, 4)
    end

    def forward(hidden, tokens, mask)
      [Torch.tanh(@linear.call(hidden)).masked_fill(mask.unsqueeze(-1), 0.25), hidden, tokens]
    end
  end

  # The one before's second result gets no gradient if it is not used.
  class Back < Torch::NN::Module
    attr_reader :head

    def initialize(skip)
      super()
      @skip = skip
      @head = Torch::NN::Linear.new(4, 7, bias: false)
    end

    def forward(hidden, earlier, tokens)
      hidden += earlier if @skip
      @head.call(hidden) * (tokens + 1).unsqueeze(-1).to(dtype: :float64)
    end
  end

  CROSS = ->(output, target) { Torch::NN::F.cross_entropy(output.view(-1, 7), target.reshape(-1)) }

  def parts(skip: true)
    Torch.manual_seed(2)
    [Front.new, Middle.new, Back.new(skip)].each(&:double)
  end

  def tokens(rows, length, step = 0)
    ((Torch.arange(0, rows * length) * 5 + step) % 7).view(rows, length)
  end

  # Trains the parts on this rank beside all of them.
  #
  # @return [Float] the largest difference of losses and of parameters
  def compare(schedule, plain, shapes, tied: false)
    optimizers = [plain, schedule.stages.map(&:submodule)].map do |modules|
      Torch::Optim::SGD.new(modules.flat_map(&:parameters).uniq(&:object_id), lr: 0.1)
    end
    shapes.each_with_index.map do |shape, step|
      x, y = tokens(*shape, step), tokens(*shape, step + 1)
      optimizers.each(&:zero_grad)
      expected = CROSS.call(plain.inject([x]) { |values, part| part.call(*values) }, y)
      expected.backward
      schedule.step(x, target: y, losses: losses = [], return_outputs: false)
      optimizers.each(&:step)
      [(mean(losses, shape[0]) - expected.item).abs] + schedule.stages.flat_map do |stage|
        stage.submodule.named_parameters.map { |name, parameter| far(parameter, plain[stage.stage_index].named_parameters[name]) }
      end
    end.flatten.max
  end

  [2, 3].each do |size|
    # Shapes change after the first step, for some micro-batches, back and again.
    define_method(:"test_several_tensors_of_changing_shapes_on_#{size}_ranks") do
      shapes = [[4, 3], [5, 3], [5, 6], [5, 6], [5, 3], [6, 3], [6, 3]]
      found = world(size) do |rank|
        [true, false].map do |skip|
          list = parts(skip: skip)
          list = [list[0], Joined.new(list[1], list[2])] if size == 2
          stage = Pipelining::PipelineStage.new(list[rank])
          schedule = Pipelining::Schedule1F1B.new(stage, n_microbatches: 3, loss_fn: CROSS)
          plain = parts(skip: skip)
          compare(schedule, (size == 2) ? [plain[0], Joined.new(plain[1], plain[2])] : plain, shapes)
        end
      end
      assert_operator found.flatten.max, :<, 1e-10
    end
  end

  # Two parts as one.
  class Joined < Torch::NN::Module
    def initialize(first, second)
      super()
      @first = first
      @second = second
    end

    def forward(*values)
      @second.call(*@first.call(*values))
    end
  end

  def test_tied_weights
    tie = [{2 => "head.weight", 0 => "embedding.weight"}]
    found = world(3) do |rank|
      plain = parts
      plain[2].head.instance_variable_set(:@weight, plain[0].embedding.weight)
      # Equal at the start because the lowest stage's are sent.
      list = parts
      schedule = Pipelining::Schedule1F1B.new(Pipelining::PipelineStage.new(list[rank]), n_microbatches: 2, loss_fn: CROSS, tie: tie)
      difference = compare(schedule, plain, [[4, 3]] * 4)
      weight = list[rank].parameters.first
      [difference, (rank == 1) ? nil : weight.to_a]
    end
    assert_operator found.map(&:first).max, :<, 1e-10
    assert_equal found[0][1], found[2][1]
    local = Distributed.fork_world(1) do
      plain, list = parts, parts
      plain[2].head.instance_variable_set(:@weight, plain[0].embedding.weight)
      stages = list.map { |part| Pipelining::PipelineStage.new(part) }
      schedule = Pipelining::ScheduleGPipe.new(stages, n_microbatches: 2, loss_fn: CROSS, tie: tie)
      [compare(schedule, plain, [[4, 3]] * 4), far(list[0].embedding.weight, list[2].head.weight)]
    end
    assert_operator local.flatten.max, :<, 1e-10
  end

  # Gradients take their time on the way, and must not change before they are sent.
  def test_large_tied_weights
    found = world(2) do |rank|
      plain, part = Array.new(2) { Torch::NN::Linear.new(1200, 1200, bias: false) }
      stage = Pipelining::PipelineStage.new(part)
      schedule = Pipelining::Schedule1F1B.new(stage, n_microbatches: 2, loss_fn: MSE, tie: [{0 => "weight", 1 => "weight"}])
      Torch.no_grad { plain.weight.copy!(part.weight) }
      x, y = batch(4, width: 1200, dtype: :float32)
      MSE.call(plain.call(plain.call(x)), y).backward
      schedule.step(x, target: y)
      far(part.weight.grad, plain.weight.grad) / plain.weight.grad.abs.max.item
    end
    assert_operator found.max, :<, 1e-5
  end

  # Gradients that are there already count once, and replicas have their own.
  def test_tied_weights_of_replicas_over_several_steps
    tie = [{0 => "embedding.weight", 1 => "second.head.weight"}]
    joined = ->(list) { [list[0], Joined.new(list[1], list[2])] }
    found = world(4) do |rank|
      mesh = Torch::Distributed.init_device_mesh(:cpu, [2, 2], mesh_dim_names: %w[dp pp])
      plain = parts
      plain[2].head.instance_variable_set(:@weight, plain[0].embedding.weight)
      part = Torch::NN::Parallel::DistributedDataParallel.new(joined.call(parts)[mesh.get_local_rank("pp")], device_mesh: mesh["dp"])
      stage = Pipelining::PipelineStage.new(part, mesh: mesh["pp"])
      schedule = Pipelining::Schedule1F1B.new(stage, n_microbatches: 2, loss_fn: CROSS, tie: tie)
      3.times do |step|
        x, y = tokens(4, 3, step), tokens(4, 3, step + 1)
        CROSS.call(plain.inject([x]) { |values, each| each.call(*values) }, y).backward
        schedule.step(x.narrow(0, 2 * mesh.get_local_rank("dp"), 2), target: y.narrow(0, 2 * mesh.get_local_rank("dp"), 2))
      end
      tied = stage.stage_index.zero? ? part.module.embedding.weight : part.module.second.head.weight
      far(tied.grad, plain[0].embedding.weight.grad)
    end
    assert_operator found.max, :<, 1e-10
  end

  def test_losses_metrics_and_outputs_everywhere
    loss = ->(output, target) { [MSE.call(output, target), {largest: output.abs.max, rows: output.size(0)}] }
    found = world(2) do |rank|
      schedule = Pipelining::Schedule1F1B.new(stages_of(layers, rank, 2), n_microbatches: 3, loss_fn: loss)
      x, y = batch(7)
      results = [:step, :eval].map do |call|
        output = schedule.public_send(call, x, target: y, losses: losses = [], metrics: metrics = [], return_outputs: :all)
        [output.to_a, losses.map(&:item), metrics, losses.map(&:dtype).uniq, output.requires_grad]
      end
      plain = Torch.no_grad { layers.call(x) }
      own = [0...3, 3...5, 5...7].map { |range| [plain[range], y[range]] }
      values = own.map { |output, _| {largest: output.abs.max.item, rows: output.size(0).to_f} }
      expected = [plain.to_a, own.map { |pair| MSE.call(*pair).item }, values, [:float64], false]
      quiet = schedule.eval(x)
      [results, expected, quiet.nil?]
    end
    found.each_with_index do |(results, expected, nothing), rank|
      results.each { |result| assert_equal expected, result }
      assert_equal rank.zero?, nothing
    end
  end

  def test_gradients_are_added_to_those_that_are_there
    found = world(2) do |rank|
      schedule = Pipelining::ScheduleGPipe.new(stages_of(layers, rank, 2), n_microbatches: 2, loss_fn: MSE)
      plain = layers
      2.times do |step|
        x, y = batch(5, step)
        MSE.call(plain.call(x), y).backward
        schedule.step(x, target: y)
      end
      sum = ->(output, target) { MSE.call(output, target) * output.numel }
      sums = Pipelining::ScheduleGPipe.new(stages_of(layers, rank, 2), n_microbatches: 2, loss_fn: sum, scale_grads: false)
      x, y = batch(5)
      sums.step(x, target: y)
      summed = layers
      (MSE.call(summed.call(x), y) * y.numel).backward
      [[schedule, plain], [sums, summed]].flat_map do |made, expected|
        made.stages[0].submodule.named_parameters.map { |name, parameter| far(parameter.grad, expected.named_parameters[name].grad) }
      end.max
    end
    assert_operator found.max, :<, 1e-10
  end

  # Frozen stages before and behind one that trains.
  def test_frozen_stages
    found = world(3) do |rank|
      model, plain = [layers, layers].each do |each|
        each.children.each_with_index { |layer, i| layer.requires_grad!(requires_grad: i.between?(6, 10)) }
      end
      stage = stages_of(model, rank, 3)
      schedule = Pipelining::Schedule1F1B.new(stage, n_microbatches: 2, loss_fn: MSE)
      x, y = batch(4)
      schedule.step(x, target: y)
      MSE.call(plain.call(x), y).backward
      stage[0].submodule.named_parameters.map do |name, parameter|
        expected = plain.named_parameters[name].grad
        (expected && parameter.grad) ? far(parameter.grad, expected) : [expected, parameter.grad].compact.size
      end
    end
    assert_operator found.flatten.max, :<, 1e-10
  end

  # Replicas of a pipeline: each has its part of the batch.
  def test_replicated_and_sharded_stages
    found = world(4) do |rank|
      mesh = Torch::Distributed.init_device_mesh(:cpu, [2, 2], mesh_dim_names: %w[dp pp])
      ddp = ->(part) { Torch::NN::Parallel::DistributedDataParallel.new(part, device_mesh: mesh["dp"]) }
      fsdp = lambda do |part|
        part.children.each { |layer| Torch::Distributed::FSDP.fully_shard(layer, mesh: mesh["dp"]) if layer.is_a?(Torch::NN::Linear) }
        Torch::Distributed::FSDP.fully_shard(part, mesh: mesh["dp"])
      end
      [ddp, fsdp].product(%i[ScheduleGPipe Schedule1F1B ScheduleInterleavedZeroBubble]).map do |wrap, name|
        part = Pipelining.split(layers, parts: 2)[mesh.get_local_rank("pp")]
        stage = Pipelining::PipelineStage.new(wrap.call(part), mesh: mesh["pp"])
        schedule = Pipelining.const_get(name).new(stage, n_microbatches: 3, loss_fn: MSE)
        plain = layers
        optimizers = [adam(plain), adam([stage])]
        3.times do |step|
          x, y = batch(6 * 2, step)
          optimizers.each(&:zero_grad)
          MSE.call(plain.call(x), y).backward
          mine = ->(tensor) { tensor.narrow(0, 6 * mesh.get_local_rank("dp"), 6) }
          schedule.step(mine.call(x), target: mine.call(y))
          optimizers.each(&:step)
        end
        state = (wrap == ddp) ? stage.submodule.module.state_dict : Torch::Distributed::FSDP.full_state_dict(stage.submodule)
        state.map { |key, value| far(value, plain.state_dict[key]) }.max
      end
    end
    assert_operator found.flatten.max, :<, 1e-10
  end

  def test_splitting
    inner = Torch::NN::Sequential.new(Torch::NN::Linear.new(2, 2), Torch::NN::Tanh.new, Torch::NN::Linear.new(2, 2))
    model = Torch::NN::Sequential.new(Torch::NN::Tanh.new, inner, Torch::NN::Linear.new(2, 1))
    names = ->(list) { list.map { |part| part.named_parameters.keys } }
    assert_equal [%w[1.0.weight 1.0.bias], %w[1.2.weight 1.2.bias 2.weight 2.bias]], names.call(Pipelining.split(model, at: ["1.2"]))
    assert_equal [[], %w[1.0.weight 1.0.bias 1.2.weight 1.2.bias], %w[2.weight 2.bias]], names.call(Pipelining.split(model, at: %w[1 2]))
    assert_equal names.call(Pipelining.split(model, at: ["1.2"])), names.call(Pipelining.split(model, parts: 2))
    x = Torch.ones(1, 2)
    expected, found = Torch.no_grad { [model.call(x), Pipelining.split(model, parts: 3).inject(x) { |value, part| part.call(value) }] }
    assert_equal expected.to_a, found.to_a
    {
      {} => "at, parts: expected one of them, got none",
      {at: ["0"]} => "at: expected layers in their order without the first one, got [\"0\"]",
      {at: ["4"]} => "at: expected names of the model's layers, 0, 1.0, 1.1, 1.2, 2, got \"4\"",
      {parts: 6} => "parts: expected 1 to 5, since the model has 5 layers, got 6"
    }.each { |options, text| assert_equal text, assert_raises(ArgumentError) { Pipelining.split(model, **options) }.message }
  end
end
