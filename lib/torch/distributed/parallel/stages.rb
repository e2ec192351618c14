# frozen_string_literal: true

module Torch
  module Distributed
    class Parallel
      # Modules of a model that run one after another.
      #
      # @api private
      class Chain < Torch::NN::Module
        # @return [Array<Torch::NN::Module>]
        attr_reader :parts

        # @param parts [Hash{String => Torch::NN::Module}] by their names in the model
        def initialize(parts)
          super()
          @parts = parts.values
          @names = parts.keys
        end

        def forward(*inputs)
          first, *rest = @parts
          rest.inject(first.call(*inputs)) { |output, part| part.call(output) }
        end

        # By the names that they have in the model.
        def named_children
          @names.zip(@parts).to_h
        end
      end
      private_constant :Chain

      # Stands where a module was that another process has.
      #
      # @api private
      class Elsewhere < Torch::NN::Module
        def initialize(name, stage)
          super()
          @name = name
          @stage = stage
        end

        def forward(*)
          raise Error, "#{@name} is in stage #{@stage}, which another process has: call the Parallel instead of the model"
        end
      end
      private_constant :Elsewhere

      # Which modules of a model run in which stage.
      #
      # @api private
      class Stages
        # @param mod [Torch::NN::Module]
        # @param names [Array<Array<String>>, nil]
        # @param processes [Integer] along the pipeline
        # @raise [ArgumentError] naming what is in no stage, in several, or no module at all; or both numbers
        def initialize(mod, names, processes)
          @mod = mod
          @names = names
          @processes = processes
          @ties = []
          names ? check : check_alone
        end

        # @return [Array<Hash{Integer => String}>] the name in each stage of the parameters that several stages have
        attr_reader :ties

        # Takes from the model what other processes have.
        #
        # @param place [Integer] this process's along the pipeline
        # @return [Array<Torch::NN::Module>] this process's stages
        def keep(place)
          return [@mod] unless @names

          all = @names.map { |stage| stage.to_h { |name| [name, @modules.fetch(name)] } }
          own = all.each_index.select { |stage| stage % @processes == place }
          remove(all, own) if @processes > 1
          own.map { |stage| Chain.new(all[stage]) }
        end

        private

        def check_alone
          return if @processes == 1

          raise ArgumentError, "stages: expected names of modules for each of #{@processes} processes along pp, got nil"
        end

        def check
          unless @names.is_a?(Array) && @names.all? { |stage| stage.is_a?(Array) && !stage.empty? && stage.all?(String) }
            raise ArgumentError, "stages: expected Arrays of one or more names of modules, got #{@names.inspect}"
          end
          unless (@names.size % @processes).zero? && @names.any?
            raise ArgumentError, "stages: expected a multiple of #{@processes}, the processes along pp, got #{@names.size}"
          end

          @modules = @mod.named_modules
          unknown = @names.flatten.find { |name| name.empty? || !@modules.key?(name) }
          raise ArgumentError, "stages: #{unknown.inspect}: expected a module of the #{@mod.class}, such as #{examples}" if unknown

          check_once
          @ties = shared
        end

        def check_once
          all = @names.flatten
          twice = all.find { |name| all.count { |other| name == other || name.start_with?("#{other}.") } > 1 }
          raise ArgumentError, "stages: #{twice.inspect} is in them twice" if twice

          left = @mod.named_parameters.keys.find { |name| stage_of(name).nil? }
          raise ArgumentError, "stages: the parameter #{left.inspect} is in none: expected all that the #{@mod.class} has" if left
        end

        def shared
          named = @mod.named_parameters.group_by { |_, parameter| parameter.object_id }.values.map { |pairs| pairs.map(&:first) }
          named.map { |names| names.reverse.to_h { |name| [stage_of(name), name] } }.select { |tie| tie.size > 1 }
        end

        def stage_of(name)
          @names.index { |stage| stage.any? { |each| name.start_with?("#{each}.") } }
        end

        def examples
          @mod.named_children.keys.first(4).map(&:inspect).join(", ")
        end

        def remove(all, own)
          all.each_with_index do |stage, number|
            next if own.include?(number)

            stage.each_key { |name| replace(name, Elsewhere.new(name, number)) }
          end
          # For checkpoints: other processes have what is missing.
          @mod.define_singleton_method(:distributed_state_dict_partial?) { true }
        end

        def replace(name, mod)
          *path, key = name.split(".")
          parent = path.empty? ? @mod : @modules.fetch(path.join("."))
          if parent.instance_variables.include?(:"@#{key}")
            parent.instance_variable_set("@#{key}", mod)
          else
            parent.add_module(key, mod)
          end
        end
      end
      private_constant :Stages
    end
  end
end
