# frozen_string_literal: true

module Torch
  module Distributed
    module Checkpoint
      # A save that goes on while the program does: see {Checkpoint.async_save}. At the process's end it is waited for, unless
      # that is because of an exception.
      class AsyncSave
        class << self
          # Waits for the save before, if there is one.
          #
          # @api private
          # @return [StandardError, nil] what it failed with, unless {#wait} has raised that
          def finish
            pending, @pending = @pending, nil
            pending&.unseen_error
          end

          # @api private
          def pending=(save)
            @pending = save
            return if @exit_pid == Process.pid

            @exit_pid = Process.pid
            at_exit do
              error = finish if @exit_pid == Process.pid && !TorchDDP::PassingError.failure
              Distributed._warn "torch-ddp: #{error.message}" if error
            end
          end
        end

        # @api private
        # @param saver [Saver] that has copied what it writes
        # @param together [Together] for the thread
        def initialize(saver, together)
          @pid = Process.pid
          @path = saver.folder
          @thread = Thread.new do
            saver.save(together)
          rescue => e
            @error = e
            nil
          ensure
            together.finish
          end
          @thread.report_on_exception = false
          AsyncSave.pending = self
        end

        # @return [String] the checkpoint's folder, once it is whole
        attr_reader :path

        # @return [Boolean] whether it has ended, well or not
        def done?
          !@thread.alive?
        end

        # Waits for its end. It is not collective, but all ranks learn the same.
        #
        # @param timeout [Numeric, nil] seconds; nil: as long as it takes
        # @return [String] the checkpoint's folder
        # @raise [CheckpointError] if it failed on one rank; what was saved before is as it was
        # @raise [PeerLostError] if a rank has ended
        # @raise [TimeoutError] if it goes on after `timeout`
        def wait(timeout = nil)
          if timeout && !(timeout.is_a?(Numeric) && timeout >= 0)
            raise ArgumentError, "timeout: expected seconds or nil, got #{timeout.inspect}"
          end
          raise Error, "async_save: it goes on in process #{@pid}, from which this one was forked" unless @pid == Process.pid
          raise TimeoutError, "async_save: #{@path} is not saved after #{timeout} s" unless @thread.join(timeout)

          @seen = true
          raise @error if @error

          @path
        end

        # @api private
        # @return [StandardError, nil]
        def unseen_error
          return if @pid != Process.pid || @seen

          @thread.join
          @error
        end

        # @return [String]
        def inspect
          state = @error ? "failed" : "done"
          "#<#{self.class.name} #{@path} #{done? ? state : "under way"}>"
        end
      end
    end
  end
end
