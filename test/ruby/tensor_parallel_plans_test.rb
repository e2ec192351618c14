# frozen_string_literal: true

require_relative "parallel_models"

# Plans of divided models: which modules they mean, whose values are taken, what is refused; and random numbers.
class TensorParallelPlansTest < Minitest::Test
  include ParallelModels

  COLUMN = ColwiseParallel.new
  ROW = RowwiseParallel.new

  # Names of the parameters that a plan divides.
  def divided(model)
    model.named_parameters.select { |_, parameter| Tensor.layout(parameter)&.divided? }.keys
  end

  def test_names
    plans = {
      "layers.*.mlp.up" => %w[layers.0.mlp.up.weight layers.0.mlp.up.bias layers.1.mlp.up.weight layers.1.mlp.up.bias],
      "layers.[1-3].mlp.u?" => %w[layers.1.mlp.up.weight layers.1.mlp.up.bias], "layers.?.attention.qk*" =>
        %w[layers.0.attention.qkv.weight layers.0.attention.qkv.bias layers.1.attention.qkv.weight layers.1.attention.qkv.bias],
      :position => %w[position.weight]
    }
    found = world(2) do
      mesh = mesh(2)
      by_name = plans.keys.map { |key| divided(Parallel.parallelize_module(Gpt.new, mesh, {key => COLUMN})) }
      itself = [{"" => COLUMN}, COLUMN].map { |plan| divided(Parallel.parallelize_module(Torch::NN::Linear.new(3, 4), mesh, plan)) }
      [by_name, itself, divided(Parallel.parallelize_module(Gpt.new, mesh, {}))]
    end
    assert_equal [[plans.values, [%w[weight bias]] * 2, []]], found.uniq
  end

  def test_whose_values_are_taken
    found = world(2) do |rank|
      mesh = mesh(2)
      [0, 1, nil].map do |source|
        model = make(seed: 10 + rank) { Mlp.new(2, 4) }
        Parallel.parallelize_module(model, mesh, {"up" => COLUMN, "down" => ROW}, src_data_rank: source)
        model.named_parameters.values.map(&:to_a)
      end
    end
    whole = Array.new(2) { |rank| Distributed.fork_world(1) { make(seed: 10 + rank) { Mlp.new(2, 4) }.named_parameters.values.map(&:to_a) }.first }
    cut = lambda do |(up, bias, down, other), rank|
      [up[2 * rank, 2], bias[2 * rank, 2], down.map { |row| row[2 * rank, 2] }, other]
    end
    found.each_with_index do |(first, second, own), rank|
      assert_equal cut.call(whole[0], rank), first
      assert_equal cut.call(whole[1], rank), second
      assert_equal cut.call(whole[rank], rank), own
    end
  end

  # Parameters stay the objects that they are: of optimizers, of modules that share them, and of graphs that are still there. A layer
  # can be moved.
  def test_objects
    found = world(2) do
      mesh = mesh(2)
      plain, model = Array.new(2) { make { Gpt.new } }
      optimizers = [plain, model].map { |each| Torch::Optim::SGD.new(each.parameters.uniq(&:object_id), lr: 0.1, momentum: 0.9) }
      before = model.call(tokens(2, 12, 24)).sum.tap(&:backward)
      Parallel.parallelize_module(model, mesh, gpt_plan)
      3.times do |step|
        ids = tokens(2, 12, 24, seed: step)
        optimizers.each(&:zero_grad)
        Torch::NN::F.cross_entropy(plain.call(ids).view(-1, 24), ids.view(-1)).backward
        Parallel.cross_entropy(model.call(ids), ids, mesh: mesh).backward
        optimizers.each(&:step)
      end
      layer = Parallel::ColumnParallelLinear.new(3, 4, mesh: mesh)
      layout = Tensor.layout(layer.weight)
      layer.double
      [difference(plain, model) { |parameter, _| full(parameter) }, model.head.weight.equal?(model.embedding.weight), layer.weight.dtype,
        Tensor.layout(layer.weight).equal?(layout), before.dtype, failure { layer.deep_dup }]
    end
    found.each do |difference, *rest|
      assert_operator difference, :<, 1e-10
      assert_equal [true, :float64, true, :float64], rest.first(4)
      assert_equal ["TypeError", "this Torch::Distributed::Tensor::Parallel::ColumnParallelLinear has been sharded by ColumnParallelLinear and " \
        "cannot be copied: copy it before that"], rest[4]
    end
  end

  # --- what is refused, on all processes and before anything is changed ---

  # Another forward.
  class Scaled < Torch::NN::Linear
    def forward(x)
      super * 2
    end
  end

  MISTAKES = {
    "layers.*.mlp.upp" => [/parallelize_plan: "layers\.\*\.mlp\.upp" matches no module: did you mean "layers\.[01]\.mlp\.up", "layers\.[01]\.mlp\.up"\?/, COLUMN],
    "nothing.like.this" => [/"nothing\.like\.this" matches no module: expected one of "embedding", "position"/, COLUMN],
    "layers.0.norm1" => [/layers\.0\.norm1 \(LayerNorm\): expected a Linear or an Embedding, .* for ColwiseParallel, got a Torch::NN::LayerNorm/, COLUMN],
    "position" => [/position \(Embedding\): weight: dimension 0 of the shape \[11, 24\]: expected a multiple of 2 processes, got 11/, ROW],
    "layers.1.attention.qkv" => [/layers\.1\.attention\.qkv \(Linear\): heads: expected a multiple of 2 processes, got 3/, ColwiseParallel.new(heads: 3)],
    "layers.0.mlp.up" => [/up \(Linear\): weight: dimension 0 of the shape \[96, 24\]: expected a multiple of 5 blocks times 2 processes, got 96/,
      ColwiseParallel.new(blocks: 5)],
    "head" => [/\Aembedding\.weight is the same parameter as that of head \(Linear\): weight, which is divided: expected a style for embedding, too/, COLUMN],
    "layers" => [/parallelize_plan: expected a style .* got #{Regexp.escape({"layers" => :colwise}.inspect)}/, :colwise]
  }.freeze

  def test_mistakes
    found = world(2) do
      mesh = mesh(2)
      model = Gpt.new(length: 11)
      before = model.named_parameters.transform_values(&:to_a)
      plans = MISTAKES.map { |key, (_, style)| {key => style} }
      plans << {"head" => COLUMN, "embedding" => COLUMN} << {"layers.*.mlp.up" => COLUMN, "layers.0.mlp.*" => ROW}
      messages = plans.map { |plan| failure { Parallel.parallelize_module(model, mesh, plan) }&.last }
      messages << failure { Parallel.parallelize_module(Scaled.new(2, 2), mesh, COLUMN) }&.last
      messages << failure { Parallel.parallelize_module(model, mesh, {"position" => COLUMN}, src_data_rank: 2) }&.last
      messages << failure { Parallel.parallelize_module(model, Distributed.init_device_mesh("cpu", [1, 2]), {}) }&.last
      messages << failure { Parallel.parallelize_module(model, nil, {}) }&.last
      [messages, model.named_parameters.transform_values(&:to_a) == before, divided(model)]
    end
    assert_equal 1, found.uniq.size
    messages, same, divided = found.first
    patterns = MISTAKES.values.map(&:first) + [
      /embedding \(Embedding\): weight is divided already: shard\(0\) of \[24, 24\] over 2, expected shard\(1\)/,
      /"layers\.\*\.mlp\.up" and "layers\.0\.mlp\.\*" both match layers\.0\.mlp\.up/,
      /the module itself \(Scaled\): expected a Linear or an Embedding, with their forward/, /src_data_rank: expected a rank from 0 to 1 or nil, got 2/,
      /device_mesh: expected one dimension, such as mesh\["tp"\], got #<Torch::Distributed::DeviceMesh/, /device_mesh: expected a DeviceMesh, got nil/
    ]
    patterns.zip(messages).each { |pattern, message| assert_match pattern, message }
    assert same
    assert_empty divided
  end

  def test_mistakes_of_one_process
    found = world(2) do |rank|
      mesh = mesh(2)
      [
        failure { Parallel.parallelize_module(Torch::NN::Linear.new(4, 3 + rank), mesh, COLUMN) },
        failure { Parallel.parallelize_module(Torch::NN::Linear.new(4, 4), mesh, rank.zero? ? COLUMN : ROW) },
        failure { Parallel.parallelize_module(Torch::NN::Linear.new(4, 4 + 2 * rank), mesh, COLUMN) }
      ]
    end
    assert_equal "ArgumentError", found[0][0].first
    assert_equal ["Torch::Distributed::MismatchError", "parallelize_module failed on global rank 0: #{found[0][0].last}"], found[1][0]
    found.each do |_, style, shape|
      assert_match(/the same on all processes, but global rank 0 has ".*ColwiseParallel.*" where global rank 1 has ".*RowwiseParallel/, style.last)
      assert_match(/global rank 0 has ".*weight: float32 shard\(0\) of \[4, 4\] over 2" where global rank 1 has ".*of \[6, 4\]/, shape.last)
    end
  end

  def test_what_is_divided_or_wrapped_already
    found = world(2) do
      mesh = mesh(2)
      twice = Parallel.parallelize_module(Mlp.new(4, 4), mesh, {"up" => COLUMN})
      sharded = Torch::Distributed::FSDP.fully_shard(Mlp.new(4, 4))
      wrapped = Torch::NN::Parallel::DistributedDataParallel.new(Mlp.new(4, 4))
      [twice, sharded, wrapped, wrapped.module].map do |model|
        failure { Parallel.parallelize_module(model, mesh, {model.equal?(wrapped) ? "module.up" : "up" => COLUMN}) }.last
      end + [failure { Parallel::ColumnParallelLinear.from(twice.up) }.last, failure { Parallel::ColumnParallelLinear.new(4, 5) }.last]
    end
    assert_equal 1, found.uniq.size
    [
      /up \(Linear\): it is parallel already, by ColwiseParallel/, /up \(Linear\): weight: it is sharded by FSDP already: divide the model, then shard it/,
      /not in a Torch::NN::Parallel::DistributedDataParallel yet/, /up \(Linear\): weight: it is in a DistributedDataParallel already/,
      /layer: it is divided already/, /the module itself \(ColumnParallelLinear\): weight: dimension 0 of the shape \[5, 4\]: .* 2 processes, got 5/
    ].zip(found.first) { |pattern, message| assert_match pattern, message }
  end

  def test_calls_that_are_wrong
    found = world(2) do
      mesh = mesh(2)
      mlp = Parallel.parallelize_module(Mlp.new(4, 6), mesh, {"up" => COLUMN, "down" => RowwiseParallel.new(output_layouts: Tensor.shard(1))})
      embedding = Parallel::VocabParallelEmbedding.new(6, 2, mesh: mesh)
      logits = Torch.zeros(3, 2)
      [
        failure { mlp.up.call(Torch.zeros(2, 6)) }, failure { mlp.down.call(Torch.zeros(2, 2, 6)) }, failure { mlp.down.call(Torch.zeros(2, 3, 3)) },
        failure { mlp.up.call(1) }, failure { embedding.call(Torch.tensor([0, 6])) }, failure { embedding.call(Torch.tensor([-1, 2])) },
        failure { Parallel.cross_entropy(logits, Torch.tensor([0, 1, 4])) }, failure { Parallel.cross_entropy(logits, Torch.tensor([0, 1])) },
        failure { Parallel.cross_entropy(logits, Torch.tensor([0, 1, 2]), reduction: "max") }, failure { Parallel.local(5, mesh) },
        failure { ColwiseParallel.new(input_layouts: 1) }, failure { ColwiseParallel.new(blocks: 0) }
      ].map(&:last) << Parallel.local(6, mesh)
    end
    assert_equal 1, found.uniq.size
    [
      /up \(Linear\): expected the whole input, with 4 features in the last dimension, got a tensor of shape \[2, 6\]/,
      /down \(Linear\): expected this process's part of the input, with 3 features .* got a tensor of shape \[2, 2, 6\]/,
      /down \(Linear\): dimension 1 of a tensor of shape \[2, 3, 3\]: expected a multiple of 2 processes, got 3/,
      /up \(Linear\): expected to be called with one tensor, got Integer/, /expected indices from 0 to 5, got 6/, /expected indices from 0 to 5, got -1/,
      /target: expected indices from 0 to 3, got 4/, /target: expected int64 of shape \[3\], .* got int64 of shape \[2\]/,
      /reduction: expected "mean", "sum", "none", got "max"/, /expected a multiple of 2 processes, got 5/,
      /input_layouts: expected a placement such as Tensor\.shard\(1\) or Tensor\.replicate, got 1/, /blocks: expected a positive Integer, got 0/
    ].zip(found.first) { |pattern, message| assert_match pattern, message }
    assert_equal 3, found.first.last
  end

  # --- random numbers ---

  def test_random_numbers
    found = world(2) do |rank|
      mesh = mesh(2)
      Parallel::Random.manual_seed(7, mesh)
      common = Torch.rand(3).to_a
      own = Parallel::Random.divided(mesh) { Torch.rand(3).to_a }
      state = Parallel::Random.get_state(mesh)
      then_common, then_own = Torch.rand(3).to_a, Parallel::Random.divided(mesh) { Torch.rand(3).to_a }
      Parallel::Random.set_state(state, mesh)
      again = Parallel::Random.divided(mesh) { Parallel::Random.divided(mesh) { Torch.rand(3).to_a } }
      Torch.manual_seed(7)
      expected = [Torch.rand(3).to_a, Torch.rand(3).to_a]
      Torch.manual_seed(7 + 2718 + rank)
      [[common, then_common], [own, then_own], again, expected, [Torch.rand(3).to_a, Torch.rand(3).to_a]]
    end
    found.each do |common, own, again, expected_common, expected_own|
      assert_equal expected_common, common
      assert_equal expected_own, own
      assert_equal own.last, again
    end
    assert_equal found[0][0], found[1][0]
    refute_equal found[0][1], found[1][1]
  end

  # A segment is computed again as it was, dropout of parts and of what all have included.
  def test_checkpointed_layers
    ids = tokens(2, 12, 24)
    found = world(2) do
      mesh = mesh(2)
      [gpt_plan, sequence_plan].flat_map do |plan|
        model = Parallel.parallelize_module(make { Gpt.new(depth: 1, dropout: 0.3) }, mesh, plan)
        gradients = [false, true].map do |checkpointed|
          model.checkpointed = checkpointed
          model.zero_grad
          Parallel::Random.manual_seed(5, mesh)
          loss = Parallel.cross_entropy(model.call(ids), ids, mesh: mesh)
          loss.backward
          [loss.item, *model.parameters.map { |parameter| parameter.grad.to_a }]
        end
        gradients[0] == gradients[1]
      end
    end
    assert_equal [[true, true]] * 2, found
  end

  # Dropout of a part of the sequence draws a process's own numbers, that of a whole one the same; both again in a checkpointed segment.
  def test_dropout_and_checkpoints
    found = world(2) do
      mesh = mesh(2)
      Torch.manual_seed(3)
      model = Torch::NN::Sequential.new(Torch::NN::Dropout.new(p: 0.5), Torch::NN::Dropout.new(p: 0.5))
      Parallel.parallelize_module(model, mesh, "1" => SequenceParallel.new)
      masks = model.children.map { |dropout| dropout.call(Torch.ones(40)).to_a }
      gradients = [false, true].map do |checkpointed|
        Parallel::Random.manual_seed(5, mesh)
        x = Torch.ones(40).requires_grad!
        y = checkpointed ? Torch::Utils::Checkpoint.checkpoint(model, x) : model.call(x)
        others = [Torch.rand(2).to_a, Parallel::Random.divided(mesh) { Torch.rand(2).to_a }]
        y.sum.backward
        [x.grad.to_a, y.to_a, others, Torch.rand(2).to_a, Parallel::Random.divided(mesh) { Torch.rand(2).to_a }]
      end
      model.eval
      [masks, gradients, model.call(Torch.ones(4)).to_a]
    end
    assert_equal found[0][0][0], found[1][0][0]
    refute_equal found[0][0][1], found[1][0][1]
    found.each do |_, (without, with), evaluated|
      assert_equal without, with
      assert_equal without[0], without[1]
      assert_equal [1.0] * 4, evaluated
    end
  end
end
