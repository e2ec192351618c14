# frozen_string_literal: true

require_relative "divided_models"
require "torch/distributed/nn"

# FSDP over parameters that a layout divides already: training, clipping and the agreement on what is not finite, beside one process.
class DividedTrainingTest < Minitest::Test
  include DividedModels

  # Of a column and a row layer, whose result is the same on all ranks of the group.
  class Mlp < Torch::NN::Module
    def initialize
      super
      @up = Torch::NN::Linear.new(5, 12)
      @down = Torch::NN::Linear.new(12, 5)
    end

    def divide(group)
      @group = group
      {@up.weight => 0, @up.bias => 0, @down.weight => 1, @down.bias => nil}.each do |parameter, dim|
        Torch::Distributed::Tensor.divide(parameter, DividedModels::Layout.new(group, parameter.shape, dim: dim))
      end
    end

    def forward(x)
      nn = Torch::Distributed::NN
      x = nn.copy_to_region(x, group: @group) if @group
      x = Torch::NN::Functional.linear(Torch.tanh(@up.call(x)), @down.weight, nil)
      x = nn.reduce_from_region(x, group: @group) if @group
      x + @down.bias
    end
  end

  def make(mesh)
    Torch.manual_seed(4)
    layers = Array.new(2) { Mlp.new }
    head = Torch::NN::Linear.new(5, 1)
    model = Torch::NN::Sequential.new(*layers, head).double
    return model unless mesh

    layers.each { |layer| layer.divide(mesh["tp"].get_group) }
    layers.each { |layer| FSDP.fully_shard(layer, mesh: mesh["dp"]) }
    FSDP.fully_shard(model, mesh: mesh["dp"])
  end

  # @param rows [Range] of the batch that this process has
  def train(model, rows, steps: 20)
    optimizer = Torch::Optim::Adam.new(model.parameters, lr: 0.02)
    norms = Array.new(steps) do |step|
      input = Torch.sin(Torch.arange(30).double.view(6, 5) * (step + 1)).narrow(0, rows.begin, rows.size)
      optimizer.zero_grad
      ((model.call(input) - 1)**2).mean.backward
      Torch::NN::Utils.clip_grad_norm_(model.parameters, 0.3).item
    ensure
      optimizer.step
    end
    [norms, optimizer]
  end

  def test_fsdp_of_divided_parameters
    Dir.mktmpdir do |dir|
      expected, norms = Distributed.fork_world(1) do
        model = make(nil)
        norms, = train(model, 0...6)
        [model.state_dict.transform_values { |tensor| tensor.detach.to_a }, norms]
      end.first
      said = world(4) do
        mesh = Distributed.init_device_mesh("cpu", [2, 2], mesh_dim_names: %w[dp tp])
        model = make(mesh)
        norms, optimizer = train(model, mesh.get_local_rank("dp").then { |half| half * 3...half * 3 + 3 })
        Checkpoint.save(dir, model: model, optimizer: optimizer)
        [Distributed.full_state_dict(model).transform_values(&:to_a), norms]
      end
      Distributed.fork_world(1) do
        model = make(nil)
        Checkpoint.load(dir, model: model, optimizer: Torch::Optim::Adam.new(model.parameters, lr: 0.02))
        model.state_dict.transform_values { |tensor| tensor.detach.to_a }
      end.each { |loaded| assert_equal said[0][0], loaded }
      assert_operator norms.max, :>, 0.3
      said.each do |values, found|
        assert_equal said[0], [values, found]
        norms.zip(found) { |one, other| assert_in_delta one, other, 1e-10 }
        expected.each { |name, numbers| numbers.flatten.zip(values[name].flatten) { |one, other| assert_in_delta one, other, 1e-10, name } }
      end
    end
  end

  # One element on one rank: none steps.
  def test_all_ranks_leave_out_a_step
    said = world(4) do |rank|
      mesh = Distributed.init_device_mesh("cpu", [2, 2], mesh_dim_names: %w[dp tp])
      model = make(mesh)
      optimizer = Torch::Optim::SGD.new(model.parameters, lr: 1.0)
      scaler = Distributed::GradScaler.new(init_scale: 4.0)
      [true, false].map do |spoiled|
        before = model.parameters.map { |parameter| parameter.detach.clone }
        optimizer.zero_grad
        scaler.scale((model.call(Torch.ones(2, 5, dtype: :float64))**2).mean).backward
        model.parameters.max_by { |each| Distributed::LocalPiece.numel(each) }.grad.fill!(Float::INFINITY) if spoiled && rank == 3
        scaler.step(optimizer)
        scaler.update
        [scaler.get_scale, model.parameters.zip(before).all? { |parameter, old| parameter.detach.equal(old) }]
      end
    end
    assert_equal [[[2.0, true], [2.0, false]]] * 4, said
  end
end
