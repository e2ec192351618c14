# frozen_string_literal: true

module Torch
  module Distributed
    module Pipelining
      # Linear layers whose weights' gradients can be computed later, by {WeightGradients}.
      #
      # @api private
      module SplitLinear
        # @param mod [Torch::NN::Module] whose layers are extended
        def self.all_of(mod)
          mod.modules.each { |each| each.extend(self) if each.instance_of?(Torch::NN::Linear) }
        end

        def forward(input)
          Torch::Distributed::NN.linear(input, @weight, @bias)
        end
      end
    end
  end
end
