# frozen_string_literal: true

module Torch
  module Distributed
    module Optim
      class ZeroRedundancyOptimizer < Torch::Optim::Optimizer
        # Checks arguments on this rank, and then that all ranks have the same.
        #
        # @api private
        module Arguments
          # Values of options that read the same on every rank.
          PLAIN = [Numeric, String, Symbol, TrueClass, FalseClass, NilClass].freeze
          private_constant :PLAIN

          module_function

          def group(group)
            return Distributed.send(:group_or_default, group) unless GroupMember::NON_GROUP_MEMBER.equal?(group)

            raise GroupError, "process_group: this process is not in the group, whose ranks would divide the optimizer's state"
          end

          def check_class(optimizer_class)
            return if optimizer_class.is_a?(Class) && optimizer_class < Torch::Optim::Optimizer &&
              !(optimizer_class <= ZeroRedundancyOptimizer) && !(optimizer_class <= PostLocalSGDOptimizer)

            raise ArgumentError, "optimizer_class: expected a class of optimizers such as Torch::Optim::Adam, got #{optimizer_class.inspect}"
          end

          # @return [Array<Hash>] copies of the groups, whose lists of parameters are frozen
          def groups(params)
            unless params.is_a?(Array) && !params.empty?
              raise ArgumentError, "params: expected an Array of parameters or of groups ({params: [...]}), got " +
                (params.is_a?(Array) ? "an empty one" : "#{params.inspect[0, 80]} (#{params.class})")
            end
            return [group_of_parameters({params: params}, nil, [])] unless params.first.is_a?(Hash)

            params.each_with_index.with_object([]) do |(group, i), done|
              done << group_of_parameters(group, "params[#{i}]", done.flat_map { |each| each[:params] })
            end
          end

          # @param name [String, nil] for texts; nil: the group is the argument `params` itself
          # @param others [Array<Torch::Tensor>] the parameters of other groups
          # @return [Hash]
          def group_of_parameters(group, name, others)
            unless group.is_a?(Hash) && group[:params].is_a?(Array)
              raise ArgumentError, "#{name}: expected a Hash with an Array of parameters as :params, got #{group.inspect[0, 80]} (#{group.class})"
            end

            name = name ? "#{name}[:params]" : "params"
            known = others.to_h { |param| [param.object_id, true] }
            group[:params].each_with_index do |param, i|
              check_parameter("#{name}[#{i}]", param)
              raise ArgumentError, "#{name}[#{i}]: expected a parameter of one group, got one that is in another as well" if known[param.object_id]
            end
            group.merge(params: group[:params].dup.freeze)
          end

          def check_parameter(name, param)
            Distributed.send(:check_tensor, name, param)
            raise ArgumentError, "#{name}: expected a parameter, got the result of an operation" unless param.leaf?
            if param.respond_to?(:to_local)
              raise ArgumentError, "#{name}: it is sharded by FSDP, and so is the state of a plain optimizer over it: use that"
            end

            # Says why it does not take a parameter that is sparse, or has no memory of its own.
            Distributed.send(:apart?, name, param) || Distributed.send(:_check_memory, name, param)
          end

          # @return [Array<String>] a group as all ranks must have it, line by line
          def described(group, index)
            options = group.except(:params).select { |_, value| [value].flatten.all? { |each| PLAIN.any? { |kind| each.is_a?(kind) } } }
            places = {}.compare_by_identity
            lines = group[:params].each_with_index.map do |param, i|
              first = (places[param] ||= i)
              "parameter #{i} of group #{index}: " + ((first == i) ? description(param) : "the same as parameter #{first}")
            end
            [*lines, "group #{index}: #{options.map { |key, value| "#{key}: #{value.inspect}" }.join(", ")}"]
          end

          def description(param)
            "#{param.dtype} of shape #{param.shape} on #{Distributed._device_name(param.device)[/\A[a-z]+/]}#{", frozen" unless param.requires_grad}"
          end

          # A collective call.
          #
          # @param operation [String]
          # @param lines [Array<String>] what must be the same on all ranks
          # @raise [MismatchError] on all ranks
          def agree(group, operation, lines)
            return if group.size == 1

            all = Distributed.all_gather_object(lines, group: group, serializer: :json)
            other = all.index { |each| each != all.first } or return
            place = all.first.zip(all[other]).index { |one, two| one != two } || all.first.size
            one, two = [0, other].map { |rank| all[rank][place]&.inspect || "nothing more" }
            raise MismatchError, "#{operation}: expected the same parameters and options on all ranks, but global rank #{group.ranks[0]} has " \
              "#{one} where global rank #{group.ranks[other]} has #{two}"
          end
        end
        private_constant :Arguments
      end
    end
  end
end
