# frozen_string_literal: true

require "torch_ddp/error_file"

module Torch
  module Distributed
    # A worker's dealings with its launcher, our torchrun or Python's.
    #
    # An exception that is not rescued is reported automatically, in the file that TORCHELASTIC_ERROR_FILE names, once
    # `torch/distributed` is loaded; under our torchrun from the script's first line on.
    module Elastic
      FAILURES = [StandardError, ScriptError, NoMemoryError, SystemStackError].freeze
      private_constant :FAILURES

      # Reports an exception in the block to the launcher, also if the program rescues it later; PyTorch's `record`.
      #
      #   Torch::Distributed::Elastic.record { train }
      #
      #   main = Torch::Distributed::Elastic.record(method(:main))
      #   main.call(ARGV)
      #
      # @param callable [#call, nil] instead of a block
      # @return [Object, Proc] the block's value; or what calls `callable` with the arguments and the block it is given
      def self.record(callable = nil, &block)
        if callable
          raise ArgumentError, "record: expected a block or something to call, got both" if block

          return ->(*arguments, **options, &inner) { record { callable.call(*arguments, **options, &inner) } }
        end
        raise ArgumentError, "record: expected a block or something to call" unless block

        begin
          yield
        rescue *FAILURES => e
          TorchDDP::ErrorFile.write(e)
          raise
        end
      end

      TorchDDP::ErrorFile.install
    end
  end
end
