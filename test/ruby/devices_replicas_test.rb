# frozen_string_literal: true

require_relative "test_helper"
require "torch_dl"

# Copies of modules and the gradients that come back from them: as on the module's own device, where parameters are shared, and
# as on another one, where tensors and gradients travel in pieces.
class DevicesReplicasTest < Minitest::Test
  NN = Torch::NN
  DP = NN::DataParallel
  Replicas = NN::Parallel::Replicas
  ROWS = 7
  EXACT = 1e-6

  # Has the CPU taken for another device than the CPU, in the process where it is prepended.
  module Apart
    def of(mod, devices, **options)
      super(mod, devices, apart: true, **options)
    end
  end

  # Two dtypes, a weight that two layers share, frozen parameters, one without elements, one that is turned, one that some replicas use
  # and one that none does.
  class Odd < NN::Module
    attr_reader :first, :second, :frozen, :turned, :none, :seldom, :never, :scale

    def initialize
      super
      @first = NN::Linear.new(4, 4)
      @second = NN::Linear.new(4, 4)
      @second.instance_variable_set(:@weight, @first.weight)
      @frozen = NN::Linear.new(4, 6)
      @frozen.parameters.each { |parameter| parameter.requires_grad!(false) }
      @turned = NN::Parameter.new(Torch.zeros(3, 6).t)
      @none = NN::Parameter.new(Torch.zeros(0, 3))
      @seldom = NN::Parameter.new(Torch.zeros(3))
      @never = NN::Parameter.new(Torch.zeros(2))
      @scale = NN::Parameter.new(Torch.zeros(3, dtype: :float64))
    end

    def forward(x)
      seldom = x[0, 0].item > 0.5
      x = Torch.tanh(@second.call(Torch.tanh(@first.call(x))))
      x = Torch.tanh(@frozen.call(x)).matmul(@turned) + @none.sum
      x += @seldom * 2 if seldom
      x.to(dtype: :float64) * @scale
    end
  end

  def test_gradients_are_those_of_one_device
    each_way do |way|
      net = fill(Odd.new)
      [1, 2, 3, 4].each do |devices|
        got = gradients_after(net) { (DP.new(net, device_ids: ["cpu"] * devices).call(rows)**2).sum }
        assert_gradients reference(net, devices), got, "#{way}, #{devices} devices"
        assert_nil got["never"]
        assert_nil got["frozen.weight"]
      end
    end
  end

  def test_parameters_are_what_they_were_at_the_call
    each_way do |way|
      net = fill(Odd.new)
      model = DP.new(net, device_ids: %w[cpu cpu cpu])
      2.times do |step|
        Torch.no_grad { net.parameters.each { |parameter| parameter.add!(0.1) if parameter.numel > 0 } }
        got = gradients_after(net) { (model.call(rows)**2).sum }
        assert_gradients reference(net, 3), got, "#{way}, step #{step}"
      end
    end
  end

  def test_a_parameter_that_is_frozen_and_thawed
    each_way do |way|
      net = fill(Odd.new)
      model = DP.new(net, device_ids: %w[cpu cpu])
      [false, true].each do |wanted|
        net.first.bias.requires_grad!(wanted)
        got = gradients_after(net) { (model.call(rows)**2).sum }
        assert_equal wanted, !got["first.bias"].nil?, way
        assert_gradients reference(net, 2), got, way
      end
    end
  end

  def test_backward_twice_adds_up
    each_way do |way|
      net = fill(Odd.new)
      loss = (DP.new(net, device_ids: %w[cpu cpu cpu]).call(rows)**2).sum
      loss.backward(retain_graph: true)
      once = gradients(net)
      loss.backward
      assert_gradients once.transform_values { |values| values&.map { |value| value * 2 } }, gradients(net), way
      assert_gradients reference(net, 3), once, way
    end
  end

  def test_second_derivatives
    each_way do |way|
      one, many = [1, 3].map do |devices|
        net = fill(NN::Linear.new(4, 2))
        forget(net)
        output = (devices == 1) ? net.call(rows) : DP.new(net, device_ids: ["cpu"] * devices).call(rows)
        (output**3).sum.backward(create_graph: true)
        first = net.weight.grad
        forget(net)
        (first**2).sum.backward
        gradients(net)
      end
      assert_gradients one, many, way
    end
  end

  def test_running_statistics_and_eval
    each_way do |way|
      norm, alone = Array.new(2) { NN::BatchNorm1d.new(4) }
      model = DP.new(norm, device_ids: %w[cpu cpu])
      model.call(rows)
      alone.call(rows[0...4])
      buffers = [norm, alone].map { |each| each.named_buffers.transform_values { |buffer| flat(buffer) } }
      assert_equal buffers[1], buffers[0], way
      [model, alone].each(&:eval)
      assert_close flat(alone.call(rows)), flat(model.call(rows)), way
      assert_equal buffers[1], norm.named_buffers.transform_values { |buffer| flat(buffer) }, way
    end
  end

  def test_without_gradients
    each_way do |way|
      net = fill(Odd.new)
      output = Torch.no_grad { DP.new(net, device_ids: %w[cpu cpu cpu]).call(rows) }
      refute output.requires_grad, way
      assert_close flat(Torch.cat([rows[0...3], rows[3...6], rows[6...7]].map { |part| net.call(part) })), flat(output), way
    end
  end

  def test_copies_of_shared_tensors_are_shared
    copy = Replicas.of(fill(Odd.new), %w[cpu cpu], apart: true).last
    assert_same copy.first.weight, copy.second.weight
    refute copy.frozen.weight.requires_grad
    assert_equal [1, 6], copy.turned.stride
    assert_equal [0, 3], copy.none.shape
  end

  def test_where_memory_is_shared
    net = fill(Odd.new)
    near, far = [false, true].map { |apart| Replicas.of(net, %w[cpu cpu], apart: apart).last }
    assert_equal span(net.scale), span(near.scale)
    refute_equal span(net.scale), span(far.scale)
    norm = NN::BatchNorm1d.new(4)
    copy = Replicas.of(norm, %w[cpu cpu]).last
    refute_equal span(norm.named_buffers["running_mean"]), span(copy.named_buffers["running_mean"])
  end

  def test_many_tensors
    net = NN::ModuleList.new(Array.new(40) { NN::Linear.new(3, 3) })
    copies = Replicas.of(net, %w[cpu cpu cpu], apart: true).drop(1)
    copies.each do |copy|
      assert_equal net.named_parameters.transform_values(&:to_a), copy.named_parameters.transform_values(&:to_a)
    end
  end

  def test_a_module_without_tensors
    assert_equal flat(Torch.tanh(rows)), flat(DP.new(NN::Tanh.new, device_ids: %w[cpu cpu]).call(rows))
  end

  def test_a_tensor_in_a_wrong_place_is_named
    net = Odd.new
    net.first.instance_variable_set(:@bias, NN::Parameter.new(Torch.empty(4, device: "meta")))
    [1, 2].each do |devices|
      error = assert_raises(Torch::Error) { DP.new(net, device_ids: ["cpu"] * devices).call(rows) }
      assert_includes error.message, "first.bias is on meta: expected the module's parameters and buffers on cpu"
    end
    error = assert_raises(Torch::Distributed::InvalidArgumentError) { NN::Parallel.replicate(net, %w[cpu cpu]) }
    assert_match(/tensors\[\d+\] is on (meta|cpu): expected all of them on (cpu|meta)/, error.message)
  end

  private

  # Backward must not run in the process of the tests, and here of two kinds. What fails there fails here.
  def each_way(&block)
    [false, true].each do |apart|
      Torch::Distributed.fork_world(1) do
        Replicas.singleton_class.prepend(Apart) if apart
        block.call(apart ? "apart" : "shared")
        nil
      end
    end
  end

  def span(tensor)
    Torch::Distributed._span(tensor)
  end

  def rows
    ((Torch.arange(0, ROWS * 4, dtype: :float64) * 0.7391).sin * 0.9).reshape(ROWS, 4).to(dtype: :float32)
  end

  def fill(net)
    Torch.no_grad do
      net.named_parameters.values.each_with_index do |parameter, index|
        values = (Torch.arange(0, parameter.numel, dtype: :float64) * 0.317 + index).cos * 0.4
        parameter.copy!(values.reshape(parameter.shape)) if parameter.numel > 0
      end
    end
    net
  end

  # The same parts one after the other, in the module itself.
  def per_replica(net, devices)
    NN::Parallel.scatter(rows, ["cpu"] * devices).map { |part| (net.call(part)**2).sum }
  end

  def reference(net, devices)
    gradients_after(net) { per_replica(net, devices).reduce(:+) }
  end

  def gradients_after(net)
    forget(net)
    loss = yield
    loss.backward
    gradients(net)
  end

  def forget(net)
    Torch::Distributed::Optim::FusedSGD.new(net.parameters, lr: 1).zero_grad
  end

  def gradients(net)
    net.named_parameters.transform_values { |parameter| parameter.grad && flat(parameter.grad) }
  end

  def flat(value)
    value.detach.to(dtype: :float64).reshape(-1).to_a
  end

  def assert_gradients(expected, actual, message)
    assert_equal expected.keys, actual.keys, message
    expected.each do |name, values|
      assert_equal values.nil?, actual[name].nil?, "#{message}: #{name}"
      assert_close values, actual[name], "#{message}: #{name}" if values
    end
  end

  def assert_close(expected, actual, message)
    assert_equal expected.size, actual.size, message
    worst = expected.zip(actual).map { |one, other| (one - other).abs / (1 + one.abs) }.max || 0
    assert_operator worst, :<=, EXACT * 10, message
  end
end
