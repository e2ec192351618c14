# frozen_string_literal: true

require_relative "data_parallel_training"

class DataParallelPrecisionTest < Minitest::Test
  include DataParallelTraining

  MixedPrecision = Torch::NN::Parallel::MixedPrecision

  # Notes what forward sees.
  class Watching < DataParallelTraining::Normed
    attr_reader :seen

    def forward(x, scale: nil, ids: nil)
      @seen = {
        input: x.dtype, scale: scale&.dtype, ids: ids&.dtype, weight: @linear.weight.dtype, parameter: @linear.weight.class,
        named: named_parameters.transform_values(&:dtype), mean: @norm.running_mean.dtype
      }
      super(x)
    end
  end

  def test_what_forward_sees_and_what_stays
    seen = world(2) do
      net = Watching.new
      model = DDP.new(net, mixed_precision: MixedPrecision.new(param_dtype: :bfloat16))
      before = net.named_parameters.transform_values(&:object_id)
      output = model.call(Torch.ones(4, 3), scale: Torch.ones(1, dtype: :float64), ids: Torch.tensor([1]))
      output.sum.backward
      raise "parameters" unless net.named_parameters.transform_values(&:object_id) == before

      grads = net.parameters.map { |parameter| [parameter.dtype, parameter.grad.dtype] }.uniq
      seen = net.seen
      broken = failure { model.call(Torch.ones(4, 5)) }
      raise "after an error" unless net.named_parameters.transform_values(&:object_id) == before

      [seen, output.dtype, grads, net.respond_to?(:linear), broken[0], net.instance_variable_get(:@linear).weight.class]
    end
    inner, output, grads, responds, broken, kind = seen[0]
    assert_equal [:bfloat16, :bfloat16, :int64, :bfloat16, Torch::Tensor, :float32], inner.values_at(:input, :scale, :ids, :weight, :parameter, :mean)
    assert_equal %w[linear.bias linear.weight norm.bias norm.weight], inner[:named].keys.sort
    assert_equal %i[bfloat16 bfloat16 float32 float32], inner[:named].sort.map(&:last)
    assert_equal [:bfloat16, [%i[float32 float32]], true, Torch::NN::Parameter], [output, grads, responds, kind]
    assert_includes LIBTORCH_ERRORS.map(&:name), broken
    assert_equal seen[0], seen[1]
  end

  def test_buffers_and_inputs
    seen = world(1) do
      net = Watching.new
      model = DDP.new(net, mixed_precision: MixedPrecision.new(buffer_dtype: :float64, cast_forward_inputs: false))
      batches = net.instance_variable_get(:@norm).num_batches_tracked.dtype
      model.double
      model.call(Torch.ones(4, 3, dtype: :float64)).sum.backward
      other = Watching.new
      apart = DDP.new(other, mixed_precision: MixedPrecision.new(param_dtype: :float64, buffer_dtype: :float64, cast_forward_inputs: false))
      said = failure { apart.call(Torch.ones(4, 3)) }
      whole = Watching.new
      small = MixedPrecision.new(param_dtype: :bfloat16, buffer_dtype: :bfloat16)
      DDP.new(whole, mixed_precision: small).call(Torch.ones(4, 3)).sum.backward
      raise "buffers" unless whole.seen[:named].values.uniq == [:bfloat16] && whole.seen[:mean] == :bfloat16

      [net.seen.values_at(:mean, :weight), batches, net.state_dict["norm.running_mean"].dtype, said&.first, other.seen[:input]]
    end.first
    assert_equal [%i[float64 float64], :int64, :float64, :float32], seen.values_at(0, 1, 2, 4)
    assert_includes LIBTORCH_ERRORS.map(&:name), seen[3]
  end

  # Libtorch takes statistics of the batch's dtype, and of float32 for smaller ones.
  def test_statistics_that_do_not_fit_are_refused_and_buffer_dtype_helps
    fits = lambda do |net, mean, **dtypes|
      DDP.new(net, mixed_precision: MixedPrecision.new(**dtypes)).call(Torch.randn(4, 3)).sum.backward
      net.named_modules["norm"].running_mean.dtype == mean && net.parameters.all? { |parameter| parameter.grad.dtype == parameter.dtype }
    end
    world(1) do
      [Normed.new, Torch::NN::SyncBatchNorm.convert_sync_batchnorm(Normed.new)].each do |net|
        [[:float64, nil, :float32], [:float32, :bfloat16, :bfloat16], [:bfloat16, :float64, :float64]].each do |wanted, buffers, found|
          precision = MixedPrecision.new(param_dtype: wanted, buffer_dtype: buffers)
          error = assert_raises(ArgumentError) { DDP.new(net, mixed_precision: precision) }
          assert_match(/param_dtype: :#{wanted} does not fit .*BatchNorm.* "norm", .* in :#{found}: .* buffer_dtype: :#{wanted}\z/, error.message)
          assert_equal :float32, net.state_dict["norm.running_mean"].dtype
        end
        assert fits.call(net, :float32, param_dtype: :bfloat16)
        assert fits.call(net, :float64, param_dtype: :float64, buffer_dtype: :float64)
        assert fits.call(net, :bfloat16, param_dtype: :bfloat16, buffer_dtype: :bfloat16)
      end
      bare = Torch::NN::Sequential.new(Torch::NN::Linear.new(3, 4), Torch::NN::BatchNorm1d.new(4, track_running_stats: false))
      DDP.new(bare, mixed_precision: MixedPrecision.new(param_dtype: :float64)).call(Torch.randn(4, 3)).sum.backward
      assert_equal :float32, bare.parameters.first.grad.dtype
    end
  end

  # In a larger dtype the sums are nearly exact, so that the same must come out as in float64.
  def test_training_in_a_larger_dtype_is_that_of_one_process
    one = alone_trained(dtype: :float64, steps: 3)
    together = world(3) { |rank| train(rank, 3, dtype: :float32, steps: 3, mixed_precision: MixedPrecision.new(param_dtype: :float64)) { |model, input, _| model.call(input).float } }
    assert_equal 1, together.uniq.size
    one.zip(together[0]).each { |expected, actual| refute_nil expected && actual && assert_equal(expected.keys, actual.keys) }
    exact = Torch::Distributed.fork_world(1) { train(0, 1, wrap: false, dtype: :float32, steps: 3) }.first
    exact.zip(together[0]).each { |expected, actual| assert_follows(expected, actual, 1e-5, "float64 within float32") }
  end

  # Eight bits: close to training in float32, and not the same.
  {nil => 1e-2, :bfloat16 => 3e-2, :float32 => 1e-2}.each do |reduce, tolerance|
    define_method(:"test_training_in_bfloat16_reduced_in_#{reduce || "the_parameters_own"}") do
      call = ->(model, input, _) { model.call(input).float }
      one = Torch::Distributed.fork_world(1) { train(0, 1, wrap: false, dtype: :float32) }.first
      precision = MixedPrecision.new(param_dtype: :bfloat16, reduce_dtype: reduce)
      together = world(2) { |rank| train(rank, 2, dtype: :float32, mixed_precision: precision, &call) }
      assert_equal 1, together.uniq.size
      assert_follows(one[0], together[0][0], tolerance, "parameters")
      refute_equal one[0], together[0][0]
    end
  end

  # The second run, in backward, has the casts too.
  def test_checkpointed_segments
    results = world(2) do |rank|
      grads = [false, true].map do |checkpointed|
        Torch.manual_seed(1)
        first = Torch::NN::Linear.new(3, 5)
        second = Torch::NN::Linear.new(5, 2)
        net = Torch::NN::Sequential.new(first, second)
        net.define_singleton_method(:forward) do |x|
          second.call(checkpointed ? Torch::Utils::Checkpoint.checkpoint(first, x) : first.call(x))
        end
        model = DDP.new(net, mixed_precision: MixedPrecision.new(param_dtype: :bfloat16))
        2.times do
          net.zero_grad
          model.call(Torch.full([2, 3], rank + 1.0)).float.pow(2).sum.backward
        end
        gradients(net)
      end
      [grads, Thread.current[:torch_ddp_surroundings]]
    end
    assert_equal results[0], results[1]
    (plain, checkpointed), left = results[0]
    assert_equal [plain, nil], [checkpointed, left]
  end

  def test_one_cast_for_a_parameter_of_two_modules
    results = world(2) do |rank|
      first = Torch::NN::Linear.new(2, 2, bias: false)
      second = Torch::NN::Linear.new(2, 2, bias: false)
      second.instance_variable_set(:@weight, first.weight)
      Torch.no_grad { first.weight.copy!(Torch.eye(2)) }
      model = DDP.new(Torch::NN::Sequential.new(first, second), mixed_precision: MixedPrecision.new(param_dtype: :bfloat16))
      model.call(Torch.full([1, 2], rank + 1.0)).sum.backward
      [first.weight.grad.to_a, first.weight.equal?(second.weight)]
    end
    assert_equal [[[[3.0, 3.0], [3.0, 3.0]], true]] * 2, results
  end

  def test_wrong_arguments
    assert_match(/param_dtype: expected one of .*got :int8/, assert_raises(ArgumentError) { MixedPrecision.new(param_dtype: :int8) }.message)
    assert_match(/keep_low_precision_grads: expected false/, assert_raises(ArgumentError) { MixedPrecision.new(keep_low_precision_grads: true) }.message)
    assert_equal %i[float16 float64 float32], %i[half double float].map { |dtype| MixedPrecision.new(param_dtype: dtype).param_dtype }
    alone do
      error = assert_raises(ArgumentError) { DDP.new(Odd.new, mixed_precision: MixedPrecision.new(reduce_dtype: :float64)) }
      assert_match(/reduce_dtype: expected :float16, :bfloat16 or the parameters' own dtype, got :float64.*:float32/, error.message)
      DDP.new(Odd.new, mixed_precision: MixedPrecision.new(reduce_dtype: :float32))
    end
  end
end
