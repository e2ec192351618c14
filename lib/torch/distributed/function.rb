# frozen_string_literal: true

require "torch"
require "torch_ddp/ext"

module Torch
  module Distributed
    # An operation on CPU tensors with a backward of its own, as PyTorch's torch.autograd.Function.
    #
    #   class Cube < Torch::Distributed::Function
    #     def self.forward(ctx, x)
    #       ctx.save_for_backward(x)
    #       x**3
    #     end
    #
    #     def self.backward(ctx, grad)
    #       x, = ctx.saved_tensors
    #       grad * 3 * x**2
    #     end
    #   end
    #
    #   y = Cube.apply(x)
    #
    # `forward` runs without grad. It returns a tensor, or an Array of tensors and other objects; arguments may be any
    # objects, and tensors that are arguments themselves get gradients. `backward` gets one gradient for each result, and
    # returns one for each argument, of the argument's shape and dtype, or nil. With `create_graph` it runs with grad, so
    # that operations in it have derivatives again; other Ruby code in it has none.
    #
    # Backward runs on the thread that called `backward` on the loss. For tensors on a GPU autograd has threads that can't run
    # Ruby: `apply` raises {UnsupportedError} then. Compose operations that have a gradient instead.
    class Function
      class << self
        # Runs forward, and has backward computed by {.backward} if an argument requires a gradient.
        #
        # @param args [Array<Object>] forward's arguments
        # @raise [UnsupportedError] if a result that has a gradient is not on the CPU
        # @return [Object] forward's result, with a history
        def apply(*args)
          context = Context.new(self, args)
          result = Torch.no_grad { forward(context, *args) }
          outputs = context.connect(result.is_a?(Array) ? result : [result])
          result.is_a?(Array) ? outputs : outputs.first
        end

        # Computes the result: to be defined by each function.
        #
        # @abstract
        # @param ctx [Context]
        # @param args [Array<Object>] those of {.apply}
        # @return [Torch::Tensor, Array<Object>]
        def forward(ctx, *args)
          raise NotImplementedError, "#{self}.forward(ctx, …) is not defined"
        end

        # Computes the arguments' gradients: to be defined by each function.
        #
        # @abstract
        # @param ctx [Context] that of forward
        # @param grads [Array<Torch::Tensor, nil>] one for each result of forward
        # @return [Torch::Tensor, nil, Array<Torch::Tensor, nil>] one for each argument of forward
        def backward(ctx, *grads)
          raise NotImplementedError, "#{self}.backward(ctx, …) is not defined"
        end
      end

      # What forward leaves to backward. Apart from tensors in {#save_for_backward} it takes any attributes
      # (`ctx.scale = 2`, `ctx[:scale] = 2`). Results of forward belong into {#save_for_backward}, as PyTorch demands.
      class Context
        # @api private
        attr_reader :function

        # @return [Array<Boolean>] for each argument whether it is a tensor that requires a gradient
        attr_reader :needs_input_grad

        # @api private
        def initialize(function, args)
          @function = function
          @args = args
          @needs_input_grad = args.map { |arg| arg.is_a?(Torch::Tensor) && arg.requires_grad }.freeze
          @to_save = []
          @non_differentiable = []
          @materialize_grads = true
          @attributes = {}
        end

        # In forward: keeps tensors for backward. Autograd raises there if one was changed in place meanwhile.
        #
        # @param tensors [Array<Torch::Tensor, nil>]
        # @return [void]
        def save_for_backward(*tensors)
          wrong = tensors.find { |tensor| !(tensor.nil? || tensor.is_a?(Torch::Tensor)) }
          raise TypeError, "save_for_backward: expected tensors or nil, got #{wrong.inspect}: make it an attribute (ctx[:name] = …)" if wrong

          during_forward("save_for_backward")
          @to_save = tensors
        end

        # @return [Array<Torch::Tensor, nil>] in backward: what forward saved
        def saved_tensors
          @saved_tensors || raise(Torch::Distributed::Error, "saved_tensors are there in backward only")
        end

        # In forward: results that have no gradient. Integers and booleans have none in any case.
        #
        # @param outputs [Array<Torch::Tensor>] results of forward
        # @return [void]
        def mark_non_differentiable(*outputs)
          during_forward("mark_non_differentiable")
          @non_differentiable = outputs
        end

        # In forward: whether backward gets zeros for results that the loss does not depend on, as it does by default, or nil.
        #
        # @param value [Boolean]
        # @return [void]
        def set_materialize_grads(value)
          during_forward("set_materialize_grads")
          @materialize_grads = value ? true : false
        end

        # @return [Object, nil] an attribute
        def [](name)
          @attributes[name.to_sym]
        end

        # Sets an attribute.
        def []=(name, value)
          @attributes[name.to_sym] = value
        end

        # Ends forward.
        #
        # @api private
        # @return [Array<Object>] the outputs, of which tensors have a history
        def connect(outputs)
          tensors = tensors_of(outputs)
          lost = @non_differentiable.find { |one| tensors.none? { |other| other.equal?(one) } }
          raise ArgumentError, "mark_non_differentiable: expected results of forward, got #{lost.inspect}" if lost

          constant = tensors.map { |tensor| @non_differentiable.any? { |one| one.equal?(tensor) } }
          fresh = _apply(function.to_s, tensors_of(@args), tensors, constant, @to_save, @materialize_grads)
          @count = @args.size
          @args = @to_save = @non_differentiable = nil # kept, if at all, by the graph
          outputs.zip(fresh).map { |output, tensor| tensor || output }
        end

        # @api private
        def method_missing(name, *args)
          if name.end_with?("=") && args.size == 1
            @attributes[name[0..-2].to_sym] = args.first
          elsif @attributes.key?(name) && args.empty?
            @attributes[name]
          else
            super
          end
        end

        # @api private
        def respond_to_missing?(name, include_private = false)
          name.end_with?("=") || @attributes.key?(name) || super
        end

        # The attributes' values may be large.
        #
        # @return [String]
        def inspect
          "#<#{self.class} of #{function}: #{@attributes.keys.join(", ")}>"
        end

        private

        def tensors_of(objects)
          objects.map { |object| object if object.is_a?(Torch::Tensor) }
        end

        def during_forward(name)
          raise Torch::Distributed::Error, "#{name}: forward is over" unless @args
        end

        # Called by the extension.
        def _backward(saved, grads)
          outer = @saved_tensors
          @saved_tensors = saved
          found = function.backward(self, *grads)
          found = [found] unless found.is_a?(Array)
          found = found.first(@count) if found.drop(@count).none?
          return found if found.size == @count

          raise ArgumentError, "expected #{@count} gradients, one (or nil) for each argument of forward, got #{found.size}"
        ensure
          @saved_tensors = outer
        end
      end
    end
  end
end
