# frozen_string_literal: true

require_relative "test_helper"
require "torch_dl"

# One process with several devices: here the CPU, listed several times, which takes the same way as GPUs do.
class DevicesDataParallelTest < Minitest::Test
  NN = Torch::NN
  DP = NN::DataParallel
  ROWS = 7
  EXACT = 1e-12

  # Layers in instance variables, in a list and in a Sequential, one of them twice, and parameters in an Array.
  class Net < NN::Module
    attr_reader :seen

    def initialize
      super
      @first = NN::Linear.new(4, 6)
      @more = NN::ModuleList.new([NN::Linear.new(6, 6), NN::Sequential.new(NN::Linear.new(6, 6), NN::Tanh.new)])
      @again = @more[0]
      @factors = [NN::Parameter.new(Torch.ones(6, dtype: :float64)), {last: NN::Parameter.new(Torch.ones(1, dtype: :float64))}]
      register_parameter("factor", @factors[0])
      register_parameter("last", @factors[1][:last])
      @out = NN::Linear.new(6, 3)
    end

    def forward(x, scale: nil)
      @seen = x.size(0)
      x = @more[1].call(Torch.tanh(@again.call(@more[0].call(@first.call(x)))))
      x = x * @factors[0] * @factors[1][:last]
      x *= scale if scale
      @out.call(x)
    end
  end

  # Returns what it is told to.
  class Returning < NN::Module
    def initialize(&block)
      super
      @layer = NN::Linear.new(4, 2)
      @block = block
    end

    def forward(*inputs, **kwargs)
      @block.call(@layer, *inputs, **kwargs)
    end
  end

  def test_gradients_are_those_of_one_device
    [1, 2, 3, 4, ROWS, ROWS + 2].each do |devices|
      one, many = in_process do
        net = Net.new
        [net, DP.new(net, device_ids: ["cpu"] * devices)].map { |model| trained(fill(net), model, rows(ROWS)) }
      end
      assert_close one, many, "#{devices} devices"
    end
  end

  def test_parts_are_as_even_as_whole_samples_allow
    sizes = [[7, 3], [7, 4], [6, 4], [1, 3], [0, 2]].map do |samples, devices|
      NN::Parallel.scatter(Torch.zeros(samples, 2), ["cpu"] * devices).map { |part| part.size(0) }
    end
    assert_equal [[3, 3, 1], [2, 2, 2, 1], [2, 2, 2], [1], [0]], sizes
  end

  def test_scatter_and_gather_are_each_others_reverse_along_any_dimension
    x = Torch.arange(0, 30).reshape(2, 5, 3)
    [0, 1, 2, -1].each do |dim|
      parts = TorchDL.scatter(x, %w[cpu cpu cpu], dim)
      assert_equal x.to_a, TorchDL.gather(parts, "cpu", dim).to_a
    end
    error = assert_raises(ArgumentError) { TorchDL.scatter(x, %w[cpu cpu], 3) }
    assert_includes error.message, "dim 3: an input of shape [2, 5, 3] has dimensions -3 to 2"
  end

  def test_inputs_are_nested_and_what_is_no_tensor_goes_to_all
    seen = Queue.new
    model = DP.new(Returning.new { |_, list, scale:, name:| seen << [list[0][:x].size(0), list[1].size(0), scale.item, name] && list[0][:x] },
      device_ids: %w[cpu cpu])
    out = model.call([{x: rows(5)}, rows(5)], scale: Torch.tensor(2.0), name: :both)
    assert_equal [[2, 2, 2.0, :both], [3, 3, 2.0, :both]], Array.new(2) { seen.pop }.sort_by(&:first)
    assert_equal rows(5).to_a, out.to_a
  end

  def test_inputs_must_agree_on_the_number_of_samples
    model = DP.new(Net.new, device_ids: %w[cpu cpu])
    error = assert_raises(ArgumentError) { model.call(rows(4), scale: rows(3)) }
    assert_includes error.message, "inputs have 4 and 3 samples along dimension 0"
  end

  def test_a_mean_loss_is_that_of_the_whole_batch
    one, plain, by_method, accumulated = in_process do
      net = Returning.new { |layer, x, targets:| [layer.call(x), ((layer.call(x) - targets)**2).mean] }
      fill(net)
      targets = rows(ROWS)[0..-1, 0...2]
      run = lambda do |model, &block|
        net.parameters.each { |parameter| parameter.grad&.zero! }
        block.call(model)
        [flat(model.call(rows(ROWS), targets: targets)), gradients(net)]
      end
      model = DP.new(net, device_ids: %w[cpu cpu cpu])
      backward = ->(which) { which.call(rows(ROWS), targets: targets).last.backward }
      [run.call(net, &backward), run.call(model, &backward),
        run.call(model) { |which| which.call(rows(ROWS), targets: targets) && which.backward },
        run.call(model) { |which| 2.times { which.call(rows(ROWS), targets: targets) && which.backward(scale: 0.5) } }]
    end
    assert_close one, plain
    assert_close one, by_method
    assert_close one, accumulated
  end

  def test_what_becomes_of_scalars
    outcomes = %i[mean sum stack].map do |scalars|
      net = Returning.new { |_, x| [x.sum, Torch.tensor(x.size(0))] }
      DP.new(net, device_ids: %w[cpu cpu], scalars: scalars).call(Torch.ones(5, 1, dtype: :float64)).map(&:to_a)
    end
    assert_equal [[[2.6], [5]], [[5.0], [5]], [[3.0, 2.0], [3, 2]]], outcomes.map { |pair| pair.map { |value| [value].flatten } }
  end

  def test_backward_without_a_loss
    model = DP.new(fill(Net.new), device_ids: %w[cpu cpu])
    assert_includes assert_raises(Torch::Error) { model.backward }.message, "returned no loss"
    model.call(rows(4))
    assert_includes assert_raises(Torch::Error) { model.backward }.message, "returned no loss"
  end

  # torch-dl's does nothing then but add gradients up, and its loss, made of the outputs, has a backward of its own.
  def test_backward_without_a_loss_as_in_torch_dl
    expected, actual = in_process do
      plain, divided = Array.new(2) { fill(Net.new) }
      plain.call(rows(4)).pow(2).mean.backward
      model = ::DataParallel.new(divided, device_ids: %w[cpu cpu])
      loss = model.call(rows(4)).pow(2).mean
      model.backward(scale: 2.0)
      loss.backward
      [gradients(plain), gradients(divided)]
    end
    assert_close expected, actual
  end

  def test_outputs_of_any_form
    pair = Struct.new(:a, :b)
    model = DP.new(Returning.new { |layer, x| {y: layer.call(x), rest: pair.new([x, 1], "same")} }, device_ids: %w[cpu cpu])
    out = model.call(rows(5, dtype: :float32))
    assert_equal [5, 2], out[:y].shape
    assert_equal rows(5, dtype: :float32).to_a, out[:rest].a[0].to_a
    assert_equal [1, "same"], [out[:rest].a[1], out[:rest].b]
  end

  def test_outputs_that_cannot_be_one
    error = assert_raises(ArgumentError) { DP.new(Returning.new { |_, x| x.size(0) }, device_ids: %w[cpu cpu]).call(rows(5)) }
    assert_includes error.message, "replicas returned 3 and 2"
    error = assert_raises(ArgumentError) { DP.new(Returning.new { |_, x| [x] * x.size(0) }, device_ids: %w[cpu cpu]).call(rows(5)) }
    assert_includes error.message, "an Array of 3 and an Array of 2"
  end

  def test_buffers_follow_the_first_device
    ours, first = in_process do
      norm = NN::BatchNorm1d.new(4)
      DP.new(norm, device_ids: %w[cpu cpu]).call(rows(8, dtype: :float32))
      alone = NN::BatchNorm1d.new(4)
      alone.call(rows(8, dtype: :float32)[0...4])
      [norm, alone].map { |each| each.named_buffers.values.map { |buffer| flat(buffer) } }
    end
    assert_close first, ours
  end

  def test_what_forward_keeps_is_kept_by_the_module
    net = fill(Net.new)
    DP.new(net, device_ids: %w[cpu cpu]).call(rows(5))
    assert_equal 3, net.seen
  end

  def test_replicas_know_their_parameters
    net = fill(Net.new)
    copy = NN::Parallel.replicate(net, %w[cpu cpu]).last
    assert_equal net.named_parameters.keys, copy.named_parameters.keys
    assert_same copy.instance_variable_get(:@again), copy.instance_variable_get(:@more)[0]
    assert_same copy.instance_variable_get(:@factors)[0], copy.named_parameters["factor"]
    refute_same net.instance_variable_get(:@first), copy.instance_variable_get(:@first)
  end

  def test_without_gradients
    model = DP.new(fill(Net.new), device_ids: %w[cpu cpu])
    refute Torch.no_grad { model.call(rows(4)) }.requires_grad
    assert model.call(rows(4)).requires_grad
  end

  def test_an_error_names_its_replica
    model = DP.new(Returning.new { |_, x| (x.size(0) == 2) ? raise(IndexError, "two rows") : x }, device_ids: %w[cpu cpu])
    error = assert_raises(IndexError) { model.call(rows(5)) }
    assert_equal "replica 1 on cpu: two rows", error.message
  end

  class Misfit < StandardError
    attr_reader :wanted

    def initialize(wanted:, got:)
      @wanted = wanted
      super("expected #{wanted}, got #{got}")
    end
  end

  # Their initializers take what they like.
  def test_an_error_stays_what_it_is
    kinds = [-> { raise Misfit.new(wanted: 1, got: 2) }, -> { {}.fetch(:lost) }, -> { raise KeyError.new("no", receiver: {}, key: :lost) },
      -> { nil.lost }, -> { raise Misfit.new(wanted: 3, got: 4), cause: IndexError.new("why") }]
    errors = kinds.map do |kind|
      model = DP.new(Returning.new { |_, _| kind.call }, device_ids: %w[cpu cpu])
      assert_raises(StandardError) { model.call(rows(4)) }
    end
    assert_equal [Misfit, KeyError, KeyError, NoMethodError, Misfit], errors.map(&:class)
    assert_equal [1, :lost, :lost, :lost, 3], [errors[0].wanted, errors[1].key, errors[2].key, errors[3].name, errors[4].wanted]
    assert_equal "replica 0 on cpu: expected 1, got 2", errors[0].message
    assert_equal "why", errors[4].cause.message
    errors.each { |error| assert_includes error.backtrace.join, "test_an_error_stays_what_it_is" }
  end

  def test_one_device_none_and_a_batch_without_rows
    net = fill(Net.new)
    expected = net.call(rows(3)).to_a
    assert_equal expected, DP.new(net, device_ids: %w[cpu]).call(rows(3)).to_a
    assert_equal expected, DP.new(net, device_ids: []).call(rows(3)).to_a
    assert_equal [0, 3], DP.new(net, device_ids: %w[cpu cpu]).call(rows(0)).shape
  end

  def test_it_is_a_module
    net = fill(Net.new)
    model = DP.new(net, device_ids: %w[cpu cpu])
    assert_same net, model.module
    assert_same net, model.wrapped_module
    assert_equal net.state_dict.keys.map { |key| "module.#{key}" }, model.state_dict.keys
    refute model.eval.module.training
  end

  # torch-dl's has the module's own names; both load both.
  def test_states_with_and_without_the_prefix
    net = fill(Net.new)
    models = [::DataParallel, DP].map { |kind| kind.new(net, device_ids: %w[cpu cpu]) }
    assert_kind_of DP, models.first
    assert_equal net.state_dict.keys, models.first.state_dict.keys
    assert_equal net.named_parameters.keys, models.first.named_parameters.keys
    assert_equal [%w[cpu cpu], nil], [models.first.device_ids, models.first.reduce_gradients]
    models.product([TorchDL::DataParallel, TorchDL::NN::DataParallel, DP]) do |model, kind|
      other = kind.new(Net.new.double, device_ids: %w[cpu])
      other.load_state_dict(model.state_dict)
      assert_equal net.call(rows(2)).to_a, other.module.call(rows(2)).to_a
    end
    error = assert_raises(Torch::Error) { models.first.load_state_dict({"module.first.weight" => net.state_dict["first.weight"]}) }
    assert_match(/Missing key/, error.message)
    # A module that has a module of that name itself.
    around = DP.new(models.last, device_ids: %w[cpu])
    around.load_state_dict(models.last.state_dict)
    around.load_state_dict(around.state_dict)
  end

  def test_mistakes
    assert_includes assert_raises(TypeError) { DP.new("net") }.message, "expected the Torch::NN::Module to train, got \"net\""
    assert_includes assert_raises(ArgumentError) { DP.new(Net.new, device_ids: "cpu") }.message, "expected an Array of devices"
    assert_includes assert_raises(ArgumentError) { DP.new(Net.new, device_ids: [1.5]) }.message, "got 1.5"
    assert_includes assert_raises(ArgumentError) { DP.new(Net.new, device_ids: [77]) }.message, "device 77: expected a GPU's number"
    assert_includes assert_raises(ArgumentError) { DP.new(Net.new, dim: "0") }.message, "dim: expected an Integer"
    assert_includes assert_raises(ArgumentError) { DP.new(Net.new, scalars: :max) }.message, "scalars: expected one of :mean, :sum, :stack"
    assert_includes assert_raises(ArgumentError) { NN::Parallel.gather([], "cpu") }.message, "at least one"
    assert_includes assert_raises(ArgumentError) { NN::Parallel.parallel_apply([Net.new], []) }.message, "got 0 for 1"
  end

  def test_the_functions_leave_the_module_its_own
    assert_equal "Torch::NN::Parallel", NN::Parallel.name
  end

  def test_the_functions
    net = fill(Net.new)
    expected = net.call(rows(5)).to_a
    assert_equal expected, NN::Parallel.data_parallel(net, rows(5), device_ids: %w[cpu cpu]).to_a
    replicas = NN::Parallel.replicate(net, %w[cpu cpu])
    outputs = NN::Parallel.parallel_apply(replicas, NN::Parallel.scatter(rows(5), %w[cpu cpu]))
    assert_equal expected, NN::Parallel.gather(outputs, "cpu").to_a
  end

  private

  # Backward must not run in the process of the tests.
  def in_process(&block)
    Torch::Distributed.fork_world(1) { block.call }.first
  end

  def rows(count, dtype: :float64)
    ((Torch.arange(0, count * 4, dtype: :float64) * 0.7391).sin * 0.9).reshape(count, 4).to(dtype: dtype)
  end

  def fill(net)
    net.double
    net.named_parameters.values.each_with_index do |parameter, index|
      values = (Torch.arange(0, parameter.numel, dtype: :float64) * 0.317 + index).cos * 0.4
      Torch.no_grad { parameter.copy!(values.reshape(parameter.shape)) }
    end
    net
  end

  def trained(net, model, input)
    optimizer = Torch::Optim::SGD.new(net.parameters, lr: 0.1)
    3.times do
      optimizer.zero_grad
      (model.call(input, scale: Torch.tensor(1.5, dtype: :float64))**2).mean.backward
      optimizer.step
    end
    [flat(model.call(input)), gradients(net), net.parameters.map { |parameter| flat(parameter) }]
  end

  def gradients(net)
    net.parameters.map { |parameter| flat(parameter.grad) }
  end

  def flat(value)
    return value.map { |each| flat(each) } if value.is_a?(Array)

    value.detach.to(dtype: :float64).reshape(-1).to_a
  end

  def assert_close(expected, actual, message = nil)
    expected = expected.flatten
    actual = actual.flatten
    assert_equal expected.size, actual.size, message
    worst = expected.zip(actual).map { |one, other| (one - other).abs / (1 + one.abs) }.max
    assert_operator worst, :<=, EXACT, message
  end
end
