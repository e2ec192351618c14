# frozen_string_literal: true

module Torch
  module Distributed
    # Frees the tensors of past training steps in time, so that the next ones reuse their memory. To Ruby's garbage
    # collector a tensor is a small object however much memory it owns: on its own it runs once in many steps; by then
    # the process holds gigabytes, and each step touches fresh pages instead of cached ones.
    #
    # Measures now and then how much garbage a step leaves, and collects young objects whenever some {BUDGET} bytes have
    # accumulated. {DistributedDataParallel} calls {#step} before each forward, and
    # {Distributed.keep_memory} does so for programs without it.
    #
    # All ranks collect at the same steps: those whose number is a multiple of the period, which is a power of two, so that
    # ranks whose steps leave about the same need not agree on it. Otherwise each rank would wait in its next collective
    # for the collections of every other one. For the same reason the heap is given room for a period's objects: then
    # Ruby has no cause to collect in between.
    class StepMemory
      # Bytes of garbage that steps may leave before it is collected.
      BUDGET = 32 * 1024 * 1024

      # Steps that leave next to nothing are left to Ruby.
      MOST_STEPS = 1024

      # Steps from one measurement to the next; fewer at first. The C library takes up to a millisecond to tell what is in
      # use, and is asked twice.
      MEASURED_EVERY = 64

      # For how many objects room is made at most, some 20 MiB, and how often: what else makes Ruby collect stays as it is.
      MOST_OBJECTS = 500_000
      MOST_ROOMS = 8
      # Segments from one that is measured to the next: odd, so that it is now this layer of a model and now that.
      SEGMENTS_EVERY = 7
      private_constant :MEASURED_EVERY, :MOST_OBJECTS, :MOST_ROOMS, :SEGMENTS_EVERY

      class << self
        # @return [StepMemory] the process's own; its C heap keeps what is freed from now on, unless TDDP_KEEP_MEMORY=0
        def instance
          @instance ||= new(kept: Distributed.send(:_keep_heap))
        end
      end

      # @param in_use [#call] bytes of the heap in use, or nil
      # @param collect [#call]
      # @param kept [Boolean] whether the C heap keeps what is freed
      def initialize(in_use: Distributed.method(:_heap_in_use).to_proc, collect: -> { GC.start(full_mark: false) }, kept: false)
        @in_use = in_use
        @collect = collect
        @kept = kept
        @steps = 0
        @rooms = 0
        @after = nil
        @segments = @segment_bytes = @segment_garbage = 0
        synchronize(MOST_STEPS, BUDGET)
      end

      # @return [Boolean] whether the C heap keeps what is freed
      def kept?
        @kept
      end

      # @param every [Integer, nil] the longest period, in steps; nil: never collects
      # @param budget [Integer] bytes
      def synchronize(every, budget)
        @every = every
        @budget = budget
        @period = 1
        @measured_at = 0
      end

      # A new training step begins.
      def step
        @steps += 1
        return unless @every

        measure if @after
        collect if (@steps % @period).zero?
        nil
      end

      # Around what leaves garbage amid a step: a checkpointed segment, whose results on the way are to be freed, but which
      # Ruby would keep until it collects.
      #
      # @return [Object] the block's value
      def segment
        return yield unless @every

        before = @in_use.call if (@segments % SEGMENTS_EVERY).zero?
        @segments += 1
        result = yield
        @segment_bytes = [@in_use.call - before, 0].max if before
        left(@segment_bytes)
        result
      end

      # So many bytes have become garbage.
      def left(bytes)
        return unless @every

        @segment_garbage += bytes
        collect_segments if @segment_garbage > @budget
      end

      private

      def collect_segments
        @collect.call
        @collections &&= GC.count
        @segment_garbage = 0
      end

      # One step after a collection: learns how much a step leaves, and so how many fill the budget.
      def measure
        grown = @in_use.call - @after
        @after = nil
        @measured_at = @steps
        # Less than before: Ruby has collected meanwhile, so the growth is unknown.
        return unless grown.positive?

        @period = @every
        @period /= 2 while @period > 1 && @period * grown > @budget
      end

      def collect
        make_room if @collections && GC.count > @collections
        @collect.call
        @collections = GC.count
        @objects = GC.stat(:total_allocated_objects)
        return if @steps < [2 * @measured_at, @measured_at + MEASURED_EVERY].min

        @after = @in_use.call
        @period = @every unless @after
      end

      # Ruby has collected since the last time: makes as many objects as were made since then, all at once, so that the heap
      # has room for them afterwards.
      def make_room
        made = GC.stat(:total_allocated_objects) - @objects
        return if made > MOST_OBJECTS || @rooms == MOST_ROOMS

        @rooms += 1
        enabled = !GC.disable
        begin
          Array.new(made) { Object.new }
        ensure
          GC.enable if enabled
        end
      end
    end

    # The memory of past training steps.
    module KeptMemory
      # Has this process keep the memory that a training step frees for the next one, and frees the tensors of past
      # steps in time. {Torch::NN::Parallel::DistributedDataParallel} does the same by itself: a program that trains
      # alone, without it, calls this at the beginning of each step, and then trains as fast as one rank of a group.
      #
      #   batches.each do |images, labels|
      #     Torch::Distributed.keep_memory
      #     optimizer.zero_grad
      #     loss(model.call(images), labels).backward
      #     optimizer.step
      #   end
      #
      # The first call sets glibc's malloc: blocks are not mapped one by one (M_MMAP_THRESHOLD), and free memory does
      # not go back to the system (M_TRIM_THRESHOLD). With TDDP_KEEP_MEMORY=0, or where GLIBC_TUNABLES or MALLOC_*
      # decide on that, malloc stays as it is.
      #
      # @return [Boolean] whether malloc keeps what is freed
      def keep_memory
        memory = StepMemory.instance
        memory.step
        memory.kept?
      end

      # Sets at which training steps this process runs Ruby's garbage collector. By default all ranks do so at the same
      # steps, at least once in 1,024, and sooner where the garbage of the steps in between would take more than 32 MiB.
      #
      # @param every [Integer, Boolean] collects after so many steps, or after a half, a quarter and so on of them where the
      #   budget asks for it; true: the default; false: Ruby alone decides when it collects
      # @param budget [Integer] bytes that the garbage of training steps may take
      # @raise [ArgumentError] if they are not positive
      # @return [nil]
      # @see #keep_memory which programs without {Torch::NN::Parallel::DistributedDataParallel} call in each step
      def synchronize_gc(every: true, budget: StepMemory::BUDGET)
        steps = (every == true) ? StepMemory::MOST_STEPS : every
        {every: (every == false) ? 1 : steps, budget: budget}.each do |name, value|
          next if value.is_a?(Integer) && value.positive?

          raise ArgumentError, "#{name}: expected an Integer of 1 or more#{", true or false" if name == :every}, got #{value.inspect}"
        end
        StepMemory.instance.synchronize(steps || nil, budget)
        nil
      end
    end
  end
end
