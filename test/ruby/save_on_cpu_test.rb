# frozen_string_literal: true

require_relative "test_helper"
require "torch/utils/checkpoint"

# Activation offload where everything is on the CPU already: see gpu_offload_test.rb for what is moved.
class SaveOnCPUTest < Minitest::Test
  Checkpoint = Torch::Utils::Checkpoint

  def setup
    Torch.manual_seed(11)
    @net = Torch::NN::Sequential.new(Torch::NN::Linear.new(5, 4), Torch::NN::Tanh.new, Torch::NN::Linear.new(4, 2))
    @input = Torch.randn(3, 5)
  end

  # In a process of its own, where backward may run.
  def aside
    Distributed.fork_world(1) { yield && nil }
  end

  def gradients
    @net.parameters.each { |parameter| parameter.grad&.zero! }
    yield.backward
    @net.parameters.map { |parameter| parameter.grad.to_a }
  end

  # The first backward is one of libtorch's own engine, and so is what it saved: both go on.
  def test_nothing_changes_on_the_cpu
    aside do
      before = @net.call(@input).sum
      expected = gradients { @net.call(@input).sum }
      assert_equal expected, gradients { Checkpoint.save_on_cpu { @net.call(@input).sum } }
      assert_equal expected, gradients { Checkpoint.save_on_cpu(pin_memory: true) { @net.call(@input) }.sum }
      segment = -> { Checkpoint.checkpoint(@net, @input.clone) }
      assert_equal expected, gradients { Checkpoint.save_on_cpu { segment.call }.sum }
      assert_equal expected, gradients { before }
      assert_equal [0, 0], Checkpoint._saved_on_cpu
    end
  end

  def test_what_is_modified_is_an_error_as_without_it
    aside do
      hidden = nil
      loss = Checkpoint.save_on_cpu { (hidden = @net.call(@input).exp).sum }
      Torch.no_grad { hidden.zero! }
      error = assert_raises(StandardError) { loss.backward }
      assert_match(/modified by an inplace operation/, error.message)
    end
  end

  def test_a_block_that_raises_ends
    assert_raises(KeyError) { Checkpoint.save_on_cpu { raise KeyError } }
    assert_equal 3, Checkpoint.save_on_cpu { Checkpoint.save_on_cpu(pin_memory: true) { 3 } }
  end

  def test_a_wrapped_module_is_the_same_one
    names = @net.state_dict.keys
    assert_same @net, Checkpoint.offload_wrapper(@net)
    assert_equal names, @net.state_dict.keys
    assert_equal [3, 2], @net.call(@input).shape
  end

  def test_arguments
    assert_match(/expected a block/, assert_raises(ArgumentError) { Checkpoint.save_on_cpu }.message)
    assert_match(/pin_memory: expected true or false, got nil/, assert_raises(ArgumentError) { Checkpoint.save_on_cpu(pin_memory: nil) {} }.message)
    assert_match(/expected a Torch::NN::Module, got 5/, assert_raises(TypeError) { Checkpoint.offload_wrapper(5) }.message)
    error = assert_raises(ArgumentError) { Distributed::FSDP::CPUOffloadPolicy.new(pin_memory: 1) }
    assert_match(/pin_memory: expected true or false, got 1/, error.message)
  end
end
