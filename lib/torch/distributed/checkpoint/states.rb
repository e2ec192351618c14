# frozen_string_literal: true

module Torch
  module Distributed
    module Checkpoint
      # Converts between objects and their states: what is saved of a model, an optimizer, a sampler or a hash of such, and how it
      # goes back.
      #
      # @api private
      module States
        WRAPPER = "module."
        private_constant :WRAPPER

        # How a state must fit: `strict` about a model's names, `exact` about the dtypes of models. `elsewhere` is filled with the names
        # that other ranks must have, by object.
        Terms = Struct.new(:strict, :exact, :parts, :elsewhere)

        module_function

        # What is given by keyword: objects that have a state, or hashes and arrays of them.
        def check(objects, method)
          objects.each do |name, object|
            next if stateful?(object, method)

            raise TypeError, "#{name}: expected an object with #{method}, or a Hash or an Array of them, got #{object.inspect[0, 80]} " \
              "(#{object.class}); plain values go into extra:, or into the state_dict that is saved by checkpoint_id:"
          end
        end

        def stateful?(object, method)
          case object
          when Hash then object.values.all? { |each| stateful?(each, method) }
          when Array then object.all? { |each| stateful?(each, method) }
          else object.respond_to?(method)
          end
        end

        # @param parts [Parts]
        # @param divided [Boolean] whether states have this rank's {Piece}s
        # @return [Object] plain data: the object's state, or the value itself
        def of(object, parts, divided)
          case object
          when Torch::Tensor then object
          when Torch::NN::Module then model_state(unwrapped(object), parts, divided)
          when Hash then object.to_h { |name, each| [name.is_a?(Symbol) ? name.to_s : name, of(each, parts, divided)] }
          when Array then object.map { |each| of(each, parts, divided) }
          else
            return object unless object.respond_to?(:state_dict)

            (parts.optimizer(object)&.state if divided) || other_state(object, parts)
          end
        end

        def model_state(model, parts, divided)
          state = divided ? parts.state_of_model(model) : model.state_dict.compact
          state.is_a?(PartialState) ? state : WholeState.new(state)
        end

        def other_state(object, parts)
          state = parts.numbered_state(object)
          object.is_a?(Torch::Optim::Optimizer) ? WholeState.new(state) : state
        end

        # @return [Array<Torch::Tensor>] what models keep beside their parameters: each rank's comes from its own batches
        def buffers(object)
          case object
          when Torch::NN::Module then object.modules.flat_map { |each| each.named_buffers.values.grep(Torch::Tensor) }
          when Hash then object.values.flat_map { |each| buffers(each) }
          when Array then object.flat_map { |each| buffers(each) }
          else []
          end
        end

        # Says what keeps a state from going back; nothing is changed yet.
        #
        # @param saved [Object] what {Reading} gave
        # @param terms [Terms]
        def check_fit(name, object, saved, terms)
          case object
          when Torch::NN::Module then check_model(name, unwrapped(object), saved, terms)
          when Hash, Array
            each_with_saved(name, object, saved) { |inner, each, state| check_fit(inner, each, state, terms) }
          when Torch::Tensor
            return if saved.is_a?(Torch::Tensor) && saved.shape == object.shape

            raise ArgumentError, "#{name}: expected a tensor of shape #{object.shape}, got #{described(saved)}"
          else
            return unless saved.is_a?(OptimizerParts::Fetched)

            naming(name) { terms.parts.optimizer(object).check(saved) }
            terms.elsewhere[name] = saved.elsewhere unless saved.elsewhere.empty?
          end
        end

        # Gives an object its state. Tensors are filled in place.
        #
        # @return [Object] what stands for it from now on: the object, or the value that was saved
        def restore(name, object, saved, terms)
          case object
          when Torch::NN::Module then restore_model(unwrapped(object), saved, terms)
          when Torch::Tensor then Torch.no_grad { object.copy!(saved) }
          when Hash
            each_with_saved(name, object, saved) { |inner, each, state, key| object[key] = restore(inner, each, state, terms) }
          when Array
            each_with_saved(name, object, saved) { |inner, each, state, key| object[key] = restore(inner, each, state, terms) }
          else
            return saved unless object.respond_to?(:load_state_dict)

            naming(name) { saved.is_a?(OptimizerParts::Fetched) ? terms.parts.optimizer(object).load(saved) : object.load_state_dict(saved) }
          end
          object
        end

        # A model in a DistributedDataParallel, a FullyShardedDataParallel or a Parallel is saved and loaded as the model itself.
        def unwrapped(model)
          model = model.module while wrapper?(model)
          model
        end

        def wrapper?(model)
          model.is_a?(Torch::NN::Parallel::DistributedDataParallel) ||
            (FSDP.const_defined?(:FullyShardedDataParallel, false) && model.is_a?(FSDP::FullyShardedDataParallel)) ||
            (Distributed.autoload?(:Parallel).nil? && model.is_a?(Parallel))
        end

        def each_with_saved(name, object, saved)
          pairs = object.is_a?(Hash) ? object.to_a : object.each_with_index.map { |each, i| [i, each] }
          pairs.each do |key, each|
            found = case saved
            when Hash then [key, key.to_s].find { |wanted| saved.key?(wanted) }
            when Array then key if key.is_a?(Integer) && key < saved.size
            end
            raise ArgumentError, "#{name}.#{key}: it was not saved, there is #{described(saved)}" if found.nil?

            yield "#{name}.#{key}", each, saved[found], key
          end
        end

        def check_model(name, model, saved, terms)
          if !saved.is_a?(Hash) || !saved.values.compact.all? { |each| [Torch::Tensor, Slice].any? { |kind| each.is_a?(kind) } }
            raise ArgumentError, "#{name}: expected the state of a model, names and tensors, got #{described(saved)}"
          end

          own = terms.parts.layout(model)
          saved = named_as(own, saved)
          faults = []
          if terms.strict
            others = saved.keys - own.keys
            terms.elsewhere[name] = others if (partial = terms.parts.partial?(model)) && others.any?
            faults += listed("missing", own.keys - saved.keys) + listed("not known to the model", partial ? [] : others)
          end
          own = own.slice(*saved.keys)
          faults += listed("of another shape", different(own, saved, &:shape))
          faults += listed("of another dtype", different(own, saved) { |each| dtype_of(each) }) if terms.exact
          raise ArgumentError, "#{name}: what was saved does not fit this #{model.class.name}: #{faults.join("; ")}" unless faults.empty?
        end

        def different(own, saved)
          own.filter_map do |key, piece|
            one, two = [piece, saved[key]].map { |each| yield each }
            "#{key} (the model's #{one}, saved #{two})" unless one == two
          end
        end

        def dtype_of(value)
          case value
          when Slice then value.dtype
          when Piece then Checkpoint.dtype_name(value.tensor)
          else Checkpoint.dtype_name(value)
          end
        end

        def restore_model(model, saved, terms)
          own = terms.parts.layout(model)
          saved = named_as(own, saved)
          Torch.no_grad { own.each { |key, piece| piece.fill(saved[key]) if saved[key] } }
        end

        # A model that was saved within a wrapper goes into one without, and the other way round.
        def named_as(own, saved)
          saved = saved.compact
          inside, outside = [own, saved].map { |state| !state.empty? && state.keys.all? { |key| key.start_with?(WRAPPER) } }
          return saved if inside == outside || own.empty?

          outside ? saved.transform_keys { |key| key.delete_prefix(WRAPPER) } : saved.transform_keys { |key| WRAPPER + key }
        end

        def listed(what, names)
          names.empty? ? [] : ["#{what}: #{names.first(6).join(", ")}#{", ... (#{names.size} in all)" if names.size > 6}"]
        end

        def described(value)
          case value
          when Torch::Tensor then "a tensor of shape #{value.shape}"
          when Hash then "a Hash of #{value.keys.first(8).join(", ")}"
          else value.inspect[0, 80]
          end
        end

        # An object's own complaint, with its name.
        def naming(name)
          yield
        rescue ArgumentError => e
          raise ArgumentError, "#{name}: #{e.message}"
        end
      end
    end
  end
end
