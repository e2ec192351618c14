# frozen_string_literal: true

require "minitest/autorun"
require "fileutils"
require_relative "example_programs"

# The gem torch-ddp 0.3.0, as the registry has it: its tests and its programs run as they stand, with this library.
class TorchDdp03ProgramsTest < Minitest::Test
  include ExamplePrograms

  NAME = "torch-ddp-0.3.0"
  STAND_INS = File.join(__dir__, "support/torchvision")

  # @return [String] the folder with its tests and examples, without its library
  def self.folder
    @folder ||= Dir.mktmpdir.tap do |dir|
      Minitest.after_run { FileUtils.remove_entry(dir) }
      got = [%W[gem fetch torch-ddp --version 0.3.0], %W[gem unpack #{NAME}.gem]].all? do |command|
        system(*command, chdir: dir, out: File::NULL, err: File::NULL, unsetenv_others: false)
      end
      FileUtils.rm_rf(%w[lib ext].map { |name| File.join(dir, NAME, name) }) if got
    end
    File.join(@folder, NAME)
  end

  def setup
    @folder = self.class.folder
    skip "the gem #{NAME} cannot be had here: gem fetch torch-ddp --version 0.3.0" unless File.directory?(@folder)
  end

  def in_folder(*command, env: {})
    lib = [File.join(ROOT, "lib"), STAND_INS].join(File::PATH_SEPARATOR)
    run_command("bundle", "exec", *command, chdir: @folder, env: GEMFILE.merge("RUBYLIB" => lib, **env))
  end

  def assert_passed(out, runs)
    assert_match(/^#{runs} runs, [1-9]\d* assertions, 0 failures, 0 errors/, out)
  end

  # What needs two GPUs is skipped there; so are the abstract cases.
  def test_its_tests
    assert_passed in_folder(RbConfig.ruby, "-Itest", "test/distributed_test.rb"), 16
    assert_passed in_folder(RbConfig.ruby, "-Itest", "test/torchrun_test.rb"), 1
  end

  def test_its_mnist_example_goes_on_from_a_checkpoint
    checkpoint = File.join(File.dirname(@folder), "mnist.pt")
    mnist = [RbConfig.ruby, "examples/mnist/distributed.rb", "--gpus", "2", "--epochs", "1", "--batch-size", "16", "--backend", "gloo",
      "--checkpoint", checkpoint]
    first = in_folder(*mnist)
    assert_match(/^Saved checkpoint to #{checkpoint}$/, first)
    again = in_folder(*mnist, "--resume")
    assert_match(/^Loaded checkpoint weights from #{checkpoint}$/, again)
    losses = [first, again].flat_map { |out| out.scan(/^Test set: Average loss: ([\d.]+)/).flatten.map(&:to_f) }
    assert_equal 2, losses.size, first + again
    assert_operator losses.last, :<, losses.first
    # The first batch after the checkpoint is far better than the very first one.
    firsts = [first, again].map { |out| out[/Epoch 1 \[0.*Loss: ([\d.]+)/, 1].to_f }
    assert_operator firsts.last, :<, firsts.first / 2
  end

  def test_its_benchmark
    table = in_folder(RbConfig.ruby, "examples/benchmark/training.rb", "--arch", "mnist_cnn", "--backends", "gloo", "--batch-sizes", "8,16",
      "--gpus", "2", "--steps", "3", "--warmup", "1")
    assert_match(/^Backend +\| Proc Group +\| Batch/, table)
    assert_equal [%w[gloo 1 8], %w[gloo 1 16], %w[gloo 2 8], %w[gloo 2 16]], table.scan(/^(gloo) +\| (\d) +\| (\d+) +\| \d/)
  end
end
