# frozen_string_literal: true

module Torch
  module Distributed
    # The last operations of every group of this process, on request: `torchfrtrace` merges what the ranks wrote and
    # says who went astray.
    #
    # With TDDP_FR_DUMP (or PyTorch's TORCH_FR_DUMP_TEMP_FILE) set, they are also written when a group fails, when an
    # operation times out, when the process gets SIGUSR1, and when a signal such as SIGTERM ends it:
    #
    #   TDDP_FR_DUMP=/var/tmp/traces/ bundle exec torchrun --nproc-per-node=2 train.rb
    #   bundle exec torchfrtrace /var/tmp/traces
    module FlightRecorder
      VARIABLES = %w[TDDP_FR_DUMP TORCH_FR_DUMP_TEMP_FILE TORCH_NCCL_DEBUG_INFO_TEMP_FILE].freeze
      private_constant :VARIABLES

      # Writes what this rank knows, one file.
      #
      # @param prefix [String, nil] a folder, or what the file's name begins with; nil: what TDDP_FR_DUMP says
      # @return [Integer] how many files were written: 0 without a process group, or if nothing says where to
      # @raise [SystemError] naming the path
      def dump_flight_recorder(prefix = nil)
        _dump_flight_recorder(prefix)
      end

      private

      # A handler that was there before is called as well.
      def dump_on_signal
        return if @dumps_on_signal == Process.pid || VARIABLES.none? { |name| ENV[name] && !ENV[name].empty? }

        @dumps_on_signal = Process.pid
        before = trap("USR1") do
          try_to_dump
          before.call if before.respond_to?(:call)
        end
      end

      def try_to_dump
        dump_flight_recorder
      rescue Error => e
        warn "torch-ddp: no flight recorder: #{e.message}"
      end
    end
  end
end
