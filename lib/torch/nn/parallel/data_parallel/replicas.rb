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
      # While a module is copied its tensors are only collected; then all of them go to all devices at once.
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

        # Fresh tensors are cheaper by the dozen.
        FRESH = 16
        private_constant :FRESH

        class << self
          # The first is the module itself: what it keeps in forward stays, statistics in its buffers too. On the module's own
          # device a copy's parameters share the memory of the module's, its buffers do not.
          #
          # @param mod [Torch::NN::Module] with parameters and buffers on the first of the devices
          # @param devices [Array<String>]
          # @param apart [Boolean] on the module's own device, too, parameters are copied
          # @param home [String, nil] where the module is to be; nil: wherever it is
          # @return [Array<Torch::NN::Module>] one for each device
          # @raise [Torch::Distributed::InvalidArgumentError] if not all of its tensors are on one device, or not on `home`
          def of(mod, devices, apart: false, home: nil)
            others = devices.drop(1)
            replicas = others.map { new }
            copies = replicas.map { |replica| replica.copy(mod) }
            fill(replicas.map(&:parameters), others, apart, false, home)
            fill(replicas.map(&:buffers), others, true, true, home)
            [mod, *copies]
          end

          private

          # All came to the same tensors, in the same order.
          def fill(collected, devices, *how)
            tensors = collected.first&.keys
            return if tensors.nil? || tensors.empty?

            Distributed.__send__(:_replicate, tensors, devices, collected.flat_map(&:values), *how)
          end
        end

        # @return [Hash{Torch::Tensor => Torch::Tensor}] the module's own tensors, and what is to become their copies
        attr_reader :parameters, :buffers

        def initialize
          @parameters = {}.compare_by_identity
          @buffers = {}.compare_by_identity
          @modules = {}.compare_by_identity
          @fresh = []
        end

        # @param mod [Torch::NN::Module]
        # @return [Torch::NN::Module] whose tensors are to be filled
        def copy(mod)
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
            copy.extend(Copy)
          end
        end

        private

        def buffers_of(mod)
          mod.named_buffers.values.compact.to_h { |buffer| [buffer, true] }.compare_by_identity
        end

        def of(value, buffers)
          case value
          when Torch::NN::Parameter then parameter(value)
          when Torch::NN::Module then copy(value)
          when Torch::Tensor then buffers.key?(value) ? buffer(value) : value
          when Array then value.map { |part| of(part, buffers) }
          when Hash then value.to_h { |key, part| [key, of(part, buffers)] }
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
