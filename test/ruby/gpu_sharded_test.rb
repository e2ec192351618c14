# frozen_string_literal: true

require_relative "sharded_on_gpu"

# What fully sharded training has beside plain steps (gpu_training_test.rb) and offloading (gpu_offload_test.rb): strategies,
# precisions, states and checkpoints; and ZeroRedundancyOptimizer.
class GPUShardedTest < Minitest::Test
  include ShardedOnGPU

  DDP = Torch::NN::Parallel::DistributedDataParallel
  ZeRO = Distributed::Optim::ZeroRedundancyOptimizer
  Checkpoint = Distributed::Checkpoint
  TOLERANCE = 1e-9

  # Rank 1 has other values before it takes over those of rank 0.
  def test_strategies_follow_one_process
    found = shared_and_apart(2) do |rank|
      policy = FSDP::WrapPolicies.module_wrap_policy(Torch::NN::Sequential)
      %i[full_shard shard_grad_op no_shard].to_h do |strategy|
        net = make(seed: rank + 1) { Tower.new }.to(device)
        model = FSDP::FullyShardedDataParallel.new(net, auto_wrap_policy: policy, sharding_strategy: strategy, sync_module_states: true)
        [strategy, [follow(tower, model, rank, 2, steps: 5, clip: 0.05), devices(net.parameters) == [device]]]
      end
    end
    found.each do |strategies|
      strategies.each do |name, (worst, there)|
        assert_operator worst, :<, TOLERANCE, name
        assert there, name
      end
    end
  end

  # Two ranks have the model, and two others a replica.
  def test_replicas_of_shards
    found = ranks(4) do |rank|
      mesh = Distributed.init_device_mesh(MESH_DEVICE, [2, 2])
      model = shard(tower, mesh: mesh)
      [follow(tower, model, rank, 4, steps: 5, clip: 0.05), model.parameters.sum { |each| each.to_local.numel }.to_f / tower.parameters.sum(&:numel)]
    end
    found.each do |worst, share|
      assert_operator worst, :<, TOLERANCE
      assert_in_delta 0.5, share, 0.05
    end
  end

  # One of two layers.
  class Either < Torch::NN::Module
    def initialize
      super
      @one, @other, @neither = Array.new(3) { Torch::NN::Linear.new(5, 3) }
    end

    def forward(x, one)
      (one ? @one : @other).call(x)
    end
  end

  # Every rank has its part of their mean, and so of their step; where none uses a parameter there is no gradient.
  def test_parameters_that_some_ranks_use
    found = ranks(3) do |rank|
      [{}, {offload_policy: FSDP::CPUOffloadPolicy.new}].map do |options|
        plain, model = Array.new(2) { make { Either.new }.to(device) }
        FSDP.fully_shard(model, **options)
        x, = batch(0, 1)
        3.times { |other| (plain.call(x, other == 1).sum / 3).backward }
        model.call(x, rank == 1).sum.backward
        whole = plain.named_parameters.transform_values { |each| each.grad&.flatten&.cpu&.to_a }
        [model.named_parameters.transform_values { |piece| piece.grad&.cpu&.to_a }, whole]
      end
    end
    found.transpose.each do |each|
      each[0][1].each do |name, whole|
        pieces = each.map { |grads, _| grads[name] }
        next assert_equal([nil] * 3, pieces, name) if whole.nil?

        assert_equal whole.size, pieces.sum(&:size), name
        whole.zip(pieces.flatten) { |expected, actual| assert_in_delta expected, actual, TOLERANCE, name }
      end
    end
  end

  # Each rank's rows go through a copy in one dtype, and the gradients are averaged in another one.
  def rounded_gradients(step, size, compute, reduce)
    Array.new(size) do |rank|
      copy = tower(dtype: :float32)
      copy._apply(->(tensor) { tensor.to(dtype: compute) })
      x, y = batch(step, size).map { |tensor| mine(tensor, rank, size) }
      loss(copy.call(x.to(dtype: compute)).to(dtype: y.dtype), y).backward
      copy.parameters.map { |parameter| parameter.grad.to(dtype: reduce) }
    end.transpose.map { |grads| grads.inject(:+) / size }
  end

  PRECISIONS = {float32: [:float64, 1e-5], bfloat16: [:float32, 0.02]}.freeze

  def test_other_precisions
    found = shared_and_apart(2) do |rank|
      PRECISIONS.to_h do |compute, (reduce, _)|
        net = tower
        policy = FSDP::MixedPrecisionPolicy.new(param_dtype: compute, reduce_dtype: reduce)
        seen = []
        watching = Module.new { define_method(:forward) { |x| seen << x.dtype and super(x) } }
        net.layers[1].children[1].singleton_class.prepend(watching)
        model = shard(net, mp_policy: policy)
        differences = Array.new(3) do |step|
          expected = rounded_gradients(step, 2, compute, reduce)
          x, y = batch(step, 2).map { |tensor| mine(tensor, rank, 2) }
          model.parameters.each { |parameter| parameter.grad&.zero! }
          loss(model.call(x).to(dtype: y.dtype), y).backward
          model.named_parameters.values.zip(expected).map { |parameter, whole| piece_apart(parameter.grad, whole, rank) }.max
        end
        [compute, [differences.max, seen.uniq, model.parameters.map(&:grad).map(&:dtype).uniq]]
      end
    end
    found.each do |precisions|
      precisions.each do |compute, (difference, seen, kept)|
        assert_operator difference, :<, PRECISIONS.fetch(compute).last, compute
        assert_equal [[compute], [:float64]], [seen, kept]
      end
    end
  end

  # @return [Float] relative to the largest value of the whole
  def piece_apart(piece, whole, rank)
    return 0.0 if piece.numel.zero?

    start = rank.zero? ? 0 : whole.numel - piece.numel
    (piece - whole.reshape(-1).narrow(0, start, piece.numel).to(dtype: piece.dtype)).abs.max.item / whole.abs.max.item
  end

  # --- states ---

  # A model and Adam in a form. Plain ones have the data of all ranks.
  def run_of(form, seed: 1)
    net = make(seed: seed) { Tower.new }.to(device)
    case form
    when :units then shard(net)
    when :one_unit then FSDP.fully_shard(net)
    when :offloaded then shard(net, offload_policy: FSDP::CPUOffloadPolicy.new)
    when :zero, :zero_views then net = DDP.new(net)
    end
    optimizer = if form.start_with?("zero")
      ZeRO.new(net.parameters, optimizer_class: Torch::Optim::Adam, parameters_as_bucket_view: form == :zero_views, lr: 0.01)
    else
      Torch::Optim::Adam.new(net.parameters, lr: 0.01)
    end
    {model: net, optimizer: optimizer}
  end

  def train(form, run, steps, rank)
    steps.each do |step|
      x, y = batch(step, 2)
      x, y = [x, y].map { |tensor| mine(tensor, rank, 2) } unless form == :plain
      run[:optimizer].zero_grad
      loss(run[:model].call(x), y).backward
      run[:optimizer].step
    end
  end

  def whole(run)
    Distributed.full_state_dict(run[:model])
  end

  def apart(expected, got)
    expected.map { |name, tensor| (tensor - got.fetch(name)).abs.max.item }.max
  end

  FORMS = %i[plain units one_unit offloaded zero zero_views].freeze

  # Saved by sharded ones, and loaded into all forms.
  def test_checkpoints_go_on_in_any_form
    found = in_folder do |folder|
      shared_and_apart(2) do |rank|
        places = Array.new(2) { folder_of_world(folder) }
        plain, run = run_of(:plain), run_of(:units)
        {plain: plain, units: run}.each { |form, each| train(form, each, 0...3, rank) }
        Checkpoint.save(places[0], **run, step: 3)
        saving = Checkpoint.async_save(places[1], **run, step: 3)
        {plain: plain, units: run}.each { |form, each| train(form, each, 3...5, rank) }
        saving.wait
        expected = whole(plain)
        FORMS.product(places).map do |form, place|
          other = run_of(form, seed: 9)
          loaded = Checkpoint.load(place, **other)
          train(form, other, loaded.step...5, rank)
          there = devices(other[:model].parameters) == [(form == :offloaded) ? "cpu" : device]
          [form, loaded.step, there, apart(expected, whole(other))]
        end << [:itself, 3, true, apart(expected, whole(run))]
      end
    end
    found.flatten(1).each do |form, step, there, difference|
      assert_equal [3, true], [step, there], form
      assert_operator difference, :<, TOLERANCE, form
    end
  end

  # The whole state of an optimizer, from pieces into a plain one and into other pieces.
  def test_optimizer_states
    found = shared_and_apart(2) do |rank|
      plain, run = run_of(:plain), run_of(:units)
      {plain: plain, units: run}.each { |form, each| train(form, each, 0...3, rank) }
      states = [plain[:optimizer].state_dict, FSDP.full_optim_state_dict(run[:model], run[:optimizer], rank0_only: false)]
      moments = states.map do |state|
        state["state"].values.flat_map(&:values).grep(Torch::Tensor).map { |tensor| tensor.detach.cpu.clone }
      end
      others = {plain: run_of(:plain, seed: 9), one_unit: run_of(:one_unit, seed: 9)}
      full = whole(run)
      others[:plain][:model].load_state_dict(full)
      others[:plain][:optimizer].load_state_dict(states[1])
      FSDP.load_full_state_dict(others[:one_unit][:model], full)
      FSDP.load_full_optim_state_dict(others[:one_unit][:model], others[:one_unit][:optimizer], states[1])
      train(:plain, plain, 3...5, rank)
      others.each { |form, each| train(form, each, 3...5, rank) }
      [moments.map(&:size), moments.transpose.map { |one, other| (one - other).abs.max.item }.max,
        others.values.map { |other| apart(whole(plain), whole(other)) }.max]
    end
    found.each do |sizes, moments, went_on|
      assert_equal 1, sizes.uniq.size
      assert_operator sizes.first, :>=, 2 * 16
      [moments, went_on].each { |difference| assert_operator difference, :<, TOLERANCE }
    end
  end

  # Each rank has half of the state, and updates half of the elements.
  def test_zero_follows_one_process
    found = shared_and_apart(2) do |rank|
      plain = run_of(:plain)
      train(:plain, plain, 0...5, rank)
      all = plain[:model].parameters.sum(&:numel)
      %i[zero zero_views].map do |form|
        run = run_of(form)
        train(form, run, 0...5, rank)
        held = run[:optimizer].optim.param_groups.sum { |group| group[:params].sum(&:numel) }
        run[:optimizer].consolidate_state_dict
        state = rank.zero? ? run[:optimizer].state_dict["state"].values.flat_map(&:values).grep(Torch::Tensor) : []
        [apart(whole(plain), whole(run)), held.to_f / all, state.sum(&:numel).to_f / all]
      end
    end
    found.each_with_index do |forms, i|
      forms.each do |difference, held, state|
        assert_operator difference, :<, TOLERANCE
        assert_in_delta 0.5, held, 0.01
        # Two moments, on the first rank.
        assert_in_delta i.even? ? 2 : 0, state, 0.01
      end
    end
  end
end
