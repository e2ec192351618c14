# frozen_string_literal: true

module Torch
  module NN
    module Parallel
      # Copies of a module on other devices whose gradients flow back to it.
      #
      # A copy has the module's own objects, but for parameters (tensors that autograd knows to come from them), buffers (copies
      # of their own) and modules within (copies in turn), wherever those stand: in instance variables, Arrays or Hashes. So no kind
      # of layer is named here.
      #
      # While a module is copied its tensors are only collected; then all of them go to all devices at once. The copies may be
      # used for further calls: their tensors are new for each, and the rest is compared with what was copied.
      #
      # @api private
      class Replicas
        # What a copy answers where it is asked for its parameters: layers do that, and losses with a penalty.
        module Copy
          def named_parameters(prefix: "", recurse: true)
            found = {}
            named_children.each { |name, mod| found.merge!(mod.named_parameters(prefix: "#{prefix}#{name}.")) } if recurse
            @_replica_parameters.each { |name, tensor| found["#{prefix}#{name}"] = tensor }
            found
          end
        end

        # What a module, an Array or a Hash held at some time.
        class Held
          def initialize(object)
            @object = object
            @names = names
            @values = values
          end

          # @return [Boolean] whether it holds the same objects still, in the same places
          def current?
            return false unless names == @names

            found = values
            i = -1
            found.size == @values.size && found.all? { |value| value.equal?(@values[i += 1]) }
          end

          private

          def names
            case @object
            when Array then nil
            when Hash then @object.keys
            else @object.instance_variables
            end
          end

          def values
            case @object
            when Array then @object.dup
            when Hash then @object.values
            else @names.map { |name| @object.instance_variable_get(name) }
            end
          end
        end

        # Fresh tensors are cheaper by the dozen.
        FRESH = 16
        private_constant :Held, :FRESH

        class << self
          # The first is the module itself: what it keeps in forward stays, statistics in its buffers too. On the module's own
          # device a copy's parameters share the memory of the module's, its buffers do not.
          #
          # @param mod [Torch::NN::Module] with parameters and buffers on the first of the devices
          # @param devices [Array<String>]
          # @param apart [Boolean] on the module's own device, too, parameters are copied
          # @param home [String, nil] where the module is to be; nil: wherever it is
          # @param kept [Array<Replicas>] of a call before, which must be over; they are used as long as the module is what it was.
          #   Afterwards those of this call
          # @return [Array<Torch::NN::Module>] one for each device
          # @raise [Torch::Distributed::InvalidArgumentError] if not all of its tensors are on one device, or not on `home`
          def of(mod, devices, apart: false, home: nil, kept: [])
            others = devices.drop(1)
            replicas = kept.first(others.size)
            unless replicas.size == others.size && replicas.all? { |replica| replica.current?(mod) }
              kept.replace(replicas = others.map { new(mod) })
            end
            fill(replicas.map(&:parameters), others, apart, false, home)
            fill(replicas.map(&:buffers), others, true, true, home)
            [mod, *replicas.map(&:copy)]
          end

          private

          # All came to the same tensors, in the same order.
          def fill(collected, devices, *how)
            tensors = collected.first&.keys
            return if tensors.nil? || tensors.empty?

            Distributed.__send__(:_replicate, tensors, devices, collected.flat_map(&:values), *how)
          end
        end

        # @return [Torch::NN::Module] whose tensors are to be filled
        attr_reader :copy

        # @return [Hash{Torch::Tensor => Torch::Tensor}] the module's own tensors, and what is to become their copies
        attr_reader :parameters, :buffers

        # @param mod [Torch::NN::Module]
        def initialize(mod)
          @mod = mod
          @parameters = {}.compare_by_identity
          @buffers = {}.compare_by_identity
          @modules = {}.compare_by_identity
          @held = []
          @known = true
          @fresh = []
          @copy = copy_of(mod)
        end

        # @return [Boolean] whether a copy made now would be what this one is, but for what is in its tensors: all modules within and
        #   their copies have the objects that they had, in their Arrays and Hashes too
        def current?(mod)
          @known && mod.equal?(@mod) && @held.all?(&:current?)
        end

        private

        def copy_of(mod)
          @modules[mod] ||= begin
            copy = mod.dup
            @modules[mod] = copy
            names = mod.named_parameters(recurse: false)
            buffers = buffers_of(mod)
            mod.instance_variables.each do |name|
              value = mod.instance_variable_get(name)
              copied = of(value, buffers)
              copy.instance_variable_set(name, copied) unless copied.equal?(value)
            end
            copy.instance_variable_set(:@_replica_parameters, names.transform_values { |parameter| parameter(parameter) })
            # Others may have their tensors from anywhere.
            @known &&= %i[named_parameters named_buffers].all? { |name| mod.method(name).owner == Torch::NN::Module }
            keep(mod, copy.extend(Copy))
          end
        end

        def keep(original, copy)
          @held.push(Held.new(original), Held.new(copy))
          copy
        end

        def buffers_of(mod)
          mod.named_buffers.values.compact.to_h { |buffer| [buffer, true] }.compare_by_identity
        end

        def of(value, buffers)
          case value
          when Torch::NN::Parameter then parameter(value)
          when Torch::NN::Module then copy_of(value)
          when Torch::Tensor then buffers.key?(value) ? buffer(value) : value
          when Array then keep(value, value.map { |part| of(part, buffers) })
          when Hash then keep(value, value.to_h { |key, part| [key, of(part, buffers)] })
          else value
          end
        end

        def parameter(tensor)
          @parameters[tensor] ||= fresh
        end

        # Statistics of other parts are not the module's.
        def buffer(tensor)
          @buffers[tensor] ||= fresh
        end

        def fresh
          @fresh = Distributed.__send__(:_fresh_tensors, FRESH) if @fresh.empty?
          @fresh.pop
        end
      end
    end
  end
end
