# frozen_string_literal: true

require "minitest/autorun"
require "socket"
require_relative "example_programs"

# The commands that the programs which this library follows document, as they are typed, but for Ruby's names.
class DocumentedProgramsTest < Minitest::Test
  include ExamplePrograms

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
end
