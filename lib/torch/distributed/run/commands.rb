# frozen_string_literal: true

require "shellwords"
require "socket"

module Torch
  module Distributed
    module Run
      # The torchrun commands of a job on several machines.
      #
      # @api private
      class Commands
        # As torchrun's own for a wrong command line.
        STATUS = 2
        private_constant :STATUS

        # @param arguments [Arguments]
        def initialize(arguments)
          @nodes = arguments.nodes
          @processes = arguments.processes
          @address = ENV["MASTER_ADDR"] || Socket.gethostname
          @port = Rendezvous.env_integer("MASTER_PORT") || Rendezvous::DEFAULT_PORT
        end

        # Prints the commands and ends the program.
        def leave_to_torchrun
          @nodes.times do |node|
            puts "# on #{node.zero? ? @address : "machine #{node + 1} of #{@nodes}"}", command(node)
          end
          $stdout.flush
          warn ["nodes: #{@nodes}, but no launcher started this process: run the commands above, one on each machine",
            Schedulers.obstacle].compact.join(". ")
          exit STATUS
        end

        # @return [String] for the shell
        def command(node)
          [*bundler, "torchrun", "--nnodes=#{@nodes}", "--node-rank=#{node}", "--nproc-per-node=#{@processes}",
            "--master-addr=#{@address}", "--master-port=#{@port}", $PROGRAM_NAME, *SPAWN_ARGV].map { |word| quoted(word) }.join(" ")
        end

        private

        # Shellwords puts a backslash before "=" as well.
        def quoted(word)
          word.match?(%r{\A[\w.,:/=@%+-]+\z}) ? word : word.shellescape
        end

        def bundler
          ENV.key?("BUNDLE_GEMFILE") ? %w[bundle exec] : []
        end
      end
    end
  end
end
