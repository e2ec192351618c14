# frozen_string_literal: true

module Torch
  module Distributed
    module Tensor
      module Parallel
        # A module of the model, and how it is to be run.
        #
        # @api private
        Target = Struct.new(:name, :mod, :style) do
          # For messages.
          def to_s
            "#{name.empty? ? "the module itself" : name} (#{mod.class.name.to_s[/\w*\z/]})"
          end
        end
        private_constant :Target

        # Which modules the names of a plan mean.
        #
        # @api private
        class Plan
          # Names that a message shows.
          SHOWN = 8
          private_constant :SHOWN

          # @return [Array<Target>]
          attr_reader :targets

          def initialize(root, plan)
            plan = {"" => plan} if plan.is_a?(ParallelStyle)
            unless plan.is_a?(Hash) && plan.each_value.all?(ParallelStyle)
              raise TypeError, "parallelize_plan: expected a style such as ColwiseParallel.new, or a Hash of names and styles, " \
                "got #{plan.inspect}"
            end

            @names = {}
            walk(root, [], [])
            @keys = {}.compare_by_identity
            @targets = plan.flat_map { |key, style| found(key.to_s, style) }
          end

          private

          # A module that has several names is found by each of them.
          def walk(mod, name, above)
            return if above.any? { |each| each.equal?(mod) }

            @names[name.join(".")] = mod
            mod.named_children.each { |key, child| walk(child, [*name, key], [*above, mod]) if child.is_a?(Torch::NN::Module) }
          end

          def found(key, style)
            names = @names.keys.select { |name| match?(key, name) }
            raise ArgumentError, "parallelize_plan: #{key.inspect} matches no module: #{suggestion(key)}" if names.empty?

            names.uniq { |name| @names[name].object_id }.map do |name|
              mod = @names[name]
              if @keys[mod]
                raise ArgumentError, "parallelize_plan: #{@keys[mod].inspect} and #{key.inspect} both match #{name}: expected one style " \
                  "for each module"
              end

              @keys[mod] = key
              Target.new(name, mod, style)
            end
          end

          # Part by part, so that no `*` stands for a dot.
          def match?(key, name)
            patterns, parts = [key, name].map { |each| each.split(".") }
            patterns.size == parts.size && patterns.zip(parts).all? { |pattern, part| File.fnmatch?(pattern, part, File::FNM_NOESCAPE) }
          end

          def suggestion(key)
            names = @names.keys - [""]
            return "the #{@names[""].class} has none in it" if names.empty?

            close = defined?(DidYouMean::SpellChecker) ? DidYouMean::SpellChecker.new(dictionary: names).correct(key) : []
            last = key.split(".").last
            close |= names.select { |name| name.split(".").last == last }
            shown = (close.empty? ? names : close).first(SHOWN).map(&:inspect).join(", ")
            close.empty? ? "expected one of #{shown}#{", ..." if names.size > SHOWN}" : "did you mean #{shown}?"
          end
        end
        private_constant :Plan
      end
    end
  end
end
