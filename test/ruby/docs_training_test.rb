# frozen_string_literal: true

require_relative "test_helper"
require_relative "documented"

# The Ruby in README.md and docs, as it stands there, but for what needs GPUs.
class DocsTrainingTest < Minitest::Test
  include Worlds
  include Documented

  def test_a_model_on_its_gpu
    program = code("device = ").sub("Torch::Distributed.init_process_group  ", "").sub(/"cuda:.*"$/, '"cpu"').sub("[device]", "nil")
    assert_equal ["cpu"] * 2, world(2) { (here = binding).local_variable_set(:net, MyModel.new) && here.eval(program).module.parameters.first.device.to_s }
  end

  def test_messages_in_a_ring
    program = code("batch_isend_irecv(messages)")
    received = world(3) do |rank|
      here = binding
      {size: 3, rank: rank, outgoing: Torch.tensor([rank + 0.5]), incoming: Torch.zeros(1)}.each { |name, value| here.local_variable_set(name, value) }
      here.eval(program)
      here.local_variable_get(:incoming).to_a
    end
    assert_equal [[2.5], [0.5], [1.5]], received
  end

  # test/schedulers trains over MPI.
  def test_over_mpi
    program = code("init_process_group(\"mpi\")").sub("Torch::Distributed.init_process_group(\"mpi\")", "nil")
    gradients = world(2) do |rank|
      here = binding
      {net: Torch::NN::Linear.new(4, 1), x: Torch.ones(1, 4) * (rank + 1)}.each { |name, value| here.local_variable_set(name, value) }
      here.eval(program)
      here.local_variable_get(:model).parameters.first.grad.to_a
    end
    assert_equal [[[1.5] * 4]] * 2, gradients
  end

  def test_collectives_with_a_gradient
    program = code("parts = Torch::Distributed::NN")
    gradients = world(2) do
      here = binding
      features = Torch.ones(1, 2).requires_grad!
      here.local_variable_set(:features, features)
      here.eval(program)
      features.grad.to_a
    end
    assert_equal [[[2.0, 2.0]]] * 2, gradients
  end

  def test_scaled_losses
    program = code("scaler = Torch::Distributed::GradScaler")
    parameters = world(2) do |rank|
      here = binding
      model = Torch::NN::Parallel::DistributedDataParallel.new(MyModel.new)
      optimizer = Torch::Optim::SGD.new(model.parameters, lr: 0.1)
      {model: model, optimizer: optimizer, x: Torch.randn(5, 4)}.each { |name, value| here.local_variable_set(name, value) }
      before = model.parameters.map(&:to_a)
      here.eval(program)
      [before == model.parameters.map(&:to_a), model.parameters.map(&:to_a)]
    end
    assert_equal [false, false], parameters.map(&:first)
    assert_equal parameters[0], parameters[1]
  end

  def test_a_function_with_a_backward_of_its_own
    program = code("class Cube")
    gradients = Distributed.fork_world(1) do
      here = binding
      x = Torch.tensor([1.0, 2.0]).requires_grad!
      here.local_variable_set(:x, x)
      here.eval(program)
      x.grad.to_a
    end
    assert_equal [[3.0, 12.0]], gradients
  end

  # Each line with a model of its own.
  def test_options_of_the_model
    lines = code("DDP = ").lines.grep(/\S/)
    done = world(2) do |rank|
      lines.map do |line|
        here = binding
        net = MyModel.new
        first = x = Torch.randn(5, 4)
        here.local_variable_set(:net, net)
        here.local_variable_set(:first, first)
        here.local_variable_set(:x, x)
        here.local_variable_set(:layer, Torch::NN::Linear.new(4, 4))
        here.local_variable_set(:batches, Array.new(rank + 1) { Torch.randn(5, 4) })
        if line.start_with?("model", "Torch::NN::Utils")
          @model = Torch::NN::Parallel::DistributedDataParallel.new(net)
          here.local_variable_set(:model, @model)
          @model.call(x).sum.backward if line.include?("clip")
        end
        here.eval(line).class
      end
    end
    parallel = Torch::NN::Parallel::DistributedDataParallel
    assert_equal 11, lines.size
    done.each { |classes| assert_equal [parallel] * 4, classes[1, 4] }
  end

  def test_a_backend_in_ruby
    program = code("class OverStore")
    parameters = Distributed.fork_world(2) do |rank|
      Torch.manual_seed(rank)
      here = TOPLEVEL_BINDING.dup
      here.local_variable_set(:net, MyModel)
      here.eval(program.sub("MyModel.new", "net.new"))
      model = here.local_variable_get(:model)
      model.call(Torch.randn(5, 4)).sum.backward
      model.parameters.map { |parameter| [parameter.to_a, parameter.grad.to_a] }
    end
    assert_equal 4, parameters[0].size
    assert_equal parameters[0], parameters[1]
  end

  # Under a torchrun of its own, which the program starts.
  def test_torchrun_from_within_a_program
    deadline = code("Elastic.expires")
    program = code("Elastic.launch(config").sub("do |offset|\n", "do |offset|\n  batch = nil\n  def train(batch) = nil\n  #{deadline}")
    Dir.mktmpdir do |folder|
      File.write(File.join(folder, "program.rb"), "require \"torch/distributed\"\n#{program}")
      out, err, status = Open3.capture3(RbConfig.ruby, "-I", File.join(Documented::ROOT, "lib"), "program.rb", chdir: folder)
      assert_predicate status, :success?, err
      assert_equal({0 => 21, 1 => 21}.to_s, out.chomp)
    end
  end

  def test_a_loader
    program = code("seen = loader.lazy")
    found = world(2) do
      here = binding
      @model = Torch::NN::Linear.new(4, 1)
      here.local_variable_set(:dataset, dataset)
      here.eval(program)
      [here.local_variable_get(:loader).size, here.local_variable_get(:seen)]
    end
    assert_equal [[6, [8, 8]]] * 2, found
  end

  def test_a_model_from_a_hub
    program = code("Checkpoint.load(\"downloaded\"")
    Dir.mktmpdir do |folder|
      Dir.chdir(folder) do
        Dir.mkdir("downloaded")
        weight = Torch.arange(12).to(:float32).reshape(3, 4)
        tensors = {"model.layers.0.weight" => weight.to(:bfloat16), "head.weight" => Torch.zeros(2)}
        Distributed::Checkpoint::Safetensors.save("downloaded/model.safetensors", tensors)
        model = MyModel.new
        (here = binding).local_variable_set(:model, model)
        here.eval(program)
        assert_equal weight.to_a, model.state_dict["layers.0.weight"].to_a
      end
    end
  end

  def test_a_divided_optimizer
    lines = code("ZeRO = ").sub("ZeRO = ", "zero = ").gsub("ZeRO.", "zero.")
    found = world(2) do
      here = binding
      model = Torch::NN::Parallel::DistributedDataParallel.new(MyModel.new)
      model.call(Torch.randn(5, 4)).sum.backward
      here.local_variable_set(:model, model)
      here.eval(lines)
      optimizer = here.local_variable_get(:optimizer)
      [here.local_variable_get(:state)&.fetch("state")&.size, optimizer.optim.param_groups[0][:params].sum(&:numel), model.parameters.sum(&:numel)]
    end
    assert_equal [[4, 12, 23], [nil, 11, 23]], found
  end

  def test_checkpoints_of_sharded_models
    program = code("saving = ").gsub("FSDP = ", "fsdp = ").gsub(/^(.*)FSDP\./, '\1fsdp.')
      .sub("Safetensors = ", "safetensors = ").gsub(/^Safetensors\./, "safetensors.")
    found = Dir.mktmpdir do |folder|
      Dir.chdir(folder) do
        world(2) do
          here = binding
          @model = Torch::Distributed::FSDP.fully_shard(MyModel.new)
          optimizer = Torch::Optim::Adam.new(@model.parameters)
          train(Torch.randn(5, 4))
          optimizer.step
          {model: @model, optimizer: optimizer, batch: Torch.randn(5, 4)}.each { |name, value| here.local_variable_set(name, value) }
          here.eval(program)
          [here.local_variable_get(:weights).size, here.local_variable_get(:state).fetch("state", {}).size]
        end << Dir["{checkpoints/*,exported/*}"].sort
      end
    end
    assert_equal [[7, 4], [0, 0], %w[checkpoints/step-000000100 exported/model.safetensors]], found
  end

  def test_a_model_that_is_divided
    lines = code("net.layers.each { |layer| FSDP").lines.drop(1).join.gsub("FSDP.", "Torch::Distributed::FSDP.")
    found = world(2) do
      here = binding
      here.local_variable_set(:net, MyModel.new.tap { |net| net.define_singleton_method(:layers) { [@layers] } })
      here.local_variable_set(:batch, Torch.randn(5, 4))
      here.eval(lines)
      [here.local_variable_get(:state).size, here.local_variable_get(:net).parameters.sum { |each| each.to_local.numel }]
    end
    assert_equal [7, 0], found.map(&:first)
    assert_equal 23, found.sum(&:last)
  end

  def test_layers_that_are_divided
    program = code("ways = ")
    world(2) do
      here = binding
      here.local_variable_set(:net, net = Pairs.new)
      x = Torch.randn(3, 4)
      expected = net.call(x).detach
      here.eval(program)
      raise "not divided" unless net.layers[0].up.weight.shape == [3, 4]
      raise "differs" unless (net.call(x) - expected).abs.max.item < 1e-6
    end
  end

  def test_layers_after_one_another
    program = code("Pipelining = ").gsub("Pipelining", "pipelining").sub("Distributed::pipelining", "Distributed::Pipelining")
    world(2) do |rank|
      net = Pairs.new
      x, y = Array.new(2) { Torch.randn(8, 4) }
      here = binding
      {layers: [net.layers[rank]], x: x, y: y, loss_fn: Torch::NN::F.method(:mse_loss)}.each { |name, value| here.local_variable_set(name, value) }
      here.eval(program)
      mean = here.local_variable_get(:losses).sum { |loss| loss.item / 4 }
      raise "differs: #{mean}" unless (mean - Torch::NN::F.mse_loss(net.call(x), y).item).abs < 1e-6
    end
  end

  def test_all_at_once
    program = code("mesh_dim_names: %w[pp dp tp]").sub("[2, 2, 2]", "[2, 1, 2]")
    losses = world(4) do
      here = binding
      x, y = Array.new(2) { Torch.randn(8, 4) }
      ways = Distributed::Tensor::Parallel
      plan = {"layers.*.up" => ways::ColwiseParallel.new, "layers.*.down" => ways::RowwiseParallel.new}
      {gpt: Pairs.new, plan: plan, stages: [["layers.0"], ["layers.1"]], loss_fn: Torch::NN::F.method(:mse_loss), ids: x, next_ids: y}
        .each { |name, value| here.local_variable_set(name, value) }
      expected = Torch::NN::F.mse_loss(here.local_variable_get(:gpt).call(x), y).item
      here.eval(program)
      (here.local_variable_get(:loss) - expected).abs
    end
    assert_operator losses.max, :<, 1e-6
  end

  def test_what_fits_into_memory
    programs = [code("estimate[:full_shard]"), code("# tensors that are made from now on")]
    fitting, total, stats = Distributed.fork_world(1) do
      here = binding
      {net: MyModel.new, x: Torch.randn(5, 4)}.each { |name, value| here.local_variable_set(name, value) }
      out, = capture_io { here.eval(programs[0]) }
      estimate = here.local_variable_get(:estimate)
      assert_equal "#{estimate}\n", out
      [estimate.fitting, here.eval(programs[0].lines.last), here.eval(programs[1])]
    end.first
    assert_equal %i[no_shard zero shard_grad_op full_shard], fitting
    assert_operator total, :>, 23 * 16 / 4
    assert_operator stats[:current_bytes], :>=, 23 * 4
  end

  def test_several_devices_in_one_process
    program = code("model = Torch::NN::DataParallel").gsub("cuda:0", "cpu").sub("[0, 1]", '["cpu", "cpu"]')
    found = Distributed.fork_world(1) do
      gradients = [false, true].map do |parallel|
        here = binding
        net = MyModel.new.eval
        net.parameters.each { |parameter| Torch.no_grad { parameter.fill!(0.5) } }
        {net: net, x: Torch.arange(24).float.reshape(6, 4), y: Torch.ones(6, 3)}.each { |name, value| here.local_variable_set(name, value) }
        here.eval(parallel ? program : "Torch::NN::F.mse_loss(net.call(x), y).backward")
        net.parameters.map { |parameter| parameter.grad.to_a }
      end
      gradients
    end.first
    found[0].flatten.zip(found[1].flatten) { |alone, divided| assert_in_delta alone, divided, 1e-4 * alone.abs }
  end

  def test_saving_and_going_on
    program = code("run = {model:").sub(/^…\n/, "epoch = loaded ? loaded.epoch + 1 : 0\n")
    Dir.mktmpdir do |folder|
      epochs = world(2) do
        Dir.chdir(folder)
        Array.new(2) do
          here = binding
          model = Torch::NN::Parallel::DistributedDataParallel.new(MyModel.new)
          optimizer = Torch::Optim::SGD.new(model.parameters, lr: 0.1)
          data = dataset
          sampler = Torch::Utils::Data::DistributedSampler.new(data)
          {model: model, optimizer: optimizer, scheduler: Torch::Optim::LRScheduler::StepLR.new(optimizer, step_size: 1),
           loader: Torch::Utils::Data::DistributedDataLoader.new(data, batch_size: 8, sampler: sampler)}
            .each { |name, value| here.local_variable_set(name, value) }
          here.eval(program)
          here.local_variable_get(:epoch)
        end
      end
      assert_equal [[0, 1]] * 2, epochs
      assert_equal 2, Dir.children(File.join(folder, "checkpoints")).grep(/\d/).size
    end
  end

  def test_collectives
    lines = code("sums = ").lines.grep(/\S/)
    found = world(2) do |rank|
      here = binding
      here.local_variable_set(:tensors, Array.new(3) { |at| Torch.tensor([at + 1.0]) })
      last = lines.map { |line| here.eval((rank == 1 && line.include?(".send(")) ? "Torch::Distributed.recv(sums, src: 0)" : line) }.last
      [here.local_variable_get(:sums), *here.local_variable_get(:pieces), *here.local_variable_get(:tensors)].map(&:to_a) << last
    end
    assert_equal [[[4.0, 2.0], [4.0, 2.0], [4.0, 2.0], [2.0], [4.0], [6.0], [{"loss" => 0.5}] * 2]] * 2, found
  end

  def test_shared_tensors
    program = code("x = Torch::Distributed.empty_shared")
    assert_equal [[[1024, 1024], 0.0]] * 2, world(2) {
      here = binding
      here.eval(program)
      x = here.local_variable_get(:x)
      [x.shape, x.abs.sum.item]
    }
  end

  def test_some_of_the_ranks
    program = code("evens = ")
    sums = world(4) do |rank|
      here = binding
      here.local_variable_set(:sums, Torch.tensor([rank + 1.0]))
      here.eval(program)
      here.local_variable_get(:sums).item
    end
    assert_equal [6.0, 6.0, 8.0, 8.0], sums # 1 + 3 on the even ranks, then of ranks 0 and 1, and of 2 and 3
  end
end
