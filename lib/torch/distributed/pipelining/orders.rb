# frozen_string_literal: true

require_relative "action"

module Torch
  module Distributed
    module Pipelining
      # In which order each rank acts, by schedule: numbers alone. Stage s is on rank s mod p of p ranks.
      #
      # @api private
      module Orders
        class << self
          # All forwards, then all backwards: stage after stage, where a rank has several.
          #
          # @param ranks [Integer]
          # @param stages [Integer] of all ranks
          # @param micro_batches [Integer]
          # @return [Array<Array<Action>>] by rank
          def fill_drain(ranks, stages, micro_batches)
            Array.new(ranks) do |rank|
              mine = (rank...stages).step(ranks).to_a
              of = ->(kind, list) { list.flat_map { |stage| Array.new(micro_batches) { |i| Action.new(stage, kind, i) } } }
              of.call(:F, mine) + of.call(:B, mine.reverse)
            end
          end

          # Forwards that fill the pipeline; then a forward and a backward in turn; then the backwards that are left. A rank with
          # several stages does each for some micro-batches, then the next for the same ones.
          #
          # @param ahead [Integer] by how many forwards more than the next rank one begins
          # @param split [Boolean] whether backward is split: weights' gradients wait until the next ranks have what they need, as
          #   long on each rank as the pipeline's end is idle for it, so that all ranks have as many micro-batches in flight
          # @return [Array<Array<Action>>] by rank
          # @raise [ArgumentError] if the micro-batches can't be divided into rounds of about as many as there are ranks
          def one_forward_one_backward(ranks, stages, micro_batches, ahead: 1, split: false)
            per_rank = stages / ranks
            round = round_of(ranks, per_rank, micro_batches)
            Array.new(ranks) do |rank|
              stage_of = ->(k, chunk) { chunk.call(k / round % per_rank) * ranks + rank }
              forwards = numbered(per_rank * micro_batches, :F) { |k| stage_of.call(k, ->(chunk) { chunk }) }
              backwards = numbered(per_rank * micro_batches, split ? :I : :B) { |k| stage_of.call(k, ->(chunk) { per_rank - 1 - chunk }) }
              warm_up = [(per_rank - 1) * round + ahead * (ranks - 1 - rank), forwards.size].min
              interleave(forwards, backwards, warm_up, split && rank)
            end
          end

          # A forward of every micro-batch, without backward.
          #
          # @return [Array<Array<Action>>] by rank
          def forward_only(ranks, stages, micro_batches)
            fill_drain(ranks, stages, micro_batches).map { |list| list.select { |action| action.kind == :F } }
          end

          private

          def round_of(ranks, per_rank, micro_batches)
            return micro_batches if per_rank == 1

            rounds = [1, micro_batches / ranks].max
            return micro_batches / rounds if (micro_batches % rounds).zero?

            raise ArgumentError, "n_microbatches: expected a multiple of #{rounds}, since #{ranks} ranks with several stages take them " \
              "in #{rounds} rounds, got #{micro_batches}"
          end

          # The micro-batches of each stage are numbered as they come.
          def numbered(count, kind)
            next_of = Hash.new(-1)
            Array.new(count) do |k|
              stage = yield(k)
              Action.new(stage, kind, next_of[stage] += 1)
            end
          end

          # @param lag [Integer, false] by how many backwards the weights' gradients are behind; false: they are not apart
          def interleave(forwards, backwards, warm_up, lag)
            list = forwards.first(warm_up)
            weights = []
            backwards.each_with_index do |backward, i|
              list << forwards[warm_up + i] if warm_up + i < forwards.size
              list << backward
              next unless lag

              weights << Action.new(backward.stage, :W, backward.micro_batch)
              list << weights.shift if weights.size > lag
            end
            list + weights
          end
        end
      end
    end
  end
end
