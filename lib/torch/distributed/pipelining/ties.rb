# frozen_string_literal: true

module Torch
  module Distributed
    module Pipelining
      # Parameters that are one, but in several stages: an embedding and a head, for instance. They get the lowest stage's values at first,
      # and the sum of all their gradients in each step, added in the same order everywhere, so that they remain equal.
      #
      # @api private
      class Ties
        # @param ties [Array<Hash{Integer => String}>] for each of them its name in each stage's module
        # @param stages [Hash{Integer => PipelineStage}] this process's
        # @param owner [Proc] the rank of a stage
        def initialize(ties, stages, owner, num_stages)
          check(ties, num_stages)
          @owner = owner
          @stages = stages
          @ties = ties.map { |tie| tie.sort.to_h }
          @parameters = @ties.map do |tie|
            tie.slice(*stages.keys).to_h { |stage, name| [stage, parameter(stages[stage], stage, name)] }
          end
        end

        # @return [Array<Hash>] of each tie what all ranks compare
        def description
          @ties.zip(@parameters).map do |tie, mine|
            forms = mine.values.map { |each| "#{each.dtype} #{each.shape}" }
            {"stages" => tie.map { |stage, name| "#{stage}: #{name}" }, "here" => forms.uniq}
          end
        end

        # The values of the lowest stage's go to the others.
        #
        # @param link [Link, nil]
        def equalize(link)
          each_here do |number, stages, mine|
            first = stages.first
            values = mine[first] || received(link, number, first)
            (mine.values - [values]).each { |each| Torch.no_grad { each.copy!(values) } }
            next unless mine.key?(first)

            others(stages).each { |rank| link.send_plain(rank, number, [mine[first].detach]) }
          end
          link&.finish
        end

        # @param link [Link, nil]
        def sum(link)
          each_here do |number, stages, mine|
            grads = gradients(mine)
            if distinct(mine).size > 1 || mine.size < stages.size
              grads.each_value { |grad| others(stages).each { |rank| link.send_plain(rank, number, [grad]) } }
              all = stages.map { |stage| grads[stage] || received(link, number, stage) }
              total = Torch.no_grad { all.inject(:+) }
              distinct(mine).each { |each| each.grad = total.clone }
            end
          end
          link&.finish
        end

        private

        def each_here
          @ties.zip(@parameters).each_with_index do |(tie, mine), number|
            yield number + 1, tie.keys, mine unless mine.empty?
          end
        end

        # An object that is in several stages here has the gradient of all of them.
        def gradients(mine)
          seen = {}.compare_by_identity
          mine.transform_values do |each|
            again = seen.key?(each)
            seen[each] = true
            (each.grad unless again) || Torch.zeros_like(each.detach)
          end
        end

        def distinct(mine)
          mine.values.uniq(&:object_id)
        end

        def received(link, number, stage)
          link.receive_plain(@owner.call(stage), number).first
        end

        # The other ranks that have some of these stages.
        def others(stages)
          stages.reject { |each| @stages.key?(each) }.map { |each| @owner.call(each) }.uniq
        end

        def check(ties, count)
          right = ties.is_a?(Array) && ties.all? do |tie|
            tie.is_a?(Hash) && tie.size > 1 && tie.keys.all? { |stage| (0...count).to_a.include?(stage) } && tie.values.all?(String)
          end
          return if right

          raise ArgumentError, "tie: expected an Array of Hashes from two or more stages, 0 to #{count - 1}, to a parameter's name, " \
            "got #{ties.inspect}"
        end

        def parameter(stage, index, name)
          found = stage.submodule.named_parameters[name]
          unless found
            raise ArgumentError, "tie: stage #{index} has no parameter #{name.inspect}, but " \
              "#{stage.submodule.named_parameters.keys.join(", ")}"
          end
          if !Distributed.autoload?(:FSDP) && FSDP.const_get(:Unit, false).owner(found)
            raise UnsupportedError, "tie: parameter #{name.inspect} of stage #{index} is sharded: leave it out by fully_shard's " \
              "ignored_params"
          end

          found
        end
      end
    end
  end
end
