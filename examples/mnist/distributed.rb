# frozen_string_literal: true

# Trains a small convolutional network on MNIST with several processes.
#
#   ruby examples/mnist/distributed.rb --gpus 2
#   bundle exec torchrun --standalone --nproc-per-node=2 examples/mnist/distributed.rb
#
# With a GPU for each process it trains on GPUs, else on the CPU.

require "bundler/setup"
require "optparse"
require "tmpdir"
require "torch"
require "torch/distributed"
require_relative "trainer"

options = {
  epochs: 5, batch_size: 64, lr: 1.0, gamma: 0.7, log_interval: 20, gpus: nil, backend: nil,
  data_dir: File.join(__dir__, "data"), checkpoint: File.join(Dir.tmpdir, "mnist_ddp_checkpoint.pt"), resume: false
}
parser = OptionParser.new do |opts|
  opts.banner = "Usage: ruby distributed.rb [options]"
  opts.on("--epochs N", Integer, "epochs in all (#{options[:epochs]})")
  opts.on("--batch-size N", Integer, "images in a batch of each process (#{options[:batch_size]})")
  opts.on("--lr RATE", Float, "learning rate of Adadelta (#{options[:lr]})")
  opts.on("--gamma FACTOR", Float, "learning rate's factor after each epoch (#{options[:gamma]})")
  opts.on("--backend NAME", "gloo or nccl (nccl with GPUs, else gloo)")
  opts.on("--gpus N", Integer, "processes to start, one a GPU where there are GPUs; torchrun decides this itself")
  opts.on("--log-interval N", Integer, "batches between progress lines (#{options[:log_interval]})")
  opts.on("--data-dir DIR", "where the MNIST files are or shall be")
  opts.on("--checkpoint PATH", "where the run is saved after each epoch")
  opts.on("--subset N", Integer, "use the first N images only, for a quick look")
  opts.on("--[no-]resume", "go on from the checkpoint if there is one")
end
begin
  rest = parser.parse(ARGV, into: given = {})
  raise OptionParser::InvalidArgument, rest.join(" ") unless rest.empty?
rescue OptionParser::ParseError => e
  abort "#{e.message}\n#{parser.help}"
end
options.merge!(given.transform_keys { |name| name.to_s.tr("-", "_").to_sym })
%i[epochs batch_size gpus log_interval subset].each do |name|
  next unless options[name] && options[name] < 1

  abort "--#{name.to_s.tr("_", "-")} #{options[name]}: expected a number from 1 up"
end

# Whoever starts first on a machine fetches the data; the others wait for it, then find it complete.
def train(options, **group)
  MNISTData.fetch(options[:data_dir]) { |line| puts line }
  Torch::Distributed.init_process_group(options[:backend], **group)
  Trainer.new(options).run
ensure
  Torch::Distributed.destroy_process_group
end

if ENV.key?("RANK")
  train(options)
else
  gpus = Torch::CUDA.available? ? Torch::CUDA.device_count : 0
  processes = options[:gpus] || [gpus, 1].max
  abort "--gpus #{processes}: there are #{gpus} GPUs" if gpus.positive? && processes > gpus
  begin
    results = Torch::Distributed.fork_world(processes, start_method: :spawn) do |rank, port|
      train(options, init_method: "tcp://127.0.0.1:#{port}", rank: rank, world_size: processes)
      true
    end
  rescue Interrupt
    warn "interrupted"
    exit 130
  end
  abort "training failed" unless results.all?
end
