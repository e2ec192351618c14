# frozen_string_literal: true

require "set"

module Torch
  module Distributed
    # Tensors within Arrays, Hashes, Sets, Structs, Data objects and the instance variables of other objects, and within what these hold,
    # to any depth; an object may be there several times, and hold itself. All that looks into inputs, outputs and batches looks here.
    #
    # @api private
    module Nested
      # Data came with Ruby 3.2.
      RECORD = (defined?(::Data) && ::Data.respond_to?(:define)) ? ::Data : nil

      # Values that hold no tensor, and objects whose tensors are not data that passes through a module.
      PLAIN = [NilClass, TrueClass, FalseClass, Numeric, String, Symbol, ::Module, Range, Regexp, Time, Exception, IO, Torch::NN::Module,
        Torch::Optim::Optimizer, Torch::Device].freeze
      private_constant :RECORD, :PLAIN

      class << self
        # @param value [Object]
        # @return [Array<Torch::Tensor>] all tensors in it, in the order in which {.map} comes to them
        def tensors(value)
          return [value] if value.is_a?(Torch::Tensor)

          found = []
          walk(value) { |_, _, tensor| found << tensor }
          found
        end

        # What a module returned, whose gradients something has to follow.
        #
        # @param value [Object]
        # @param where [String] for messages
        # @return [Array<Torch::Tensor>]
        # @raise [TypeError] if no tensor with a gradient is found, but an object that cannot be looked into
        def outputs(value, where)
          found = tensors(value)
          return found if !Torch.grad_enabled? || found.any?(&:requires_grad)

          hidden = opaque(value) or return found
          raise TypeError, "#{where}: forward returned a #{hidden.class}, in which no tensor can be looked for, so that backward could not be " \
            "followed: return tensors, or Arrays, Hashes, Structs or objects that have them in instance variables"
        end

        # Rebuilds `value` with other tensors. What holds none that changed stays the object that it is, and nothing is
        # changed in place.
        #
        # @param value [Object]
        # @yieldparam tensor [Torch::Tensor]
        # @yieldreturn [Object] what takes its place
        def map(value)
          return yield(value) if value.is_a?(Torch::Tensor)

          holders = {}.compare_by_identity # of each container: where it is
          changes = {}.compare_by_identity # in each container
          walk(value, holders) do |holder, key, tensor|
            other = yield(tensor)
            (changes[holder] ||= {})[key] = other unless other.equal?(tensor)
          end
          changes.empty? ? value : Rebuilding.new(holders, changes).copy(value)
        end

        # @return [Object] the value with its tensors on a device; those that are there stay the objects that they are
        def to(value, device)
          name = Distributed._device_name(device)
          map(value) { |tensor| (Distributed._device_name(tensor.device) == name) ? tensor : tensor.to(device) }
        end

        # @return [Boolean] whether {.map} looks into it
        def container?(value)
          case value
          when Array, Hash, Set, Struct then true
          when *PLAIN, Torch::Tensor then false
          else record?(value) || !value.instance_variables.empty? || readable?(value)
          end
        end

        # @return [Hash] what a container holds, by its place: a number, or the name of a member or an instance variable
        def parts_of(value)
          case value
          when Array, Set then value.each_with_index.to_h { |part, index| [index, part] }
          when Hash then value.to_a.each_with_index.to_h { |(_, part), index| [index, part] }
          when Struct then value.to_h
          else
            return value.to_h if record?(value)

            names = value.instance_variables
            return names.to_h { |name| [name, value.instance_variable_get(name)] } unless names.empty?

            value.respond_to?(:to_tuple) ? parts_of(value.to_tuple.to_a) : value.to_h
          end
        end

        # @param changed [Hash] other parts, by their places
        # @return [Object] the same container but for these
        def with(value, changed)
          return value.with(**changed) if record?(value)

          copy = shell(value)
          fill(copy, value, changed)
          value.frozen? ? copy.freeze : copy
        end

        # @api private
        # @return [Object, nil] a copy to be filled; nil: it is made from its parts
        def shell(value)
          case value
          when Array, Hash, Set, Struct then value.dup
          else
            return if record?(value)
            return value.clone(freeze: false) unless value.instance_variables.empty?

            raise TypeError, "cannot put other tensors into a #{value.class}, which shows what it has by #{value.respond_to?(:to_tuple) ? "to_tuple" : "to_h"} " \
              "only: expected Arrays, Hashes, Structs or objects with instance variables"
          end
        end

        # @api private
        def fill(copy, value, changed)
          case value
          when Set
            parts = value.to_a
            copy.replace(changed.each_with_object(parts) { |(index, part), list| list[index] = part })
          when Hash
            keys = value.keys
            changed.each { |index, part| copy[keys[index]] = part }
          when Array, Struct then changed.each { |key, part| copy[key] = part }
          else changed.each { |name, part| copy.instance_variable_set(name, part) }
          end
        end

        private

        # Depth first, without recursion.
        #
        # @param holders [Hash, nil] gets of each container where it is: other containers, and the places in them
        def walk(value, holders = {}.compare_by_identity)
          open = [[nil, nil, value]]
          until open.empty?
            holder, key, each = open.pop
            if each.is_a?(Torch::Tensor)
              yield holder, key, each
            elsif holders.key?(each)
              holders[each] << [holder, key]
            elsif container?(each)
              holders[each] = [[holder, key]]
              parts_of(each).reverse_each { |place, part| open << [each, place, part] }
            end
          end
        end

        def opaque(value)
          open = [value]
          seen = {}.compare_by_identity
          until open.empty?
            each = open.pop
            next if seen[each] || each.is_a?(Torch::Tensor)

            seen[each] = true
            if container?(each)
              open.concat(parts_of(each).values)
            elsif Distributed._native?(each) && PLAIN.none? { |kind| kind === each }
              return each
            end
          end
        end

        # What a library in C shows of its objects.
        def readable?(value)
          Distributed._native?(value) && !value.is_a?(Enumerable) && (value.respond_to?(:to_tuple) || value.respond_to?(:to_h))
        end

        def record?(value)
          RECORD ? value.is_a?(RECORD) : false
        end
      end

      # Copies of the containers in which something changes, and of those that hold them. Containers that can be changed are copied first and
      # filled then, since they may hold each other.
      class Rebuilding
        # @param holders [Hash{Object => Array<Array(Object, Object)>}] where each container is, in the order in which they were found
        # @param changes [Hash{Object => Hash}] other parts of containers, by places
        def initialize(holders, changes)
          @holders = holders
          @changes = changes
          @inner = {}.compare_by_identity # of each container that is copied: containers in it that are, by place
          collect(changes.keys)
          @copies = {}.compare_by_identity
          @inner.each_key { |each| Nested.shell(each)&.then { |shell| @copies[each] = shell } }
          @inner.keys.reverse_each { |each| @copies[each] ||= Nested.with(each, changed(each)) }
          @inner.each_key { |each| complete(each) }
        end

        # @return [Object]
        def copy(value)
          @copies.fetch(value, value)
        end

        private

        def collect(open)
          open.each { |each| @inner[each] = {} }
          until open.empty?
            each = open.pop
            @holders[each].each do |holder, key|
              next if key.nil? && holder.nil?

              open << holder unless @inner.key?(holder)
              (@inner[holder] ||= {})[key] = each
            end
          end
        end

        # One that is made from its parts needs those first that are made so, too.
        def changed(value)
          @inner[value].transform_values { |each| @copies[each] ||= Nested.with(each, changed(each)) }.merge(@changes[value] || {})
        end

        def complete(value)
          copy = @copies.fetch(value)
          return if copy.frozen? # made from its parts

          Nested.fill(copy, value, changed(value))
          copy.freeze if value.frozen?
        end
      end
      private_constant :Rebuilding
    end
  end
end
