# frozen_string_literal: true

require "json"

module Torch
  module Distributed
    # What each rank did when, as a trace for chrome://tracing and ui.perfetto.dev: training and communication side
    # by side. `torchtrace` makes one of all ranks' and adds up the times.
    #
    #   TDDP_TRACE=/var/tmp/traces bundle exec torchrun --nproc-per-node=2 train.rb
    #   bundle exec torchtrace /var/tmp/traces -o merged.json
    #
    # With TDDP_TRACE set, a rank's trace begins in `init_process_group` and ends in `destroy_process_group`, or with
    # the process. Operations of groups, forward and backward of DistributedDataParallel, steps of optimizers and waits
    # for a {Utils::Data::DistributedDataLoader} are in it by themselves.
    #
    # `TDDP_TRACE_STEPS=100..110` has these steps traced alone. A step ends with that of an optimizer, and the next one begins; where there
    # are several optimizers, the one that has made most counts. The first since `init_process_group` is 1.
    module Trace
      # The folder; a job that torchrun has restarted writes into folders of its own in it.
      VARIABLE = "TDDP_TRACE"
      STEPS_VARIABLE = "TDDP_TRACE_STEPS"
      LANE = "training"
      private_constant :VARIABLE, :STEPS_VARIABLE, :LANE

      # Shows what the block does in the trace, if there is one.
      #
      #   loss = Torch::Distributed.trace("validation") { validate(model) }
      #
      # @param name [String]
      # @param lane [String] a lane of the trace; others than "training" get a line of their own
      # @param args [Hash] what else to show, as JSON
      # @return [Object] the block's value
      def trace(name, lane: LANE, **args)
        raise ArgumentError, "trace needs a block" unless block_given?
        return yield unless _trace_enabled?

        start = _trace_now
        begin
          yield
        ensure
          add_span(name, start, lane, args)
        end
      end

      # @return [Boolean] whether this process writes a trace now
      def tracing?
        _trace_enabled?
      end

      private

      def add_span(name, start, lane = LANE, args = nil)
        json = trace_json(args) unless args.nil? || args.empty?
        _trace_span(trace_text(lane), trace_text(name), start, _trace_now, json)
      end

      # A name may be anything, and so may what is shown with it; none is worth an error in the midst of training.
      def trace_text(text)
        text.to_s.scrub.delete("\0")
      end

      # JSON knows no NaN, for instance.
      def trace_json(args)
        JSON.generate(args)
      rescue JSON::JSONError, EncodingError
        JSON.generate(args.to_h { |key, value| [trace_text(key), trace_text(value)] })
      end

      # Called once there is a default group. A trace that cannot be written does not prevent training.
      def open_trace(rank)
        folder = ENV[VARIABLE]
        return if folder.nil? || folder.empty? || _trace_enabled?

        @traced_steps = traced_steps
        restarts = ENV["TORCHELASTIC_RESTART_COUNT"].to_i
        folder = File.join(folder, "attempt_#{restarts}") if restarts.positive?
        _trace_open(folder, rank)
        trace_optimizers
        pause_trace
        @traced_memory = track_traced_memory
      rescue Error => e
        _warn "torch-ddp: no trace: #{e.message}"
      end

      # @return [Range, nil] nil: all
      def traced_steps
        text = ENV[STEPS_VARIABLE]
        return if text.nil? || text.empty?

        first, dots, last = text.match(/\A([1-9]\d*)(?:(\.\.)(\d*))?\z/)&.captures
        steps = dots ? (first.to_i..(last.to_i unless last.empty?)) : first.to_i..first.to_i
        return steps if first && (steps.end.nil? || steps.end >= steps.begin)

        raise Error, "#{STEPS_VARIABLE}=#{text.inspect}: expected steps, as in 100..110, 100.. or 100; the first is 1"
      end

      # Between the steps that are wanted.
      def pause_trace
        _trace_pause(!@traced_steps.include?(@steps_made + 1)) if @traced_steps
      end

      def close_trace
        @step_watches&.each(&:disable)
        @step_watches = nil
        _trace_close
      end

      # Steps are shown without it where another library has replaced libtorch's allocator.
      def track_traced_memory
        track_memory
        true
      rescue UnsupportedError
        false
      end

      # Looks on while steps are made, from outside: the classes stay what they are. Those that are loaded later are
      # looked for when their bodies end.
      def trace_optimizers
        @steps_under_way = {}
        @steps_made = 0
        @steps_of = ObjectSpace::WeakMap.new # by optimizer
        @step_watches = [TracePoint.new(:end) { |point| watch_steps(point.self) if point.self.is_a?(Class) && point.self < Torch::Optim::Optimizer }]
        @step_watches.first.enable
        [Torch::Optim::Optimizer, *descendants(Torch::Optim::Optimizer)].each { |optimizer| watch_steps(optimizer) }
      end

      def watch_steps(optimizer)
        return unless @step_watches && optimizer.method_defined?(:step, false)

        watch = TracePoint.new(:call, :return) { |point| (point.event == :call) ? begin_step : end_step(point.self) }
        watch.enable(target: optimizer.instance_method(:step))
        @step_watches << watch
      end

      # A step that calls its superclass's is one.
      def begin_step
        under_way = (@steps_under_way[Thread.current] ||= [0, _trace_now])
        under_way[0] += 1
      end

      def end_step(optimizer)
        under_way = @steps_under_way[Thread.current]
        return if under_way.nil? || (under_way[0] -= 1).positive?

        @steps_under_way.delete(Thread.current)
        memory = (@traced_memory && _trace_enabled?) ? memory_stats.slice(:current_bytes, :peak_bytes) : {}
        add_span("optimizer", under_way[1], LANE, {class: optimizer.class.name.to_s, **memory}) if _trace_enabled?
        count_step(optimizer)
      end

      # Several optimizers of one step count it once.
      def count_step(optimizer)
        made = @steps_of[optimizer] = (@steps_of[optimizer] || 0) + 1
        return if made <= @steps_made

        @steps_made = made
        pause_trace
      end

      def descendants(parent)
        parent.subclasses.flat_map { |child| [child, *descendants(child)] }
      end
    end
  end
end
