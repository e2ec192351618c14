# frozen_string_literal: true

require "minitest/autorun"
require "shellwords"
require "torch/distributed"
require_relative "../../examples/benchmark/contestant"
require_relative "../../examples/benchmark/training_chart"
require_relative "../../examples/benchmark/training_run"
require_relative "../../examples/common/command_line"
require_relative "../../examples/common/text_table"
require_relative "../../examples/equivalence/modes"
require_relative "../../examples/resnet/multi_node"

# The parts of the example programs that need no processes.
class ExamplesPartsTest < Minitest::Test
  def parse(*arguments)
    options = {batch_size: 8, gpus: [0], lr: 0.1, verbose: false}
    CommandLine.parse("ruby x.rb", options, positive: %i[batch_size lr], arguments: arguments) do |opts|
      opts.on("--batch-size N", Integer)
      opts.on("--lr RATE", Float)
      opts.integers("--gpus LIST")
      opts.on("--verbose")
    end
  end

  def refused(*arguments)
    error = nil
    _, text = capture_io { error = assert_raises(SystemExit) { parse(*arguments) } }
    assert_equal 1, error.status
    assert_equal 1, text.lines.size
    text
  end

  def test_options_in_dashes_and_underscores
    assert_equal({batch_size: 8, gpus: [0], lr: 0.1, verbose: false}, parse)
    assert_equal({batch_size: 4, gpus: [2, 3], lr: 0.1, verbose: true}, parse("--batch_size", "4", "--gpus", "2,3", "--verbose"))
    assert_equal 5, parse("--batch-size=5")[:batch_size]
  end

  def test_mistakes_are_one_line_with_the_value
    assert_match(/invalid argument: --batch-size many/, refused("--batch-size", "many"))
    assert_match(/--batch-size 0: expected a number from 1 up/, refused("--batch_size", "0"))
    assert_match(/--lr -0.5: expected a number above 0/, refused("--lr", "-0.5"))
    assert_match(/invalid argument: --gpus 1,,2/, refused("--gpus", "1,,2"))
    assert_match(/unexpected argument: more words/, refused("more", "words"))
  end

  def test_tables_align_numbers_to_the_right
    # A cell that ends its row early may be longer than its column.
    expected = <<~TABLE.chomp
      a    |  b | c
      -----+----+----
      gloo |  1 | x
      n    | 12 | y z
      nn   | not available, and long
    TABLE
    assert_equal expected, TextTable.format(%w[a b c], [["gloo", 1, "x"], ["n", 12, "y z"], ["nn", "not available, and long"]])
  end

  def test_shards_as_distributed_sampler_gives_them
    options = {no_shuffle: true, num_examples: 9, batch_size: 3, dim: 2, drop_last: false}
    assert_equal [[[0, 2, 4], [1, 3, 5]], [[6, 8], [7, 0]]], Equivalence.new(options, 2).shards(0)
    dropping = Equivalence.new(options.merge(drop_last: true), 2)
    assert_equal [[[0, 2, 4], [1, 3, 5]], [[6], [7]]], dropping.shards(0)
    assert_equal [8], dropping.left_out(0)
    shuffled = Equivalence.new(options.merge(no_shuffle: false), 3)
    refute_equal shuffled.shards(0), shuffled.shards(1)
    assert_equal (0..8).to_a, shuffled.shards(1).flatten.sort
  end

  def test_the_difference_of_two_outcomes
    one, near, diverged = [200.0, 199.0, Float::NAN].map { |loss| Equivalence::Outcome.new("a form", 0.1, [1.0, loss], [[[0.5]], [0.25]]) }
    assert_equal 0.0, Equivalence.difference(one, one)
    assert_in_delta 0.005, Equivalence.difference(one, near), 1e-12
    assert_predicate Equivalence.difference(one, diverged), :nan?
  end

  def test_commands_for_each_machine
    job = MultiNode.new(nnodes: 2, nproc_per_node: "gpu", master_addr: "fe80::1", port: 29503, job: "a b", program: ["x.rb", "it's", "$HOME", ""])
    first, second = job.commands
    assert_equal ["--rdzv-endpoint=[fe80::1]:29503", "--rdzv-id=a b", "x.rb", "it's", "$HOME", ""], first.shellsplit.last(6)
    assert_equal first.sub("--node-rank=0", "--node-rank=1"), second
  end

  # Kilobytes that a fresh process still holds of 64 MiB that it had and freed.
  def kept_by(**malloc)
    program = <<~RUBY
      require "fiddle"
      require "json"
      rss = -> { File.read("/proc/self/status")[/VmRSS:\\s+(\\d+)/, 1].to_i }
      before = rss.call
      data = Fiddle.malloc(64 << 20)
      Fiddle::Pointer.new(data)[0, 64 << 20] = "x" * (64 << 20)
      GC.start
      Fiddle.free(data)
      $stdout.sync = true
      puts JSON.generate("version" => rss.call - before)
      $stdin.read
    RUBY
    contestant = Contestant.new("malloc", [RbConfig.ruby, "-e", program], 1, limit: 60, **malloc)
    contestant.version
  ensure
    contestant&.close
  end

  # Images per second stand beside those of programs with the same malloc.
  def test_all_programs_of_a_comparison_keep_what_they_free
    assert_operator kept_by(kept: true), :>=, 60 * 1024
    assert_operator kept_by(counted: true), :<=, 30 * 1024
  end

  def result(processes, batch_size, losses, seconds: 2.0)
    TrainingRun::Result.new(backend: "gloo", processes: processes, batch_size: batch_size, seconds: seconds, losses: losses)
  end

  def test_speeds
    measured = result(2, 8, [3.0] * 10 + [1.0] * 10)
    assert_equal 160.0, measured.images_per_second
    assert_equal 0.1, measured.loss_reduction_per_step
    assert_equal 1.0, measured.loss_reduction_per_second
  end

  def test_the_chart_and_the_page
    report = TrainingReport.new({arch: "mlp", steps: 3, warmup: 0})
    report.measured(result(1, 8, [2.0, 1.5, 1.0]))
    report.measured(result(2, 8, [2.0, 1.4, 0.9]))
    report.not_measured("nccl", 1, 8, "no GPU here & <none>")
    chart = TrainingChart.new(report)
    texts = chart.svg.scan(%r{<text[^>]*>([^<]*)</text>}m).flatten.map(&:strip)
    assert_includes texts, "gloo, 2 processes"
    assert_includes texts, "nccl: not available"
    assert_equal 2, chart.svg.scan(/<polyline [^>]*points="[\d., ]+"/).size
    assert_includes chart.html, "not available: no GPU here &amp; &lt;none&gt;"
  end

  def test_a_chart_of_nothing
    report = TrainingReport.new({arch: "mlp", steps: 3, warmup: 0})
    report.not_measured("nccl", 1, 8, "no GPU here")
    assert_includes TrainingChart.new(report).svg, "nothing could be measured"
  end
end
