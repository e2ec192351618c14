# frozen_string_literal: true

require_relative "on_gpu"
require_relative "parallel_models"

# Tensor parallel, sequence parallel and loss parallel on a GPU, beside the same models in one process on the same GPU.
class GPUTensorTest < Minitest::Test
  include OnGPU
  include ParallelModels

  TOLERANCE = 1e-9

  def make(**)
    # Moving makes other parameters, and so unties them.
    super.to(device).tap { |model| model.tie if model.respond_to?(:tie) }
  end

  def mesh(size)
    Distributed.init_device_mesh(MESH_DEVICE, [size])
  end

  def numbers(...)
    super.to(device)
  end

  def tokens(...)
    super.to(device)
  end

  def language_loss(model, step, divided, mesh)
    ids = tokens(2, 12, 24, seed: step)
    targets = tokens(2, 12, 24, seed: step + 50)
    targets[0, 3] = -100
    logits = model.call(ids)
    return Parallel.cross_entropy(logits, targets, mesh: mesh) if divided

    Torch::NN::F.cross_entropy(logits.view(-1, 24), targets.view(-1))
  end

  def gpt_on(mesh, plan, **options)
    model = Parallel.parallelize_module(make { Gpt.new(**options) }, mesh, plan)
    differences = follow(make { Gpt.new(**options) }, model, steps: 3) { |each, step, divided| language_loss(each, step, divided, mesh) }
    [differences, devices(model.parameters)]
  end

  # The fused attention has one projection for query, key and value; with sequence parallel the rest of a layer is divided, too.
  def test_models_follow_one_process
    found = shared_and_apart(2) do
      mesh = mesh(2)
      model = Parallel.parallelize_module(make { Mlp.new(6, 24) }, mesh, "up" => ColwiseParallel.new, "down" => RowwiseParallel.new)
      mlp = follow(make { Mlp.new(6, 24) }, model) { |each, step| each.call(numbers(5, 6, seed: step)).pow(2).mean }
      {
        mlp: [mlp, devices(model.parameters)],
        fused: gpt_on(mesh, gpt_plan), apart: gpt_on(mesh, gpt_plan(fused: false), fused: false),
        sequence: gpt_on(mesh, sequence_plan), sequence_apart: gpt_on(mesh, sequence_plan(fused: false), fused: false)
      }.transform_values { |differences, where| [differences, where == [device]] }
    end
    found.each do |all|
      all.each do |name, (differences, there)|
        assert_operator differences.max, :<, TOLERANCE, "#{name}: losses, gradients and parameters: #{differences}"
        assert there, name
      end
    end
  end

  def test_models_on_four_ranks
    ranks(4) { gpt_on(mesh(4), sequence_plan).first }.each { |differences| assert_operator differences.max, :<, TOLERANCE }
  end

  # Of layers that are divided already.
  class Words < Torch::NN::Module
    def initialize(mesh)
      super()
      nn, divided = Torch::NN, Torch::Distributed::Tensor::Parallel
      @embedding = mesh ? divided::VocabParallelEmbedding.new(12, 6, mesh: mesh) : nn::Embedding.new(12, 6)
      @up = mesh ? divided::ColumnParallelLinear.new(6, 16, mesh: mesh) : nn::Linear.new(6, 16)
      @down = mesh ? divided::RowParallelLinear.new(16, 6, mesh: mesh) : nn::Linear.new(16, 6)
      @head = mesh ? divided::ColumnParallelLinear.new(6, 12, bias: false, mesh: mesh) : nn::Linear.new(6, 12, bias: false)
    end

    def forward(ids)
      @head.call(@down.call(Torch.tanh(@up.call(@embedding.call(ids)))))
    end
  end

  # Made on the CPU, and moved.
  def test_layers
    found = shared_and_apart(2) do
      mesh = mesh(2)
      model = make { Words.new(mesh) }
      losses = [Torch::NN::CrossEntropyLoss.new, Parallel::ParallelCrossEntropy.new(mesh: mesh)]
      differences = follow(make { Words.new(nil) }, model) do |each, step, divided|
        logits = each.call(tokens(3, 5, 12, seed: step))
        losses[divided ? 1 : 0].call(logits.view(15, -1), tokens(15, 1, 12, seed: step + 7).view(15))
      end
      [differences, model.parameters.map(&:shape), devices(model.parameters) == [device]]
    end
    found.each do |differences, shapes, there|
      assert_operator differences.max, :<, TOLERANCE
      assert_equal [[[6, 6], [8, 6], [8], [6, 8], [6], [6, 6]], true], [shapes, there]
    end
  end

  # Logits that differ by much, some of them minus infinity, and rows that do not count.
  def test_losses
    found = shared_and_apart(2) do |rank|
      mesh = mesh(2)
      %w[mean sum none].map do |reduction|
        logits = numbers(7, 12, seed: 2) * 300
        logits[0].narrow(0, 0, 6).fill!(-Float::INFINITY)
        target = tokens(1, 7, 12).view(7)
        target[0] = 8
        target[3] = -100
        plain, own = logits.clone.requires_grad!, logits.narrow(1, 6 * rank, 6).contiguous.requires_grad!
        expected = Torch::NN::F.cross_entropy(plain, target, reduction: reduction)
        actual = Parallel.cross_entropy(own, target, mesh: mesh, reduction: reduction)
        weights = numbers(*expected.shape, seed: 3) unless expected.dim.zero?
        [expected, actual].each { |loss| (weights ? loss * weights : loss).sum.backward }
        [(expected - actual).abs.max.item / expected.abs.max.item, (plain.grad.narrow(1, 6 * rank, 6) - own.grad).abs.max.item]
      end
    end
    found.flatten.each { |difference| assert_operator difference, :<, TOLERANCE }
  end

  # Parts are put together in the state, and in a plain model that goes on from a checkpoint.
  def test_states_and_checkpoints
    found = in_folder do |folder|
      shared_and_apart(2) do
        mesh = mesh(2)
        place = folder_of_world(folder)
        plain = make { Gpt.new }
        models = [plain, Parallel.parallelize_module(make { Gpt.new }, mesh, gpt_plan)]
        optimizers = models.map { |each| Torch::Optim::Adam.new(each.parameters.uniq(&:object_id), lr: 0.01, eps: 1e-5) }
        train = lambda do |model, optimizer, steps, divided|
          steps.each do |step|
            optimizer.zero_grad
            language_loss(model, step, divided, mesh).backward
            optimizer.step
          end
        end
        2.times { |i| train.call(models[i], optimizers[i], 0...2, i == 1) }
        Distributed::Checkpoint.save(place, model: models[1], optimizer: optimizers[1], step: 2)
        state = Distributed.full_state_dict(models[1])
        saved = plain.state_dict.map { |name, tensor| (tensor.detach.cpu - state.fetch(name)).abs.max.item }.max
        other = make(seed: 5) { Gpt.new }
        optimizer = Torch::Optim::Adam.new(other.parameters.uniq(&:object_id), lr: 0.01, eps: 1e-5)
        Distributed::Checkpoint.load(place, model: other, optimizer: optimizer)
        train.call(plain, optimizers[0], 2...4, false)
        train.call(other, optimizer, 2...4, false)
        [saved, difference(plain, other) { |parameter, _| parameter.detach }]
      end
    end
    found.flatten.each { |difference| assert_operator difference, :<, TOLERANCE }
  end
end
