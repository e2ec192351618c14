# frozen_string_literal: true

require "json"
require "tmpdir"

module Torch
  module Distributed
    module Elastic
      # One torchrun for {Elastic.launch}: workers leave their values in a folder, torchrun its report.
      #
      # @api private
      class Launcher
        TORCHRUN = File.expand_path("../../../../bin/torchrun", __dir__)
        # torchrun's status for a wrong command line.
        USAGE = 2
        private_constant :TORCHRUN, :USAGE

        # @param flags [Array<String>] torchrun's
        # @param program [Array<String>] what the workers run, and before it flags that say how
        def initialize(flags, program)
          @flags = flags
          @program = program
        end

        # @param call [Spawned::Call, nil] the call that the workers are for; nil: they are a script
        # @return [Hash{Integer => Object}] the workers' values, by rank
        def run(call)
          Dir.mktmpdir("torch-ddp") do |folder|
            status = await(start(folder, environment(call, folder)))
            report = read_report(folder)
            raise failure(status, report) unless status.success?

            report.fetch("ranks").to_h { |rank| [rank, value(folder, rank)] }
          end
        end

        private

        # What is not given to torchrun is not taken from the environment, either.
        def environment(call, folder)
          env = ENV.keys.grep(/\APET_/).to_h { |name| [name, nil] }
          return env unless call

          results = File.join(folder, "results")
          File.open(results, "wb") { |file| Spawned.write_results(file) }
          env.update(Spawned.environment(call, folder, results))
        end

        # torchrun ends with this process, and the workers with torchrun. Its few lines of Ruby need no gems; the workers have all.
        def start(folder, env)
          command = [RbConfig.ruby, "--disable=gems,rubyopt", TORCHRUN, *@flags, "--report-file=#{report_file(folder)}", *@program]
          Thread.handle_interrupt(Object => :never) do
            Process.fork do
              Distributed.send(:_die_with_parent)
              Process.exec(env, *command)
            rescue SystemCallError => e
              warn "torch-ddp: #{e.message}"
            ensure
              Process.exit!(1)
            end
          end
        end

        # An exception from outside, Ctrl-C for instance, ends the workers first; a second one does not wait for that.
        def await(pid)
          status = Process.wait2(pid).last
        ensure
          unless status
            begin
              Process.kill(:TERM, pid)
              finished = Process.wait(pid)
            ensure
              Process.kill(:KILL, pid) && Process.wait(pid) unless finished
            end
          end
        end

        def report_file(folder)
          File.join(folder, "report.json")
        end

        def read_report(folder)
          JSON.parse(File.read(report_file(folder)))
        rescue Errno::ENOENT
          {}
        end

        # A script leaves none, nor does a block that calls `exit!`.
        def value(folder, rank)
          bytes = File.binread(File.join(folder, rank.to_s))
          Marshal.load(bytes) unless bytes.empty?
        rescue Errno::ENOENT
          nil
        end

        def failure(status, report)
          return InvalidArgumentError.new("torchrun does not take this configuration: its message is above") if status.exitstatus == USAGE

          attempt = report.fetch("attempts", []).last
          return Error.new("the job was ended by #{report["signal"]}") if report["signal"]
          return ChildFailedError.of(report.fetch("program"), attempt) if attempt && ended_by?(attempt, report["cause"])
          return Error.new("the job failed: #{report["cause"]}") if report["cause"]

          Error.new("torchrun (#{status}) started no worker: its message is above")
        end

        # Whether the job ended because of this attempt: with several nodes the cause is what all agree on, the failure of a worker here
        # or elsewhere, or something else after that.
        def ended_by?(attempt, cause)
          root = attempt.fetch("failures").first
          cause.nil? || !attempt["elsewhere"].nil? || cause.start_with?("rank #{root && root["rank"]} on node #{attempt["node_rank"]}:")
        end
      end
    end
  end
end
