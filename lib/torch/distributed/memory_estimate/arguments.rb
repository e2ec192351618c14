# frozen_string_literal: true

module Torch
  module Distributed
    class MemoryEstimate
      # Checks what {MemoryStats#estimate_memory} is given.
      #
      # @api private
      module Arguments
        class << self
          def check_model(model)
            raise TypeError, "model: expected a Torch::NN::Module, got #{model.inspect}" unless model.is_a?(Torch::NN::Module)
            if model.is_a?(Torch::NN::Parallel::DistributedDataParallel)
              raise ArgumentError, "model: expected the model itself, got a #{model.class}: pass its `module`"
            end
            raise ArgumentError, "model: expected one with parameters, this #{model.class} has none" if model.parameters.empty?
          end

          # @return [Integer]
          def ranks(world_size)
            world_size = Distributed.get_world_size if world_size.nil? && Distributed.initialized?
            return world_size if world_size.is_a?(Integer) && world_size.positive?

            raise ArgumentError, "world_size: expected a number of ranks, 1 or more#{", as there is no process group" if world_size.nil?}, " \
              "got #{world_size.inspect}"
          end

          # @return [Array<Symbol>]
          def strategies(given)
            return STRATEGIES if given.nil?

            asked = Array(given).map { |each| each.is_a?(String) ? each.downcase.to_sym : each }
            wrong = asked.reject { |each| STRATEGIES.include?(each) }
            return asked.uniq if wrong.empty? && asked.any?

            raise ArgumentError, "strategy: expected some of #{STRATEGIES.inspect}, or nil for all, got #{given.inspect}"
          end

          # @return [Integer, nil]
          def limit(given)
            return given&.to_i if given.nil? || given.is_a?(Numeric) && given.real? && given.positive?

            raise ArgumentError, "limit: expected a number of bytes, more than 0, or nil, got #{given.inspect}"
          end

          def check_batch(batch, checkpoint_ratio, loss)
            unless batch.is_a?(Array) ? batch.any? : [NilClass, Torch::Tensor].any? { |each| batch.is_a?(each) }
              raise ArgumentError, "batch: expected the model's input, a Torch::Tensor or an Array of all its inputs, or nil, got #{batch.inspect}"
            end
            {checkpoint_ratio: checkpoint_ratio, "a block": loss}.each do |name, value|
              raise ArgumentError, "#{name}: expected a batch: beside it" if value && batch.nil?
            end
            return if checkpoint_ratio.nil? || checkpoint_ratio.is_a?(Numeric) && checkpoint_ratio.real? && checkpoint_ratio.between?(0, 1)

            raise ArgumentError, "checkpoint_ratio: expected a number from 0 to 1, or nil, got #{checkpoint_ratio.inspect}"
          end
        end
      end
      private_constant :Arguments
    end
  end
end
