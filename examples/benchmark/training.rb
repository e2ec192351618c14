# frozen_string_literal: true

# Measures training: images per second, and how fast the loss falls, by backend, number of processes and batch size.
#
#   ruby examples/benchmark/training.rb --arch mnist_cnn --batch-size 256 --gpus 2 --steps 50
#   ruby examples/benchmark/training.rb --backends gloo,nccl --batch-sizes 32,64,128,256 --gpus 2 --chart training.html
#   bundle exec torchrun --standalone --nproc-per-node=2 examples/benchmark/training.rb --batch-sizes 32,64
#
# What cannot be run here is a row that says why.

require_relative "../common/bundle"
require_relative "../common/command_line"
require_relative "training_run"
require_relative "training_report"

gpus = Ranks.gpus
options = {arch: "mnist_cnn", batch_size: nil, batch_sizes: nil, backend: nil, backends: nil, gpus: [gpus, 1].max, group_sizes: nil,
           steps: 100, warmup: 10, lr: 0.01, synthetic: false, data_dir: File.expand_path("../mnist/data", __dir__), json: nil, chart: nil}
positive = %i[batch_size batch_sizes gpus group_sizes steps lr]
options = CommandLine.parse("ruby training.rb [options]", options, positive: positive) do |opts|
  opts.on("--arch NAME", BenchmarkModels::NAMES, "#{BenchmarkModels::NAMES.join(", ")} (#{options[:arch]})")
  opts.on("--batch-size N", Integer, "images in a batch of each process (128)")
  opts.integers("--batch-sizes LIST", "several of them, one after the other")
  opts.on("--gpus N", Integer, "the most processes, one a GPU where there are GPUs (#{options[:gpus]})")
  opts.integers("--group-sizes LIST", "numbers of processes (all from 1 to --gpus); torchrun decides on one itself")
  opts.on("--steps N", Integer, "timed steps (#{options[:steps]})")
  opts.on("--warmup N", Integer, "steps before them (#{options[:warmup]})")
  opts.on("--backend NAME", "gloo or nccl (nccl with GPUs, else gloo)")
  opts.on("--backends LIST", Array, "several of them, one after the other")
  opts.on("--lr RATE", Float, "learning rate of SGD (#{options[:lr]})")
  opts.on("--synthetic", "generated images instead of MNIST")
  opts.on("--data-dir DIR", "where the MNIST files are or shall be")
  opts.on("--json FILE", "write the figures there too, with the loss of each step")
  opts.on("--chart FILE", /\A.+\.(?:svg|html)\z/, "draw them: FILE.svg, or FILE.html with the table")
end
options[:chart] = options[:chart].first if options[:chart].is_a?(Array)
CommandLine.refuse("--warmup #{options[:warmup]}: expected 0 or more") if options[:warmup].negative?
[options[:json], options[:chart]].compact.each do |file|
  CommandLine.refuse("#{file}: there is no folder #{File.dirname(file)}") unless File.directory?(File.dirname(file))
end

backends = options[:backends] || [options[:backend] || Torch::Distributed.get_default_backend_for_device(nil)]
batch_sizes = options[:batch_sizes] || [options[:batch_size] || 128]
sizes = Ranks.launched? ? [Ranks.launched_size] : options[:group_sizes] || (1..options[:gpus]).to_a
prints = Ranks.launched? ? Ranks.first_launched? : !ENV.key?(Torch::Distributed::SPAWN_ENV_KEY)
begin
  MNISTData.fetch(options[:data_dir]) { |line| puts line if prints } unless options[:synthetic]
rescue MNISTData::Error => e
  abort "#{File.basename($PROGRAM_NAME)}: #{e.message}. --synthetic does without"
end

# @return [String, nil] why a backend cannot be measured with as many processes
obstacle = lambda do |backend, processes|
  next "not in this installation" unless Torch::Distributed.backend_available?(backend)
  next "no GPU here" if backend == "nccl" && gpus.zero?

  "#{processes} GPUs wanted, #{gpus} here" if backend == "nccl" && processes > gpus && !Ranks.launched?
end

report = TrainingReport.new(options)
backends.product(sizes, batch_sizes) do |backend, processes, batch_size|
  if (reason = obstacle.call(backend, processes))
    report.not_measured(backend, processes, batch_size, reason)
    next
  end
  if prints
    puts "#{backend}, #{processes} #{(processes == 1) ? "process" : "processes"}, batch #{batch_size} ..."
    $stdout.flush
  end
  begin
    run = TrainingRun.new(options, backend: backend, processes: processes, batch_size: batch_size)
    report.measured(Ranks.run(processes) { run.measure }.first)
  rescue Torch::Error => e
    report.not_measured(backend, processes, batch_size, e.message.lines.first.strip)
  end
end
exit unless prints

puts "", report.table, "",
  "Images/s: of all processes together. Loss/step and Loss/s: how much the loss fell on average in a step and in a second."
File.write(options[:json], report.json) if options[:json]
if options[:chart]
  require_relative "training_chart"
  chart = TrainingChart.new(report)
  File.write(options[:chart], options[:chart].end_with?(".svg") ? chart.svg : chart.html)
  puts "chart: #{options[:chart]}"
end
abort "#{File.basename($PROGRAM_NAME)}: nothing could be measured" if report.results.empty?
