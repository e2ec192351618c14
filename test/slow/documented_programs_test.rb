# frozen_string_literal: true

require "minitest/autorun"
require "socket"
require_relative "example_programs"
require_relative "../held_ports"

# The commands that the programs which this library follows document, as they are typed, but for Ruby's names.
class DocumentedProgramsTest < Minitest::Test
  include ExamplePrograms
  include HeldPorts

  # @return [String] what the command prints, started in that folder of examples/ within the bundle
  def documented(folder, command)
    run_command("sh", "-c", "bundle exec #{command}", chdir: example(folder), env: GEMFILE)
  end

  # --- the equivalence of one process, DataParallel and DDP ---

  EQUAL_LOSSES = {
    "sgd" => <<~COMMANDS,
      ruby main.rb --no_shuffle --epochs 3 --opt sgd --batch_size 10 --lr 1  # CPU
      ruby main.rb --no_shuffle --epochs 3 --opt sgd --batch_size 10 --lr 1  --gpus 0  # GPU
      ruby main.rb --no_shuffle --epochs 3 --opt sgd --batch_size 10 --lr 1  --gpus 0,1  # DP
      torchrun --standalone --nnodes=1 --nproc_per_node=2 main.rb --no_shuffle --epochs 3 --opt sgd --batch_size 5 --lr 2 --gpus 0,1  # DDP
    COMMANDS
    "adam" => <<~COMMANDS
      ruby main.rb --no_shuffle --epochs 3 --opt adam --batch_size 10 --lr 1 --eps 0 # CPU
      ruby main.rb --no_shuffle --epochs 3 --opt adam --batch_size 10 --lr 1 --eps 0 --gpus 0  # GPU
      ruby main.rb --no_shuffle --epochs 3 --opt adam --batch_size 10 --lr 1 --eps 0 --gpus 0,1  # DP
      torchrun --standalone --nnodes=1 --nproc_per_node=2 main.rb --no_shuffle --epochs 3 --opt adam --batch_size 5 --lr 1 --eps 0 --gpus 0,1  # DDP
    COMMANDS
  }.freeze

  EQUAL_LOSSES.each do |optimizer, commands|
    define_method("test_one_process_data_parallel_and_ddp_have_equal_losses_with_#{optimizer}") do
      tables = commands.lines.map { |command| table(documented("equivalence", command), "step |") }
      steps, first = tables.first.transpose
      assert_equal %w[1 2 3 4 5 6], steps
      assert_operator first.map { |loss| Float(loss) }.uniq.size, :>, 1
      tables.each do |rows|
        assert_equal steps, rows.map(&:first)
        first.zip(rows.map(&:last)) { |one, loss| assert_in_delta Float(one), Float(loss), 1e-9 }
      end
    end
  end

  SHARDING = "torchrun --standalone --nnodes=1 --nproc_per_node=2 main.rb --num_examples 9 --dim 1 --batch_size 3 --epochs 1 --no_shuffle --gpus 0,1"

  def test_nine_examples_on_two_processes
    padded = documented("equivalence", SHARDING)
    assert_equal [["1", "x1 x3 x5", "x2 x4 x6"], ["2", "x7 x9", "x8 x1"]], table(padded, "iteration |")
    dropped = documented("equivalence", "#{SHARDING} --drop_last")
    assert_equal [["1", "x1 x3 x5", "x2 x4 x6"], ["2", "x7", "x8"]], table(dropped, "iteration |")
    assert_match(/^left out: x9$/, dropped)
  end

  # --- ResNet-18 on several machines ---

  def test_instructions_for_each_machine
    first, second = documented("resnet", "ruby multi_node.rb").lines.grep(/torchrun/)
    assert_match(/ --nnodes=2 --node-rank=0 .*train_ddp\.rb --epochs 3 --batch-size 128 --lr 0\.001$/, first)
    assert_equal first.sub("--node-rank=0", "--node-rank=1"), second
    assert_includes first, "--rdzv-endpoint=#{Socket.gethostname}:29503"
  end

  # --- torch-dl ---

  # Devices are the CPU, several times, where GPUs stand there.
  TORCH_DL = {
    "a module that returns its output" => <<~RUBY,
      dp_model = DataParallel.new(model, device_ids: ["cpu", "cpu"])
      criterion = Torch::NN::MSELoss.new
      optimizer.zero_grad
      output = dp_model.call(input)
      loss = criterion.call(output, target)
      loss.backward
      optimizer.step
    RUBY
    "a module that returns its loss" => <<~RUBY,
      dp_model = DataParallel.new(Lossy.new(model), device_ids: ["cpu", "cpu"])
      optimizer.zero_grad
      logits, loss = dp_model.call(input, targets: target)
      dp_model.backward(scale: 1.0)
      optimizer.step
    RUBY
    "gradients that add up" => <<~RUBY
      dp_model = DataParallel.new(Lossy.new(model), device_ids: ["cpu", "cpu"])
      gradient_accumulation_steps = 4
      optimizer.zero_grad
      (0...gradient_accumulation_steps).each do |step|
        logits, loss = dp_model.call(input, targets: target)
        dp_model.backward(scale: 1.0 / gradient_accumulation_steps)
      end
      optimizer.step
      optimizer.zero_grad
    RUBY
  }.freeze

  # What the documented lines take for granted, and one step on one device to compare with.
  AROUND_TORCH_DL = [<<~BEFORE, <<~AFTER].freeze
    require "torch_dl"
    class Lossy < Torch::NN::Module
      def initialize(net)
        super()
        @net = net
      end

      def forward(input, targets:)
        logits = @net.call(input)
        [logits, Torch::NN::F.mse_loss(logits, targets)]
      end
    end

    make = lambda do
      Torch.manual_seed(1)
      Torch::NN::Sequential.new(Torch::NN::Linear.new(3, 4), Torch::NN::Tanh.new, Torch::NN::Linear.new(4, 2))
    end
    input, target = Torch.arange(0, 18, dtype: :float32).reshape(6, 3) / 18, Torch.ones(6, 2)
    alone, model = make.call, make.call
    step = Torch::Optim::SGD.new(alone.parameters, lr: 0.5)
    Torch::NN::F.mse_loss(alone.call(input), target).backward
    step.step
    optimizer = Torch::Optim::SGD.new(model.parameters, lr: 0.5)
  BEFORE
    different = dp_model.state_dict.values.zip(alone.parameters).map { |one, other| (one - other).abs.max.item }.max
    abort "differs by \#{different}" unless different < 1e-6
    parts = TorchDL.scatter(input, ["cpu", "cpu"], 0)
    puts "as one device, \#{parts.map { |part| part.size(0) }.inspect}, \#{Torch.equal(TorchDL.gather(parts, "cpu", 0), input)}"
  AFTER

  TORCH_DL.each do |name, lines|
    define_method("test_torch_dl_has_#{name.tr(" ", "_")}") do
      code = AROUND_TORCH_DL.join("\n").sub(/^different/) { "#{lines}\ndifferent" }
      assert_equal "as one device, [3, 3], true\n", script(code, "ruby")
    end
  end

  # --- TorchBridge's guide ---

  # By name, after the launcher's and torch's own lines; what each rank prints.
  TORCH_BRIDGE = {
    "data parallel" => [<<~'RUBY', "2 of 2: 4"],
      Torch::Distributed.init_process_group(Torch::CUDA.available? ? "nccl" : "gloo")
      local_rank = Integer(ENV["LOCAL_RANK"])
      Torch::CUDA.set_device(local_rank) if Torch::CUDA.available?
      model = Torch::NN::Parallel::DistributedDataParallel.new(YourModel.new)
      model.call(Torch.ones(2, 8)).sum.backward
      puts "#{local_rank + 1} of #{Torch::Distributed.get_world_size}: #{model.parameters.count(&:grad)}"
    RUBY
    "fully sharded" => [<<~'RUBY', "2 units, 1 finite"],
      Torch::Distributed.init_process_group("gloo")
      fsdp_manager = AdvancedFSDPManager.new(
        sharding_strategy: "FULL_SHARD", # FULL_SHARD, SHARD_GRAD_OP, NO_SHARD
        mixed_precision: true,
        cpu_offload: false,
        activation_checkpointing: true
      )
      model = fsdp_manager.wrap_model(Torch::NN::Sequential.new(YourModel.new, Torch::NN::Linear.new(8, 1)))
      units = model.module.children.count { |each| each.is_a?(Torch::Distributed::FSDP::FSDPModule) }
      loss = model.call(Torch.ones(2, 8)).to(dtype: :float32).sum
      loss.backward
      puts "#{units} units, #{[loss.item].count(&:finite?)} finite"
    RUBY
    "tensor parallel" => [<<~RUBY, "[2, 8]"],
      class ParallelMLP < Torch::NN::Module
        def initialize(hidden_size, intermediate_size)
          super()
          @gate_proj = ColumnParallelLinear.new(hidden_size, intermediate_size)
          @down_proj = RowParallelLinear.new(intermediate_size, hidden_size)
        end

        def forward(x)
          @down_proj.call(Torch::NN::F.relu(@gate_proj.call(x)))
        end
      end
      Torch::Distributed.init_process_group("gloo")
      puts ParallelMLP.new(8, 16).call(Torch.ones(2, 8)).shape.inspect
    RUBY
    "pipeline parallel" => [<<~RUBY, "[0.0]"],
      layers = Array.new(4) { Torch::NN::Linear.new(8, 8) }
      stages = [
        PipelineStage.new(layers: layers[0...2], device: "cpu"),
        PipelineStage.new(layers: layers[2..], device: "cpu")
      ]
      schedule = Torch::Distributed::Pipelining::ScheduleGPipe.new(stages, n_microbatches: 2, loss_fn: ->(out, target) { (out - target).pow(2).mean * 0 })
      schedule.step(Torch.ones(4, 8), target: Torch.ones(4, 8), losses: losses = [])
      puts [losses.sum(&:item)].inspect
    RUBY
    "an estimate of memory" => [<<~'RUBY', "576 parameter bytes"],
      model = YourModel.new
      Torch::Distributed.estimate_memory(model, optimizer: :adam, world_size: 4).to_s
      param_bytes = model.parameters.sum { |p| p.numel * p.element_size }
      puts "#{param_bytes} parameter bytes"
    RUBY
    "several nodes by one call" => [<<~'RUBY', "2 ranks, 3.0"],
      manager = MultiNodeTrainingManager.new
      context = manager.setup(num_nodes: 1)
      sum = Torch::Distributed.all_reduce(Torch.tensor([context.rank + 1.0]))
      puts "#{context.world_size} ranks, #{sum.item}"
    RUBY
    "memory optimization" => [<<~'RUBY', "1 layers"]
      model = Torch::NN::Sequential.new(YourModel.new, YourModel.new)
      checkpointing = SelectiveGradientCheckpointing.new(model, checkpoint_ratio: 0.5)
      fsdp_manager = AdvancedFSDPManager.new(cpu_offload: true)
      puts "#{checkpointing.checkpointed_layers.size} layers"
    RUBY
  }.freeze

  YOUR_MODEL = <<~RUBY
    require "torch_bridge"
    class YourModel < Torch::NN::Module
      def initialize
        super
        @up = Torch::NN::Linear.new(8, 8)
        @down = Torch::NN::Linear.new(8, 8)
      end

      def forward(x)
        @down.call(Torch.tanh(@up.call(x)))
      end
    end
  RUBY

  TORCH_BRIDGE.each do |name, (code, said)|
    define_method("test_torch_bridge_has_#{name.tr(" ", "_")}") do
      lines = script("#{YOUR_MODEL}\n#{code}", "torchrun --nproc_per_node=2").lines.map(&:chomp)
      assert_equal 2, lines.size, lines.join("\n")
      assert_includes lines, said
    end
  end

  def test_a_set_up_is_checked_by_one_line
    out = script("", %q(torchrun --nproc_per_node=2 -c "
      require 'torch/distributed'
      Torch::Distributed.init_process_group('gloo')
      puts %(Rank #{Torch::Distributed.get_rank} of #{Torch::Distributed.get_world_size})
    "))
    assert_equal ["Rank 0 of 2\n", "Rank 1 of 2\n"], out.lines.sort
  end

  def test_two_nodes
    code = "require \"torch_bridge\"\nputs MultiNodeTrainingManager.new.setup(num_nodes: 2).to_h.slice(:rank, :local_rank, :world_size)"
    port = held_port
    outputs = Array.new(2) do |node|
      Thread.new { script(code, "torchrun --nproc_per_node=1 --nnodes=2 --node_rank=#{node} --master_addr=127.0.0.1 --master_port=#{port}") }
    end
    assert_equal Array.new(2) { |rank| {rank: rank, local_rank: 0, world_size: 2}.inspect }, outputs.map { |thread| thread.value.chomp }
  end

  # @return [String] what a program prints that lies in a file of its own
  def script(code, launcher)
    Dir.mktmpdir do |dir|
      File.write(File.join(dir, "train.rb"), code)
      run_command("sh", "-c", "bundle exec #{launcher}#{" train.rb" unless code.empty?}", chdir: dir,
        env: GEMFILE.merge("RUBYLIB" => File.join(ROOT, "lib")))
    end
  end
end
