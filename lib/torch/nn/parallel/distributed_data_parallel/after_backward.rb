# frozen_string_literal: true

module Torch
  module NN
    module Parallel
      class DistributedDataParallel < Module
        # Runs communication hooks in Ruby for gradients on devices: autograd computes these on threads that cannot run Ruby, so
        # the hooks run once backward has returned to the thread that called it. What calls backward gets a module in front of it
        # when the first such hook is registered, which changes nothing else.
        #
        # @api private
        module AfterBackward
          KEY = :tddp_backward
          private_constant :KEY

          @awaited = {}.compare_by_identity

          class << self
            # Puts itself around backward; once is enough.
            def install
              return if @installed

              @installed = true
              {Torch::Tensor => :backward, Torch::Distributed.singleton_class => :_backward,
               Torch::Distributed::WeightGradients => :run}.each do |owner, name|
                owner.prepend(::Module.new do
                  define_method(name) { |*arguments, **options| AfterBackward.around { super(*arguments, **options) } }
                  private name if owner.private_method_defined?(name)
                end)
              end
            end

            # @param model [DistributedDataParallel] whose forward has run, and whose hook is for gradients on devices. It is kept
            #   until its backward has been.
            def await(model)
              @awaited[model] = true
            end

            # Within another backward, as in a checkpointed segment, the outer one counts.
            def around
              thread = Thread.current
              return yield if thread.thread_variable_get(KEY)

              begin
                thread.thread_variable_set(KEY, true)
                value = yield
              ensure
                thread.thread_variable_set(KEY, nil)
              end
              finish
              value
            end

            private

            # In the same order on all ranks, that of their forwards. Those whose backward is still due stay.
            def finish
              Torch.no_grad { @awaited.keys.each { |model| @awaited.delete(model) unless model._finish_backward } }
            end
          end
        end
        private_constant :AfterBackward
      end
    end
  end
end
