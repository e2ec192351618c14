# frozen_string_literal: true

module Torch
  module Distributed
    module Optim
      class ZeroRedundancyOptimizer < Torch::Optim::Optimizer
        # Parameters of one dtype on one device, laid out end to end and divided into ranges of the same number of elements,
        # one for each rank. A range may begin and end within a parameter; the last ranges may be shorter, or empty.
        #
        # The part of a parameter that lies in one range is a piece. The optimizer of a rank steps on its own pieces, which are
        # views of the parameters: what it writes needs no copy to get there.
        #
        # Parameters stay in their own memory, and are gathered piece by piece. Or they are moved to one memory, in which the
        # ranges are: then one operation gathers them all, and over shared memory it copies nothing twice.
        #
        # @api private
        class Partition
          # @!attribute param
          #   @return [Torch::Tensor] the parameter
          # @!attribute start
          #   @return [Integer] the piece's first element in it
          # @!attribute length
          #   @return [Integer]
          # @!attribute local
          #   @return [Torch::NN::Parameter, nil] what the optimizer steps on, on the rank that owns the piece
          Piece = Struct.new(:param, :start, :length, :local)

          # torch-rb 0.12 cannot set a gradient to nil.
          DROP_GRADIENTS = Fused.instance_method(:_zero_grad)
          private_constant :DROP_GRADIENTS

          # @return [Array<Torch::Tensor>]
          attr_reader :params

          # @return [Array<Array<Piece>>] by rank
          attr_reader :pieces

          # @param params [Array<Torch::Tensor>] each of them once
          # @param group [ProcessGroup]
          # @param as_views [Boolean] whether the parameters are moved to one memory
          def initialize(params, group, as_views)
            @params = params
            @group = group
            @trained = params.any?(&:requires_grad)
            @share = [(params.sum(&:numel) + group.size - 1) / group.size, 1].max
            @offsets = {}.compare_by_identity
            @pieces = divide
            @bucket = bucket if as_views
            @spans = {}.compare_by_identity
            @memories = {}.compare_by_identity
            attach
          end

          # @return [Array<Piece>] this rank's
          def own
            @pieces[@group.rank]
          end

          def include?(param)
            @spans.key?(param)
          end

          # @return [Array<Array(Integer, Piece)>] the pieces of a parameter in their order, with their ranks
          def pieces_of(param)
            @pieces_of ||= @pieces.each_with_index.flat_map { |pieces, rank| pieces.map { |piece| [rank, piece] } }
              .group_by { |_, piece| piece.param.object_id }
            @pieces_of.fetch(param.object_id)
          end

          # Parameters that were frozen from the beginning, and still are, are neither stepped nor gathered.
          def active?
            @trained || @params.any?(&:requires_grad)
          end

          # Finds the parameters' memory again, and sets the gradients of this rank's pieces: views, so that what torch-rb's optimizers
          # add to a gradient for weight decay is seen in it, as far as this rank's range goes.
          def prepare
            attach
            own.each do |piece|
              gradient = piece.param.grad or next
              piece.local.grad = gradient.detach.reshape(-1).narrow(0, piece.start, piece.length)
            end
          end

          # Otherwise the pieces would keep gradients in memory that the program has dropped.
          def drop_gradients
            DROP_GRADIENTS.bind_call(self, [{params: own.map(&:local)}], true)
          end

          # Copies every rank's range to all others, to where their parameters lie. A collective call.
          def gather
            rounds.each { |parts| @group._all_gather_list(parts, parts[@group.rank], false) }
            @spans.each { |param, span| param.data.copy!(@memories[param].view(param.shape)) if span.nil? }
          end

          private

          # A parameter without elements is a piece as well, since optimizers keep a state for it.
          def divide
            pieces = Array.new(@group.size) { [] }
            offset = 0
            @params.each do |param|
              @offsets[param] = offset
              count = param.numel
              first, last = [offset, offset + [count - 1, 0].max].map { |at| [at / @share, @group.size - 1].min }
              (first..last).each do |rank|
                from = [offset, rank * @share].max
                to = [offset + count, (rank + 1) * @share].min
                pieces[rank] << Piece.new(param, from - offset, [to - from, 0].max)
              end
              offset += count
            end
            pieces
          end

          # Room for all ranges.
          def bucket
            param = @params.first
            device = Distributed._device_name(param.device)
            return @group._empty_shared([@share * @group.size], param.dtype) if device == "cpu" && @group.backend != "nccl"

            Torch.zeros(@share * @group.size, dtype: param.dtype, device: device)
          end

          # Parameters may have got other memory, by `set_data`. One that is not contiguous is copied, each time.
          def attach
            @params.each do |param|
              span = Distributed._span(param)
              next if span && span == @spans[param]

              span = move_to_bucket(param) if @bucket
              @spans[param] = span
              @memories[param] = param.data.reshape(-1)
              @rounds = nil
              pieces_of(param).each { |rank, piece| attach_piece(piece) if rank == @group.rank }
            end
          end

          # @return [Array(Integer, Integer)] where it is
          def move_to_bucket(param)
            view = @bucket.narrow(0, @offsets[param], param.numel).reshape(param.shape)
            param.set_data(view.copy!(param.data))
            Distributed._span(param)
          end

          # The optimizer keeps its state under the Parameter: it stays the same object.
          def attach_piece(piece)
            view = memory_of(piece)
            return piece.local.set_data(view) if piece.local

            piece.local = Torch::NN::Parameter.new(view, requires_grad: piece.param.requires_grad)
          end

          def memory_of(piece)
            @memories.fetch(piece.param).narrow(0, piece.start, piece.length)
          end

          # Lists of one tensor for each rank: every rank's range, or in round i its piece i, each where it belongs.
          def rounds
            return [] if @group.size == 1
            return [Array.new(@group.size) { |rank| @bucket.narrow(0, rank * @share, @share) }] if @bucket

            @rounds ||= begin
              none = @memories.fetch(@params.first).narrow(0, 0, 0)
              Array.new(@pieces.map(&:size).max) { |i| @pieces.map { |pieces| pieces[i] ? memory_of(pieces[i]) : none } }
                .reject { |parts| parts.all? { |part| part.numel.zero? } }
            end
          end
        end
        private_constant :Partition
      end
    end
  end
end
