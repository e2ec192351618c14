# frozen_string_literal: true

module Torch
  module Distributed
    module Tensor
      module Parallel
        # How a module is divided and run: what the plan of {Parallel.parallelize_module} consists of.
        #
        # Placements say what a process has of an input or output: `Tensor.replicate` all of it, `Tensor.shard(1)` an equal part along
        # that dimension. A tensor that goes into several divided modules can be prepared for all of them in one operation, also
        # backwards, if it is `Tensor.replicate(gradient: :partial)`.
        #
        # @abstract
        class ParallelStyle
          WHOLE = Tensor.replicate
          PARTIAL = Tensor.replicate(gradient: :partial)
          FEATURES = Tensor.shard(-1)
          private_constant :WHOLE, :PARTIAL, :FEATURES

          # @api private
          # @param _target [Target]
          # @param _group [ProcessGroup]
          # @return [Hash{String => Array(Torch::NN::Parameter, Layout)}] by the parameters' names
          # @raise [ArgumentError] if the module can't be run so
          def layouts(_target, _group)
            {}
          end

          # @api private
          # @param inputs [Array<Object>] with `kwargs` what the module is called with
          # @param forward [Proc] runs the module with (inputs, kwargs)
          # @return [Object] what the call returns
          def run(_target, _group, inputs, kwargs, forward)
            forward.call(inputs, kwargs)
          end

          # @return [String]
          def inspect
            options = instance_variables.map { |name| "#{name[1..]}: #{instance_variable_get(name).inspect}" }
            "#{self.class.name[/\w+\z/]}(#{options.join(", ")})"
          end

          private

          def placement(name, value, default = nil)
            value = default if value.nil?
            return value if value.is_a?(Shard) || value.is_a?(Replicate) || (value.nil? && default.nil?)

            raise TypeError, "#{name}: expected a placement such as Tensor.shard(1) or Tensor.replicate, got #{value.inspect}"
          end

          # @param parameters [Hash{String => Torch::NN::Parameter}]
          # @param dims [Hash{String => Integer}] along which they are divided; the others are not
          def layouts_of(target, group, parameters, dims = {}, blocks: 1)
            parameters.to_h do |name, parameter|
              check_unwrapped(parameter)
              shape = (Tensor.layout(parameter) || parameter).shape
              [name, [parameter, Layout.new(group, shape, dim: dims[name], blocks: blocks)]]
            rescue ArgumentError => e
              raise ArgumentError, "#{target}: #{name}: #{e.message}"
            end
          end

          def check_unwrapped(parameter)
            raise ArgumentError, "it is sharded by FSDP already: divide the model, then shard it" if FSDP.sharded?(parameter)
            return unless Torch::NN::Parallel::DistributedDataParallel.trains?(parameter)

            raise ArgumentError, "it is in a DistributedDataParallel already: divide the model, then wrap it"
          end
        end

        # Gives a module's inputs another placement.
        #
        #   "attention" => PrepareModuleInput.new(
        #     input_layouts: Tensor.shard(1), desired_input_layouts: Tensor.replicate(gradient: :partial)
        #   )
        #   "attention.query" => ColwiseParallel.new(input_layouts: Tensor.replicate(gradient: :partial))
        class PrepareModuleInput < ParallelStyle
          # @param input_layouts [Shard, Replicate, nil, Array] those of the positional arguments; nil for one that is left as it is
          # @param desired_input_layouts [Shard, Replicate, nil, Array] what they are to have
          # @param input_kwarg_layouts [Hash{Symbol => Shard, Replicate}] those of keyword arguments
          # @param desired_input_kwarg_layouts [Hash{Symbol => Shard, Replicate}]
          def initialize(input_layouts: nil, desired_input_layouts: nil, input_kwarg_layouts: {}, desired_input_kwarg_layouts: {})
            super()
            @inputs = Preparation.new("input_layouts", input_layouts, desired_input_layouts)
            @kwargs = Preparation.new("input_kwarg_layouts", input_kwarg_layouts, desired_input_kwarg_layouts)
          end

          # @api private
          def run(target, group, inputs, kwargs, forward)
            forward.call(@inputs.list(target, inputs, group), @kwargs.hash(target, kwargs, group))
          end
        end

        # Gives a module's outputs another placement.
        class PrepareModuleOutput < ParallelStyle
          # @param output_layouts [Shard, Replicate, nil, Array] those of the outputs; nil for one that is left as it is
          # @param desired_output_layouts [Shard, Replicate, nil, Array] what they are to have
          def initialize(output_layouts:, desired_output_layouts:)
            super()
            @outputs = Preparation.new("output_layouts", output_layouts, desired_output_layouts)
          end

          # @api private
          def run(target, group, inputs, kwargs, forward)
            output = forward.call(inputs, kwargs)
            output.is_a?(Array) ? @outputs.list(target, output, group) : @outputs.list(target, [output], group).first
          end
        end

        # Gives a module's inputs and its outputs another placement.
        class PrepareModuleInputOutput < ParallelStyle
          # @param options [Hash] those of {PrepareModuleInput#initialize}
          # @see PrepareModuleOutput#initialize for the other arguments
          def initialize(output_layouts:, desired_output_layouts:, **options)
            super()
            @input = PrepareModuleInput.new(**options)
            @output = PrepareModuleOutput.new(output_layouts: output_layouts, desired_output_layouts: desired_output_layouts)
          end

          # @api private
          def run(target, group, inputs, kwargs, forward)
            @output.run(target, group, inputs, kwargs, ->(args, options) { @input.run(target, group, args, options, forward) })
          end
        end

        # Runs a module on this process's part of the sequence: a norm, a dropout, or several in one module. Its parameters are the same
        # on all processes, and get the sum of all their gradients; its random numbers are this process's own ({Random.divided}).
        class SequenceParallel < ParallelStyle
          # @param sequence_dim [Integer] for PyTorch's sake: the input is this process's part already
          def initialize(sequence_dim: 1)
            super()
            @sequence_dim = sequence_dim
          end

          # @api private
          def layouts(target, group)
            layouts_of(target, group, target.mod.named_parameters)
          end

          # @api private
          def run(target, group, inputs, kwargs, forward)
            Random.within(target.mod.training ? group : nil) { summing(target.mod, group) { forward.call(inputs, kwargs) } }
          end

          private

          # The parameters' gradients are all processes' sums: during the block the module has copies whose gradients are.
          def summing(mod, group)
            places = (group.size > 1 && Torch.grad_enabled?) ? places(mod) : []
            return yield if places.empty?

            copies = copies(places.map(&:last).uniq(&:object_id), group)
            begin
              places.each { |write, parameter| write.call(copies.fetch(parameter)) }
              yield
            ensure
              places.each { |write, parameter| write.call(parameter) }
            end
          end

          # @return [Array<Array(Proc, Torch::NN::Parameter)>] where parameters that train are kept
          def places(mod)
            mod.modules.flat_map do |each|
              registered = each.instance_variable_get(:@parameters)
              fields = each.instance_variables.map do |name|
                [->(value) { each.instance_variable_set(name, value) }, each.instance_variable_get(name)]
              end
              entries = registered.map { |key, value| [->(other) { registered[key] = other }, value] }
              (fields + entries).select { |_, value| value.is_a?(Torch::NN::Parameter) && value.requires_grad }
            end
          end

          # All of them in one operation, in backward.
          def copies(parameters, group)
            found = {}.compare_by_identity
            parameters.group_by(&:dtype).each_value do |list|
              flat = NN.copy_to_region(Torch.cat(list.map { |each| each.reshape(-1) }), group: group)
              list.inject(0) do |offset, each|
                found[each] = flat.narrow(0, offset, each.numel).view(each.shape)
                offset + each.numel
              end
            end
            found
          end
        end

        # What a list of placements has to become.
        #
        # @api private
        class Preparation
          def initialize(name, given, desired)
            @name = name
            @pairs = given.is_a?(Hash) ? by_key(given, desired) : by_place(Array(given), Array(desired))
            @pairs.each_value { |from, to| check(from, to) }
          end

          # @param values [Array<Object>]
          # @return [Array<Object>]
          def list(target, values, group)
            unless @pairs.empty? || @pairs.size == values.size
              raise ArgumentError, "#{target}: #{@name}: expected #{values.size} placements, as many as there are values, " \
                "got #{@pairs.size}"
            end

            values.each_with_index.map { |value, i| move(target, value, @pairs[i], group) }
          end

          # @param values [Hash{Symbol => Object}]
          # @return [Hash{Symbol => Object}]
          def hash(target, values, group)
            values.to_h { |key, value| [key, move(target, value, @pairs[key], group)] }
          end

          def inspect
            @pairs.map { |key, (from, to)| "#{"#{key}: " if key.is_a?(Symbol)}#{from.inspect} to #{to.inspect}" }.inspect
          end

          private

          def by_place(given, desired)
            unless given.size == desired.size
              raise ArgumentError, "desired_#{@name}: expected #{given.size} placements, as many as #{@name}, got #{desired.size}"
            end

            given.zip(desired).each_with_index.to_h { |pair, i| [i, pair] }
          end

          def by_key(given, desired)
            unless desired.is_a?(Hash) && given.keys.sort == desired.keys.sort
              raise ArgumentError, "desired_#{@name}: expected placements of #{given.keys.inspect}, as #{@name}, got #{desired.inspect}"
            end

            given.to_h { |key, from| [key.to_sym, [from, desired[key]]] }
          end

          def check(from, to)
            return if from.nil? && to.nil?

            wrong = [from, to].find { |each| !(each.is_a?(Shard) || each.is_a?(Replicate)) }
            raise TypeError, "#{@name}: expected placements such as Tensor.shard(1) or Tensor.replicate, got #{wrong.inspect}" if wrong
            return unless from.is_a?(Replicate) && from.gradient && to.is_a?(Replicate) && !to.gradient

            raise ArgumentError, "#{@name}: expected another than #{from}, which can't become #{to}"
          end

          def move(target, value, pair, group)
            from, to = pair
            return value if from.nil? || value.nil?

            Distributed.send(:check_tensor, "#{target}: #{@name}", value)
            Redistribution.call(target, value, from, to, group)
          end
        end
        private_constant :Preparation
      end
    end
  end
end
