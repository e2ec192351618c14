# frozen_string_literal: true

require "torch/distributed/nested"

module Torch
  module NN
    module Parallel
      # Divides inputs among devices, and concatenates the outputs of the parts. Autograd records all of it.
      #
      # @api private
      module ScatterGather
        # How the scalars of several replicas become one.
        SCALARS = %i[mean sum stack].freeze

        # The inputs of one replica, and how many samples are in them.
        Part = Struct.new(:inputs, :kwargs, :samples)

        class << self
          # Tensors are divided along `dim`, as evenly as whole samples allow, the larger parts first. Tensors without
          # dimensions and everything else go to every replica. There are fewer parts than devices where there are fewer samples.
          #
          # @param inputs [Array]
          # @param kwargs [Hash]
          # @param devices [Array<String>]
          # @return [Array<Part>] at least one
          # @raise [ArgumentError] if tensors do not agree on the number of samples, or have none along `dim`
          def scatter(inputs, kwargs, devices, dim)
            samples = samples_in([inputs, kwargs], dim)
            return [Part.new(on(devices.first, inputs), on(devices.first, kwargs), samples)] if samples.nil? || samples.zero?

            sizes = sizes_of(samples, devices.size)
            devices.first(sizes.size).each_with_index.map do |device, i|
              first = sizes.first(i).sum
              Part.new(*[inputs, kwargs].map { |value| part(value, device, dim, first, sizes[i]) }, sizes[i])
            end
          end

          # What replicas returned becomes one value of the same form. Tensors are joined along `dim`; scalars are averaged with
          # the weights of the samples they come from, so that the mean over a batch is what it was (`:sum` adds them, `:stack` gives
          # PyTorch's vector of them); integers without dimensions, which count something, are added. What is no tensor must be
          # equal on all.
          #
          # @param outputs [Array] of each replica
          # @param device [String]
          # @param weights [Array<Numeric>] of each replica: its samples
          # @param scalars [Symbol]
          # @raise [ArgumentError] if the replicas' outputs cannot be one
          def gather(outputs, device, dim, weights: [1] * outputs.size, scalars: :stack)
            return Distributed::Nested.map(outputs.first) { |tensor| alone(tensor.to(device), scalars) } if outputs.size == 1

            join(outputs, device, dim, weights, scalars)
          end

          private

          def samples_in(value, dim)
            found = Distributed::Nested.tensors(value).reject { |tensor| tensor.dim.zero? }
            found.each do |tensor|
              next if dim.between?(-tensor.dim, tensor.dim - 1)

              raise ArgumentError, "dim #{dim}: an input of shape #{tensor.shape} has dimensions #{-tensor.dim} to #{tensor.dim - 1}"
            end
            sizes = found.map { |tensor| tensor.size(dim) }.uniq
            return sizes.first if sizes.size <= 1

            raise ArgumentError, "inputs have #{sizes.join(" and ")} samples along dimension #{dim}: expected the same, as they are divided in the same way; " \
              "what every replica is to have whole goes into the module, or through a block"
          end

          # As Torch.chunk does.
          def sizes_of(samples, parts)
            each = (samples + parts - 1) / parts
            (0...parts).map { |i| [each, samples - i * each].min }.select(&:positive?)
          end

          def part(value, device, dim, first, size)
            Distributed::Nested.map(value) do |tensor|
              (tensor.dim.zero? ? tensor : tensor.narrow(dim, first, size)).to(device)
            end
          end

          def on(device, value)
            Distributed::Nested.to(value, device)
          end

          def alone(tensor, scalars)
            (tensor.dim.zero? && scalars == :stack) ? tensor.unsqueeze(0) : tensor
          end

          def join(outputs, device, dim, weights, scalars)
            check_alike(outputs)
            first = outputs.first
            return join_tensors(outputs.map { |tensor| tensor.to(device) }, dim, weights, scalars) if first.is_a?(Torch::Tensor)
            return the_same(outputs) unless Distributed::Nested.container?(first)

            parts = outputs.map { |output| Distributed::Nested.parts_of(output) }
            Distributed::Nested.with(first, parts.first.to_h { |key, _| [key, join(parts.map { |each| each.fetch(key) }, device, dim, weights, scalars)] })
          end

          def the_same(outputs)
            return outputs.first if outputs.uniq.size == 1

            raise ArgumentError, "replicas returned #{outputs.map(&:inspect).join(" and ")}: expected tensors, or what is the same on all"
          end

          def check_alike(outputs)
            kinds = outputs.map { |output| output.is_a?(Torch::Tensor) ? Torch::Tensor : output.class }
            forms = outputs.map { |output| form_of(output) }
            return if kinds.uniq.size == 1 && forms.uniq.size == 1

            raise ArgumentError, "replicas returned #{outputs.map { |output| describe(output) }.join(" and ")}: expected the same form of all"
          end

          def form_of(output)
            case output
            when Array then output.size
            when Hash then output.keys
            end
          end

          def describe(output)
            case output
            when Array then "an Array of #{output.size}"
            when Hash then "a Hash with #{output.keys.inspect}"
            else "a #{output.class}"
            end
          end

          def join_tensors(tensors, dim, weights, scalars)
            return Torch.cat(tensors, dim) unless tensors.first.dim.zero?

            stacked = Torch.stack(tensors)
            return stacked if scalars == :stack

            counts = !stacked.floating_point? && !stacked.complex?
            return stacked.sum if scalars == :sum || counts

            (stacked * Torch.tensor(weights.map(&:to_f), dtype: stacked.dtype, device: stacked.device) / weights.sum).sum
          end
        end
      end
    end
  end
end
