# frozen_string_literal: true

module Torch
  module Distributed
    class MemoryEstimate
      # What an optimizer keeps for each element, and what its step leaves for the garbage collector: measured, by steps of
      # a small parameter.
      #
      # @api private
      class OptimizerCost
        NAMED = {
          sgd: ->(params) { Torch::Optim::SGD.new(params, lr: 0.01) },
          sgd_momentum: ->(params) { Torch::Optim::SGD.new(params, lr: 0.01, momentum: 0.9) },
          adam: ->(params) { Torch::Optim::Adam.new(params) },
          adamw: ->(params) { Torch::Optim::AdamW.new(params) },
          fused_adam: ->(params) { Torch::Optim::Adam.new(params, fused: true) },
          fused_adamw: ->(params) { Torch::Optim::AdamW.new(params, fused: true) },
          rmsprop: ->(params) { Torch::Optim::RMSprop.new(params) },
          adagrad: ->(params) { Torch::Optim::Adagrad.new(params) },
          adadelta: ->(params) { Torch::Optim::Adadelta.new(params) },
          adamax: ->(params) { Torch::Optim::Adamax.new(params) }
        }.freeze

        # So that numbers which are one for each parameter don't count.
        ELEMENTS = 1 << 16

        # Bytes for each element of a dtype: of the state, and of what a step leaves.
        Cost = Struct.new(:state, :left)

        # @return [String] for tables
        attr_reader :name

        # @param optimizer [Symbol, String, Class, Integer, #call]
        # @raise [ArgumentError]
        def initialize(optimizer)
          @name = optimizer.is_a?(Proc) ? "a block's optimizer" : optimizer.to_s
          @costs = {}
          case optimizer
          when Integer then constant(optimizer)
          when Symbol, String then @make = NAMED[optimizer.to_s.downcase.to_sym]
          when Class then @make = ->(params) { made_of(optimizer, params) } if optimizer <= Torch::Optim::Optimizer
          else @make = optimizer if optimizer.respond_to?(:call)
          end
          return if @make || @constant

          raise ArgumentError, "optimizer: expected one of #{NAMED.keys.map(&:inspect).join(", ")}, a class of optimizers, a Proc that makes one of " \
            "parameters, or the bytes of its state for each parameter's element, got #{optimizer.inspect}"
        end

        # @param dtype [Symbol] of the parameters
        # @return [Cost]
        def of(dtype)
          @constant || (@costs[dtype] ||= measure(dtype))
        end

        private

        def constant(bytes)
          raise ArgumentError, "optimizer: expected 0 bytes or more for each parameter's element, got #{bytes}" if bytes.negative?

          @name = "an optimizer of #{bytes} bytes an element"
          @constant = Cost.new(bytes, 0)
        end

        # SGD has no learning rate of its own.
        def made_of(optimizer, params)
          lr = optimizer.instance_method(:initialize).parameters.include?([:keyreq, :lr])
          optimizer.new(params, **(lr ? {lr: 0.01} : {}))
        end

        def measure(dtype)
          parameter = Torch::NN::Parameter.new(Torch.ones(ELEMENTS, dtype: dtype))
          parameter.grad = Torch.ones(ELEMENTS, dtype: dtype)
          stepped = nil
          state = Measured.held { stepped = @make.call([parameter]).tap(&:step) }
          left = Measured.peak { stepped.step }
          Cost.new(*[state, left].map { |bytes| (bytes.to_f / ELEMENTS).round(1) })
        end
      end
      private_constant :OptimizerCost
    end
  end
end
