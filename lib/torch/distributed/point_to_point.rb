# frozen_string_literal: true

module Torch
  module Distributed
    # Messages from one rank to another. They begin at once, beside the operations of all ranks; those between two
    # ranks with one tag arrive in the order in which they were sent. One exception: a receive from any rank and one
    # from a given rank that wait for the same tag at the same time may get each other's messages.
    #
    # Each is received into a tensor with as many elements of the same dtype. Ranks are global ones (`dst: 3`), or
    # those within the group (`group_dst: 1`).
    module PointToPoint
      # The largest tag.
      MAX_TAG = 2**32 - 1
      private_constant :MAX_TAG

      # Sends `tensor` to rank `dst`; returns when its memory may be changed, which says nothing of its arrival.
      #
      # @overload send(tensor, dst: nil, group: nil, tag: 0, group_dst: nil)
      #   @param tensor [Torch::Tensor]
      #   @param dst [Integer, nil] the receiver's global rank
      #   @param group [ProcessGroup, nil] nil: the default group
      #   @param tag [Integer] messages match only those of the same tag
      #   @param group_dst [Integer, nil] instead of `dst`: its rank within the group
      #   @return [nil]
      # @overload send(method, *arguments)
      #   Ruby's own: calls a method by its name, for those who do not expect another one here.
      def send(tensor, *arguments, **options, &block)
        return super if tensor.is_a?(Symbol) || tensor.is_a?(String)

        send_tensor(tensor, *arguments, **options)
      end

      # Receives into `tensor` from rank `src`. An interrupt (Ctrl-C, Timeout) ends the wait, not the receive: it still
      # takes the next message of its tag.
      #
      # @param tensor [Torch::Tensor]
      # @param src [Integer, nil] the sender's global rank; nil, without `group_src`: any
      # @param group [ProcessGroup, nil] nil: the default group
      # @param tag [Integer]
      # @param group_src [Integer, nil] instead of `src`: its rank within the group
      # @return [Integer] the sender's global rank
      def recv(tensor, src: nil, group: nil, tag: 0, group_src: nil)
        return unless (group = member_group(group, "recv"))
        return irecv(tensor, src: src, group: group, tag: tag, group_src: group_src) && nil if Batch.of(group)

        peer = sender(group, src, group_src)
        source = into("tensor", tensor) { |memory| group._recv(memory, peer, check_tag(tag), false) }
        # On a device's queue the message may be on its way still; there the sender is known.
        group.ranks[source || peer]
      end

      # Begins to send `tensor`; it may be changed once {Work#wait} has returned.
      #
      # @return [Work, nil] nil within {Coalescing#coalescing_manager}
      # @see #send
      def isend(tensor, dst: nil, group: nil, tag: 0, group_dst: nil)
        return unless (members = member_group(group, "isend"))

        peer = rank_in_group(members, "dst", dst, group_dst)
        if (batch = Batch.of(members))
          _check_operand("tensor", tensor, written: false)
          return batch.message(outgoing(tensor, peer, tag))
        end

        members._send(from("tensor", tensor), peer, check_tag(tag), true)._writes(nil)
      end

      # Begins to receive into `tensor`; {Work#source_rank} says from whom it was.
      #
      # @return [Work, nil] nil within {Coalescing#coalescing_manager}
      # @see #recv
      def irecv(tensor, src: nil, group: nil, tag: 0, group_src: nil)
        return unless (members = member_group(group, "irecv"))

        peer = sender(members, src, group_src)
        if (batch = Batch.of(members))
          _check_operand("tensor", tensor)
          return batch.message(incoming(tensor, peer, tag))
        end

        into("tensor", tensor) { |memory| members._recv(memory, peer, check_tag(tag), true) }._among(members.ranks)._writes(tensor)
      end

      # Begins several messages: all of them, or with an error none.
      #
      # Over NCCL they are one launch, in which none waits for another: ranks that send to each other begin such messages
      # together. Single ones between two ranks are carried out in the order in which each rank begins them, both directions
      # in one, as in PyTorch: where one rank sends and then receives, the other has to receive and then send. A batch that is
      # the group's first operation on a GPU is begun by all ranks of the group, unless it is bound to a device (`device_id:`).
      #
      # @param p2p_op_list [Array<P2POp>] on one group
      # @return [Array<Work>] empty within {Coalescing#coalescing_manager}
      def batch_isend_irecv(p2p_op_list)
        unless p2p_op_list.is_a?(Array) && !p2p_op_list.empty? && p2p_op_list.all?(P2POp)
          raise ArgumentError, "p2p_op_list: expected an Array of one or more P2POp, got #{p2p_op_list.inspect}"
        end

        group = p2p_op_list.first.group
        return [] unless (members = member_group(group, "batch_isend_irecv"))

        p2p_op_list.each_with_index { |each, index| check_p2p("p2p_op_list[#{index}]", each, members) }
        messages = p2p_op_list.map do |each|
          next outgoing(each.tensor, rank_in_group(members, "dst", each.peer, each.group_peer), each.tag) if each.op == :isend

          incoming(each.tensor, sender(members, each.peer, each.group_peer), each.tag)
        end
        batch = Batch.of(members)
        return messages.filter_map { |each| batch.message(each) } if batch

        _begin_together(messages, members)
      end

      # @api private
      # @param messages [Array] those of {#outgoing} and {#incoming}
      # @return [Array<Work>]
      def _begin_together(messages, members)
        messages.zip(members._batch(messages)).map do |(sends, memory, _, _, tensor), work|
          next work._writes(nil) if sends

          work = finish(work) { copy_back([[tensor, memory]]) } unless memory.equal?(tensor)
          work._among(members.ranks)._writes(tensor)
        end
      end

      # @api private
      # Says what libtddp would say of a tensor's memory.
      def _check_operand(name, tensor, written: true)
        check_tensor(name, tensor)
        apart = written ? apart?(name, tensor) : _memory_form(tensor)
        _check_memory(name, tensor) unless apart
      end

      private

      def send_tensor(tensor, dst: nil, group: nil, tag: 0, group_dst: nil)
        return unless (group = member_group(group, "send"))
        return isend(tensor, dst: dst, group: group, tag: tag, group_dst: group_dst) && nil if Batch.of(group)

        peer = rank_in_group(group, "dst", dst, group_dst)
        group._send(from("tensor", tensor), peer, check_tag(tag), false)
      end

      # @return [Integer, nil] its rank in the group; nil: any
      def sender(group, src, group_src)
        rank_in_group(group, "src", src, group_src) unless src.nil? && group_src.nil?
      end

      # A message as the extension takes it, and the caller's tensor, which has been checked.
      def outgoing(tensor, peer, tag)
        [true, from("tensor", tensor), peer, check_tag(tag), tensor]
      end

      def incoming(tensor, peer, tag)
        [false, apart?("tensor", tensor) ? in_one_piece(tensor) : tensor, peer, check_tag(tag), tensor]
      end

      def check_tag(tag)
        return tag if tag.is_a?(Integer) && tag.between?(0, MAX_TAG)

        raise ArgumentError, "tag: expected an Integer from 0 to #{MAX_TAG}, got #{tag.inspect}"
      end

      def check_p2p(name, message, members)
        unless group_or_default(message.group).equal?(members)
          raise ArgumentError, "#{name}: expected all messages to be of one group, #{members.inspect}, got #{message.group.inspect}"
        end

        receives = message.op == :irecv
        check_tag(message.tag)
        unless receives && message.peer.nil? && message.group_peer.nil?
          rank_in_group(members, "peer", message.peer, message.group_peer)
        end
        _check_operand("#{name}.tensor", message.tensor, written: receives)
      end
    end

    # One message of {PointToPoint#batch_isend_irecv}.
    class P2POp
      # @return [Symbol] :isend or :irecv
      attr_reader :op

      # @return [Torch::Tensor]
      attr_reader :tensor

      # @return [Integer, nil] the other's global rank
      attr_reader :peer

      # @return [Integer, nil] the other's rank within the group
      attr_reader :group_peer

      # @return [ProcessGroup, nil]
      attr_reader :group

      # @return [Integer]
      attr_reader :tag

      # @param op [Symbol, String, Method] :isend or :irecv, or `Torch::Distributed.method(:isend)`
      # @param tensor [Torch::Tensor]
      # @param peer [Integer, nil] the other's global rank; nil, without `group_peer`, receives from any
      # @param group [ProcessGroup, nil] nil: the default group
      # @param tag [Integer]
      # @param group_peer [Integer, nil] instead of `peer`: its rank within the group
      def initialize(op, tensor, other = nil, peer: other, group: nil, tag: 0, group_peer: nil)
        name = op.respond_to?(:name) ? op.name.to_s : op.to_s
        unless %w[isend irecv].include?(name)
          raise ArgumentError, "op: expected :isend or :irecv, got #{op.inspect}"
        end
        unless tensor.is_a?(Torch::Tensor)
          raise TypeError, "tensor: expected a Torch::Tensor, got #{tensor.inspect} (#{tensor.class})"
        end

        @op = name.to_sym
        @tensor = tensor
        @peer = peer
        @group = group
        @tag = tag
        @group_peer = group_peer
      end
    end
  end
end
