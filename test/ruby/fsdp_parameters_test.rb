# frozen_string_literal: true

require_relative "sharded_training"
require "tmpdir"

# What a program sees of a sharded model's parameters, and what it cannot write to a file by mistake.
class FsdpParametersTest < Minitest::Test
  include ShardedTraining

  Checkpoint = Torch::Distributed::Checkpoint
  Parallel = Torch::Distributed::Tensor::Parallel

  # As nanoGPT does.
  def groups(model)
    decayed, others = model.parameters.partition { |each| each.dim >= 2 }
    [{params: decayed, weight_decay: 0.5}, {params: others, weight_decay: 0.0}]
  end

  OPTIMIZERS = {
    plain: ->(groups) { Torch::Optim::AdamW.new(groups, lr: 0.05) },
    fused: ->(groups) { Torch::Distributed::Optim::FusedAdamW.new(groups, lr: 0.05) }
  }.freeze

  (1..3).each do |size|
    define_method(:"test_groups_by_dimensions_train_as_one_process_on_#{size}_ranks") do
      found = world(size) do |rank|
        STRATEGIES.flat_map do |strategy|
          OPTIMIZERS.flat_map do |_, make|
            [true, false].map do |before|
              model = tower
              made = groups(model) if before # the parameters remain the objects that they are
              policy = FSDP::WrapPolicies.module_wrap_policy(Torch::NN::Sequential)
              wrapped = FSDP::FullyShardedDataParallel.new(model, sharding_strategy: strategy, auto_wrap_policy: policy)
              made ||= groups(wrapped)
              optimizers = [make.call(groups(plain = tower)), make.call(made)]
              counts = [groups(plain), made].map { |of| of.map { |group| group[:params].size } }
              [counts.uniq.size, trained(plain, wrapped, optimizers, rank, size)]
            end
          end
        end
      end
      assert_equal [1], found.flatten(1).map(&:first).uniq
      assert_operator found.flatten(1).map(&:last).max, :<, 1e-10
    end
  end

  STRATEGIES = %i[full_shard shard_grad_op no_shard].freeze

  def trained(plain, model, optimizers, rank, size)
    4.times do |step|
      x, y = batch(step, size)
      optimizers.each(&:zero_grad)
      loss(plain.call(x), y).backward
      loss(model.call(mine(x, rank, size)), mine(y, rank, size)).backward
      optimizers.each(&:step)
    end
    difference(plain, model.full_state_dict)
  end

  # In every state of a step; what is computed with a parameter has the form of the piece.
  def test_parameters_answer_for_the_model
    found = world(2) do |rank|
      plain, model = tower, shard(tower)
      asked = ->(of) { of.parameters.map { |each| [each.dim, each.ndim, each.shape, each.size, each.size(-1), each.numel, each.length] } }
      states = [asked.call(model)]
      output = model.call(batch(0, 1)[0])
      states << asked.call(model)
      output.sum.backward
      states << asked.call(model)
      FSDP.summon_full_params(model) { states << asked.call(model) }
      weight = model.instance_variable_get(:@input).weight
      own = weight.to_local
      first = weight.to_a.first
      Torch.no_grad { own.add!(1) }
      {states: states.uniq, plain: asked.call(plain), names: [model, plain].map { |of| of.named_parameters.keys }.uniq.size,
       local: [own.shape, weight.grad.shape, Torch.zeros_like(weight).shape, weight.detach.shape, weight.map(&:item).size], moved: first ? weight.to_a.first - first : 1,
       text: weight.inspect, same: weight.to_a == own.to_a, frozen: weight.shape.frozen?, empty: model.parameters.map { |each| each.to_local.numel }.min}
    end
    found.each do |each|
      assert_equal [[each[:plain]], 1, true, false], [each[:states], *each.values_at(:names, :same, :frozen)]
      count = each[:local][0][0]
      assert_equal [[count]] * 4 + [count], each[:local]
      assert_in_delta 1, each[:moved]
      assert_match(/\AParameter of shape \[7, 5\], of which this process has #{count} elements:\ntensor\(\[/, each[:text])
    end
    assert_equal 35, found.sum { |each| each[:local][0][0] }
    assert_equal 0, found.map { |each| each[:empty] }.min
  end

  # Each rank's pieces would look like a model.
  def test_pieces_are_not_saved_as_if_they_were_all
    [1, 2].each do |size|
      found = world(size) do |rank|
        model = shard(tower)
        optimizer = Torch::Optim::Adam.new(model.parameters)
        model.call(batch(0, 1)[0]).sum.backward
        optimizer.step
        written = Dir.mktmpdir do |dir|
          path = ->(name) { File.join(dir, name) }
          values = {"state" => model.state_dict, "parameter" => model.layers[0].children[0].weight, "list" => [1, {"a" => model.parameters}], "model" => model,
                    "clones" => model.state_dict.transform_values(&:clone), "cpu" => model.state_dict.transform_values { |each| each.detach.cpu.float },
                    "optimizer" => optimizer.state_dict}
          refused = values.map { |name, value| failure { Torch.save(value, path.call(name)) }&.then { |kind, text| [name, kind, text] } }
          refused << failure { Checkpoint::Safetensors.save(path.call("s"), model.state_dict) }&.then { |kind, text| ["safetensors", kind, text] }
          refused << failure { Checkpoint.save({"model" => model.state_dict}, checkpoint_id: path.call("c")) }&.then { |kind, text| ["checkpoint", kind, text] }
          FSDP.summon_full_params(model) { Torch.save(model.state_dict, path.call("whole")) }
          Torch.save(Torch::Distributed.full_state_dict(model), path.call("full"))
          Torch.save({"epoch" => 1, "list" => [Torch.ones(2)]}, path.call("other"))
          [refused, Dir.children(dir).sort, [path.call("whole"), path.call("full")].map { |each| Torch.load(each).transform_values(&:shape) }]
        end
        written + [tower.state_dict.transform_values(&:shape)]
      end
      found.each do |refused, files, loaded, shapes|
        assert_equal 9, refused.compact.size
        refused.each do |_, kind, text|
          assert_match(/Error/, kind)
          assert_match(/this process's piece, of \d+ elements, of a tensor of shape \[.*Torch::Distributed.full_state_dict\(model\).*Checkpoint.save/, text)
        end
        assert_equal [%w[full other whole], [shapes, shapes]], [files - ["c"], loaded]
      end
    end
  end

  def test_what_divides_a_second_time_is_refused
    found = world(2) do
      model = shard(tower)
      [failure { Torch::Distributed::Optim::ZeroRedundancyOptimizer.new(model.parameters, optimizer_class: Torch::Optim::Adam) },
        failure { Torch::NN::Parallel::DistributedDataParallel.new(model) }].map(&:last)
    end
    found.each do |zero, ddp|
      assert_match(/params\[0\]: it is sharded by FSDP/, zero)
      assert_match(/the \S*Tower is sharded by FSDP/, ddp)
    end
  end

  def test_plain_states_are_not_loaded_into_pieces
    found = world(2) do
      model = shard(tower)
      before = FSDP.full_state_dict(model)
      other = make(seed: 2) { Tower.new }.state_dict.transform_values(&:detach)
      pieces = model.state_dict.transform_values { |each| Torch.zeros_like(each) }
      errors = [other, pieces, model.state_dict].map { |state| failure { model.load_state_dict(state) } }
      errors << failure { Torch::NN::Sequential.new(Torch::NN::Linear.new(2, 2), model).load_state_dict({}) }
      kept = FSDP.full_state_dict(model).all? { |name, tensor| tensor.equal(before[name]) }
      FSDP.summon_full_params(model) { model.load_state_dict(other) }
      loaded = FSDP.full_state_dict(model).all? { |name, tensor| tensor.equal(other[name]) }
      [errors, kept, loaded]
    end
    found.each do |errors, kept, loaded|
      errors.each { |_, text| assert_match(/load_state_dict: this process has a piece of ".*weight|bias".*load_full_state_dict\(model, state\)/, text) }
      assert_equal [true, true, 4], [kept, loaded, errors.compact.size]
    end
  end

  def test_an_optimizers_whole_state_is_not_loaded_into_pieces
    found = world(2) do
      plain, model = tower, shard(tower)
      optimizers = [plain, model].map do |of|
        Torch::Optim::Adam.new(of.parameters).tap do |made|
          of.call(batch(0, 1)[0]).sum.backward
          made.step
        end
      end
      own = optimizers[1].state_dict
      optimizers[1].load_state_dict(own)
      failure { optimizers[1].load_state_dict(optimizers[0].state_dict) }.last
    end
    found.each { |text| assert_match(/expected exp_avg of parameter \d+ in its shape \[\d+\], got \[.*FSDP.load_full_optim_state_dict/, text) }
  end

  # Pieces of tensor dimensions keep their dimensions, and know that they are pieces, also once FSDP has divided them further.
  def test_pieces_of_layouts
    found = world(4) do
      mesh = Torch::Distributed.init_device_mesh("cpu", [2, 2], mesh_dim_names: %w[dp tp])
      make = lambda do
        net = make(seed: 3, dtype: :float32) { Torch::NN::Sequential.new(Torch::NN::Linear.new(4, 8), Torch::NN::Tanh.new, Torch::NN::Linear.new(8, 4)) }
        Parallel.parallelize_module(net, mesh["tp"], {"0" => Parallel::ColwiseParallel.new, "2" => Parallel::RowwiseParallel.new})
      end
      divided = make.call
      sharded = FSDP.fully_shard(make.call, mesh: mesh["dp"])
      [divided, sharded].flat_map do |net|
        [net.parameters.map(&:shape), failure { Torch.save(net.state_dict, File::NULL) }&.last, failure { net.load_state_dict(net.state_dict) }&.last,
          Torch::Distributed.full_state_dict(net).transform_values(&:shape).values]
      end << FSDP.summon_full_params(sharded) { failure { Torch.save(sharded.state_dict, File::NULL) }&.last }
    end
    found.each do |values|
      last = values.pop
      values.each_slice(4) do |local, saved, loaded, whole|
        assert_equal [[[4, 4], [4], [4, 4], [4]], [[8, 4], [8], [4, 8], [4]]], [local, whole]
        assert_match(/Torch.save: "\d.\w+" is this process's piece/, saved)
        assert_match(/load_state_dict: this process has a piece/, loaded)
      end
      assert_match(/Torch.save: "\d.\w+" is this process's piece, of 16|4 elements, of a tensor of shape \[[84]/, last)
    end
  end
end
