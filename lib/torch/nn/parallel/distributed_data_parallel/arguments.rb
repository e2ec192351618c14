# frozen_string_literal: true

module Torch
  module NN
    module Parallel
      class DistributedDataParallel < Module
        # The arguments of the constructor, validated and completed with defaults. Nothing here waits for another process.
        #
        # @api private
        class Arguments
          MEBIBYTE = 1024 * 1024
          FIRST_BUCKET = MEBIBYTE
          BUCKET_CAP = 25 * MEBIBYTE
          MAX_BUCKET_CAP_MB = 1 << 40 # in bytes still a whole number of 64 bits
          private_constant :MEBIBYTE, :FIRST_BUCKET, :BUCKET_CAP, :MAX_BUCKET_CAP_MB

          DEFAULTS = {
            device_ids: nil, output_device: nil, dim: 0, broadcast_buffers: nil, forward_sync_buffers: nil,
            init_sync: true, process_group: nil, device_mesh: nil, bucket_cap_mb: nil, bucket_cap_mb_list: nil,
            find_unused_parameters: false, check_reduction: false, gradient_as_bucket_view: true, static_graph: false,
            delay_all_reduce_named_params: nil, param_to_hook_all_reduce: nil, mixed_precision: nil,
            skip_all_reduce_unused_params: false, batched_grad_copy: false
          }.freeze
          FLAGS = %i[init_sync find_unused_parameters check_reduction gradient_as_bucket_view static_graph
            skip_all_reduce_unused_params batched_grad_copy].freeze
          private_constant :DEFAULTS, :FLAGS

          # @return [Torch::Distributed::ProcessGroup]
          attr_reader :process_group

          # @return [Torch::Device, nil] where the module goes, and where its outputs go
          attr_reader :device, :output_device

          # @return [Array<Integer>, nil] bytes of the buckets, nil being PyTorch's
          attr_reader :limits

          # @return [MixedPrecision, nil]
          attr_reader :mixed_precision

          # @return [Array<String>] parameters that are reduced together, once that named `delayed_by` is ready
          attr_reader :delayed

          # @return [String, nil]
          attr_reader :delayed_by

          # @param mod [Torch::NN::Module]
          # @param given [Hash] the constructor's keywords
          # @raise [ArgumentError] naming what is wrong, and what was expected
          def initialize(mod, given)
            @given = DEFAULTS.merge(given)
            check_names(given)
            check_flags
            check_dim
            check_unused
            @process_group = group_of(@given[:process_group], @given[:device_mesh])
            @limits = limits_of(@given[:bucket_cap_mb], @given[:bucket_cap_mb_list])
            @mixed_precision = precision_of(@given[:mixed_precision], mod)
            @delayed, @delayed_by = delayed_of(mod)
            @device = single_device(@given[:device_ids])
            @output_device = @given[:output_device] && device_of("output_device", @given[:output_device])
            @forward_sync_buffers, @initial_buffers = buffers_of(@given[:broadcast_buffers], @given[:forward_sync_buffers])
          end

          def init_sync?
            @given[:init_sync]
          end

          # Whether rank 0's buffers are sent before each forward.
          def forward_sync_buffers?
            @forward_sync_buffers
          end

          # Whether they are sent by the constructor.
          def initial_buffers?
            @initial_buffers && init_sync?
          end

          # A static graph finds by itself what is unused.
          def find_unused?
            @given[:find_unused_parameters] && !static_graph?
          end

          def static_graph?
            @given[:static_graph]
          end

          def skip_unused?
            @given[:skip_all_reduce_unused_params]
          end

          def gradient_as_bucket_view?
            @given[:gradient_as_bucket_view]
          end

          def bucket_cap_bytes
            @limits ? @limits.last : BUCKET_CAP
          end

          # @return [Hash] as they were given
          def to_h
            @given
          end

          private

          def check_names(given)
            unknown = given.keys - DEFAULTS.keys
            return if unknown.empty?

            raise ArgumentError, "unknown keyword#{"s" if unknown.size > 1}: #{unknown.map(&:inspect).join(", ")}; expected some of " \
              "#{DEFAULTS.keys.map { |name| "#{name}:" }.join(", ")}"
          end

          def check_flags
            FLAGS.each do |name|
              # A String or a number, as from an environment variable, must not count as true.
              @given[name] = flag(name, @given[name])
            end
            return unless @given[:check_reduction]

            Torch::Distributed._warn "check_reduction: true is deprecated and does nothing: every backward is checked"
          end

          def flag(name, value)
            return value ? true : false if value.nil? || value == true || value == false

            raise ArgumentError, "#{name}: expected true or false, got #{value.inspect}"
          end

          def check_dim
            return if @given[:dim].is_a?(Integer)

            raise ArgumentError, "dim: expected the Integer of a dimension, got #{@given[:dim].inspect}"
          end

          def check_unused
            if @given[:static_graph] && @given[:find_unused_parameters]
              Torch::Distributed._warn "find_unused_parameters: is not needed with static_graph: true, which finds them in the first iteration"
            end
            return if !skip_unused? || @given[:find_unused_parameters] || static_graph?

            raise ArgumentError, "skip_all_reduce_unused_params: true needs find_unused_parameters: true, which finds what is unused"
          end

          def buffers_of(broadcast, forward)
            broadcast = flag(:broadcast_buffers, broadcast) unless broadcast.nil?
            forward = flag(:forward_sync_buffers, forward) unless forward.nil?
            if !broadcast.nil? && !forward.nil? && broadcast != forward
              raise ArgumentError, "broadcast_buffers: #{broadcast} contradicts forward_sync_buffers: #{forward}: expected one of them " \
                "(broadcast_buffers: false leaves buffers alone in the constructor as well)"
            end

            [broadcast != false && forward != false, broadcast != false]
          end

          def group_of(group, mesh)
            return Torch::Distributed.send(:group_or_default, group) if mesh.nil?

            unless group.nil?
              raise ArgumentError, "process_group: and device_mesh: are both given, expected one of them"
            end
            unless mesh.is_a?(Torch::Distributed::DeviceMesh)
              raise ArgumentError, "device_mesh: expected a Torch::Distributed::DeviceMesh, got #{mesh.inspect}"
            end
            unless mesh.ndim == 1
              raise ArgumentError, "device_mesh: expected a mesh of one dimension, got #{mesh.inspect}: take a slice of it, " \
                "mesh[#{(mesh.mesh_dim_names || ["name"]).first.inspect}]"
            end

            Torch::Distributed.send(:group_or_default, mesh.get_group(0))
          end

          # An explicit size is that of the first bucket too, as in PyTorch.
          def limits_of(cap, list)
            return cap && [bytes("bucket_cap_mb", cap)] if list.nil?

            raise ArgumentError, "bucket_cap_mb: and bucket_cap_mb_list: are both given, expected one of them" unless cap.nil?
            unless list.is_a?(Array) && !list.empty?
              raise ArgumentError, "bucket_cap_mb_list: expected an Array of sizes in MiB, got #{list.inspect}"
            end

            list.each_with_index.map { |each, index| bytes("bucket_cap_mb_list[#{index}]", each) }
          end

          def bytes(name, megabytes)
            if megabytes.is_a?(Numeric) && megabytes.real? && megabytes.positive? && megabytes <= MAX_BUCKET_CAP_MB
              return [(megabytes * MEBIBYTE).to_i, 1].max
            end

            raise ArgumentError, "#{name}: expected a positive number of MiB, at most #{MAX_BUCKET_CAP_MB}, got #{megabytes.inspect}"
          end

          def precision_of(precision, mod)
            return if precision.nil?
            unless precision.is_a?(MixedPrecision)
              raise ArgumentError, "mixed_precision: expected a Torch::NN::Parallel::MixedPrecision, got #{precision.inspect}"
            end

            precision.check(mod.parameters.select(&:requires_grad))
            Casts.check(mod, precision)
            precision
          end

          # Names stay when the module is moved; its parameters become other objects by that.
          def delayed_of(mod)
            list, hook = @given.values_at(:delay_all_reduce_named_params, :param_to_hook_all_reduce)
            return [[], nil] if list.nil? && hook.nil?
            if list.nil? || hook.nil?
              raise ArgumentError, "delay_all_reduce_named_params: and param_to_hook_all_reduce: expected both or neither, " \
                "got #{list.nil? ? "the second" : "the first"} alone"
            end
            if ![Hash, Array].include?(list.class) || list.empty?
              raise ArgumentError, "delay_all_reduce_named_params: expected [name, parameter] pairs, got #{list.inspect}"
            end

            known = mod.named_parameters
            names = list.map { |name, parameter| delayed_name(known, name, parameter) }
            [names, name_of(known, "param_to_hook_all_reduce", hook)]
          end

          def delayed_name(known, name, parameter)
            name = name_of(known, "delay_all_reduce_named_params", name)
            return name if parameter.nil? || parameter.equal?(known[name])

            raise ArgumentError, "delay_all_reduce_named_params: expected the module's own parameter at #{name.inspect}, got another tensor"
          end

          def name_of(known, argument, given)
            # Tensors are equal by their values.
            name = given.is_a?(Torch::Tensor) ? known.each_key.find { |each| known[each].equal?(given) } : given.to_s
            parameter = known[name]
            return name if parameter&.requires_grad

            raise ArgumentError, "#{argument}: expected a parameter of the module that requires a gradient, or its name, got " \
              "#{given.is_a?(Torch::Tensor) ? "another tensor" : given.inspect}"
          end

          def single_device(device_ids)
            ids = device_ids.is_a?(Array) ? device_ids : [device_ids].compact
            return if ids.empty?
            unless ids.size == 1
              raise ArgumentError, "device_ids: expected the one device of this process, got #{ids.size}: #{ids.inspect}"
            end

            device_of("device_ids", ids.first)
          end

          def device_of(name, device)
            return device if device.is_a?(Torch::Device)
            return Torch.device(device.to_s) unless device.is_a?(Integer)
            unless Torch::CUDA.available? && device.between?(0, Torch::CUDA.device_count - 1)
              raise ArgumentError, "#{name}: there is no GPU #{device} here (#{Torch::CUDA.device_count} found): " \
                "leave #{name} out to train on the CPU"
            end

            Torch.device("cuda:#{device}")
          end
        end
        private_constant :Arguments
      end
    end
  end
end
