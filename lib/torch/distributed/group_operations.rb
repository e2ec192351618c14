# frozen_string_literal: true

module Torch
  module Distributed
    # The operations of {Torch::Distributed} as methods of a group: `group.all_reduce(x)` is
    # `Torch::Distributed.all_reduce(x, group: group)`, with the same other arguments and the same result. So `src:` and
    # `dst:` are global ranks here too, `group_src:` and `group_dst:` those within the group. {GroupMember::NON_GROUP_MEMBER} has
    # these methods as well; they warn, and do nothing.
    #
    #   evens = Torch::Distributed.new_group([0, 2])
    #   evens.all_reduce(tensor, op: :avg)
    #
    # @!method all_reduce(tensor, **options)
    #   @see Collectives#all_reduce
    # @!method all_reduce_coalesced(tensors, **options)
    #   @see Collectives#all_reduce_coalesced
    # @!method reduce(tensor, **options)
    #   @see Collectives#reduce
    # @!method broadcast(tensor, **options)
    #   @see Collectives#broadcast
    # @!method barrier(**options)
    #   @see Collectives#barrier
    # @!method monitored_barrier(**options)
    #   @see Collectives#monitored_barrier
    # @!method all_gather(*arguments, **options)
    #   @see Pieces#all_gather
    # @!method all_gather_into_tensor(output, input, **options)
    #   @see Pieces#all_gather_into_tensor
    # @!method all_gather_single(output, input, **options)
    #   @see Pieces#all_gather_into_tensor
    # @!method all_gather_coalesced(output_tensor_lists, input_tensor_list, **options)
    #   @see Pieces#all_gather_coalesced
    # @!method gather(tensor, gather_list = nil, **options)
    #   @see Pieces#gather
    # @!method gather_into_tensor(output, input, **options)
    #   @see Pieces#gather_into_tensor
    # @!method gather_single(output, input, **options)
    #   @see Pieces#gather_into_tensor
    # @!method scatter(tensor, scatter_list = nil, **options)
    #   @see Pieces#scatter
    # @!method reduce_scatter(output, input_list, **options)
    #   @see Pieces#reduce_scatter
    # @!method reduce_scatter_tensor(output, input, **options)
    #   @see Pieces#reduce_scatter_tensor
    # @!method reduce_scatter_single(output, input, **options)
    #   @see Pieces#reduce_scatter_tensor
    # @!method all_to_all(output_tensor_list, input_tensor_list, **options)
    #   @see Pieces#all_to_all
    # @!method all_to_all_single(output, input, *splits, **options)
    #   @see Pieces#all_to_all_single
    # @!method recv(tensor, **options)
    #   @see PointToPoint#recv
    # @!method isend(tensor, **options)
    #   @see PointToPoint#isend
    # @!method irecv(tensor, **options)
    #   @see PointToPoint#irecv
    # @!method coalescing_manager(**options)
    #   @see Coalescing#coalescing_manager
    # @!method all_gather_object(*arguments, **options)
    #   @see Objects#all_gather_object
    # @!method gather_object(object, object_gather_list = nil, **options)
    #   @see Objects#gather_object
    # @!method broadcast_object_list(object_list, **options)
    #   @see Objects#broadcast_object_list
    # @!method scatter_object_list(output_list, input_list = nil, **options)
    #   @see Objects#scatter_object_list
    # @!method send_object_list(object_list, **options)
    #   @see Objects#send_object_list
    # @!method recv_object_list(object_list, **options)
    #   @see Objects#recv_object_list
    module GroupOperations
      [Collectives, Pieces, PointToPoint, Coalescing, Objects].each do |operations|
        operations.public_instance_methods(false).each do |name|
          next unless operations.instance_method(name).parameters.include?([:key, :group])

          define_method(name) do |*arguments, **options, &block|
            raise ArgumentError, "#{name}: unknown keyword: group, since #{inspect} is the group" if options.key?(:group)

            Distributed.public_send(name, *arguments, group: self, **options, &block)
          end
        end
      end

      # Sends `tensor`; with a method's name first it is Ruby's own.
      #
      # @see PointToPoint#send
      def send(tensor, *arguments, **options, &block)
        return super if tensor.is_a?(Symbol) || tensor.is_a?(String)

        Distributed.send(tensor, *arguments, group: self, **options)
      end
    end

    # Methods of its own, such as `rank`, come first.
    class ProcessGroup
      include GroupOperations
    end

    module GroupMember
      NON_GROUP_MEMBER.class.include(GroupOperations)
    end
  end
end
