# frozen_string_literal: true

require_relative "parallel_models"

# Divided layers beside the same ones that are not: values, gradients, what a process holds, and what is sent.
class TensorParallelLayersTest < Minitest::Test
  include ParallelModels

  Pair = Struct.new(:plain, :divided)

  # The same random numbers for both.
  def pair(plain, *arguments, layer: nil, **options)
    Torch.manual_seed(3)
    first = plain.new(*arguments).double
    Torch.manual_seed(3)
    second = layer ? layer.new(*arguments, **options) : yield(plain.new(*arguments).double)
    Pair.new(first, second.double)
  end

  # The largest difference of results, and of gradients.
  def compare(pair, input, output: ->(tensor) { tensor })
    results = [pair.plain, pair.divided].map do |layer|
      x = input.floating_point? ? input.clone.requires_grad! : input
      y = (layer == pair.divided) ? output.call(layer.call(x)) : layer.call(x)
      (y * numbers(*y.shape, seed: 4)).sum.backward
      [y.detach, x.grad || Torch.zeros(1, dtype: :float64)]
    end
    pairs = results.transpose
    gradients = difference(pair.plain, pair.divided) { |parameter, _| full(parameter, parameter.grad.to_dense) }
    (pairs.map { |one, two| (one - two).abs.max.item } + [gradients]).max
  end

  LAYERS = {
    column: lambda do |test, group, mesh|
      pair = test.pair(Torch::NN::Linear, 5, 12, layer: Parallel::ColumnParallelLinear, mesh: mesh)
      test.compare(pair, test.numbers(3, 5), output: ->(y) { Torch::Distributed::NN.gather_from_region(y, group: group) })
    end,
    gathered: lambda do |test, _, mesh|
      test.compare(test.pair(Torch::NN::Linear, 5, 12, layer: Parallel::ColumnParallelLinear, mesh: mesh, gather_output: true), test.numbers(2, 3, 5))
    end,
    row: lambda do |test, _, mesh|
      pair = test.pair(Torch::NN::Linear, 12, 5, layer: Parallel::RowParallelLinear, mesh: mesh, input_is_parallel: false)
      test.compare(pair, test.numbers(3, 12))
    end,
    features_of_features: lambda do |test, _, mesh|
      pair = test.pair(Torch::NN::Linear, 12, 24) do |linear|
        style = ColwiseParallel.new(input_layouts: Tensor.replicate, output_layouts: Tensor.shard(0))
        Parallel.parallelize_module(Torch::NN::Sequential.new(linear), mesh, "0" => style)
        linear
      end
      test.compare(pair, test.numbers(12, 12), output: ->(y) { Torch::Distributed::NN.gather_from_region(y, dim: 0) })
    end,
    divided_input: lambda do |test, group, mesh|
      pair = test.pair(Torch::NN::Linear, 12, 24) do |linear|
        style = ColwiseParallel.new(input_layouts: Tensor.shard(-1), output_layouts: Tensor.replicate)
        Parallel.parallelize_module(linear, mesh, style)
      end
      # This process's features, of which gradients are put together again.
      divided = pair.divided
      pair.divided = Struct.new(:layer, :group) do
        def call(x) = layer.call(Torch::Distributed::NN.scatter_to_region(x, group: group))
        def named_parameters = layer.named_parameters
      end.new(divided, group)
      test.compare(pair, test.numbers(4, 12))
    end,
    vocabulary: lambda do |test, _, mesh|
      pair = test.pair(Torch::NN::Embedding, 12, 5, layer: Parallel::VocabParallelEmbedding, mesh: mesh)
      test.compare(pair, test.tokens(2, 6, 12))
    end,
    columns: lambda do |test, _, mesh|
      pair = test.pair(Torch::NN::Embedding, 5, 12) do |embedding|
        Parallel.parallelize_module(embedding, mesh, ColwiseParallel.new(output_layouts: Tensor.replicate))
      end
      test.compare(pair, test.tokens(2, 6, 5))
    end,
    from: lambda do |test, _, mesh|
      pair = test.pair(Torch::NN::Linear, 12, 7) { |linear| Parallel::RowParallelLinear.from(linear, mesh: mesh, input_is_parallel: false) }
      test.compare(pair, test.numbers(3, 12))
    end
  }.freeze

  EMBEDDINGS = [{padding_idx: 7}, {padding_idx: 0}, {sparse: true}].freeze

  # Options of embeddings that rows depend on.
  def embedding(options, mesh)
    layers = [Torch::NN::Embedding, Parallel::VocabParallelEmbedding].map do |each|
      Torch.manual_seed(3)
      each.new(12, 5, **options, **((each == Torch::NN::Embedding) ? {} : {mesh: mesh})).double
    end
    compare(Pair.new(*layers), tokens(2, 12, 12))
  end

  CROSS_ENTROPIES = [[[6], {}], [[2, 3], {reduction: :sum}], [[4], {reduction: "none"}], [[7], {ignore_index: 5}]].freeze

  def cross_entropy(shape, options, mesh, size)
    logits = numbers(*shape, 12, seed: 2) * 8
    # Also all that a process has; the target is another.
    logits[0].narrow(0, 0, 3).fill!(-Float::INFINITY) if shape == [6]
    target = tokens(1, shape.inject(:*), 12).reshape(shape)
    results = [false, true].map do |divided|
      x = logits.clone.requires_grad!
      losses = if divided
        Parallel.cross_entropy(Torch::Distributed::NN.scatter_to_region(x), target, mesh: mesh, **options)
      else
        options = options.transform_values { |value| value.is_a?(Symbol) ? value.to_s : value }
        Torch::NN::F.cross_entropy(x.reshape(-1, 12), target.reshape(-1), **options)
      end
      (losses.reshape(-1) * numbers(losses.numel, seed: 1)).sum.backward
      [losses.reshape(-1).detach, x.grad]
    end
    results.transpose.map { |one, two| (one - two).abs.max.item }.max
  end

  (1..4).each do |size|
    define_method(:"test_layers_on_#{size}_ranks") do
      found = world(size) do
        mesh = mesh(size)
        group = mesh.get_group(0)
        [*LAYERS.map { |name, run| [name, run.call(self, group, mesh)] }, *EMBEDDINGS.map { |options| [options, embedding(options, mesh)] },
          *CROSS_ENTROPIES.map { |arguments| [arguments, cross_entropy(*arguments, mesh, size)] }]
      end
      found.flatten(1).each { |name, difference| assert_operator difference, :<, 1e-12, name.to_s }
    end
  end

  # Of a module's input and output, between all placements: what a process has, and the gradient of a sum of products.
  PLACEMENTS = [Tensor.replicate, Tensor.replicate(gradient: :partial), Tensor.shard(0), Tensor.shard(-1)].freeze

  class Named < Torch::NN::Module
    def forward(x, other:)
      [x, other]
    end
  end

  def parts(tensor, placement, group)
    return tensor.clone unless placement.is_a?(Tensor::Shard)

    tensor.chunk(group.size, placement.dim)[group.rank].clone
  end

  def sum_over_ranks(tensor, group)
    Torch::Distributed.all_reduce(tensor.detach.clone, group: group)
  end

  # @return [Float] the largest difference of values and gradients from those of one process
  def moved(from, to, mesh)
    group = mesh.get_group(0)
    given = {output_layouts: [from, nil], desired_output_layouts: [to, nil]}
    prepare = Parallel::PrepareModuleInputOutput.new(input_kwarg_layouts: {other: from}, desired_input_kwarg_layouts: {other: to}, **given)
    mod = Parallel.parallelize_module(Named.new, mesh, prepare)
    whole, weights = numbers(12, 24), numbers(12, 24, seed: 3)
    inputs = Array.new(2) { parts(whole, from, group).requires_grad! }
    mod.call(inputs[0], other: inputs[1]).zip(inputs).map do |output, input|
      product = (output * parts(weights, to, group)).sum
      # Each process's share of the loss.
      product = product * (group.rank + 1) / (1..group.size).sum if to == PLACEMENTS[1]
      ((to == PLACEMENTS[0] || group.size == 1) ? product : Torch::Distributed::NN.reduce_from_region(product, group: group)).backward
      gradient = (from == PLACEMENTS[1]) ? sum_over_ranks(input.grad, group) : input.grad
      [(output - parts(whole, to, group)).abs.max.item, (gradient - parts(weights, from, group)).abs.max.item].max
    end.max
  end

  def test_placements
    [2, 3].each do |size|
      found = world(size) do
        mesh = mesh(size)
        PLACEMENTS.product(PLACEMENTS).reject { |pair| pair == PLACEMENTS.first(2).reverse }.map { |from, to| [[from, to], moved(from, to, mesh)] }
      end
      found.flatten(1).each { |pair, difference| assert_operator difference, :<, 1e-12, pair.inspect }
    end
    assert_match(/expected another than replicate\(gradient: :partial\), which can't become replicate/, failure do
      Parallel::PrepareModuleInput.new(input_layouts: PLACEMENTS[1], desired_input_layouts: PLACEMENTS[0])
    end.last)
  end

  # The same seed gives the unsharded layer, of which each process has its part, in its order.
  def test_what_a_process_holds
    found = world(3) do |rank|
      Torch.manual_seed(5)
      plain = Torch::NN::Linear.new(6, 9)
      Torch.manual_seed(5)
      column = Parallel::ColumnParallelLinear.new(6, 9)
      fused = Parallel::ColumnParallelLinear.from(Torch::NN::Linear.new(2, 9), blocks: 3)
      row = Parallel::RowParallelLinear.from(Torch::NN::Linear.new(6, 4))
      [
        (column.weight - plain.weight.narrow(0, 3 * rank, 3)).abs.max.item, (column.bias - plain.bias.narrow(0, 3 * rank, 3)).abs.max.item,
        [column, fused, row].map { |layer| [layer.weight.shape, layer.bias.shape, [layer.in_features, layer.out_features]] },
        [fused, row].flat_map { |layer| [layer.weight, layer.bias] }.map { |parameter| Tensor.layout(parameter).inspect }
      ]
    end
    found.each do |weight, bias, shapes, layouts|
      assert_equal [0, 0], [weight, bias]
      assert_equal [[[3, 6], [3], [6, 9]], [[3, 2], [3], [2, 9]], [[4, 2], [4], [6, 4]]], shapes
      assert_equal ["shard(0) of 3 blocks of [9, 2] over 3", "shard(0) of 3 blocks of [9] over 3", "shard(1) of [4, 6] over 3", "replicate of [4]"],
        layouts
    end
  end

  # --- what is sent ---

  def mlp(mesh, sequence)
    plan = {
      "up" => ColwiseParallel.new(input_layouts: sequence), "down" => RowwiseParallel.new(output_layouts: sequence)
    }
    Parallel.parallelize_module(make { Mlp.new(6, 12) }, mesh, plan)
  end

  def forward_and_backward(input)
    loss = nil
    [operations { loss = yield(input).pow(2).sum }, operations { loss.backward }]
  end

  def test_an_mlp_has_one_operation_each_way
    found = world(2) do
      mesh = mesh(2)
      x = numbers(2, 4, 6).requires_grad!
      part = numbers(2, 2, 6).requires_grad!
      divided, sequence = mlp(mesh, nil), mlp(mesh, Tensor.shard(1))
      [
        forward_and_backward(x) { |input| divided.call(input) }, forward_and_backward(x.detach) { |input| divided.call(input) },
        forward_and_backward(part) { |input| sequence.call(input) }
      ]
    end
    assert_equal [[
      [{"all_reduce" => 1}, {"all_reduce" => 1}], [{"all_reduce" => 1}, {}],
      [{"all_gather" => 1, "reduce_scatter" => 1}, {"all_gather" => 1, "reduce_scatter" => 1}]
    ]], found.uniq
  end

  def test_operations_of_a_transformer
    ids = tokens(2, 12, 24)
    found = world(2) do
      mesh = mesh(2)
      {[gpt_plan, true] => nil, [sequence_plan, true] => nil, [sequence_plan(fused: false), false] => nil}.keys.map do |plan, fused|
        model = Parallel.parallelize_module(make { Gpt.new(fused: fused) }, mesh, plan)
        loss = nil
        [operations { loss = Parallel.cross_entropy(model.call(ids), ids, mesh: mesh) }, operations { loss.backward }]
      end
    end
    assert_equal 1, found.uniq.size
    divided, fused, apart = found.first
    # Embedding, two in each layer, two of the loss; the head and the same two of each layer.
    assert_equal [{"all_reduce" => 7}, {"all_reduce" => 5}], divided
    # Parts of the sequence: for each of the above one of both kinds, but for the loss; and the norms' gradients. The position's
    # gradient is put together.
    assert_equal fused, apart
    assert_equal [{"all_reduce" => 2, "all_gather" => 5, "reduce_scatter" => 5}, {"all_reduce" => 5, "all_gather" => 6, "reduce_scatter" => 5}], fused
  end

  def test_groups_of_one_process_send_nothing
    found = world(1) do
      mesh = mesh(1)
      ids = tokens(2, 12, 24)
      models = [gpt_plan, sequence_plan].map { |plan| Parallel.parallelize_module(make { Gpt.new }, mesh, plan) }
      operations { models.each { |model| Parallel.cross_entropy(model.call(ids), ids, mesh: mesh).backward } }
    end
    assert_equal [{}], found
  end
end
