# frozen_string_literal: true

require_relative "test_helper"
require "torch_dl"

# Copies of a module that are kept from one call to the next, as long as a copy that is made anew would be the same.
class DevicesKeptTest < Minitest::Test
  NN = Torch::NN
  DP = NN::DataParallel

  class Net < NN::Module
    attr_accessor :first, :list, :table, :scale, :block

    def initialize
      super
      @first = NN::Linear.new(2, 2)
      @norm = NN::BatchNorm1d.new(2)
      @list = [NN::Linear.new(2, 2), [1.5, "text"]]
      @table = {last: NN::Linear.new(2, 1), inner: {factor: 2}}
      @scale = 3
    end

    def forward(x)
      @block&.call(self, x)
      @table[:last].call(@list[0].call(@norm.call(@first.call(x)))) * @scale * @list[1][0] * @table[:inner][:factor]
    end
  end

  def setup
    @net = Net.new
    @made = made = []
    # Which objects compute.
    @net.block = ->(copy, _) { made << copy }
    @model = DP.new(@net, device_ids: %w[cpu cpu cpu])
  end

  # @return [Array<Net>] that computed besides the module itself
  def copies_of_a_call(rows: 6)
    @made.clear
    @output = @model.call(Torch.arange(0, 2 * rows, dtype: :float32).reshape(rows, 2))
    @made.reject { |copy| copy.equal?(@net) }.sort_by(&:object_id)
  end

  def kept?
    before = copies_of_a_call
    (before & copies_of_a_call).any?
  end

  def test_they_are_kept_for_as_many_parts_and_for_fewer
    @net.eval
    all = copies_of_a_call
    assert_equal 2, all.uniq.size
    assert_equal all, copies_of_a_call
    assert_equal 1, (all & copies_of_a_call(rows: 2)).size
    assert_equal all, copies_of_a_call
  end

  CHANGES = {
    "another number" => ->(net) { net.scale = 4 },
    "another layer" => ->(net) { net.first = NN::Linear.new(2, 2) },
    "another layer in a list" => ->(net) { net.list[0] = NN::Linear.new(2, 2) },
    "something in a list within a list" => ->(net) { net.list[1][0] = 2.5 },
    "one more in a list" => ->(net) { net.list << 1 },
    "something in a table within a table" => ->(net) { net.table[:inner][:factor] = 5 },
    "another key" => ->(net) { net.table[:more] = 1 },
    "another parameter" => ->(net) { net.first.instance_variable_set(:@weight, NN::Parameter.new(Torch.ones(2, 2))) },
    "one more variable" => ->(net) { net.instance_variable_set(:@more, 1) },
    "the mode" => ->(net) { net.train(!net.training) },
    "another buffer" => ->(net) { net.instance_variable_get(:@norm).register_buffer("running_mean", Torch.ones(2)) }
  }.freeze

  # With the statistics of eval each row is computed alone.
  def test_changes_are_seen
    CHANGES.each do |change, make|
      before = copies_of_a_call
      make.call(@net)
      after = copies_of_a_call
      assert_empty before & after, change
      assert_equal 2, (after & copies_of_a_call).size, change
      @net.eval
      copies_of_a_call
      expected = @net.call(Torch.arange(0, 12, dtype: :float32).reshape(6, 2))
      assert_operator (@output - expected).abs.max.item, :<, 1e-4, change
    end
  end

  def test_what_is_in_tensors_is_copied_for_each_call
    @net.eval
    before = copies_of_a_call
    Torch.no_grad do
      @net.first.weight.add!(1)
      @net.named_buffers.each_value { |buffer| buffer.fill!(1) }
      @net.instance_variable_get(:@norm).named_buffers["running_mean"].fill!(3)
    end
    assert_equal before, copies_of_a_call
    expected = @net.call(Torch.arange(0, 12, dtype: :float32).reshape(6, 2))
    assert_operator (@output - expected).abs.max.item, :<, 1e-4
  end

  # As before there were kept ones, each call begins with what the module has.
  def test_what_forward_leaves_in_a_copy_is_gone
    @net.block = ->(copy, _) { copy.scale += 1 }
    seen = Queue.new
    @model.call(Torch.ones(6, 2))
    @net.block = ->(copy, _) { seen << copy.scale }
    @model.call(Torch.ones(6, 2))
    assert_equal [4] * 3, Array.new(3) { seen.pop }
  end

  def test_a_call_within_a_call_has_copies_of_its_own
    @net.eval
    inner = nil
    @net.block = lambda do |copy, x|
      @made << copy
      inner ||= @model.call(Torch.ones(4, 2)) if x.size(0) == 1
    end
    @model.call(Torch.ones(3, 2))
    assert_equal [4, 1], inner.shape
  end

  # A module that tells its parameters itself may have them from anywhere.
  def test_modules_that_tell_their_parameters_themselves_are_not_kept
    @net.first = Class.new(NN::Linear) { def named_parameters(**options) = super }.new(2, 2)
    refute_predicate self, :kept?
  end

  def test_gradients_are_those_of_one_device
    one, kept = Torch::Distributed.fork_world(1) do
      [false, true].map do |parallel|
        Torch.manual_seed(1)
        net = NN::Sequential.new(NN::Linear.new(2, 3), NN::Tanh.new, NN::Linear.new(3, 1))
        model = parallel ? DP.new(net, device_ids: %w[cpu cpu cpu]) : net
        optimizer = Torch::Optim::Adam.new(net.parameters, lr: 0.1)
        x = Torch.arange(0, 14, dtype: :float32).reshape(7, 2) / 7
        # Two backwards a step, and a call whose graph is never used.
        3.times do
          optimizer.zero_grad
          losses = Array.new(2) { |i| (model.call(x + i)**2).mean }
          model.call(x)
          losses.each(&:backward)
          optimizer.step
        end
        net.parameters.flat_map { |parameter| parameter.detach.reshape(-1).to_a }
      end
    end.first
    one.zip(kept) { |a, b| assert_in_delta a, b, 1e-5 }
  end
end
