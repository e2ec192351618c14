# frozen_string_literal: true

module Torch
  module Distributed
    # Frees the tensors of past training steps in time, so that the next ones reuse their memory. To Ruby's garbage
    # collector a tensor is a small object however much memory it owns: on its own it runs once in many steps; by then
    # the process holds gigabytes, and each step touches fresh pages instead of cached ones.
    #
    # Measures how much garbage each step leaves, and collects young objects whenever some {BUDGET} bytes have
    # accumulated. {DistributedDataParallel} calls {#step} before each forward, and
    # {Distributed.keep_memory} does so for programs without it.
    class StepMemory
      # Bytes of garbage that steps may leave before it is collected.
      BUDGET = 32 * 1024 * 1024

      # Steps that leave next to nothing are left to Ruby.
      MOST_STEPS = 1000
      private_constant :MOST_STEPS

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
        @left = 1
        @after = nil
        @period = 1
      end

      # @return [Boolean] whether the C heap keeps what is freed
      def kept?
        @kept
      end

      # A new training step begins.
      def step
        @left -= 1
        look if @left <= 0
        nil
      end

      private

      # Alternately: one step after a collection, measures the growth since then; and, after as many steps as fill the
      # budget, collects.
      def look
        if @after
          grown = @in_use.call - @after
          @after = nil
          # Less than before: Ruby has collected meanwhile, so the growth is unknown.
          @period = (BUDGET / grown).clamp(1, MOST_STEPS) if grown.positive?
          @left = @period - 1
          return if @left.positive?
        end
        @collect.call
        @after = @in_use.call
        @left = @after ? 1 : MOST_STEPS
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
    end
  end
end
