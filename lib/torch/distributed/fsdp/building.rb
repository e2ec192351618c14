# frozen_string_literal: true

module Torch
  module Distributed
    module FSDP
      # Sees modules being made, from outside: their classes stay what they are.
      #
      # @api private
      class Building
        # @param classes [Array<Class>]
        # @yieldparam mod [Torch::NN::Module] of one of these classes, whose `initialize` has just returned
        def initialize(classes, &made)
          @classes = classes
          @made = made
        end

        # @return [Object] the block's value
        def during
          methods = @classes.flat_map { |each| with_descendants(each) }.map { |each| each.instance_method(:initialize) }
          watches = methods.uniq(&:owner).map { |method| watch(method) }
          yield
        ensure
          watches&.each(&:disable)
        end

        private

        def with_descendants(parent)
          [parent, *parent.subclasses.flat_map { |child| with_descendants(child) }]
        end

        # A subclass's own `initialize` returns after the one that it calls.
        def watch(method)
          TracePoint.new(:return) do |point|
            mod = point.self
            finished = mod.class.instance_method(:initialize).owner == method.owner
            @made.call(mod) if finished && @classes.any? { |each| mod.is_a?(each) }
          end.tap { |point| point.enable(target: method, target_thread: Thread.current) }
        end
      end
      private_constant :Building
    end
  end
end
