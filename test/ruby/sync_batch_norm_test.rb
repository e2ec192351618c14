# frozen_string_literal: true

require_relative "test_helper"

class SyncBatchNormTest < Minitest::Test
  NN = Torch::NN
  DDP = NN::Parallel::DistributedDataParallel

  # The rows of each rank: of different numbers, on the last of four none.
  SHARES = [3, 1, 5, 0].freeze

  class Net < NN::Module
    def initialize(norms, **options)
      super()
      @first = NN::Conv2d.new(2, 5, 3)
      @norms = NN::ModuleList.new([norms.new(5, **options), norms.new(3, **options)])
      @second = NN::Conv2d.new(5, 3, 2)
    end

    def forward(x)
      x = Torch.tanh(@norms[0].call(@first.call(x)))
      @norms[1].call(@second.call(x))
    end
  end

  def fill(model)
    model.named_parameters.values.each_with_index do |param, index|
      values = (Torch.arange(0, param.numel, dtype: :float64) * 0.7391 + index).sin * 0.5 + 0.1
      Torch.no_grad { param.copy!(values.reshape(param.shape)) }
    end
    model
  end

  def flat(tensor)
    tensor.detach.to(dtype: :float64).reshape(-1).to_a
  end

  # Three steps; the loss adds over the batch, so gradients of parts add up.
  def train(model, inputs, weights)
    3.times do |step|
      input = inputs[step].clone.requires_grad!
      model.zero_grad
      output = model.call(input)
      (output * weights[step]).sum.backward
      @last = [output, input.grad]
    end
    norms = model.modules.grep(NN::BatchNorm)
    buffers = norms.map { |norm| [flat(norm.running_mean), flat(norm.running_var), norm.num_batches_tracked.item] }
    gradients = model.parameters.map { |param| flat(param.grad) }
    [flat(@last[0]), flat(@last[1]), buffers, gradients]
  end

  def data(rows, dtype, first: 0)
    make = lambda do |channels, side|
      Array.new(3) do |step|
        values = (Torch.arange(0, SHARES.sum * channels * side * side, dtype: :float64) * (0.317 + step)).cos + 2
        values.reshape(-1, channels, side, side).narrow(0, first, rows).to(dtype: dtype)
      end
    end
    [make.call(2, 7), make.call(3, 4)]
  end

  def assert_near(expected, got, tolerance)
    assert_equal expected.size, got.size
    size = 1 + (expected.map(&:abs).max || 0)
    expected.zip(got) { |one, other| assert_in_delta one, other, tolerance * size }
  end

  TOLERANCES = {float64: 1e-10, float32: 1e-4}.freeze

  def net(dtype)
    fill(Net.new(NN::BatchNorm2d).then { |net| (dtype == :float64) ? net.double : net })
  end

  (1..4).each do |size|
    define_method(:"test_#{size}_processes_equal_one_with_the_whole_batch") do
      rows = SHARES.first(size)
      wholes = Distributed.fork_world(1) { TOLERANCES.keys.to_h { |dtype| [dtype, train(net(dtype), *data(rows.sum, dtype))] } }.first
      parts = world(size) do |rank|
        TOLERANCES.keys.to_h do |dtype|
          model = NN::SyncBatchNorm.convert_sync_batchnorm(net(dtype))
          [dtype, train(DDP.new(model), *data(rows[rank], dtype, first: rows.first(rank).sum))]
        end
      end
      TOLERANCES.each { |dtype, tolerance| assert_equals_whole(wholes[dtype], parts.map { |part| part[dtype] }, tolerance) }
    end
  end

  def assert_equals_whole(whole, parts, tolerance)
    assert_near whole[0], parts.flat_map { |part| part[0] }, tolerance
    assert_near whole[1], parts.flat_map { |part| part[1] }, tolerance
    parts.each do |part|
      whole[2].zip(part[2]) do |one, other|
        assert_near one[0], other[0], tolerance
        assert_near one[1], other[1], tolerance
        assert_equal 3, other[2]
      end
      # Averages over the ranks.
      whole[3].zip(part[3]) { |one, other| assert_near one, other.map { |value| value * parts.size }, tolerance }
    end
    assert_equal 1, parts.map { |part| part[2] }.uniq.size
  end

  def test_all_dimensions_without_affine_and_statistics
    results = world(2) do |rank|
      [[4], [4, 3], [4, 3, 2], [4, 3, 2, 2]].map do |shape|
        whole = (Torch.arange(0, 5 * shape.inject(:*), dtype: :float32) * 0.7).sin.reshape(5, *shape)
        norm = NN::SyncBatchNorm.new(4, affine: false, track_running_stats: false, eps: 1e-3)
        alone = NN::F.batch_norm(whole, nil, nil, training: true, eps: 1e-3)
        mine = rank.zero? ? whole.narrow(0, 0, 2) : whole.narrow(0, 2, 3)
        wanted = rank.zero? ? alone.narrow(0, 0, 2) : alone.narrow(0, 2, 3)
        (norm.call(mine) - wanted).abs.max.item
      end
    end
    assert_operator results.flatten.max, :<, 1e-5
  end

  def test_momentum_nil_takes_the_plain_mean_over_all_batches
    results = world(2) do |rank|
      norm = NN::SyncBatchNorm.new(1, momentum: nil)
      [[0.0, 2.0], [4.0, 6.0], [8.0, 16.0]].each { |values| norm.call(Torch.tensor([[values[rank]]])) }
      [norm.running_mean.item, norm.running_var.item, norm.num_batches_tracked.item]
    end
    results.each { |mean, variance, count| assert_near [6.0, (2 + 2 + 32) / 3.0, 3], [mean, variance, count], 1e-6 }
  end

  def test_evaluation_and_a_process_alone_are_plain
    input = Torch.randn(4, 3)
    norm = NN::SyncBatchNorm.new(3)
    plain = NN::BatchNorm1d.new(3)
    Torch.no_grad do
      assert_equal plain.call(input).to_a, norm.call(input).to_a # no process group at all
      assert_equal plain.running_var.to_a, norm.running_var.to_a
      results = world(2) do |rank|
        next if rank == 1 # nobody is waited for

        norm.eval
        norm.call(input).to_a
      end
      assert_equal plain.eval.call(input).to_a, results[0]
    end
    error = assert_raises(ArgumentError) { norm.call(Torch.zeros(3)) }
    assert_equal "expected at least 2D and at most 5D input (got 1D input)", error.message
  end

  # As mixed precision has it: halves come and go, the parameters are float32 or halves too.
  def test_halves_are_computed_in_float32
    results = world(2) do |rank|
      Torch.manual_seed(rank + 1)
      input = Torch.randn(5, 3).to(dtype: :bfloat16)
      coefficients = Torch.randn(5, 3)
      [:float32, :bfloat16].map do |dtype|
        norm = Torch::NN::SyncBatchNorm.new(3)
        [norm.weight, norm.bias].each_with_index { |tensor, i| Torch.no_grad { tensor.copy!(Torch.tensor([0.5, 2.0, 1.0]) + i) } }
        wide = Torch::NN::SyncBatchNorm.new(3)
        Torch.no_grad { wide.state_dict.each { |name, tensor| tensor.copy!(norm.state_dict[name]) if tensor.floating_point? } }
        norm = norm.to(dtype)
        halves, floats = [[norm, input], [wide, input.to(dtype: :float32)]].map do |mod, x|
          x = x.clone.requires_grad!
          y = mod.call(x)
          # Not the sum of squares: its gradient with respect to the input is zero, and what is computed noise.
          (y * coefficients).sum.backward
          [y.detach, x.grad, mod.weight.grad, mod.running_mean, mod.running_var]
        end
        near = halves.zip(floats).map { |half, float| (half.to(dtype: :float32) - float).abs.max.item < 0.05 * (1 + float.abs.max.item) }
        [halves.map(&:dtype), near.all?]
      end
    end
    assert_equal [[[%i[bfloat16 bfloat16 float32 float32 float32], true], [[:bfloat16] * 5, true]]] * 2, results
  end

  def test_too_few_values_are_an_error_on_all_ranks
    results = world(2) do |rank|
      norm = NN::SyncBatchNorm.new(2)
      [failure { norm.call(Torch.zeros(rank, 2)) }, norm.call(Torch.tensor([[rank.to_f, 1.0]])).to_a]
    end
    results.each_with_index do |(error, values), rank|
      assert_equal "Torch::Distributed::InvalidArgumentError", error[0]
      assert_includes error[1], "expected more than 1 value per channel over all ranks when training, got 1 (this rank's input is [#{rank}, 2])"
      assert_near [[-1.0, 1.0][rank], 0.0], values[0], 1e-4
    end
  end

  def test_a_group_of_some_ranks
    results = world(3) do |rank|
      pair = Distributed.new_group([0, 2])
      next if rank == 1

      norm = NN::SyncBatchNorm.convert_sync_batchnorm(NN::BatchNorm1d.new(1), pair)
      [norm.process_group.equal?(pair), norm.call(Torch.tensor([[rank.to_f]])).sum.item]
    end
    assert_equal [true, true], [results[0][0], results[2][0]]
    assert_near [-1.0, 1.0], [results[0][1], results[2][1]], 1e-4
  end

  def test_an_interrupt_ends_the_wait
    interrupted = Event.new
    results = world(2) do |rank|
      next interrupted.wait if rank == 1

      norm = NN::SyncBatchNorm.new(1)
      waiting = Thread.new do
        Thread.current.report_on_exception = false
        norm.call(Torch.zeros(2, 1))
      end
      await_waiting(waiting)
      # This thread runs beside the one that waits.
      10.times { sleep 0.001 }
      waiting.raise(IOError, "enough")
      error = failure { waiting.value }
      interrupted.set
      error
    end
    assert_equal ["IOError", "enough"], results[0]
  end

  # --- conversion

  class Holder < NN::Module
    attr_reader :list, :table, :twice

    def initialize
      super
      @norm = NN::BatchNorm3d.new(4, eps: 1e-3, momentum: nil)
      @twice = @norm
      @instance = NN::InstanceNorm2d.new(3)
      @list = [NN::BatchNorm1d.new(2, affine: false), 7]
      @table = {norm: NN::BatchNorm1d.new(2, track_running_stats: false)}.freeze
      @deep = NN::Sequential.new(NN::Linear.new(1, 2), NN::Sequential.new(NN::BatchNorm2d.new(5)))
      @list.each_with_index { |norm, index| add_module("item#{index}", norm) if norm.is_a?(NN::Module) }
    end
  end

  def test_conversion_keeps_all_but_the_class
    model = fill(Holder.new)
    model.norm.weight.requires_grad!(false)
    model.norm.eval
    before = model.named_parameters
    state = model.state_dict
    buffers = model.norm.named_buffers
    assert_same model, NN::SyncBatchNorm.convert_sync_batchnorm(model)

    assert_equal before.keys, model.named_parameters.keys
    model.named_parameters.each { |name, param| assert_same before.fetch(name), param, name }
    assert_equal state.keys, model.state_dict.keys
    buffers.each { |name, buffer| assert_same buffer, model.norm.named_buffers.fetch(name) }
    norm = model.norm
    assert_instance_of NN::SyncBatchNorm, norm
    assert_equal [4, 1e-3, nil, true, true, false, false],
      [*%i[num_features eps momentum affine track_running_stats].map { |name| norm.instance_variable_get(:"@#{name}") }, norm.weight.requires_grad, norm.training]
    assert_same norm, model.twice
    assert_instance_of NN::InstanceNorm2d, model.instance
    assert_instance_of NN::SyncBatchNorm, model.list[0]
    assert_same model.list[0], model.named_children.fetch("item0")
    assert_equal 7, model.list[1]
    assert_instance_of NN::SyncBatchNorm, model.table[:norm]
    assert_predicate model.table, :frozen?
    assert_nil model.table[:norm].instance_variable_get(:@running_mean)
    assert_instance_of NN::SyncBatchNorm, model.named_modules.fetch("deep.1.0")
    assert_equal "SyncBatchNorm(4, eps: 0.001, momentum: nil, affine: true, track_running_stats: true)", norm.inspect
    assert_nil norm.process_group
  end

  def test_a_batch_norm_by_itself_becomes_another
    plain = NN::BatchNorm1d.new(3)
    norm = NN::SyncBatchNorm.convert_sync_batchnorm(plain)
    assert_instance_of NN::SyncBatchNorm, norm
    assert_same plain.weight, norm.weight
    linear = NN::Linear.new(1, 1)
    assert_same linear, NN::SyncBatchNorm.convert_sync_batchnorm(linear)
  end
end
