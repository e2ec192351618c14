# frozen_string_literal: true

module Torch
  module Distributed
    module Pipelining
      # The messages between the ranks of a pipeline, matched by tags of stage, micro-batch and direction, so that no order of
      # sends and receives matters; except over NCCL, which has no tags: there messages are received in their sender's order.
      #
      # An activation is a header with its tensors' shapes, and the tensors. Their receives are posted ahead with the shapes that
      # the same micro-batch had in the step before. If these have changed, the sender fills that receive with zeros, and
      # sends the tensors under another tag, for which the receiver looks when it has read the header. A gradient has the shape
      # of its activation, and no header.
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
        # By how many messages of a rank receives are posted before they are needed. Each takes memory.
        AHEAD = 2
        # Seconds until all messages of a group that has failed have ended.
        FAILURE_TIME = 0.2
        DTYPES = %i[uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128 bool].freeze
        private_constant :FIRST_TAG, :MICRO_BATCH_BITS, :STAGE_BITS, :HEADER_LENGTH, :AHEAD, :FAILURE_TIME, :DTYPES

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
        Receive = Struct.new(:kind, :stage, :micro_batch, :header, :header_work, :expected, :forms, :tensors, :works) do
          def key
            [kind, stage, micro_batch]
          end

          def posted?
            !(header_work || works).nil?
          end
        end
        private_constant :Receive

        # @param group [ProcessGroup]
        # @param device [String, Torch::Device] of the tensors
        def initialize(group, device)
          @group = group
          @device = device
          @ordered = group.backend.include?("nccl")
          @header_device = group.backend.include?("gloo") ? "cpu" : device
          @sent = {}
          @seen = {}
          @sends = []
          @queues = {}
        end

        # A step begins.
        #
        # @param incoming [Hash{Integer => Array}] the messages from each rank in its order: kind (FORWARD, BACKWARD), the
        #   stage here, micro-batch
        def begin(incoming)
          @gradients = {}
          @queues = incoming.transform_values { |keys| keys.map { |key| Receive.new(*key) } }
        end

        def send_forward(peer, stage, micro_batch, tensors)
          forms = tensors.map { |tensor| Form.of(tensor) }
          post(peer, header_of(forms, stage), HEADER, stage, micro_batch)
          expected = @sent[[stage, micro_batch]]
          changed = expected && !same?(expected, forms)
          expected.each { |form| post(peer, zeros(form), FORWARD, stage, micro_batch) } if changed
          tensors.each { |tensor| post(peer, tensor, changed ? LATE : FORWARD, stage, micro_batch) }
          remember(@sent, [stage, micro_batch], forms, changed)
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

        # Waits for a message, and posts the receives of the next ones.
        #
        # @return [Array<Torch::Tensor>] leaves
        def fetch(peer, kind, stage, micro_batch)
          queue = @queues.fetch(peer)
          receive = queue.find { |each| each.key == [kind, stage, micro_batch] }
          before = queue.take_while { |each| !each.equal?(receive) }
          (@ordered ? [*before, receive] : [receive]).each do |each|
            begin_receive(peer, each)
            read_header(peer, each, true)
          end
          receive.works.each(&:wait)
          queue.delete(receive)
          advance
          activation(receive)
        end

        # Posts what can be posted, and forgets what was sent. Never waits.
        def advance
          @sends.reject! { |work| work.completed? && work.wait }
          return if @ordered

          @queues.each do |peer, queue|
            queue.first(AHEAD).each { |receive| begin_receive(peer, receive) && read_header(peer, receive, false) }
          end
        end

        # Waits until all that was sent has been received, or copied.
        def finish
          @sends.each(&:wait)
          @sends.clear
        end

        # After the group has failed: what stopped a message of this rank. Later ones only name the failure.
        #
        # @return [Error, nil] nil: none was under way
        def failure
          receives = @queues.values.flatten.flat_map { |receive| [receive.header_work, *receive.works] }
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
          tensors.each { |tensor| post(peer, tensor, PLAIN, 0, number) }
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

        # @return [Boolean] whether it is posted; not if the shapes are unknown so far
        def begin_receive(peer, receive)
          return true if receive.posted?

          if receive.kind == BACKWARD
            forms = @gradients.delete([receive.stage, receive.micro_batch]) or return false
            listen_to_tensors(peer, receive, forms, BACKWARD)
          else
            receive.header = empty_header
            receive.header_work = listen(peer, receive.header, HEADER, receive.stage, receive.micro_batch)
            receive.expected = @seen[[receive.stage, receive.micro_batch]]
            listen_to_tensors(peer, receive, receive.expected, FORWARD) if receive.expected
          end
          true
        end

        def listen_to_tensors(peer, receive, forms, kind)
          receive.forms = forms
          receive.tensors = forms.map { |form| empty(form) }
          receive.works = receive.tensors.filter_map { |tensor| listen(peer, tensor, kind, receive.stage, receive.micro_batch) }
        end

        def read_header(peer, receive, wait)
          return if receive.header_work.nil? || !(wait || receive.header_work.completed?)

          receive.header_work.wait
          receive.header_work = nil
          forms = forms_of(receive.header)
          changed = receive.expected && !same?(receive.expected, forms)
          if changed
            receive.works.each(&:wait)
            listen_to_tensors(peer, receive, forms, LATE)
          elsif receive.expected.nil?
            listen_to_tensors(peer, receive, forms, FORWARD)
          end
          receive.forms = forms
          remember(@seen, [receive.stage, receive.micro_batch], forms, changed)
        end

        def activation(receive)
          return receive.tensors if receive.kind == BACKWARD

          receive.tensors.each_with_index { |tensor, i| tensor.requires_grad! if receive.forms[i].requires_grad && Torch.grad_enabled? }
        end

        # Both sides know that shapes which have just changed are no good guess. NCCL would need an order of these messages.
        def remember(memory, key, forms, changed)
          (@ordered || changed) ? memory.delete(key) : memory[key] = forms
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
