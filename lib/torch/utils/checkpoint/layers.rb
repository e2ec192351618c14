# frozen_string_literal: true

module Torch
  module Utils
    module Checkpoint
      # Which of a model's modules are its layers: the children of the ModuleList or Sequential that has the most parameters;
      # or of a longer one within it, if that has more than half of these.
      #
      # @api private
      module Layers
        class << self
          # @param model [Torch::NN::Module]
          # @return [Hash{String => Torch::NN::Module}] each layer once, by its name in the model; empty if there is no such list
          def of(model)
            lists = model.named_modules.select { |_, each| list?(each) && each.children.any? }
            return {} if lists.empty?

            name, list = main_list(lists)
            prefix = name.empty? ? "" : "#{name}."
            list.named_children.compact.to_a.uniq { |_, layer| layer.object_id }.to_h { |key, layer| ["#{prefix}#{key}", layer] }
          end

          # @param name [String] of a module
          # @param outer [String] of another one
          def within?(name, outer)
            name != outer && (outer.empty? || name.start_with?("#{outer}."))
          end

          private

          def main_list(lists)
            outer = lists.reject { |name, _| lists.each_key.any? { |other| within?(name, other) } }
            name, list = outer.max_by { |_, each| elements(each) }
            while (found = main_list_within(name, list, lists))
              name, list = found
            end
            [name, list]
          end

          # A list of blocks between other layers in a list.
          def main_list_within(name, list, lists)
            longer = lists.select { |other, each| within?(other, name) && each.children.size > list.children.size }
            found = longer.max_by { |_, each| elements(each) }
            found if found && 2 * elements(found.last) > elements(list)
          end

          def list?(layer)
            layer.is_a?(Torch::NN::ModuleList) || layer.is_a?(Torch::NN::Sequential)
          end

          def elements(layer)
            layer.parameters.sum(&:numel)
          end
        end
      end
    end
  end
end
