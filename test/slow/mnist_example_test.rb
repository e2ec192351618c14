# frozen_string_literal: true

require "minitest/autorun"
require "open3"
require "rbconfig"
require "tmpdir"
require_relative "../../examples/mnist/mnist_data"

# The MNIST example as a user runs it, on part of the data.
class MNISTExampleTest < Minitest::Test
  ROOT = File.expand_path("../..", __dir__)
  SCRIPT = File.join(ROOT, "examples/mnist/distributed.rb")
  DATA = File.join(ROOT, "examples/mnist/data")

  def setup
    MNISTData.fetch(DATA)
  rescue MNISTData::Unreachable => e
    skip "MNIST is not here and cannot be fetched: #{e.message}"
  end

  def run_command(*command, ok: true)
    out, status = Open3.capture2e(*command, chdir: ROOT)
    assert_equal ok, status.success?, out
    out
  end

  def torchrun(processes, *options, ok: true)
    run_command("bundle", "exec", "torchrun", "--standalone", "--nproc-per-node=#{processes}", SCRIPT,
      "--data-dir", DATA, "--subset", "2000", *options, ok: ok)
  end

  def epoch_lines(out)
    out.lines.grep(/\Aepoch \d+: loss/).map { |line| line.sub(/\d+ images\/s/, "") }
  end

  def test_a_resumed_run_goes_on_as_if_it_had_not_stopped
    Dir.mktmpdir do |dir|
      whole = torchrun(2, "--epochs", "2", "--checkpoint", "#{dir}/whole.pt")
      torchrun(2, "--epochs", "1", "--checkpoint", "#{dir}/parts.pt")
      resumed = torchrun(2, "--epochs", "2", "--checkpoint", "#{dir}/parts.pt", "--resume")
      assert_match(/resumed after epoch 1/, resumed)
      assert_equal 2, epoch_lines(whole).size
      assert_equal epoch_lines(whole).last, epoch_lines(resumed).last
      assert_match(/parameters are equal, bit for bit, on 2 ranks/, resumed)
      assert_equal %w[parts.pt whole.pt], Dir.children(dir).sort
    end
  end

  def test_it_starts_its_processes_itself
    Dir.mktmpdir do |dir|
      out = run_command(RbConfig.ruby, SCRIPT, "--gpus", "2", "--epochs", "1", "--data-dir", DATA, "--subset", "2000",
        "--checkpoint", "#{dir}/c.pt")
      accuracy = out[/test accuracy ([\d.]+) %/, 1].to_f
      assert_operator accuracy, :>, 60
      assert_match(/2 ranks on cpu, 1000 images a rank and epoch/, out)
    end
  end

  def test_three_processes_with_an_uneven_share
    Dir.mktmpdir do |dir|
      out = torchrun(3, "--epochs", "1", "--batch-size", "50", "--checkpoint", "#{dir}/c.pt")
      assert_match(/3 ranks on cpu, 667 images a rank/, out)
      assert_match(/\(\d+ of 2000\)/, out)
    end
  end

  def test_a_truncated_data_file_is_named
    Dir.mktmpdir do |dir|
      MNISTData::FILES.each_value { |file| FileUtils.cp(File.join(DATA, file.name), dir) }
      File.truncate(File.join(dir, "train-labels-idx1-ubyte"), 1000)
      out = run_command("bundle", "exec", "torchrun", "--standalone", "--nproc-per-node=2", SCRIPT, "--data-dir", dir, ok: false)
      assert_match(/train-labels-idx1-ubyte is not what it should be: expected 60008 bytes, found 1000 bytes/, out)
    end
  end

  def test_wrong_options_are_named
    assert_match(/invalid option: --epoch-count/, run_command(RbConfig.ruby, SCRIPT, "--epoch-count", "3", ok: false))
    assert_match(/--epochs 0: expected a number from 1 up/, run_command(RbConfig.ruby, SCRIPT, "--epochs", "0", ok: false))
    assert_match(/no backend "nccl" in this installation/, run_command(RbConfig.ruby, SCRIPT, "--backend", "nccl", "--subset", "10", ok: false))
  end
end
