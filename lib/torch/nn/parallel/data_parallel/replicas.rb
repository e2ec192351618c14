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

        # The first is the module itself: what it keeps in forward stays, statistics in its buffers too.
        #
        # @param mod [Torch::NN::Module] on the first of the devices
        # @param devices [Array<String>]
        # @return [Array<Torch::NN::Module>] one for each device
        def self.of(mod, devices)
          [mod, *devices.drop(1).map { |device| new(device).copy(mod) }]
        end

        # @param device [String]
        def initialize(device)
          @device = device
          @copies = {}.compare_by_identity
        end

        # @param mod [Torch::NN::Module]
        # @return [Torch::NN::Module]
        def copy(mod)
          @copies[mod] ||= begin
            copy = mod.dup
            @copies[mod] = copy
            names = mod.named_parameters(recurse: false)
            buffers = buffers_of(mod)
            mod.instance_variables.each do |name|
              value = mod.instance_variable_get(name)
              copy.instance_variable_set(name, of(value, buffers))
            end
            copy.instance_variable_set(:@_replica_parameters, names.transform_values { |parameter| tensor(parameter) })
            copy.extend(Copy)
          end
        end

        private

        def buffers_of(mod)
          mod.named_buffers.values.compact.to_h { |buffer| [buffer, true] }.compare_by_identity
        end

        def of(value, buffers)
          case value
          when Torch::NN::Parameter then tensor(value)
          when Torch::NN::Module then copy(value)
          when Torch::Tensor then buffers.key?(value) ? buffer(value) : value
          when Array then value.map { |part| of(part, buffers) }
          when Hash then value.to_h { |key, part| [key, of(part, buffers)] }
          else value
          end
        end

        # Of a tensor on this very device autograd still sees one of its own: gradients are added up either way.
        def tensor(parameter)
          @copies[parameter] ||= here?(parameter) ? parameter.view_as(parameter) : parameter.to(@device)
        end

        def here?(tensor)
          Parallel.device(tensor.device) == @device
        end

        # Statistics of other parts are not the module's.
        def buffer(tensor)
          @copies[tensor] ||= here?(tensor) ? tensor.detach.clone : tensor.detach.to(@device)
        end
      end
    end
  end
end
