# frozen_string_literal: true

# Prints the command that each machine of a job with several machines has to run. It starts nothing and needs no gem.
#
#   ruby examples/resnet/multi_node.rb
#   ruby examples/resnet/multi_node.rb --nnodes 2 --nproc-per-node 4 --master-addr host0 -- examples/resnet/train_ddp.rb --epochs 3

require "optparse"
require "socket"

# The torchrun commands of a job, one for each machine.
class MultiNode
  # @param nnodes [Integer] machines
  # @param nproc_per_node [String] workers on each: a number, or "gpu" for one for each GPU
  # @param master_addr [String] the first machine, by a name or an address that all the others know
  # @param program [Array<String>] the script and its arguments
  # @param environment [Array<String>] NAME=value, for the command alone
  def initialize(nnodes:, nproc_per_node:, master_addr:, port:, job:, program:, environment: [])
    @nnodes = nnodes
    @nproc_per_node = nproc_per_node
    @endpoint = "#{master_addr.include?(":") ? "[#{master_addr}]" : master_addr}:#{port}"
    @job = job
    @program = program
    @environment = environment
  end

  # @return [Array<String>] by machine, each ready for a shell
  def commands
    Array.new(@nnodes) { |node| command(node).map { |word| quoted(word) }.join(" ") }
  end

  private

  def command(node)
    [*@environment, "bundle", "exec", "torchrun", "--nnodes=#{@nnodes}", "--node-rank=#{node}", "--nproc-per-node=#{@nproc_per_node}",
      "--rdzv-backend=c10d", "--rdzv-endpoint=#{@endpoint}", "--rdzv-id=#{@job}", *@program]
  end

  # Shellwords would put a backslash before each sign that is not plain, also where quotes read better.
  def quoted(word)
    return word if word.match?(%r{\A[\w.,:/=@%+-]+\z})

    "'#{word.gsub("'", "'\\\\''")}'"
  end
end

return unless $PROGRAM_NAME == __FILE__

options = {nnodes: 2, nproc_per_node: "gpu", master_addr: Socket.gethostname, port: 29503, job: "resnet"}
parser = OptionParser.new do |opts|
  opts.banner = "Usage: ruby multi_node.rb [options] [--] [script.rb [its arguments]]"
  opts.on("--nnodes N", Integer, "machines (#{options[:nnodes]})")
  opts.on("--nproc-per-node N", /\A(?:[1-9]\d*|gpu|cpu|auto)\z/, "workers on each machine, or gpu: one for each GPU (#{options[:nproc_per_node]})")
  opts.on("--master-addr HOST", "the first machine, as the others call it (this one, #{options[:master_addr]})")
  opts.on("--port N", Integer, "a free port there (#{options[:port]})")
  opts.on("--job NAME", "the same on all machines, another for each job that runs at a time (#{options[:job]})")
end
refuse = ->(message) { abort "#{File.basename(__FILE__)}: #{message} (--help lists the options)" }
begin
  # What follows the script is the script's.
  program = parser.order(ARGV, into: given = {})
rescue OptionParser::ParseError => e
  refuse.call(e.message)
end
options.merge!(given.transform_keys { |name| name.to_s.tr("-", "_").to_sym })
refuse.call("--nnodes #{options[:nnodes]}: expected a number from 1 up") unless options[:nnodes].positive?
refuse.call("--port #{options[:port]}: expected 1 to 65535") unless options[:port].between?(1, 65_535)

if program.empty?
  options[:environment] = ["BUNDLE_WITH=vision"]
  program = ["examples/resnet/train_ddp.rb", "--epochs", "3", "--batch-size", "128", "--lr", "0.001"]
end
puts "Run on each machine, in the same folder of this repository:", ""
MultiNode.new(**options, program: program).commands.each_with_index do |command, node|
  puts node.zero? ? "# on #{options[:master_addr]}" : "# on machine #{node + 1} of #{options[:nnodes]}", command
end
