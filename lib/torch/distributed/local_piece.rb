# frozen_string_literal: true

module Torch
  module Distributed
    # A tensor that has only what this process holds of one that several processes divide: a parameter that {FSDP} or a layout
    # divides, a copy of one, an optimizer's state of one. It knows that, so that no file gets it as if it were the whole.
    #
    # @api private
    module LocalPiece
      SHAPE = Torch::Tensor.instance_method(:shape)
      NUMEL = Torch::Tensor.instance_method(:numel)
      WHOLE = :@_whole_shape
      private_constant :SHAPE, :NUMEL, :WHOLE

      class << self
        # @param tensor [Torch::Tensor]
        # @param whole [Array<Integer>] the shape of the tensor that is divided
        # @return [Torch::Tensor] the same object
        def mark(tensor, whole)
          tensor.instance_variable_set(WHOLE, whole)
          tensor.extend(self)
        end

        # @param tensor [Torch::Tensor] also a {FSDP::ShardedParameter}, which answers for the whole parameter
        # @return [Array<Integer>] of what this process has
        def shape(tensor)
          SHAPE.bind_call(tensor)
        end

        # @return [Integer]
        def numel(tensor)
          NUMEL.bind_call(tensor)
        end

        # @return [Boolean] whether this process has only a part of it now
        def part?(tensor)
          tensor.is_a?(LocalPiece) && shape(tensor) != tensor.whole_shape
        end

        # @param call [String] what would write them
        # @param value [Object] tensors in Hashes and Arrays, or a module
        # @raise [ArgumentError] if one of them is a part
        def refuse(call, value)
          name, part = find(value)
          return unless part

          raise ArgumentError, "#{call}: #{name ? "#{name.inspect} is" : "this is"} this process's piece, of #{numel(part)} elements, of a " \
            "tensor of shape #{part.whole_shape} that other processes have parts of: give whole ones, from " \
            "Torch::Distributed.full_state_dict(model) or FSDP.full_optim_state_dict(model, optimizer), collective calls both, or save " \
            "in parts by Torch::Distributed::Checkpoint.save"
        end

        private

        # @return [Array(Object, Torch::Tensor), nil]
        def find(value)
          open = [[nil, value]]
          seen = {}.compare_by_identity
          until open.empty?
            name, each = open.pop
            return [name, each] if each.is_a?(Torch::Tensor) && part?(each)

            parts = parts_of(each) or next
            next if seen[each]

            seen[each] = true
            open.concat(parts.map { |key, part| [key.is_a?(String) ? key : name, part] })
          end
        end

        def parts_of(value)
          case value
          when Hash then value
          when Array then value.map { |each| [nil, each] }
          when Torch::NN::Module then value.named_parameters
          end
        end
      end

      # @return [Array<Integer>] of the tensor that is divided
      def whole_shape
        instance_variable_get(WHOLE)
      end

      # Copies are pieces as well.
      %i[clone dup detach to cpu cuda type float double half].each do |name|
        define_method(name) do |*arguments, **options, &block|
          copy = super(*arguments, **options, &block)
          (copy.equal?(self) || !LocalPiece.part?(self)) ? copy : LocalPiece.mark(copy, whole_shape)
        end
      end

      # Before Torch.save.
      module Saving
        def save(object, *)
          LocalPiece.refuse("Torch.save", object)
          super
        end
      end

      # Before a model's load_state_dict, which would copy whole tensors or another process's pieces to pieces.
      module Loading
        def load_state_dict(*, **)
          name, = named_parameters.find { |_, parameter| LocalPiece.part?(parameter) }
          return super unless name

          raise ArgumentError, "load_state_dict: this process has a piece of #{name.inspect}, other processes have the rest: load whole tensors by " \
            "Torch::Distributed.load_full_state_dict(model, state), on all of them, or what Torch::Distributed::Checkpoint.save wrote by its load"
        end
      end

      # What an optimizer keeps of pieces are pieces.
      module OptimizerStates
        def state_dict(...)
          @state.each do |parameter, kept|
            next unless parameter.is_a?(Torch::Tensor) && kept.is_a?(Hash) && LocalPiece.part?(parameter)

            own = LocalPiece.shape(parameter)
            kept.each_value { |value| LocalPiece.mark(value, parameter.whole_shape) if value.is_a?(Torch::Tensor) && value.shape == own }
          end
          super
        end
      end

      {Torch.singleton_class => Saving, Torch::NN::Module => Loading, Torch::Optim::Optimizer => OptimizerStates}
        .each { |extended, extension| extended.prepend(extension) }
    end
  end
end
