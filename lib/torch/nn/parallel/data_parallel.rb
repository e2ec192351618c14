# frozen_string_literal: true

require "torch/distributed"

require_relative "data_parallel/replicas"
require_relative "data_parallel/scatter_gather"
require_relative "wrapper"

module Torch
  module NN
    module Parallel
      # Trains one module on several devices of one process: each call divides its inputs along one dimension, runs a copy of
      # the module for each part, and puts the outputs together. The copies' gradients are added up in the module's own.
      #
      #   net.to("cuda:0")
      #   model = Torch::NN::DataParallel.new(net, device_ids: [0, 1])
      #   loss.call(model.call(input), target).backward
      #   optimizer.step
      #
      # Outputs without dimensions, as of modules that return their loss, are averaged with the weights of the samples they come
      # from: a loss that is a mean over the batch is that of the whole batch, and `loss.backward` gives its gradients. A loss
      # that is a sum wants `scalars: :sum`.
      #
      # The copies are kept for further calls, and on other devices their memory too, while the module and what is within have the
      # same objects; what is in parameters and buffers is copied for each call. A module that changes in forward (a counter in an
      # instance variable, for instance) is copied for each call as well.
      #
      # With one device, or without any GPU, the module is called as it is. Several processes with
      # {DistributedDataParallel} are faster: there is one Ruby for each.
      class DataParallel < Module
        include Wrapper

        # Of names of the state.
        PREFIX = "module."
        private_constant :PREFIX

        # @return [Torch::NN::Module] the module that was given
        attr_reader :module
        alias_method :wrapped_module, :module

        # @return [Array<String>] "cpu", "cuda:1"; empty: the module is called as it is
        attr_reader :devices

        # @return [String, nil] where outputs go
        attr_reader :output_device

        # @return [Integer] the dimension of inputs and outputs that counts samples
        attr_reader :dim

        # @param mod [Torch::NN::Module] its parameters and buffers on the first device
        # @param device_ids [Array<Integer, String, Torch::Device>, nil] GPUs by number, or any devices; one may be listed twice;
        #   nil: all GPUs
        # @param output_device [Integer, String, Torch::Device, nil] nil: the first device
        # @param dim [Integer]
        # @param scalars [Symbol] what becomes of outputs without dimensions: `:mean`, `:sum`, or `:stack` as in PyTorch, a vector of
        #   one for each replica
        # @raise [TypeError] if it is no module
        # @raise [ArgumentError] for a device that is not there or not one, or a wrong dim
        def initialize(mod, device_ids: nil, output_device: nil, dim: 0, scalars: :mean)
          super()
          unless mod.is_a?(Torch::NN::Module)
            raise TypeError, "mod: expected the Torch::NN::Module to train, got #{mod.inspect} (#{mod.class})"
          end
          raise ArgumentError, "dim: expected an Integer, got #{dim.inspect}" unless dim.is_a?(Integer)
          unless ScatterGather::SCALARS.include?(scalars)
            raise ArgumentError, "scalars: expected one of #{ScatterGather::SCALARS.map(&:inspect).join(", ")}, got #{scalars.inspect}"
          end

          @module = mod
          @dim = dim
          @scalars = scalars
          @kept = []
          @devices = Parallel.devices(device_ids)
          @output_device = output_device ? Parallel.device(output_device) : @devices.first
        end

        # @raise [ArgumentError] if the inputs cannot be divided, or the outputs cannot be put together
        # @raise [Torch::Error] if parameters or buffers are not on the first device
        def forward(*inputs, **kwargs)
          return remember(@module.call(*inputs, **kwargs)) if @devices.empty?

          parts = ScatterGather.scatter(inputs, kwargs, @devices, @dim)
          outputs = with_replicas(parts.size) { |replicas| Parallel.apply_parts(replicas, parts, @devices) }
          remember(ScatterGather.gather(outputs, @output_device, @dim, weights: parts.map { |part| part.samples || 1 }, scalars: @scalars))
        end

        # Loads the module's state.
        #
        # @param state_dict [Hash{String => Torch::Tensor}] with the names of {#state_dict}, or with those of the module
        # @param strict [Boolean] as for the module
        # @return [nil]
        # @raise [Torch::Error] as of the module
        def load_state_dict(state_dict, strict: true)
          prefixed = state_dict.keys.all? { |key| key.start_with?(PREFIX) } && !@module.state_dict.keys.all? { |key| state_dict.key?(key) }
          @module.load_state_dict(prefixed ? state_dict.transform_keys { |key| key.delete_prefix(PREFIX) } : state_dict, strict: strict)
          nil
        end

        # Runs backward from the loss that the last call returned: the last of its outputs that has no dimensions. The same as
        # `(loss * scale).backward`; gradients of several calls add up.
        #
        # @param scale [Numeric] 1.0 / n for n calls that make one step
        # @return [nil]
        # @raise [Torch::Error] if there is no such output, or its backward has run
        def backward(scale: 1.0)
          loss, @loss = @loss, nil
          unless loss
            raise Torch::Error, "backward: the last call returned no loss, a tensor without dimensions that depends on parameters, or it was used " \
              "already: call the model first, or call backward on what you made of its outputs"
          end

          (loss * scale).backward
          nil
        end

        private

        def remember(output)
          @loss = Torch::Distributed::Nested.tensors(output).reverse.find { |tensor| tensor.requires_grad && tensor.numel == 1 && tensor.dim.zero? }
          output
        end

        # A call beside this one, of another thread or from within the module, makes copies of its own.
        def with_replicas(count)
          kept, @kept = @kept, []
          result = yield(replicas(count, kept))
          @kept = kept
          result
        end

        # Whether all is where it should be is found out on the way, and its name only if it is not.
        def replicas(count, kept)
          check_places if count == 1
          Replicas.of(@module, @devices.first(count), home: @devices.first, kept: kept)
        rescue Distributed::InvalidArgumentError
          check_places
          raise
        end

        def check_places
          home = @devices.first
          @module.named_modules.each do |prefix, mod|
            [mod.named_parameters(recurse: false), mod.named_buffers].each do |tensors|
              tensors.each do |name, tensor|
                next if tensor.nil? || Parallel.device(tensor.device) == home

                raise Torch::Error, "#{[prefix, name].reject(&:empty?).join(".")} is on #{Parallel.device(tensor.device)}: expected the module's parameters and buffers " \
                  "on #{home}, the first of its devices; call to(#{home.inspect}) on the module first"
              end
            end
          end
        end
      end

      class << self
        # Divides a tensor, or all tensors in a value, along a dimension.
        #
        # @param inputs [Torch::Tensor, Object] tensors may be nested in Arrays, Hashes, Structs and Data objects
        # @param target_gpus [Array<Integer, String, Torch::Device>]
        # @param dim [Integer]
        # @return [Array] a part for each device, fewer if there are fewer samples
        def scatter(inputs, target_gpus, dim = 0)
          ScatterGather.scatter([inputs], {}, devices(target_gpus), dim).map { |part| part.inputs.first }
        end

        # The other way round: joins what replicas returned along a dimension, scalars to a vector.
        #
        # @param outputs [Array]
        # @param target_device [Integer, String, Torch::Device]
        # @param dim [Integer]
        def gather(outputs, target_device, dim = 0)
          raise ArgumentError, "outputs: expected at least one" if outputs.empty?

          ScatterGather.gather(outputs, device(target_device), dim)
        end

        # @param network [Torch::NN::Module] on the first of the devices
        # @param devices [Array<Integer, String, Torch::Device>]
        # @return [Array<Torch::NN::Module>] the module itself, and copies of it on the other devices; gradients of
        #   theirs flow back to it
        def replicate(network, devices)
          Replicas.of(network, self.devices(devices))
        end

        # Calls each module with its inputs, each in a thread of its own.
        #
        # @param modules [Array<Torch::NN::Module>]
        # @param inputs [Array<Array, Object>] of each module
        # @param kwargs_tup [Array<Hash>, nil] of each module
        # @param devices [Array, nil] for messages
        # @return [Array] what they returned
        # @raise the first exception of any of them, with its replica in the message
        def parallel_apply(modules, inputs, kwargs_tup = nil, devices = nil)
          if [inputs, kwargs_tup].compact.any? { |list| list.size != modules.size }
            raise ArgumentError, "expected as many inputs as modules, got #{inputs.size}#{" and #{kwargs_tup.size}" if kwargs_tup} for #{modules.size}"
          end

          parts = inputs.each_with_index.map do |input, i|
            ScatterGather::Part.new(input.is_a?(Array) ? input : [input], kwargs_tup ? kwargs_tup[i] : {}, nil)
          end
          apply_parts(modules, parts, devices)
        end

        # One call of {DataParallel}.
        #
        # @param mod [Torch::NN::Module]
        # @param inputs [Array, Torch::Tensor]
        # @param module_kwargs [Hash]
        def data_parallel(mod, inputs, device_ids: nil, output_device: nil, dim: 0, module_kwargs: {})
          DataParallel.new(mod, device_ids: device_ids, output_device: output_device, dim: dim, scalars: :stack)
            .call(*(inputs.is_a?(Array) ? inputs : [inputs]), **module_kwargs)
        end

        # @api private
        # @return [Array<String>] "cpu", "cuda:1"
        def devices(list)
          list ||= (0...Torch::CUDA.device_count).to_a
          raise ArgumentError, "device_ids: expected an Array of devices, got #{list.inspect}" unless list.is_a?(Array)

          list.map { |each| device(each) }
        end

        # @api private
        # @return [String]
        def device(value)
          case value
          when Integer then gpu(value)
          when String, Symbol, Torch::Device then name_of(value.is_a?(Torch::Device) ? value : Torch.device(value.to_s))
          else raise ArgumentError, "device: expected a GPU's number, a String or a Torch::Device, got #{value.inspect}"
          end
        end

        # @api private
        def apply_parts(modules, parts, devices)
          return [modules.first.call(*parts.first.inputs, **parts.first.kwargs)] if parts.size == 1

          grad = Torch.grad_enabled?
          threads = modules.zip(parts).map { |mod, part| Thread.new { run(mod, part, grad) } }
          results = threads.map(&:value)
          failed = results.index { |_, error| error }
          return results.map(&:first) unless failed

          error = results[failed].last
          place = devices && " on #{devices[failed]}"
          raise error.exception("replica #{failed}#{place}: #{error.message}") # with what else it has
        end

        private

        # Whether gradients are wanted is a thread's own matter.
        def run(mod, part, grad)
          Thread.current.report_on_exception = false
          Torch.grad_enabled(grad) { [mod.call(*part.inputs, **part.kwargs), nil] }
        rescue => e
          [nil, e]
        end

        def name_of(device)
          # Of none torch-rb says -1 or nil, by its version.
          index = device.index if device.index&.between?(0, Float::INFINITY)
          return gpu(index || 0) if device.type == "cuda"

          index ? "#{device.type}:#{index}" : device.type
        end

        def gpu(number)
          count = Torch::CUDA.device_count
          return "cuda:#{number}" if number.between?(0, count - 1)

          raise ArgumentError, "device #{number}: expected a GPU's number, #{count.zero? ? "and there are no GPUs here: name other devices as \"cpu\"" : "0 to #{count - 1}"}"
        end
      end
    end

    # PyTorch's name for {Parallel::DataParallel}.
    DataParallel = Parallel::DataParallel
  end
end
