# frozen_string_literal: true

require "json"

module Torch
  module Distributed
    module Pipelining
      # What comes of a step: the last stage's rank sends it to all others.
      #
      # @api private
      Results = Struct.new(:losses, :metrics, :output) do
        class << self
          # @param outputs_too [Boolean]
          # @return [Results]
          def share(layout, link, execution, outputs_too)
            return of_last(execution) if layout.local?
            return received(link.receive_plain(layout.last_rank, 0), outputs_too) unless layout.last_here?

            results = of_last(execution)
            tensors = packed(results) + (outputs_too ? [results.output].flatten.compact : [])
            layout.group.size.times { |rank| link.send_plain(rank, 0, tensors) unless rank == layout.rank }
            results
          end

          private

          def of_last(execution)
            output = one_or_several(MicroBatches.join(execution.outputs)) unless execution.outputs.empty?
            new(execution.losses, execution.metrics, output)
          end

          def one_or_several(tensors)
            (tensors.size == 1) ? tensors.first : tensors
          end

          def packed(results)
            names = results.metrics.first&.keys || []
            values = results.metrics.flat_map { |each| each.values_at(*names) }
            losses = results.losses.empty? ? Torch.empty(0) : Torch.stack(results.losses.map { |loss| loss.reshape([]) })
            [losses, Distributed.send(:bytes_tensor, JSON.generate(names)), Torch.tensor(values, dtype: :float64)]
          end

          def received(tensors, outputs_too)
            losses, names, values, *outputs = tensors
            names = JSON.parse(Distributed.send(:_bytes, names.cpu)).map(&:to_sym)
            losses = losses.numel.zero? ? [] : Array.new(losses.size(0)) { |i| losses[i] }
            rows = names.empty? ? losses.map { [] } : values.to_a.each_slice(names.size).to_a
            new(losses, rows.map { |row| names.zip(row).to_h }, outputs_too ? one_or_several(outputs) : nil)
          end
        end
      end
    end
  end
end
