# frozen_string_literal: true

require "torch/distributed"

module Torch
  module Distributed
    module Algorithms
      # What a process whose inputs have ended does while the others still iterate.
      class JoinHook
        # Called again and again while some process still has inputs: takes part in every operation that these call in
        # one iteration, in the same order.
        def main_hook
        end

        # Called once, when no process has inputs any more.
        #
        # @param is_last_joiner [Boolean] whether this process was among the last to have any
        def post_hook(is_last_joiner)
        end
      end

      # For classes whose operations happen in each iteration: they call {Join.notify_join_context} before the first of
      # them, and define {#join_hook}.
      module Joinable
        # @api private
        JoinConfig = Struct.new(:enable, :throw_on_early_termination, :first, :active)
        DISABLED = JoinConfig.new(false, false, false, nil).freeze
        private_constant :DISABLED

        # @param kwargs [Hash] what was given to {Join} beside its own arguments
        # @return [JoinHook]
        def join_hook(**kwargs)
          raise NotImplementedError, "#{self.class}#join_hook: expected to be defined, since it is a Joinable"
        end

        # @return [ProcessGroup] the group whose processes join
        def join_process_group
          raise NotImplementedError, "#{self.class}#join_process_group: expected to be defined, since it is a Joinable"
        end

        # @return [Torch::Device, String, nil] where tensors of its operations are; nil: on the CPU
        def join_device
          nil
        end

        # @return [Boolean] whether it is in a {Join} now
        def joining?
          join_config.enable
        end

        # @api private
        def join_config
          @join_config || DISABLED
        end

        # @api private
        attr_writer :join_config
      end

      # Lets processes with different numbers of inputs train together: a process that has none left takes part in the others'
      # operations until all are through.
      #
      #   Torch::Distributed::Algorithms::Join.run([model, optimizer]) do
      #     inputs.each { |input| step(model, optimizer, input) }
      #   end
      #
      # All processes of the group run it. The first of the joinables counts an iteration, the others follow it.
      class Join
        # How often to go on for others before it is said that they have many more inputs.
        WARN_AFTER = 1000
        private_constant :WARN_AFTER

        class << self
          # @see #initialize
          # @return [Object] the block's value
          def run(joinables, **options, &block)
            new(joinables, **options).run(&block)
          end

          # Called by joinables before the operations of an iteration. Announces to the processes that have no more inputs that
          # there is one more; does nothing outside of {#run} and for all joinables but the first.
          #
          # @param joinable [Joinable]
          # @return [Integer, nil] how many processes still have inputs
          # @raise [Error] on every process, if one has run out of inputs and `throw_on_early_termination` was asked for
          def notify_join_context(joinable)
            config = joinable.join_config
            return unless config.enable && config.first

            active, ended = census(joinable, 1, 0)
            if ended.positive?
              raise Error, "throw_on_early_termination: #{ended} of #{joinable.join_process_group.size} processes have no " \
                "more inputs"
            end
            config.active = active
          end

          # @api private
          # @return [Array(Integer, Integer)] how many still have inputs, and how many of the others want an end to it
          def census(joinable, active, ended)
            counts = Distributed.send(:group_tensor, joinable.join_process_group, [active, ended], :int64)
            counts = counts.to(joinable.join_device) if joinable.join_device
            Distributed.all_reduce(counts, group: joinable.join_process_group).to_a
          end
        end

        # @param joinables [Array<Joinable>] all of one process group; the first is the one that is called first in an iteration
        # @param enable [Boolean] false: {#run} runs the block and nothing else, for inputs that are known to be even
        # @param throw_on_early_termination [Boolean] whether to raise on every process as soon as one has no inputs left
        # @param kwargs [Hash] for each joinable's `join_hook`
        def initialize(joinables, enable: true, throw_on_early_termination: false, **kwargs)
          check(joinables)
          @joinables = joinables.dup.freeze
          @enable = enable
          @throw = throw_on_early_termination
          @hooks = @joinables.map { |joinable| joinable.join_hook(**kwargs) }
        end

        # Runs the block, then goes on for the others until their inputs have ended too. An exception ends it at once.
        #
        # @return [Object] the block's value
        def run
          return yield unless @enable

          configure
          yield
        ensure
          if @enable
            begin
              go_on unless TorchDDP::PassingError.current
            ensure
              @joinables.each { |joinable| joinable.join_config = nil }
            end
          end
        end

        private

        def check(joinables)
          unless joinables.is_a?(Array) && !joinables.empty? && joinables.all?(Joinable)
            raise ArgumentError, "joinables: expected an Array of Torch::Distributed::Algorithms::Joinable, such as " \
              "DistributedDataParallel, got #{joinables.is_a?(Array) ? joinables.map(&:class).inspect : joinables.class}"
          end
          groups = joinables.map(&:join_process_group)
          return if groups.all? { |group| group.equal?(groups.first) }

          raise ArgumentError, "joinables: expected all of one process group, got #{groups.uniq.map(&:inspect).join(" and ")}"
        end

        def configure
          @joinables.each_with_index do |joinable, index|
            joinable.join_config = Joinable::JoinConfig.new(true, @throw, index.zero?, joinable.join_process_group.size)
          end
        end

        # This process has no more inputs.
        def go_on
          last = true
          rounds = 0
          while (active = still_active).positive?
            last = false
            @joinables.each { |joinable| joinable.join_config.active = active }
            @hooks.each(&:main_hook)
            rounds += 1
            warn_of(active) if rounds == WARN_AFTER
          end
          @hooks.each { |hook| hook.post_hook(last) }
        end

        def still_active
          first = @joinables.first
          active, ended = Join.census(first, 0, @throw ? 1 : 0)
          return active unless @throw && active.positive?

          raise Error, "throw_on_early_termination: #{ended} of #{first.join_process_group.size} processes have no more inputs, " \
            "rank #{first.join_process_group.rank} among them"
        end

        def warn_of(active)
          group = @joinables.first.join_process_group
          Distributed._warn "rank #{group.rank} has taken part in #{WARN_AFTER} iterations without inputs of its own: #{active} of #{group.size} " \
            "processes have many more, and it might be worth sharing them more evenly"
        end
      end
    end
  end
end
