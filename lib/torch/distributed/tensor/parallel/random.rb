# frozen_string_literal: true

require_relative "../../random_streams"

module Torch
  module Distributed
    module Tensor
      module Parallel
        # Random numbers on the CPU where a model is divided. Outside of that all processes of a group draw the same ones; where each
        # computes its own part, as in dropout on its part of the sequence or on its attention heads, each has its own:
        #
        #   Parallel::Random.manual_seed(17, mesh["tp"])
        #   weights = Parallel::Random.divided(mesh["tp"]) { @dropout.call(weights) }
        #
        # {SequenceParallel} does that for its modules, so that in a plan it may also stand for the dropout of attention weights.
        # Checkpointed segments draw both again. On a GPU libtorch draws, with another state: all processes have the same numbers
        # there, also where each computes its own part.
        module Random
          # From Megatron.
          OFFSET = 2718
          private_constant :OFFSET

          class << self
            # Seeds those that all processes have, as Torch.manual_seed does, and this process's own: with `seed` + 2718 + its rank.
            # Without this call its own are seeded by the others when they are first used; Torch.manual_seed leaves them as they are.
            #
            # @param seed [Integer] the same on all processes of the mesh; another one where they have other data
            # @param mesh [DeviceMesh, nil] of one dimension; nil: all processes
            # @return [void]
            def manual_seed(seed, mesh = nil)
              raise TypeError, "seed: expected an Integer, got #{seed.inspect}" unless seed.is_a?(Integer)

              group = Parallel.group_of(mesh)
              RandomStreams.seed(group, seed + OFFSET + group.rank)
              Torch.manual_seed(seed)
              nil
            end

            # Within the block random numbers are this process's own. In a group of one process nothing changes.
            #
            # @param mesh [DeviceMesh, nil] of one dimension; nil: all processes
            # @return [Object] the block's value
            def divided(mesh = nil, &block)
              within(Parallel.group_of(mesh), &block)
            end

            # @api private
            # @param group [ProcessGroup, nil] nil: nothing changes
            def within(group, &block)
              return yield if group.nil? || group.size == 1

              RandomStreams.within(group, OFFSET + group.rank, &block)
            end

            # For checkpoints of training.
            #
            # @param mesh [DeviceMesh, nil] of one dimension; nil: all processes
            # @return [Torch::Tensor] this process's own, as {Distributed.get_rng_state} has the others
            def get_state(mesh = nil)
              state = nil
              divided(mesh) { state = Distributed.get_rng_state }
              state
            end

            # @param state [Torch::Tensor] what {.get_state} gave
            # @return [void]
            def set_state(state, mesh = nil)
              divided(mesh) { Distributed.set_rng_state(state) }
            end
          end
        end
      end
    end
  end
end
