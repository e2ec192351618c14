# frozen_string_literal: true

require "minitest/autorun"
require "fileutils"
require "json"
require_relative "../../examples/common/mnist_data"
require_relative "example_programs"

# The MNIST example as a user runs it, on part of the data.
class MNISTExampleTest < Minitest::Test
  include ExamplePrograms

  PROGRAM = "mnist/distributed.rb"
  DATA = File.join(ROOT, "examples/mnist/data")

  def need_data
    MNISTData.fetch(DATA)
  rescue MNISTData::Unreachable => e
    skip "MNIST is not here and cannot be fetched: #{e.message}"
  end

  def train(processes, *options, status: 0)
    need_data
    torchrun(processes, PROGRAM, "--data-dir", DATA, "--subset", "2000", *options, status: status)
  end

  def epoch_lines(out)
    out.lines.grep(/\Aepoch \d+: loss/).map { |line| line.sub(/\d+ images\/s/, "") }
  end

  def test_a_resumed_run_goes_on_as_if_it_had_not_stopped
    Dir.mktmpdir do |dir|
      whole = train(2, "--epochs", "2", "--checkpoint", "#{dir}/whole", "--checkpoint-every", "9", "--keep", "9")
      assert_equal 2, epoch_lines(whole).size
      # 1,000 images a rank are 16 batches.
      assert_equal %w[epoch-001 epoch-001-batch-000009 epoch-002 epoch-002-batch-000009], Dir.glob("*", base: "#{dir}/whole").sort
      %w[epoch-001 epoch-001-batch-000009 epoch-002-batch-000009].each do |name|
        FileUtils.mkdir_p("#{dir}/part")
        FileUtils.cp_r("#{dir}/whole/#{name}", "#{dir}/part/#{name}")
        resumed = train(2, "--epochs", "2", "--checkpoint", "#{dir}/part", "--resume")
        assert_match(name.include?("batch") ? /resumed after batch 9 of epoch #{name[/\d+/].to_i} / : /resumed after epoch 1 /, resumed)
        assert_equal epoch_lines(whole).last, epoch_lines(resumed).last, name
        assert_match(/parameters are equal, bit for bit, on 2 ranks/, resumed)
        FileUtils.rm_rf("#{dir}/part")
      end
    end
  end

  # What no rank had seen of the epoch is shared anew among however many there are.
  def test_a_run_moves_to_another_number_of_ranks
    Dir.mktmpdir do |dir|
      train(2, "--epochs", "1", "--checkpoint", dir, "--checkpoint-every", "9", "--keep", "9")
      FileUtils.rm_rf("#{dir}/epoch-001")
      out = train(1, "--epochs", "1", "--checkpoint", dir, "--resume", "--workers", "1", "--log-interval", "1")
      assert_match(/resumed after batch 9 of epoch 1/, out)
      # 2,000 images, of which 2 x 9 x 64 had been seen: 848 are left, the last 14 of an epoch's 32 batches.
      assert_equal 14, out.scan(/^epoch 1: \d+ of 32 batches/).size
      assert_match(/resumed after epoch 1/, train(3, "--epochs", "2", "--checkpoint", dir, "--resume"))
    end
  end

  def test_it_starts_its_processes_itself
    need_data
    Dir.mktmpdir do |dir|
      out = run_ruby(PROGRAM, "--gpus", "2", "--epochs", "1", "--data-dir", DATA, "--subset", "2000", "--checkpoint", "#{dir}/c")
      accuracy = out[/test accuracy ([\d.]+) %/, 1].to_f
      assert_operator accuracy, :>, 60
      assert_match(/2 ranks on cpu, 1000 images a rank and epoch, batches of 64$/, out)
    end
  end

  def test_three_processes_with_an_uneven_share
    Dir.mktmpdir do |dir|
      out = train(3, "--epochs", "1", "--batch-size", "50", "--checkpoint", dir)
      assert_match(/3 ranks on cpu, 667 images a rank/, out)
      assert_match(/\(\d+ of 2000\)/, out)
    end
  end

  # With momentum SGD's fused form makes the same steps but for rounding; three digits of the loss stay.
  def test_fused_optimizers_and_small_buckets
    Dir.mktmpdir do |dir|
      plain, fused = [[], %w[--fused --bucket-cap-mb 0.5]].map do |more|
        out = train(2, "--epochs", "1", "--optimizer", "sgd", "--checkpoint", "#{dir}/#{more.size}", *more)
        assert_match(/parameters are equal, bit for bit, on 2 ranks/, out)
        out[/^epoch 1: loss ([\d.]+)/, 1].to_f
      end
      assert_in_delta plain, fused, 0.02
    end
  end

  def test_a_communication_hook_and_a_trace
    Dir.mktmpdir do |dir|
      out = train(2, "--epochs", "1", "--checkpoint", "#{dir}/c", "--comm-hook", "fp16_compress", "--trace", "#{dir}/trace")
      assert_operator out[/test accuracy ([\d.]+) %/, 1].to_f, :>, 60
      traces = Dir["#{dir}/trace/**/*.json"]
      assert_equal 2, traces.size
      traces.each { |file| assert_includes JSON.generate(JSON.parse(File.read(file))), "all_reduce" }
    end
  end

  def test_a_truncated_data_file_is_named
    need_data
    Dir.mktmpdir do |dir|
      MNISTData::FILES.each_value { |file| FileUtils.cp(File.join(DATA, file.name), dir) }
      File.truncate(File.join(dir, "train-labels-idx1-ubyte"), 1000)
      out = torchrun(2, PROGRAM, "--data-dir", dir, status: 1)
      assert_match(/train-labels-idx1-ubyte is not what it should be: expected 60008 bytes, found 1000 bytes/, out)
    end
  end

  def test_mistakes_are_one_line
    assert_refused(/invalid option: --epoch-count/, PROGRAM, "--epoch-count", "3")
    assert_refused(/--epochs 0: expected a number from 1 up/, PROGRAM, "--epochs", "0")
    assert_refused(/--fused: adadelta has no fused form; expected --optimizer sgd, adam, adamw/, PROGRAM, "--fused")
    assert_refused(/invalid argument: --comm-hook zip/, PROGRAM, "--comm-hook", "zip")
    assert_refused(/that is a file; expected a folder/, PROGRAM, "--checkpoint", File.expand_path(__FILE__))
    assert_match(/--checkpoint-every N/, run_ruby(PROGRAM, "--help"))
  end

  def test_a_backend_that_is_not_there_is_named
    need_data
    said = run_ruby(PROGRAM, "--backend", "nccl", "--subset", "10", "--data-dir", DATA, status: 1)
    assert_match(/backend nccl: (the CUDA runtime|NCCL) was not found: install/, said)
  end
end
