# frozen_string_literal: true

require "torch"

module Torch
  module Distributed
    # `state_dict` and `load_state_dict` of torch-rb's optimizers, in PyTorch's form:
    #
    #   {"state" => {0 => {"step" => 5, "exp_avg" => tensor, …}, …},
    #    "param_groups" => [{"lr" => 0.001, …, "params" => [0, 1]}]}
    #
    # Parameters are numbered in the order of the groups. A run that goes on from it takes the same steps as one that was
    # never interrupted, to the last bit. What PyTorch's optimizers saved is understood too.
    #
    # Prepended to `Torch::Optim::Optimizer` where torch-rb does not do this itself.
    module OptimizerState
      # Numbers in torch-rb's state that newer versions of PyTorch keep as tensors.
      NUMBERS = %i[step eta mu].freeze

      # How PyTorch computes a step, which says nothing about where it is.
      SWITCHES = %i[foreach capturable differentiable fused decoupled_weight_decay].freeze

      # What each optimizer needs in a parameter's state to go on.
      NEEDED = {
        "Adadelta" => ->(_) { %i[step square_avg acc_delta] },
        "Adagrad" => ->(_) { %i[step sum] },
        "Adam" => ->(group) { %i[step exp_avg exp_avg_sq] + (group[:amsgrad] ? [:max_exp_avg_sq] : []) },
        "Adamax" => ->(_) { %i[step exp_avg exp_inf] },
        "AdamW" => ->(group) { %i[step exp_avg exp_avg_sq] + (group[:amsgrad] ? [:max_exp_avg_sq] : []) },
        "ASGD" => ->(_) { %i[step eta mu ax] },
        "RMSprop" => lambda { |group|
          %i[step square_avg] + (group[:momentum].to_f.positive? ? [:momentum_buffer] : []) + (group[:centered] ? [:grad_avg] : [])
        },
        "Rprop" => ->(_) { %i[step prev step_size] },
        "SGD" => ->(_) { [] }
      }.freeze
      private_constant :NUMBERS, :SWITCHES, :NEEDED

      # Whether torch-rb's own methods do the work.
      #
      # @api private
      def self.there?
        bare = Torch::Optim::Optimizer.allocate
        bare.instance_variable_set(:@param_groups, [])
        bare.instance_variable_set(:@state, {})
        bare.state_dict
        true
      rescue NotImplementedYet
        false
      rescue NoMethodError
        true
      end

      # @return [Hash] its tensors are the optimizer's own: {Checkpoint.save} or a deep copy keeps them as they are now
      def state_dict
        places = places_of_parameters
        groups = @param_groups.map do |group|
          group.except(:params).transform_keys(&:to_s).merge("params" => group[:params].map { |param| places[param] })
        end
        state = places.filter_map do |param, place|
          kept = @state[param] if @state.key?(param)
          [place, kept.transform_keys(&:to_s)] unless kept.nil? || kept.empty?
        end
        {"state" => state.to_h, "param_groups" => groups}
      end

      # Takes over what {#state_dict} or PyTorch gave. Everything is checked before anything is changed. Tensors are copied,
      # with the dtype and on the device of their parameter.
      #
      # @param state_dict [Hash]
      # @return [nil]
      # @raise [ArgumentError] if it does not go with these parameters
      def load_state_dict(state_dict)
        groups, state = checked_state_dict(state_dict)
        @param_groups.each_with_index { |group, i| group.merge!(groups[i]) }
        @param_groups.flat_map { |group| group[:params] }.each { |param| keep_state(param, state[param]) }
        nil
      end

      private

      # @return [Array(Array<Hash>, Hash)] the groups' options, and the state by parameter
      def checked_state_dict(state_dict)
        saved_groups, saved_state = check_state_dict(state_dict)
        groups = @param_groups.each_with_index.map { |group, i| loaded_group(group, saved_groups[i], i) }
        [groups, loaded_state(saved_state, saved_groups, groups)]
      end

      # The optimizer that keeps the state: a wrapper names the one inside.
      def stepping
        self
      end

      def places_of_parameters
        @param_groups.flat_map { |group| group[:params] }.uniq(&:object_id).each_with_index.to_h.compare_by_identity
      end

      def check_state_dict(state_dict)
        unless state_dict.is_a?(Hash) && state_dict["param_groups"].is_a?(Array) && state_dict["state"].is_a?(Hash)
          raise ArgumentError, "state_dict: expected a Hash with \"state\" and \"param_groups\", as state_dict gives it, got " +
            (state_dict.is_a?(Hash) ? "one with #{state_dict.keys.first(8).inspect}" : state_dict.class.name)
        end

        groups = state_dict["param_groups"]
        unless groups.size == @param_groups.size
          raise ArgumentError, "state_dict: expected #{@param_groups.size} parameter group#{"s" if @param_groups.size > 1}, as this " \
            "#{self.class.name} has, got #{groups.size}"
        end

        groups.zip(@param_groups).each_with_index { |(saved, group), i| check_group(saved, group, i) }
        [groups, state_dict["state"]]
      end

      def check_group(saved, group, index)
        params = saved["params"] if saved.is_a?(Hash)
        return if params.is_a?(Array) && params.size == group[:params].size

        raise ArgumentError, "state_dict: expected #{group[:params].size} parameters in group #{index}, as this #{self.class.name} has, " \
          "got #{params.is_a?(Array) ? params.size : "none"}"
      end

      # The options of a group: what the saved one says, but for how the step is computed.
      def loaded_group(group, saved, index)
        options = saved.transform_keys(&:to_sym).reject { |key, _| key == :params || SWITCHES.include?(key) }
        unless group.key?(:maximize)
          raise ArgumentError, "state_dict: group #{index} was trained with maximize, which #{self.class.name} does not know" if options[:maximize]

          options.delete(:maximize)
        end
        options.transform_values { |value| value.is_a?(Torch::Tensor) ? value.item : value.dup }
      end

      def loaded_state(saved, saved_groups, groups)
        owners = {}
        @param_groups.each_with_index do |group, i|
          saved_groups[i]["params"].zip(group[:params]) { |place, param| owners[place] ||= [param, group.merge(groups[i])] }
        end
        unknown = saved.keys - owners.keys
        unless unknown.empty?
          raise ArgumentError, "state_dict: there is state of #{unknown.first(8).inspect}, but its groups have the parameters " \
            "#{owners.keys.first(8).inspect}#{" ..." if owners.size > 8}"
        end

        owners.each_with_object({}.compare_by_identity) do |(place, (param, group)), state|
          kept = (saved[place] || {}).compact.to_h { |key, value| [key.to_sym, loaded_value(place, param, key.to_sym, value)] }
          check_complete(place, kept, group)
          state[param] = kept unless kept.empty?
        end
      end

      def loaded_value(place, param, key, value)
        return number(key, value) if NUMBERS.include?(key)
        return value unless value.is_a?(Torch::Tensor)

        own = LocalPiece.shape(param)
        if value.shape != own && needed_by_torch_rb
          raise ArgumentError, "state_dict: expected #{key} of parameter #{place} in its shape #{own}, got #{value.shape}" +
            (LocalPiece.part?(param) ? ": this process has a piece of it; FSDP.load_full_optim_state_dict loads a whole state" : "")
        end
        value
      end

      # torch-rb counts steps with Integers.
      def number(key, value)
        value = value.item if value.is_a?(Torch::Tensor)
        (key == :step && value.is_a?(Float) && value == value.floor) ? value.to_i : value
      end

      def check_complete(place, kept, group)
        needed = needed_by_torch_rb
        # Adagrad alone has its state from the beginning.
        return if needed.nil? || (kept.empty? && !stepping.is_a?(Torch::Optim::Adagrad))

        missing = needed.call(group) - kept.keys
        return if missing.empty?

        raise ArgumentError, "state_dict: the state of parameter #{place} lacks #{missing.join(", ")}: expected what a " \
          "#{stepping.class.name} saved, got #{kept.empty? ? "none" : kept.keys.join(", ")}"
      end

      def needed_by_torch_rb
        NEEDED.each { |name, needed| return needed if stepping.is_a?(Torch::Optim.const_get(name)) }
        nil
      end

      # Into the tensors that are there, for they may be parts of a larger memory.
      def keep_state(param, loaded)
        return @state.delete(param) if loaded.nil?

        before = @state.key?(param) ? @state[param] : {}
        @state[param] = loaded.to_h do |key, value|
          [key, value.is_a?(Torch::Tensor) ? taken_over(before[key], value, param) : value]
        end
      end

      def taken_over(there, value, param)
        Torch.no_grad do
          value = value.detach
          dtype = param.floating_point? ? param.dtype : value.dtype
          if there.is_a?(Torch::Tensor) && there.dtype == dtype && there.shape == value.shape &&
              Distributed._device_name(there.device) == Distributed._device_name(param.device)
            there.copy!(value)
            there
          else
            value.to(Distributed._device_name(param.device), dtype: dtype, copy: true)
          end
        end
      end
    end

    # `state_dict` and `load_state_dict` of torch-rb's learning rate schedulers, with PyTorch's names: "last_epoch",
    # "base_lrs", "_step_count" and what else the scheduler counts with. Functions (of LambdaLR and MultiplicativeLR) are
    # not part of it; the learning rates in force are the optimizer's.
    #
    # Included in `Torch::Optim::LRScheduler::LRScheduler`; a torch-rb that has methods of these names keeps its own.
    module SchedulerState
      NOT_STATE = %i[@optimizer @lr_lambdas].freeze
      PYTORCH_NAMES = {"step_count" => "_step_count", "t_max" => "T_max"}.freeze
      private_constant :NOT_STATE, :PYTORCH_NAMES

      # @return [Hash]
      def state_dict
        state = scheduler_variables.to_h { |name, variable| [name, instance_variable_get(variable).dup] }
        state.merge("_last_lr" => @optimizer.param_groups.map { |group| group[:lr] })
      end

      # @param state_dict [Hash] what {#state_dict} or PyTorch gave
      # @return [nil]
      # @raise [ArgumentError] if it is of another kind, or for another number of parameter groups
      def load_state_dict(state_dict)
        unless state_dict.is_a?(Hash) && state_dict["last_epoch"].is_a?(Integer)
          raise ArgumentError, "state_dict: expected a Hash with \"last_epoch\", as state_dict of a scheduler gives it, got " +
            (state_dict.is_a?(Hash) ? "one with #{state_dict.keys.first(8).inspect}" : state_dict.class.name)
        end

        variables = scheduler_variables
        missing = variables.keys - state_dict.keys
        raise ArgumentError, "state_dict: expected one of #{self.class.name}, but it lacks #{missing.join(", ")}" unless missing.empty?

        rates = state_dict["base_lrs"]
        unless rates.is_a?(Array) && rates.size == @optimizer.param_groups.size
          raise ArgumentError, "state_dict: expected base_lrs of #{@optimizer.param_groups.size} parameter groups, got #{rates.inspect}"
        end

        variables.each { |name, variable| instance_variable_set(variable, state_dict[name].dup) }
        nil
      end

      private

      def scheduler_variables
        (instance_variables - NOT_STATE).to_h do |variable|
          name = variable.to_s.delete_prefix("@")
          [PYTORCH_NAMES.fetch(name, name), variable]
        end
      end
    end

    optimizer = Torch::Optim::Optimizer
    optimizer.prepend(OptimizerState) unless OptimizerState.there?
    scheduler = Torch::Optim::LRScheduler::LRScheduler
    scheduler.include(SchedulerState) unless scheduler.method_defined?(:state_dict)
  end
end
