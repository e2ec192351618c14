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

        # A step begins: what gradients there are already is the same everywhere, and is not to be added up.
        def begin
          @before = {}.compare_by_identity
          @parameters.flat_map(&:values).each { |each| @before[each] ||= each.grad.clone if each.grad }
        end

        # @param link [Link, nil]
        def sum(link)
          each_here do |number, stages, mine|
            next if mine.size == stages.size && distinct(mine).size == 1

            grads = gradients(mine)
            theirs = exchange(link, number, stages, grads)
            total = Torch.no_grad { grads.merge(theirs).values_at(*stages).inject(:+) }
            distinct(mine).each { |each| set_gradient(each, total) }
          end
        end

        private

        def each_here
          @ties.zip(@parameters).each_with_index do |(tie, mine), number|
            yield number + 1, tie.keys, mine unless mine.empty?
          end
        end

        # What the step has added. An object that is in several stages here has the gradient of all of them.
        def gradients(mine)
          seen = {}.compare_by_identity
          mine.transform_values do |each|
            next Torch.zeros_like(each.detach) if seen[each] || each.grad.nil?

            seen[each] = true
            @before[each] ? Torch.no_grad { each.grad - @before[each] } : each.grad
          end
        end

        # The other stages' gradients. When this returns, the own ones are sent and may be changed.
        def exchange(link, number, stages, grads)
          form = grads.values.first
          theirs = (stages - grads.keys).to_h { |stage| [stage, Torch.empty(form.shape, dtype: form.dtype, device: form.device)] }
          sends = grads.values.product(others(stages)).map { |grad, rank| [:isend, grad, rank] }
          receives = theirs.map { |stage, grad| [:irecv, grad, @owner.call(stage)] }
          link.exchange(number, sends + receives) unless theirs.empty?
          theirs
        end

        # In place, since a gradient may be a part of a bucket.
        def set_gradient(parameter, total)
          Torch.no_grad do
            total += @before[parameter] if @before[parameter]
            parameter.grad ? parameter.grad.copy!(total) : parameter.grad = total.clone
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
          names = stage.submodule.named_parameters
          found = names[name] || names["module.#{name}"] # in a DistributedDataParallel
          unless found
            raise ArgumentError, "tie: stage #{index} has no parameter #{name.inspect}, but " \
              "#{names.keys.join(", ")}"
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
