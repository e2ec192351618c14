# frozen_string_literal: true

require_relative "backend/context"

module Torch
  module Distributed
    # Backends written in Ruby.
    #
    #   class Mean < Torch::Distributed::Backend
    #     def all_reduce(tensor, op:)
    #       ...
    #     end
    #   end
    #
    #   Torch::Distributed::Backend.register_backend("mean", Mean)
    #   Torch::Distributed.init_process_group("mean")
    #
    # A class need not be a subclass of this one; that has what {.register_backend} passes as attributes. These are the operations;
    # those that it does not define raise {UnsupportedError} on every rank, and no rank waits:
    #
    #   all_reduce(tensor, op:)                   broadcast(tensor, src:)             barrier
    #   all_gather(tensor_list, tensor)           reduce(tensor, dst:, op:)           all_to_all(output_list, input_list)
    #   reduce_scatter(output, input_list, op:)   gather(tensor, list or nil, dst:)   scatter(tensor, list or nil, src:)
    #
    # They write their results to the tensors that they are given: of one dimension, contiguous, on the CPU, and copies of the caller's.
    # `op` is a constant of {ReduceOp} or a {ReduceOp::PremulSum}; `src` and `dst` are ranks within the group, and only that rank has a list.
    # DistributedDataParallel needs all_reduce (with SUM and AVG), broadcast and all_gather. What is returned is waited for if it responds to `wait`.
    #
    # An operation runs on a Ruby thread of its group, one at a time, in the same order on every rank. What it raises fails the group with an
    # {InternalError}, or the {TimeoutError}, {PeerLostError}, {MismatchError}, {NetworkError} or {StoreError} that it is; an {UnsupportedError}
    # fails that operation only, and has to be raised on every rank. When time is up, or another rank fails, it is interrupted.
    # `shutdown`, if there is such a method, is called when the group ends. Sends and receives are not supported.
    class Backend
      LOCK = Mutex.new
      NAMES = %w[gloo nccl].freeze
      DEVICES = %w[cpu cuda].freeze
      private_constant :LOCK, :NAMES, :DEVICES

      # @return [Store] a part of the group's store that is this group's alone
      attr_reader :store

      # @return [Integer]
      attr_reader :rank

      # @return [Integer] how many ranks the group has
      attr_reader :size

      # @return [Float] how many seconds the creation may take
      attr_reader :timeout

      def initialize(store, rank, size, timeout)
        @store = store
        @rank = rank
        @size = size
        @timeout = timeout
      end

      @registered = {}

      class << self
        # Makes a backend known under a name, for {Groups#init_process_group} and {Subgroups#new_group}: in each process, before its groups.
        #
        # @param name [String, Symbol] letters, digits, `_` and `-`
        # @param func [Class, #call] what makes the object whose methods are the operations, one for each group: by `new` or `call`,
        #   with the store, the rank, the group's size and the timeout
        # @param devices [String, Symbol, Array, nil] "cpu", "cuda" or both: tensors of either can be used, those on GPUs are copied
        # @raise [ArgumentError] if the name is taken or none, or `devices` has others
        # @raise [TypeError] if `func` makes nothing
        def register_backend(name, func, devices: nil)
          unless func.is_a?(Class) || func.respond_to?(:call)
            raise TypeError, "func: expected a Class or something to call, got #{func.inspect}"
          end
          name = name.to_s
          raise ArgumentError, "name: #{name} is a backend already" if NAMES.include?(name) || @registered.key?(name)

          wrong = Array(devices).map(&:to_s) - DEVICES
          raise ArgumentError, "devices: expected \"cpu\" or \"cuda\", got #{wrong.first.inspect}" unless wrong.empty?

          _register(name)
          @registered[name] = func.is_a?(Class) ? func.method(:new) : func
          nil
        end

        # Has operations of this backend executed in this process, if it is one of these.
        #
        # @api private
        def _serve(name)
          return if (name.split(/[:,]/) & @registered.keys).empty?

          LOCK.synchronize { @dispatcher = dispatch(_start) unless @dispatcher&.alive? }
        end

        private

        # A thread that passes requests on, and never waits for anything else. A fork leaves it, and its groups, to the parent.
        def dispatch(descriptor)
          contexts = {}
          ready = IO.for_fd(descriptor, autoclose: false)
          Thread.new do
            loop do
              ready.wait_readable
              while (request = _next)
                context = contexts[request.context] ||= Context.new(request.backend, @registered.fetch(request.backend))
                contexts.delete(request.context) if request.kind == :destroy
                context.take(request)
              end
            end
          end
        end
      end
    end
  end
end
