# frozen_string_literal: true

require "io/wait"

module Torch
  module Distributed
    class Backend
      # A group of a backend in Ruby, and the thread that executes its requests.
      #
      # @api private
      class Context
        # Ends an operation that nobody waits for any more.
        Aborted = Class.new(Exception) # standard:disable Lint/InheritException

        # An operation that the backend does not define.
        Missing = Class.new(UnsupportedError)

        # Errors that keep their meaning for the group; the others are failures of it.
        STATUSES = {
          TimeoutError => :TDDP_TIMEOUT, PeerLostError => :TDDP_PEER_LOST, MismatchError => :TDDP_MISMATCH, NetworkError => :TDDP_NETWORK,
          StoreError => :TDDP_STORE, UnsupportedError => :TDDP_UNSUPPORTED
        }.freeze
        private_constant :Aborted, :Missing, :STATUSES

        # @param name [String] the backend's
        # @param func [#call] makes the object that has the operations
        def initialize(name, func)
          @name = name
          @func = func
          @requests = Thread::Queue.new
          @thread = Thread.new { work }
        end

        # Never waits.
        def take(request)
          return @requests << request unless request.kind == :abort

          @thread.raise(Aborted)
          request.complete([])
        end

        private

        def work
          Thread.handle_interrupt(Aborted => :never) do
            loop do
              request = @requests.pop
              kind = request.kind
              perform(request, kind)
              break if kind == :destroy
            end
          end
        end

        # What the operation raises is for those who wait for it, whatever it is.
        def perform(request, kind)
          request.complete(send(kind, request))
        rescue Exception => e # standard:disable Lint/RescueException
          fail_with(request, e)
        end

        def fail_with(request, error)
          request.fail(STATUSES.find { |type, _| error.is_a?(type) }&.last, text_of(error))
        end

        def text_of(error)
          return "backend #{@name} has no #{error.message}" if error.is_a?(Missing)

          "backend #{@name}: #{error.class}: #{error.message}#{error.backtrace&.first&.then { |line| " (#{line})" }}"
        end

        # --- requests: each gives the operation's results ---

        def create(request)
          @store, *place = request.place
          @object = interruptible { @func.call(@store, *place) }
          []
        end

        def run(request)
          name, *details = request.operation
          raise Missing, name.to_s unless @object.respond_to?(name)

          inputs = tensors(request.inputs)
          inputs.each_with_index { |tensor, index| request.read(index, tensor) }
          in_place = %i[all_reduce broadcast reduce].include?(name)
          outputs = in_place ? inputs.first(request.outputs.size) : tensors(request.outputs)
          interruptible { call(name, inputs, outputs, *details) }
          outputs
        end

        def destroy(_request)
          @object.shutdown if @object.respond_to?(:shutdown)
          []
        ensure
          @store&.close
        end

        # --- an operation ---

        def interruptible(&block)
          Thread.handle_interrupt(Aborted => :immediate, &block)
        end

        def tensors(sizes)
          sizes.map { |dtype, count| Torch.empty(count, dtype: dtype) }
        end

        def call(name, inputs, outputs, reduce, premul, root)
          op = (reduce == ReduceOp::PREMUL_SUM) ? ReduceOp.premul_sum(premul) : reduce
          works = case name
          when :all_reduce then inputs.map { |tensor| @object.all_reduce(tensor, op: op) }
          when :reduce then [@object.reduce(inputs.first, dst: root, op: op)]
          when :broadcast then [@object.broadcast(inputs.first, src: root)]
          when :barrier then [@object.barrier]
          when :all_gather then [@object.all_gather(outputs, inputs.first)]
          when :reduce_scatter then [@object.reduce_scatter(outputs.first, inputs, op: op)]
          when :gather then [@object.gather(inputs.first, outputs.empty? ? nil : outputs, dst: root)]
          when :scatter then [@object.scatter(outputs.first, inputs.empty? ? nil : inputs, src: root)]
          when :all_to_all then [@object.all_to_all(outputs, inputs)]
          end
          works.each { |work| work.wait if work.respond_to?(:wait) }
        end
      end
    end
  end
end
