# frozen_string_literal: true

require "torch"
require "torch_ddp/ext"

module Torch
  module Distributed
    # Scales the loss, so that small gradients of a forward in low precision are not lost, and leaves out steps whose
    # gradients are infinite or not a number; as PyTorch's torch.amp.GradScaler. All ranks leave out the same steps and have
    # the same scale: each {#unscale_} agrees on what was found, by an all_reduce of one number.
    #
    #   scaler = Torch::Distributed::GradScaler.new
    #   scaler.scale(loss).backward
    #   scaler.unscale_(optimizer)                                # only to clip, or look at, the gradients
    #   Torch::NN::Utils.clip_grad_norm_(model.parameters, 1.0)
    #   scaler.step(optimizer)
    #   scaler.update
    #
    # It has a state for {Torch::Distributed::Checkpoint}: `save(path, model: model, scaler: scaler)`.
    class GradScaler
      # The largest float32, in which PyTorch keeps the scale.
      LARGEST = (2 - 2.0**-23) * 2.0**127
      private_constant :LARGEST

      # What has been done for an optimizer since the last update; finite: nil if there were no gradients.
      Progress = Struct.new(:stage, :finite)
      private_constant :Progress

      # @return [Float] by which the scale is multiplied after `growth_interval` steps in a row
      attr_reader :growth_factor

      # @return [Float] by which it is multiplied after a step that was left out
      attr_reader :backoff_factor

      # @return [Integer] steps
      attr_reader :growth_interval

      # @param init_scale [Numeric]
      # @param growth_factor [Numeric] above 1
      # @param backoff_factor [Numeric] between 0 and 1
      # @param growth_interval [Integer]
      # @param enabled [Boolean] false: losses and gradients stay as they are, and {#step} always steps
      # @param process_group [ProcessGroup, nil] the ranks that agree: all that train the model, also those that have other parts of its
      #   tensors or other stages. nil: the default group, or this process alone if there is none when gradients are unscaled; a process
      #   outside of the group decides alone too
      def initialize(init_scale: 2.0**16, growth_factor: 2.0, backoff_factor: 0.5, growth_interval: 2000, enabled: true, process_group: nil)
        @enabled = enabled ? true : false
        @process_group = process_group
        @init_scale = positive("init_scale", init_scale)
        self.factors = [growth_factor, backoff_factor, growth_interval]
        @growth_tracker = 0
        @scale = nil # until the first loss
        @progress = {}.compare_by_identity
      end

      # @return [Boolean]
      def enabled?
        @enabled
      end
      alias_method :is_enabled, :enabled?

      # Multiplies a loss, or several.
      #
      # @param outputs [Torch::Tensor, Array]
      # @return [Torch::Tensor, Array]
      def scale(outputs)
        return outputs unless enabled?

        @scale ||= @init_scale
        case outputs
        when Torch::Tensor then outputs * @scale
        when Array then outputs.map { |output| scale(output) }
        else raise ArgumentError, "scale: expected a tensor or an Array of tensors, got #{outputs.inspect}"
        end
      end

      # Divides the gradients of the optimizer's parameters by the scale, in place. {#step} does so itself where it has not
      # been done. A collective call.
      #
      # @param optimizer [Torch::Optim::Optimizer]
      # @raise [Error] if it has been called for this optimizer since the last update, or nothing was scaled
      # @raise [UnsupportedError] if a gradient is float16
      # @return [void]
      def unscale_(optimizer)
        return unless enabled?

        check_scaled("unscale_")
        progress = progress_of(optimizer)
        raise Error, "unscale_: it has been called for this optimizer already since the last update" if progress.stage == :unscaled
        raise Error, "unscale_: it is called after step" if progress.stage == :stepped

        progress.finite = Distributed.send(:_unscale_gradients, parameters_of(optimizer), 1.0 / @scale, group)
        progress.stage = :unscaled
        nil
      end

      # Steps the optimizer, unless a gradient of a rank was infinite or not a number. A collective call, unless {#unscale_}
      # was called.
      #
      # @param optimizer [Torch::Optim::Optimizer]
      # @param closure [#call, nil] only without scaling: a step may be left out after it was called
      # @raise [Error] if it has been called for this optimizer since the last update, nothing was scaled, or no parameter
      #   has a gradient
      # @return [Object, nil] what the optimizer's `step` returned
      def step(optimizer, closure = nil)
        return closure ? optimizer.step(closure) : optimizer.step unless enabled?
        raise Error, "step: a closure can't be used while scaling is enabled" if closure

        check_scaled("step")
        progress = progress_of(optimizer)
        raise Error, "step: it has been called for this optimizer already since the last update" if progress.stage == :stepped

        unscale_(optimizer) if progress.stage == :ready
        raise Error, "step: none of the optimizer's parameters has a gradient, on no rank" if progress.finite.nil?

        progress.stage = :stepped
        progress.finite ? optimizer.step : nil
      end

      # Ends a training step: makes the scale smaller if a step was left out, and larger after `growth_interval` that were
      # not.
      #
      # @param new_scale [Numeric, Torch::Tensor, nil] the scale from now on, instead; the same on every rank
      # @raise [Error] if no gradients were unscaled since the last update
      # @return [void]
      def update(new_scale = nil)
        return unless enabled?

        check_scaled("update")
        if new_scale
          new_scale = new_scale.item if new_scale.is_a?(Torch::Tensor)
          @scale = positive("new_scale", new_scale)
        else
          adapt
        end
        @progress.clear
        nil
      end

      # @return [Float] 1.0 if scaling is not enabled
      def get_scale
        enabled? ? @scale || @init_scale : 1.0
      end

      # @return [Hash] in PyTorch's form; empty if scaling is not enabled
      def state_dict
        return {} unless enabled?

        {
          "scale" => get_scale, "growth_factor" => growth_factor, "backoff_factor" => backoff_factor,
          "growth_interval" => growth_interval, "_growth_tracker" => @growth_tracker
        }
      end

      # @param state_dict [Hash] what {#state_dict} returned, or PyTorch's
      # @raise [Error] if it is that of a scaler which was not enabled, and this one is
      # @return [void]
      def load_state_dict(state_dict)
        return unless enabled?
        raise Error, "load_state_dict: the state is empty: was it saved by a GradScaler that was not enabled?" if state_dict.empty?

        scale = positive("scale", state_dict.fetch("scale"))
        self.factors = state_dict.fetch_values("growth_factor", "backoff_factor", "growth_interval")
        @growth_tracker = state_dict.fetch("_growth_tracker")
        @scale ? @scale = scale : @init_scale = scale
        nil
      end

      private

      def factors=((growth, backoff, interval))
        growth = positive("growth_factor", growth)
        backoff = positive("backoff_factor", backoff)
        raise ArgumentError, "growth_factor: expected a number above 1, got #{growth}" unless growth > 1
        raise ArgumentError, "backoff_factor: expected a number below 1, got #{backoff}" unless backoff < 1
        raise ArgumentError, "growth_interval: expected a positive Integer, got #{interval.inspect}" unless interval.is_a?(Integer) && interval.positive?

        @growth_factor = growth
        @backoff_factor = backoff
        @growth_interval = interval
      end

      def positive(name, value)
        return value.to_f if value.is_a?(Numeric) && value.real? && value.to_f.finite? && value.positive?

        raise ArgumentError, "#{name}: expected a positive number, got #{value.inspect}"
      end

      def check_scaled(method)
        raise Error, "#{method}: no loss has been scaled yet: call scaler.scale(loss).backward first" unless @scale
      end

      def progress_of(optimizer)
        @progress[optimizer] ||= Progress.new(:ready)
      end

      def parameters_of(optimizer)
        optimizer.param_groups.flat_map { |group| group[:params] }
      end

      # nil: this process decides alone.
      def group
        return if @process_group.nil? && !Distributed.initialized?
        return if GroupMember::NON_GROUP_MEMBER.equal?(@process_group)

        members = Distributed.send(:member_group, @process_group, "GradScaler")
        members if members.size > 1
      end

      def adapt
        found = @progress.values.map(&:finite).compact
        raise Error, "update: no gradients were unscaled since the last update: call step first" if found.empty?

        if found.all?
          @growth_tracker += 1
          return if @growth_tracker < growth_interval

          grown = @scale * growth_factor
          @scale = grown if grown <= LARGEST
        else
          @scale *= backoff_factor
        end
        @growth_tracker = 0
      end
    end
  end
end
