# frozen_string_literal: true

require_relative "../../nn"

module Torch
  module Distributed
    module NN
      unless respond_to?(:column_linear)
        class << self
          # A linear layer.
          def linear(input, weight, bias = nil)
            Torch::NN::F.linear(input, weight, bias)
          end

          # A linear layer whose output features are divided.
          def column_linear(input, weight, bias = nil, sequence_dim: nil, group: nil)
            if Distributed.get_world_size(group) > 1
              input = sequence_dim ? gather_to_region(input, dim: sequence_dim, group: group) : copy_to_region(input, group: group)
            end
            Torch::NN::F.linear(input, weight, bias)
          end

          # A linear layer whose input features are divided.
          def row_linear(input, weight, bias = nil, sequence_dim: nil, group: nil)
            return Torch::NN::F.linear(input, weight, bias) if Distributed.get_world_size(group) == 1

            output = Torch::NN::F.linear(input, weight, nil)
            return reduce_from_region(output, group: group).then { |sum| bias ? sum + bias : sum } unless sequence_dim

            output = reduce_scatter_to_region(output, dim: sequence_dim, group: group)
            bias ? output + copy_to_region(bias, group: group) : output
          end
        end
      end
    end
  end
end
