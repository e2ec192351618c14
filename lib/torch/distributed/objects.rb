# frozen_string_literal: true

require "json"

module Torch
  module Distributed
    # Operations on Ruby objects. They are slower than those on tensors, which they use, and always wait.
    #
    # **For trusted jobs only**: objects from other ranks are loaded by Marshal, which lets their sender run code
    # here. `serializer: :json` reads plain data only (keys become strings); an object with `dump(object)`, which returns
    # a String, and `load(string)` is taken as well. All ranks must name the same.
    #
    # Lists that PyTorch fills are filled here as well, and returned; where the list is left out a new one is returned.
    module Objects
      # Gathers every rank's object.
      #
      #   losses = Torch::Distributed.all_gather_object(loss)
      #   Torch::Distributed.all_gather_object(loss, object_list: losses)
      #
      # @overload all_gather_object(object, object_list: nil, group: nil, serializer: :marshal)
      # @overload all_gather_object(object_list, object, group: nil, serializer: :marshal)
      #   As PyTorch has it.
      # @param object [Object]
      # @param object_list [Array, nil] is filled: empty, or with an element for each rank
      # @param group [ProcessGroup, nil] nil: the default group
      # @param serializer [Symbol, #dump]
      # @return [Array] the objects by rank
      def all_gather_object(object, *rest, object_list: nil, group: nil, serializer: :marshal)
        raise ArgumentError, "all_gather_object: expected an object, or a list and an object, got #{1 + rest.size} arguments" if rest.size > 1
        raise ArgumentError, "object_list: expected it once, got it before the object as well" unless rest.empty? || object_list.nil?
        return unless (group = object_group(group, "all_gather_object"))

        object_list, object = object, rest.first unless rest.empty?
        codec = Serializer.of(serializer)
        check_filled("object_list", object_list, group.size)
        device = group_device(group)
        mine = bytes_tensor(codec.dump(object), device)
        sizes = size_tensor([0] * group.size, device)
        group._all_gather(sizes, size_tensor([mine.numel], device), false)
        parts = sizes.to_a.map { |size| room_for([size], device) }
        group._all_gather_list(parts, mine, false)
        filled(object_list, parts.map { |part| codec.load(_bytes(part.cpu)) })
      end

      # Gathers every rank's object on rank `dst`.
      #
      # @param object [Object]
      # @param object_gather_list [Array, nil] is filled on rank `dst`
      # @param dst [Integer, nil] the global rank of the process that gets them; 0 if nothing is given
      # @param group_dst [Integer, nil] instead of `dst`: its rank within the group
      # @return [Array, nil] the objects by rank on rank `dst`, elsewhere nil
      # @see #all_gather_object for the other arguments
      def gather_object(object, object_gather_list = nil, dst: nil, group: nil, group_dst: nil, serializer: :marshal)
        return unless (group = object_group(group, "gather_object"))

        root = rank_in_group(group, "dst", dst, group_dst, default: 0)
        codec = Serializer.of(serializer)
        check_filled("object_gather_list", object_gather_list, group.size)
        device = group_device(group)
        mine = bytes_tensor(codec.dump(object), device)
        size = size_tensor([mine.numel], device)
        unless group.rank == root
          group._gather(nil, size, root, false)
          group._gather(nil, mine, root, false)
          return
        end

        parts = gather_parts(group, root, size, mine, device)
        filled(object_gather_list, parts.map { |part| codec.load(_bytes(part.cpu)) })
      end

      # Replaces the objects of a list by those of rank `src`.
      #
      # @param object_list [Array] as many objects on every rank
      # @param src [Integer, nil] the global rank of the process that has them; 0 if nothing is given
      # @param device [String, Torch::Device, nil] where the tensors are in which they travel; nil: in host memory, or on the GPU
      #   of this process if the group has nccl alone
      # @param group_src [Integer, nil] instead of `src`: its rank within the group
      # @return [Array] the list
      # @see #all_gather_object for the other arguments
      def broadcast_object_list(object_list, src: nil, group: nil, device: nil, group_src: nil, serializer: :marshal)
        return unless (group = object_group(group, "broadcast_object_list"))

        root = rank_in_group(group, "src", src, group_src, default: 0)
        codec = Serializer.of(serializer)
        check_objects("object_list", object_list)
        device ||= group_device(group)
        own = group.rank == root
        dumps = object_list.map { |object| codec.dump(object) } if own
        sizes = size_tensor(own ? dumps.map(&:bytesize) : [0] * object_list.size, device)
        group._broadcast(sizes, root, false)
        bytes = own ? bytes_tensor(dumps.join, device) : room_for(sizes, device)
        group._broadcast(bytes, root, false)
        own ? object_list : object_list.replace(loaded(codec, bytes, sizes))
      end

      # Gives each rank its object of those that rank `src` has.
      #
      # @param scatter_object_output_list [Array, nil] its first element becomes this rank's object
      # @param scatter_object_input_list [Array, nil] on rank `src` one object for each rank
      # @param src [Integer, nil] the global rank of the process that has them; 0 if nothing is given
      # @param group_src [Integer, nil] instead of `src`: its rank within the group
      # @return [Object] this rank's object
      # @see #all_gather_object for the other arguments
      def scatter_object_list(scatter_object_output_list, scatter_object_input_list = nil, src: nil, group: nil, group_src: nil,
        serializer: :marshal)
        return unless (group = object_group(group, "scatter_object_list"))

        root = rank_in_group(group, "src", src, group_src, default: 0)
        codec = Serializer.of(serializer)
        check_objects("scatter_object_output_list", scatter_object_output_list) unless scatter_object_output_list.nil?
        device = group_device(group)
        dumps = scattered_dumps(codec, scatter_object_input_list, group) if group.rank == root
        size = size_tensor([0], device)
        group._scatter(size, dumps&.map { |dump| size_tensor([dump.bytesize], device) }, root, false)
        bytes = room_for(size, device)
        group._scatter(bytes, dumps&.map { |dump| bytes_tensor(dump, device) }, root, false)
        object = codec.load(_bytes(bytes.cpu))
        scatter_object_output_list[0] = object if scatter_object_output_list
        object
      end

      # Sends objects to rank `dst`, which receives as many.
      #
      # @param object_list [Array]
      # @param dst [Integer, nil] the receiver's global rank
      # @param device [String, Torch::Device, nil] where the tensors are in which they travel; nil: in host memory, or on the GPU
      #   of this process if the group has nccl alone
      # @param group_dst [Integer, nil] instead of `dst`: its rank within the group
      # @return [nil]
      # @see #all_gather_object for the other arguments
      def send_object_list(object_list, dst: nil, group: nil, device: nil, group_dst: nil, serializer: :marshal)
        return unless (group = object_group(group, "send_object_list"))

        peer = rank_in_group(group, "dst", dst, group_dst)
        codec = Serializer.of(serializer)
        check_objects("object_list", object_list)
        device ||= group_device(group)
        dumps = object_list.map { |object| codec.dump(object) }
        group._send(size_tensor(dumps.map(&:bytesize), device), peer, 0, false)
        group._send(bytes_tensor(dumps.join, device), peer, 0, false)
        nil
      end

      # Receives objects in place of those of a list.
      #
      # @param object_list [Array] as many objects as are sent
      # @param src [Integer, nil] the sender's global rank; nil, without `group_src`: any
      # @param group_src [Integer, nil] instead of `src`: its rank within the group
      # @return [Integer] the sender's global rank
      # @see #send_object_list for the other arguments
      def recv_object_list(object_list, src: nil, group: nil, device: nil, group_src: nil, serializer: :marshal)
        return unless (group = object_group(group, "recv_object_list"))

        peer = sender(group, src, group_src)
        codec = Serializer.of(serializer)
        check_objects("object_list", object_list)
        device ||= group_device(group)
        sizes = size_tensor([0] * object_list.size, device)
        peer = group._recv(sizes, peer, 0, false) || peer
        bytes = room_for(sizes, device)
        group._recv(bytes, peer, 0, false)
        object_list.replace(loaded(codec, bytes, sizes))
        group.ranks[peer]
      end

      private

      def object_group(group, operation)
        return unless (group = member_group(group, operation))
        return group unless Batch.of(group)

        raise GroupError, "#{operation}: expected to be called outside of coalescing_manager, since it needs its results at once"
      end

      def bytes_tensor(bytes, device = "cpu")
        _set_bytes(Torch.empty([bytes.bytesize], dtype: :uint8), bytes).to(device)
      end

      def size_tensor(sizes, device)
        Torch.tensor(sizes, dtype: :int64, device: device)
      end

      def room_for(sizes, device)
        Torch.empty([sizes.to_a.sum], dtype: :uint8, device: device)
      end

      def gather_parts(group, root, size, mine, device)
        sizes = Array.new(group.size) { size_tensor([0], device) }
        group._gather(sizes, size, root, false)
        parts = sizes.map { |each| room_for(each, device) }
        group._gather(parts, mine, root, false)
        parts
      end

      def loaded(codec, bytes, sizes)
        all = _bytes(bytes.cpu)
        at = 0
        sizes.to_a.map { |size| codec.load(all.byteslice((at += size) - size, size)) }
      end

      def scattered_dumps(codec, list, group)
        unless list.is_a?(Array) && list.size == group.size
          raise ArgumentError, "scatter_object_input_list: expected an Array of #{group.size} objects, one for each rank, got " +
            (list.is_a?(Array) ? "#{list.size} of them" : list.class.name)
        end
        list.map { |object| codec.dump(object) }
      end

      def check_objects(name, list)
        return if list.is_a?(Array) && !list.empty? && !list.frozen?

        raise ArgumentError, "#{name}: expected an Array of one or more objects that can be changed, got #{list.inspect}"
      end

      def check_filled(name, list, size)
        return if list.nil? || (list.is_a?(Array) && !list.frozen? && (list.empty? || list.size == size))

        raise ArgumentError, "#{name}: expected nil or an Array to fill, empty or of #{size} elements, got #{list.inspect}"
      end

      def filled(list, objects)
        list ? list.replace(objects) : objects
      end
    end

    # How objects become bytes.
    #
    # @api private
    class Serializer
      # The codecs that have a name: what makes a String of an object, and what reads it.
      NAMED = {
        marshal: [Marshal.method(:dump), Marshal.method(:load)],
        json: [->(object) { JSON.generate(object) }, ->(bytes) { JSON.parse(bytes.force_encoding(Encoding::UTF_8)) }]
      }.freeze
      private_constant :NAMED

      # @param wanted [Symbol, String, #dump] :marshal, :json or an object with `dump` and `load`
      def self.of(wanted)
        named = NAMED[wanted.to_sym] if wanted.is_a?(Symbol) || wanted.is_a?(String)
        return new(wanted, *named) if named
        return new(wanted, wanted.method(:dump), wanted.method(:load)) if wanted.respond_to?(:dump) && wanted.respond_to?(:load)

        raise ArgumentError, "serializer: expected :marshal, :json or an object with dump and load, got #{wanted.inspect}"
      end

      def initialize(name, dump, load)
        @name = name
        @dump = dump
        @load = load
      end

      # @return [String]
      def dump(object)
        bytes = @dump.call(object)
        return bytes if bytes.is_a?(String)

        raise TypeError, "serializer: expected #{@name.inspect} to dump a String, got #{bytes.class}"
      end

      def load(bytes)
        @load.call(bytes)
      end
    end
    private_constant :Serializer
  end
end
