# frozen_string_literal: true

require "minitest/autorun"
require "shellwords"
require_relative "../../examples/common/mnist_data"
require_relative "example_programs"
require_relative "../held_ports"

# ResNet-18 on MNIST, on a few images.
class ResNetExampleTest < Minitest::Test
  include ExamplePrograms
  include HeldPorts

  PROGRAM = "resnet/train_ddp.rb"
  DATA = File.join(ROOT, "examples/mnist/data")
  VISION = {"BUNDLE_WITH" => "vision"}.freeze

  def need_model_and_data
    found = system(GEMFILE.merge(VISION), "bundle", "exec", "gem", "list", "-i", "torchvision", chdir: ROOT, out: File::NULL, err: File::NULL)
    skip "the gem torchvision is not here: BUNDLE_WITH=vision bundle install" unless found
    MNISTData.fetch(DATA)
  rescue MNISTData::Unreachable => e
    skip "MNIST is not here and cannot be fetched: #{e.message}"
  end

  def test_it_learns_under_torchrun
    need_model_and_data
    out = torchrun(2, PROGRAM, "--subset", "600", "--epochs", "2", "--batch-size", "32", "--lr", "0.001", env: VISION)
    assert_match(/ResNet-18, 11175370 parameters, 2 ranks on \w+, 300 images a rank and epoch, batches of 32, 28x28 pixels/, out)
    losses = out.scan(/^epoch \d: loss ([\d.]+)/).flatten.map(&:to_f)
    assert_equal 2, losses.size, out
    assert_operator losses.last, :<, losses.first
    assert_match(/\(\d+ of 600\)/, out)
  end

  def test_it_starts_its_processes_itself_and_scales_the_images
    need_model_and_data
    out = run_ruby(PROGRAM, "--gpus", "2", "--subset", "65", "--epochs", "1", "--batch-size", "16", "--image-size", "56", "--data-dir", DATA)
    assert_match(/33 images a rank and epoch, batches of 16, 56x56 pixels/, out)
    assert_match(/^epoch 1: loss .* \(\d+ of 65\)/, out)
  end

  def test_without_the_gem_it_says_what_to_do
    out = run_command("bundle", "exec", RbConfig.ruby, example(PROGRAM), "--epochs", "1", status: 1, env: GEMFILE.merge("BUNDLE_WITH" => ""))
    assert_match(/torchvision is not in the bundle. Install it with `BUNDLE_WITH=vision bundle install`/, out)
  end

  def test_mistakes_are_one_line
    assert_refused(/--lr 0.0: expected a number above 0/, PROGRAM, "--lr", "0")
    assert_refused(/invalid option: --learning/, PROGRAM, "--learning", "1")
  end

  def test_the_commands_of_several_machines
    program = ["train it.rb", "--name", "it's $HOME"]
    out = run_ruby("resnet/multi_node.rb", "--nnodes", "3", "--nproc-per-node", "4", "--master-addr", "host0", "--port", "29503", "--", *program)
    commands = out.lines.grep(/torchrun/).map(&:shellsplit)
    assert_equal 3, commands.size
    commands.each_with_index do |command, node|
      assert_equal %W[bundle exec torchrun --nnodes=3 --node-rank=#{node} --nproc-per-node=4 --rdzv-backend=c10d
        --rdzv-endpoint=host0:29503 --rdzv-id=resnet] + program, command
    end
  end

  # Two "machines" of this one: what it prints is run by a shell as it stands.
  def test_what_it_prints_runs
    out = run_ruby("resnet/multi_node.rb", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--port", held_port.to_s, "--job", "it's",
      "--", example("equivalence/main.rb"), "--compare", "--no_shuffle", "--epochs", "1")
    commands = out.lines.grep(/torchrun/)
    outputs = commands.map { |command| Thread.new { Open3.capture2e(GEMFILE, "sh", "-c", command, chdir: ROOT) } }.map(&:value)
    outputs.each { |text, status| assert status.success?, text }
    assert_match(/DDP, 2 processes beside one process/, outputs.map(&:first).join)
  end

  def test_mistakes_of_the_printer_are_one_line
    assert_refused(/invalid argument: --nproc-per-node many/, "resnet/multi_node.rb", "--nproc-per-node", "many")
    assert_refused(/--port 70000: expected 1 to 65535/, "resnet/multi_node.rb", "--master-addr", "a", "--port", "70000")
  end
end
