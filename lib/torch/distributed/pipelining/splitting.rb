# frozen_string_literal: true

module Torch
  module Distributed
    module Pipelining
      class << self
        # Divides a Sequential, also of Sequentials, into parts, whose parameters have the names and are the objects that they are in
        # it: together their state_dicts are the model's.
        #
        #   Pipelining.split(model, at: ["layers.4", "layers.8"])     # three parts
        #   Pipelining.split(model, parts: 2)
        #
        # @param model [Torch::NN::Sequential]
        # @param at [Array<String>, nil] the names of the layers with which a part begins, except for the first one
        # @param parts [Integer, nil] instead: into how many parts with about as many layers
        # @return [Array<Torch::NN::Sequential>]
        # @raise [ArgumentError] naming what is wrong, and the names that there are
        def split(model, at: nil, parts: nil)
          raise TypeError, "model: expected a Torch::NN::Sequential, got #{model.inspect}" unless model.instance_of?(Torch::NN::Sequential)
          raise ArgumentError, "at, parts: expected one of them, got #{at.nil? ? "none" : "both"}" unless at.nil? ^ parts.nil?

          layers = layers_of(model)
          starts = at ? starts_at(layers, at) : starts_of(layers, parts)
          [0, *starts].zip([*starts, layers.size]).map { |from, to| part_of(model, layers.keys[from...to]) }
        end

        private

        # @return [Hash{String => Torch::NN::Module}] what is called one after the other
        def layers_of(mod, prefix = "")
          mod.named_children.each_with_object({}) do |(name, child), found|
            found.merge!(child.instance_of?(Torch::NN::Sequential) ? layers_of(child, "#{prefix}#{name}.") : {"#{prefix}#{name}" => child})
          end
        end

        def starts_at(layers, names)
          starts = Array(names).map do |name|
            layers.keys.index { |each| each == name || each.start_with?("#{name}.") } ||
              raise(ArgumentError, "at: expected names of the model's layers, #{layers.keys.join(", ")}, got #{name.inspect}")
          end
          return starts if starts == starts.uniq.sort && !starts.include?(0)

          raise ArgumentError, "at: expected layers in their order without the first one, got #{names.inspect}"
        end

        def starts_of(layers, parts)
          unless parts.is_a?(Integer) && parts.between?(1, layers.size)
            raise ArgumentError, "parts: expected 1 to #{layers.size}, since the model has #{layers.size} layers, got #{parts.inspect}"
          end

          Array.new(parts - 1) { |i| (i + 1) * (layers.size / parts) + [i + 1, layers.size % parts].min }
        end

        # The same module with some of its layers.
        def part_of(mod, names)
          part = Torch::NN::Sequential.new
          mod.named_children.each do |name, child|
            within = names.filter_map { |each| each.delete_prefix("#{name}.") if each.start_with?("#{name}.") }
            if names.include?(name)
              part.add_module(name, child)
            elsif !within.empty?
              part.add_module(name, part_of(child, within))
            end
          end
          part
        end
      end
    end
  end
end
