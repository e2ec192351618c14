# frozen_string_literal: true

module Torch
  module Utils
    module Data
      # Threads that make batches in the background, for one pass over a loader. The program's thread asks for batches and
      # takes them in the same order; it decides how many are under way. The threads know only the queue: they end with
      # {#stop}, or when this object is garbage, as after an Enumerator that was abandoned half way.
      #
      # @api private
      class Prefetcher
        # What an exception of a data set may be. It is raised where the batch is taken.
        FAILURES = [StandardError, ScriptError, NoMemoryError, SystemStackError, SystemExit].freeze
        # They compute in shorter turns than the thread that trains.
        PRIORITY = -3
        # Seconds for a thread to end that is within a call which cannot be interrupted.
        JOIN_TIMEOUT = 5
        private_constant :FAILURES, :PRIORITY, :JOIN_TIMEOUT

        Task = Struct.new(:indices, :answer)
        private_constant :Task

        # @param fetcher [#call] makes a batch of an Array of indices
        # @param count [Integer] how many threads
        def initialize(fetcher, count)
          @fetcher = fetcher
          @pid = Process.pid
          @tasks = Thread::Queue.new
          @under_way = []
          ObjectSpace.define_finalizer(self, self.class.closer(@tasks))
          @threads = Array.new(count) { self.class.start(fetcher, @tasks) }
        end

        # @return [Integer] how many batches were asked for and not taken
        def asked
          @under_way.size
        end

        # @param indices [Array<Integer>] of a batch
        def ask(indices)
          task = Task.new(indices, Thread::Queue.new)
          @under_way << task
          @tasks << task
        end

        # Waits for the batch that was asked for first, and raises what making it has raised.
        #
        # @return [Array] its indices, and the batch
        def take
          task = @under_way.shift
          # In a forked child there are no threads.
          return [task.indices, @fetcher.call(task.indices)] if @pid != Process.pid && task.answer.empty?

          batch, error = task.answer.pop
          raise error if error
          raise Error, "a thread that read ahead was ended from outside" unless batch

          [task.indices, batch.first]
        end

        def stop
          @tasks.clear
          @tasks.close
          @threads.each(&:kill).each { |thread| thread.join(JOIN_TIMEOUT) }
          @under_way.clear
        end

        class << self
          # What the threads and the finalizer refer to must not be the prefetcher.
          def closer(tasks)
            lambda do |_|
              tasks.clear
              tasks.close
            end
          end

          def start(fetcher, tasks)
            thread = Thread.new do
              while (task = tasks.pop)
                answer(fetcher, task)
              end
            end
            thread.name = "torch-ddp data"
            thread.priority = PRIORITY
            thread
          end

          private

          def answer(fetcher, task)
            task.answer << [[fetcher.call(task.indices)], nil]
          rescue *FAILURES => e
            task.answer << [nil, e]
          ensure
            task.answer.close
          end
        end
      end
      private_constant :Prefetcher
    end
  end
end
