# frozen_string_literal: true

require "minitest/autorun"
require "json"
require_relative "example_programs"

# The benchmarks in a small form: their tables, files and exit codes; what the figures are does not matter here.
class BenchmarkExampleTest < Minitest::Test
  include ExamplePrograms

  PROGRAM = "benchmark/training.rb"
  COMPARE = "benchmark/compare_ddp.rb"
  SMALL = %w[--synthetic --steps 6 --warmup 1].freeze

  def test_a_table_of_backends_groups_and_batches
    Dir.mktmpdir do |dir|
      out = run_ruby(PROGRAM, *SMALL, "--gpus", "2", "--arch", "mlp", "--backends", "gloo,nosuch", "--batch-sizes", "8,16",
        "--json", "#{dir}/t.json", "--chart", "#{dir}/t.svg")
      rows = table(out, "Backend | Proc Group | Batch | Images/s")
      gloo = [%w[gloo 1 8], %w[gloo 1 16], %w[gloo 2 8], %w[gloo 2 16]]
      assert_equal gloo, rows.first(4).map { |row| row.first(3) }
      rows.first(4).each do |row|
        assert_equal 7, row.size
        assert_operator Float(row[3]), :>, 0
        row.drop(4).each { |cell| Float(cell) }
      end
      assert_equal 4, rows.drop(4).size
      rows.drop(4).each { |row| assert_equal ["nosuch", "not available: not in this installation"], row.values_at(0, 3) }
      check_files(dir)
    end
  end

  # PyTorch 1.13 shards on GPUs only.
  def test_fully_sharded_beside_pytorch
    skip "python3 has no torch" unless system("/usr/bin/python3", "-c", "import torch.distributed", err: File::NULL)

    rows = table(run_ruby("benchmark/compare_fsdp.rb", "--quick"), "Model  | Ranks | Optimizer")
    assert_equal %w[plain fused].product(%w[alone ddp full_shard shard_grad_op]), rows.map { |row| row.values_at(2, 3) }
    rows.each do |row|
      assert_operator Float(row[4]), :>, 0
      assert_match(/\A(-|[\d.]+)\z/, row[5])
    end
    assert_refused(/--models nosuch: expected some of layers, gpt/, "benchmark/compare_fsdp.rb", "--models", "nosuch")
  end

  # PyTorch has pipelines from 2.4 on.
  def test_pipelines_beside_pytorch
    schedules = %w[alone gpipe 1f1b interleaved zero_bubble]
    rows = table(run_ruby("benchmark/compare_parallel.rb", "--quick", "--schedules", schedules.join(",")), "Schedule")
    assert_equal schedules, rows.map(&:first)
    rows.each do |row|
      assert_operator Float(row[1]), :>, 0
      assert_match(/\A(-|[\d.]+)\z/, row[2])
    end
    assert_equal "-", rows[0].last
    rows.drop(1).each { |row| assert_match(/\A\d+\.\d %\z/, row.last) }
    assert_refused(/--schedules nosuch: expected some of alone, tensor, gpipe, 1f1b/, "benchmark/compare_parallel.rb", "--schedules", "nosuch")
  end

  def check_files(dir)
    report = JSON.parse(File.read("#{dir}/t.json"))
    assert_equal ["mlp", 6, "synthetic"], report.values_at("arch", "steps", "data")
    assert_equal 8, report["rows"].size
    report["rows"].first(4).each do |row|
      assert_equal 6, row["losses"].size
      assert_in_delta row["batch_size"] * row["processes"] * 6 / row["seconds"], row["images_per_second"], 1e-6
      # Too few steps for a mean of several: the first and the last.
      assert_in_delta (row["losses"].first - row["losses"].last) / 6, row["loss_reduction_per_step"], 1e-9
    end
    svg = File.read("#{dir}/t.svg")
    assert_equal 4, svg.scan("<polyline ").size
    assert_equal 4, svg.scan(/<rect [^>]*>\s*<title>/m).size
  end

  def test_under_torchrun_and_a_page
    Dir.mktmpdir do |dir|
      out = torchrun(2, PROGRAM, *SMALL, "--arch", "chain66", "--batch-sizes", "4,8", "--chart", "#{dir}/t.html")
      assert_equal [%w[gloo 2 4], %w[gloo 2 8]], table(out, "Backend |").map { |row| row.first(3) }
      page = File.read("#{dir}/t.html")
      assert_match(/<svg /, page)
      assert_equal 3, page.scan("<tr>").size
    end
  end

  def test_nothing_measured_is_a_failure
    out = run_ruby(PROGRAM, *SMALL, "--backend", "nosuch", status: 1)
    assert_match(/nosuch +\| +1 \| +128 \| not available: not in this installation/, out)
    assert_match(/nothing could be measured/, out)
  end

  def test_mistakes_are_one_line
    assert_refused(/invalid argument: --chart t.png/, PROGRAM, "--chart", "t.png")
    assert_refused(/invalid argument: --arch vgg/, PROGRAM, "--arch", "vgg")
    assert_refused(/--batch-sizes 0: expected a number from 1 up/, PROGRAM, "--batch-sizes", "8,0")
    assert_refused(%r{no/such/t.json: there is no folder no/such}, PROGRAM, "--json", "no/such/t.json")
    assert_refused(/--models resnet: expected some of cnn, mlp, chain66, wide/, COMPARE, "--models", "mlp,resnet")
  end

  def test_the_comparison_with_pytorch
    python = ENV.fetch("PYTHON", "/usr/bin/python3")
    skip "#{python} has no torch: install python3-torch" unless system(python, "-c", "import torch.distributed", err: File::NULL)

    Dir.mktmpdir do |dir|
      out = run_ruby(COMPARE, "--quick", "--models", "mlp,chain66", "--json", "#{dir}/c.json")
      rows = table(out, "Model")
      # Each program with both its optimizers; ratios below 0 there are none.
      assert_equal %w[mlp chain66].product(%w[torch-ddp torch-ddp PyTorch PyTorch]), rows.map { |row| row.values_at(0, 2) }
      rows.each { |row| assert_equal 15, row.size, "not measured: #{row}" }
      assert_equal %w[mlp chain66], table(out, "torch-ddp / PyTorch").map(&:first)
      check_comparison(JSON.parse(File.read("#{dir}/c.json")))
    end
  end

  def check_comparison(figures)
    assert_match(/\Atorch-rb /, figures["versions"]["torch-ddp"])
    assert_match(/\APyTorch /, figures["versions"]["PyTorch"])
    # Of each program and optimizer: one process, as many as ranks apart, one rank, two ranks.
    assert_equal 32, figures["steps"].size
    figures["steps"].each { |step| assert_operator step["milliseconds"], :>, 0 }
    held = figures["memory"].to_h { |row| [row.values_at("program", "ranks", "gradients_in_buckets"), row] }
    assert_equal 6, held.size
    # 784 x 1024 + 1024 x 1024 + 1024 x 10 weights and their biases, of four bytes.
    held.each_value { |row| assert_equal 4 * (784 * 1024 + 1024 + 1024 * 1024 + 1024 + 10_240 + 10), row["gradients"] }
  end
end
