# frozen_string_literal: true

module Torch
  module NN
    module Parallel
      class DistributedDataParallel < Module
        # The parameters and buffers of a module: which are averaged, which are broadcast.
        #
        # @api private
        class Parameters
          SPARSE = 1
          DELAYED = 2
          IGNORED = :@_ddp_params_and_buffers_to_ignore
          private_constant :SPARSE, :DELAYED

          class << self
            # @return [Array<String>] names that are to be left alone
            def ignored(mod)
              mod.instance_variable_get(IGNORED) || []
            end

            # Torch-rb's `named_buffers` are those of one module without its children.
            #
            # @return [Hash{String => Torch::Tensor}]
            def named_buffers(mod)
              mod.named_modules.each_with_object({}) do |(prefix, each), named|
                each.named_buffers.each { |name, buffer| named[prefix.empty? ? name : "#{prefix}.#{name}"] = buffer if buffer.is_a?(Torch::Tensor) }
              end
            end

            # @return [Array<Torch::NN::Parameter>] those that get sparse gradients
            def sparse(mod)
              mod.modules.select { |each| sparse_module?(each) }.flat_map { |each| each.named_parameters(recurse: false).values }
            end

            private

            def sparse_module?(mod)
              (mod.is_a?(Embedding) || mod.is_a?(EmbeddingBag)) && mod.instance_variable_get(:@sparse)
            end
          end

          # @return [Array<Torch::NN::Parameter>] those that train, and their names
          attr_reader :trained, :names

          # @return [Array<Torch::NN::Parameter>] those that do not
          attr_reader :frozen

          # @return [Array<Torch::Tensor>]
          attr_reader :buffers

          # @param mod [Torch::NN::Module]
          def initialize(mod)
            ignored = Parameters.ignored(mod).to_h { |name| [name, true] }
            # Names are the model's own; a tensor that has two of them counts once.
            named = mod.named_parameters.reject { |name, _| ignored[name] }.uniq { |_, parameter| parameter.object_id }
            trained, frozen = named.partition { |_, parameter| parameter.requires_grad }
            @names = trained.map { |name, _| name }
            @trained = trained.map { |_, parameter| parameter }
            @frozen = frozen.map { |_, parameter| parameter }
            @sparse = Parameters.sparse(mod).to_h { |parameter| [parameter.object_id, true] }
            @buffers = Parameters.named_buffers(mod).reject { |name, _| ignored[name] }.values.uniq(&:object_id)
            check_whole(mod)
          end

          # A model is wrapped to train. Later on all may be frozen, as a discriminator's are while its generator learns.
          #
          # @raise [ArgumentError] if none trains
          def check_trained(mod)
            return unless @trained.empty?

            raise ArgumentError, "no parameter of the #{mod.class} requires a gradient#{" and is not to be ignored" unless Parameters.ignored(mod).empty?}: " \
              "there is nothing to average, and DistributedDataParallel is not needed"
          end

          # @param delayed [Array<Torch::NN::Parameter>]
          # @return [Array<Integer>] what the core is to know of each that trains
          def flags(delayed)
            delayed = delayed.to_h { |parameter| [parameter.object_id, true] }
            @trained.map do |parameter|
              (@sparse[parameter.object_id] ? SPARSE : 0) | (delayed[parameter.object_id] ? DELAYED : 0)
            end
          end

          # @param other [Parameters] of the same model, at another time
          # @return [Boolean] whether these are the same objects
          def same?(other)
            [[@trained, other.trained], [@frozen, other.frozen]].all? do |mine, theirs|
              mine.size == theirs.size && mine.zip(theirs).all? { |one, two| one.equal?(two) }
            end
          end

          def sparse?
            @trained.any? { |parameter| @sparse[parameter.object_id] }
          end

          # @return [Integer, nil] the number of one that trains
          def index(parameter)
            @trained.index { |each| each.equal?(parameter) }
          end

          # @return [Array<Torch::Tensor>] everything that is the same on all ranks
          def state
            @trained + @frozen + @buffers
          end

          private

          def check_whole(mod)
            return unless (@trained + @frozen).any? { |parameter| parameter.respond_to?(:to_local) }

            raise ArgumentError, "the #{mod.class} is sharded by FSDP, whose gradients are averages over all ranks already: expected one or the other; " \
              "a mesh of two dimensions replicates what it shards"
          end
        end
        private_constant :Parameters
      end
    end
  end
end
