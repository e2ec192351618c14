# frozen_string_literal: true

module Torch
  module Distributed
    module Pipelining
      # The messages between the ranks of a pipeline. Each rank begins them in their {MessageOrder}, since over NCCL those that begin
      # in another order wait for each other. Where a backend has tags, they are of kind, stage and micro-batch.
      #
      # An activation is a header with its tensors' shapes, and the tensors. Their receives begin ahead with the shapes that the
      # same micro-batch had in the step before, and nothing is sent but the header if there was none. If shapes have changed, the
      # sender fills these receives with zeros. Tensors of other shapes than expected follow as {LATE} ones, once the receiver
      # has read the header. A gradient has the shape of its activation, and no header.
      #
      # @api private
      class Link
        # Kinds of messages, in the tag's upper bits; tags below {FIRST_TAG} are left to programs.
        HEADER, FORWARD, LATE, BACKWARD, PLAIN_HEADER, PLAIN = (0..5).to_a
        FIRST_TAG = 1 << 31
        MICRO_BATCH_BITS = 18
        STAGE_BITS = 10
        MOST_MICRO_BATCHES = 1 << MICRO_BATCH_BITS
        MOST_STAGES = 1 << STAGE_BITS
        # Numbers of a header, which is one small message.
        HEADER_LENGTH = 128
        # Seconds until all messages of a group that has failed have ended.
        FAILURE_TIME = 0.2
        DTYPES = %i[uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128 bool].freeze
        private_constant :FIRST_TAG, :MICRO_BATCH_BITS, :STAGE_BITS, :HEADER_LENGTH, :FAILURE_TIME, :DTYPES

        # What an activation or a gradient looks like: dtype, shape, whether it requires a gradient.
        Form = Struct.new(:dtype, :shape, :requires_grad) do
          def self.of(tensor)
            new(tensor.dtype, tensor.shape, tensor.requires_grad)
          end

          def same_memory?(other)
            dtype == other.dtype && shape == other.shape
          end
        end

        # A message on its way to this rank.
        Receive = Struct.new(:message, :header, :header_work, :forms, :tensors, :works)
        private_constant :Receive

        # @param group [ProcessGroup]
        # @param device [String, Torch::Device] of the tensors
        def initialize(group, device)
          @group = group
          @device = device
          @header_device = group.backend.include?("gloo") ? "cpu" : device
          @sent = {}
          @seen = {}
          @sends = []
          @order = []
          @receives = {}
        end

        # A step begins.
        #
        # @param order [Array<Action, Message>] this rank's part of {MessageOrder}
        def begin(order)
          @gradients = {}
          @late = {}
          @receives = {}
          @order = order.dup
        end

        # Sends an activation to a stage, once {#advance} has come to the action that made it.
        def send_forward(peer, stage, micro_batch, tensors)
          key = [stage, micro_batch]
          forms = tensors.map { |tensor| Form.of(tensor) }
          expected = @sent.fetch(key, [])
          post(peer, header_of(forms, stage), HEADER, *key)
          if same?(expected, forms)
            tensors.each { |tensor| post(peer, tensor, FORWARD, *key) }
          else
            expected.each { |form| post(peer, zeros(form), FORWARD, *key) }
            # Objects of our own: the caller may release its.
            @late[key] = tensors.map(&:detach)
          end
          remember(@sent, key, expected, forms)
        end

        # @param tensors [Array<Torch::Tensor>] those of the activation's tensors that require one
        def send_backward(peer, stage, micro_batch, tensors)
          tensors.each { |tensor| post(peer, tensor, BACKWARD, stage, micro_batch) }
        end

        # What {#fetch} of its gradients will return.
        #
        # @param tensors [Array<Torch::Tensor>] of an activation that was sent, which require a gradient
        def expect_gradients(stage, micro_batch, tensors)
          @gradients[[stage, micro_batch]] = tensors.map { |tensor| Form.of(tensor) }
        end

        # Begins all messages that precede the end of an action, which is about to begin, and forgets what was sent. Waits for the
        # header of what the action needs.
        def advance(action)
          @sends.reject! { |work| work.completed? && work.wait }
          begin_messages(@order.shift(@order.index(action) + 1))
        end

        # Waits for a message that the action needs.
        #
        # @return [Array<Torch::Tensor>] leaves
        def fetch(kind, stage, micro_batch)
          receive = @receives.fetch([kind, stage, micro_batch])
          receive.works.each(&:wait)
          @receives.delete([kind, stage, micro_batch])
          return receive.tensors if kind == BACKWARD

          receive.tensors.each_with_index { |tensor, i| tensor.requires_grad! if receive.forms[i].requires_grad && Torch.grad_enabled? }
        end

        # Waits until all that was sent has been received, or copied.
        def finish
          begin_messages(@order.shift(@order.size))
          @sends.each(&:wait)
          @sends.clear
        end

        # After the group has failed: what stopped a message of this rank. Later ones only name the failure.
        #
        # @return [Error, nil] nil: none was under way
        def failure
          receives = @receives.values.flat_map { |receive| [receive.header_work, *receive.works] }
          CombinedWork.new([*receives, *@sends].compact).wait(FAILURE_TIME)
          nil
        rescue Error => e
          e
        end

        # Sends tensors whose receiver knows nothing of them.
        #
        # @param number [Integer] one of several such messages
        def send_plain(peer, number, tensors)
          post(peer, header_of(tensors.map { |tensor| Form.of(tensor) }, number), PLAIN_HEADER, 0, number)
          tensors.each { |tensor| post(peer, tensor.to(@device), PLAIN, 0, number) }
        end

        # @return [Array<Torch::Tensor>]
        def receive_plain(peer, number)
          header = empty_header
          listen(peer, header, PLAIN_HEADER, 0, number).wait
          tensors = forms_of(header).map { |form| empty(form) }
          tensors.filter_map { |tensor| listen(peer, tensor, PLAIN, 0, number) }.each(&:wait)
          tensors
        end

        # Sends tensors and receives others at the same time; returns when all are there.
        #
        # @param number [Integer] one of several such messages
        # @param messages [Array<Array(Symbol, Torch::Tensor, Integer)>] each with :isend or :irecv and the other rank
        def exchange(number, messages)
          operations = messages.map do |op, tensor, peer|
            P2POp.new(op, tensor.detach, group: @group, group_peer: peer, tag: tag(PLAIN, 0, number))
          end
          Distributed.batch_isend_irecv(operations).each(&:wait)
        end

        private

        def post(peer, tensor, kind, stage, micro_batch)
          return if tensor.numel.zero?

          @sends << Distributed.isend(tensor.detach, group_dst: peer, group: @group, tag: tag(kind, stage, micro_batch))
        end

        def listen(peer, tensor, kind, stage, micro_batch)
          return if tensor.numel.zero?

          Distributed.irecv(tensor, group_src: peer, group: @group, tag: tag(kind, stage, micro_batch))
        end

        def tag(kind, stage, micro_batch)
          FIRST_TAG + (((kind << STAGE_BITS) + stage) << MICRO_BATCH_BITS) + micro_batch
        end

        def begin_messages(items)
          items.grep(Message) do |message|
            if message.kind != LATE
              begin_receive(message) if message.to == @group.rank
            elsif message.to == @group.rank
              read_header(@receives.fetch([FORWARD, *message.key]))
            else
              @late.delete(message.key)&.each { |tensor| post(message.to, tensor, LATE, *message.key) }
            end
          end
        end

        def begin_receive(message)
          key = message.key
          receive = @receives[[message.kind, *key]] = Receive.new(message)
          return receive_tensors(receive, @gradients.delete(key), BACKWARD) if message.kind == BACKWARD

          receive.header = empty_header
          receive.header_work = listen(message.from, receive.header, HEADER, *key)
          receive_tensors(receive, @seen.fetch(key, []), FORWARD)
        end

        def receive_tensors(receive, forms, kind)
          receive.forms = forms
          receive.tensors = forms.map { |form| empty(form) }
          receive.works = receive.tensors.filter_map { |tensor| listen(receive.message.from, tensor, kind, *receive.message.key) }
        end

        def read_header(receive)
          receive.header_work.wait
          receive.header_work = nil
          expected, forms = receive.forms, forms_of(receive.header)
          unless same?(expected, forms)
            receive.works.each(&:wait)
            receive_tensors(receive, forms, LATE)
          end
          receive.forms = forms
          remember(@seen, receive.message.key, expected, forms)
        end

        # Both sides know that shapes which have just changed are no good guess.
        def remember(memory, key, expected, forms)
          (expected.empty? || same?(expected, forms)) ? memory[key] = forms : memory.delete(key)
        end

        def same?(expected, forms)
          expected.size == forms.size && expected.zip(forms).all? { |one, other| one.same_memory?(other) }
        end

        def empty(form)
          Torch.empty(form.shape, dtype: form.dtype, device: @device)
        end

        def zeros(form)
          Torch.zeros(form.shape, dtype: form.dtype, device: @device)
        end

        def empty_header
          Torch.empty([8 * HEADER_LENGTH], dtype: :uint8, device: @header_device)
        end

        def header_of(forms, stage)
          numbers = [forms.size, *forms.flat_map do |form|
            [DTYPES.index(form.dtype) || refuse(form, stage), form.requires_grad ? 1 : 0, form.shape.size, *form.shape]
          end]
          if numbers.size > HEADER_LENGTH
            raise UnsupportedError, "stage #{stage}: #{forms.size} tensors are too many to be sent to it: expected 3 for each and 1 for " \
              "each dimension to be at most #{HEADER_LENGTH - 1}, got #{numbers.size - 1}"
          end

          Distributed.send(:bytes_tensor, (numbers + [0] * (HEADER_LENGTH - numbers.size)).pack("q*"), @header_device)
        end

        def refuse(form, stage)
          raise UnsupportedError, "stage #{stage}: a #{form.dtype} tensor cannot be sent to it: expected one of #{DTYPES.join(", ")}"
        end

        def forms_of(header)
          # As bytes, since a tensor's to_a makes an object of each number at twenty times the cost.
          numbers = Distributed.send(:_bytes, header.cpu).unpack("q*")
          Array.new(numbers.shift) do
            dtype, requires_grad, dims = numbers.shift(3)
            Form.new(DTYPES[dtype], numbers.shift(dims), requires_grad == 1)
          end
        end
      end
    end
  end
end
