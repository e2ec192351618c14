# frozen_string_literal: true

require_relative "test_helper"
require_relative "carried_outputs"
require_relative "random_training_cases"

# Random models and random sequences of what training does with them: each rank compares its copy after each action with
# what one process computes that has the data of all. A case is plain data, so it can be shown, run again and shortened.
module RandomTraining
  DDP = Torch::NN::Parallel::DistributedDataParallel
  WIDTH = 3
  ROWS = 4

  # Blocks of one width, called in the order that forward is given: some several times, some never.
  class Network < Torch::NN::Module
    # @param kinds [Array<Symbol>] one for each block
    def initialize(kinds)
      super()
      @count = kinds.size
      kinds.each_with_index { |kind, index| instance_variable_set(:"@block#{index}", block(kind)) }
    end

    def blocks
      Array.new(@count) { |index| instance_variable_get(:"@block#{index}") }
    end

    # @param inner [Boolean] whether the first block makes a gradient step of its own
    # @param form [Integer, nil] the kind of object that the output is in; nil: a tensor
    def forward(x, path, inner: false, form: nil)
      raise ArgumentError, "a bad batch" if x.nil?

      Torch.enable_grad { run(blocks[path.first], x).pow(2).sum.backward } if inner
      output = path.reduce(x) { |hidden, index| run(blocks[index], hidden).tanh }
      form ? CarriedOutputs.carry(output, form) : output
    end

    private

    def block(kind)
      case kind
      when :linear then Torch::NN::Linear.new(WIDTH, WIDTH).double
      when :single then Torch::NN::Linear.new(WIDTH, WIDTH) # a dtype of its own, and so a bucket
      when :norm then Torch::NN::BatchNorm1d.new(WIDTH).double
      when :sparse then Torch::NN::Embedding.new(ROWS, WIDTH, sparse: true).double
      when :shared then Torch::NN::Linear.new(WIDTH, WIDTH).double.tap { |made| made.instance_variable_set(:@weight, @block0.weight) }
      end
    end

    def run(block, x)
      return x + block.call(Torch.tensor([0, 2, 0, 3])) if block.is_a?(Torch::NN::Embedding)

      dtype = block.parameters.first.dtype
      (dtype == x.dtype) ? block.call(x) : block.call(x.to(dtype: dtype)).to(dtype: x.dtype)
    end
  end

  # A case on one rank: the model that is tested, and copies of it with every rank's data, whose gradients are averaged here.
  class Trial
    include Worlds

    # Relative; also what is computed in doubles depends on the blocks of singles.
    EXACT = 1e-9
    SINGLE = 1e-4
    RATE = 0.05
    private_constant :EXACT, :SINGLE, :RATE

    # @param side [ProcessGroup] of all ranks, for what is not the model's
    def initialize(trial, rank, side)
      @case = trial
      @rank = rank
      @side = side
      @copies = Array.new(trial.size) { network(0) }
      net = network(rank)
      kind, moment = trial.optimizer
      @optimizer = optimizer(kind, net) if moment == :before
      @model = DDP.new(net, **wrapping)
      @optimizer = optimizer(kind, net) if moment == :after
      register(trial.hook)
      @outputs = {}
      @used = [] # since the last averages, by any rank
      @open = false
      @round = 0
      @buffers_due = true
    end

    # Runs to the end in any case, so that the ranks stay in step.
    #
    # @return [String, nil] the first action after which something differs, and what
    def difference
      said = nil
      @case.actions.each_with_index do |(kind, *arguments), index|
        send(kind, *arguments)
        said ||= child_says unless kind == :fork
        said ||= compare&.then { |found| "after action #{index + 1}, #{kind}: #{found}" }
      rescue => e
        raise "#{said} in action #{index + 1}, #{kind}: #{e.class}: #{e.message}"
      end
      said
    end

    private

    def network(rank)
      Torch.manual_seed(@case.seed + rank)
      Network.new(@case.kinds).tap do |made|
        @case.frozen.each { |index| made.blocks[index].parameters.each { |parameter| parameter.requires_grad!(false) unless parameter.equal?(made.blocks[0].weight) } }
      end
    end

    def wrapping
      return @case.options unless @case.options[:delayed]

      @case.options.except(:delayed).merge(delay_all_reduce_named_params: ["block0.bias"], param_to_hook_all_reduce: "block0.weight")
    end

    def optimizer(kind, net)
      case kind
      when :plain, :fused then Torch::Optim::SGD.new(parameters(net), lr: RATE, fused: kind == :fused) # torch-rb steps what is listed twice twice
      when :zero, :zero_views
        Distributed::Optim::ZeroRedundancyOptimizer.new(net.parameters, optimizer_class: Torch::Optim::SGD, lr: RATE,
          parameters_as_bucket_view: kind == :zero_views)
      end
    end

    def register(hook)
      case hook
      when :allreduce, :noop then @model.register_comm_hook(hook)
      when :ruby
        @model.register_comm_hook { |_, bucket| Torch::Distributed.all_reduce(bucket.buffer, op: :avg, async_op: true) }
      end
    end

    def ranks
      @copies.each_index
    end

    def own
      @copies[@rank]
    end

    def input(rank, seed)
      Torch.manual_seed(seed + rank)
      Torch.randn(ROWS, WIDTH, dtype: :float64)
    end

    # --- the parts that both sides do ---

    def forward(slot, how)
      @outputs[slot] = both_forward(how)
    end

    # @return [Array] the model's output, those of the copies, the paths, and the round that is open
    def both_forward(how, training: true)
      copies_buffers if training && @buffers_due
      @buffers_due = how[:sync]
      expected = ranks.map { |rank| @copies[rank].call(input(rank, how[:seed]), how[:paths][rank], inner: how[:inner]) }
      use(how[:paths].map { |path| path.first(1) }) if how[:inner]
      call = -> { CarriedOutputs.tensor_of(@model.call(input(@rank, how[:seed]), how[:paths][@rank], inner: how[:inner], form: how[:form])) }
      actual = how[:sync] ? call.call : without_sync(&call)
      @open ||= how[:sync]
      [actual, expected, how[:paths], @open ? @round : nil]
    end

    # After a block within the block, as of two helpers that each accumulate.
    def without_sync
      @model.no_sync do
        @model.no_sync { nil }
        yield
      end
    end

    # Their parameters got gradients that are not averaged yet.
    def use(paths)
      blocks = paths.flatten.uniq.flat_map { |index| own.blocks[index].parameters }
      parameters(own).each_with_index do |parameter, index|
        @used |= [index] if parameter.requires_grad && blocks.any? { |each| each.equal?(parameter) }
      end
    end

    # Behind autograd's back, as graphs of earlier forwards have saved them.
    def copies_buffers
      return if @case.options[:broadcast_buffers] == false

      @copies.drop(1).each { |copy| buffers(@copies[0]).zip(buffers(copy)) { |from, to| to.data.copy!(from) } }
    end

    def buffers(net)
      net.blocks.flat_map { |block| block.named_buffers.values.grep(Torch::Tensor) }
    end

    def backward(slots)
      present = slots.filter_map { |slot| @outputs.delete(slot) }
      # As in PyTorch, what is unused is told by the outputs of the round that is open.
      present = present.last(1) if @case.options[:find_unused_parameters] && present.map(&:last).uniq != [@round]
      both_backward(present) if present.any?
    end

    # @yieldparam loss [Torch::Tensor] the model's, in place of its backward
    def both_backward(made)
      sum = ->(outputs) { outputs.map { |output| output.pow(2).sum }.reduce(:+) }
      ranks.each { |rank| sum.call(made.map { |_, expected, *| expected[rank] }).backward }
      use(made.flat_map { |_, _, paths, _| paths })
      loss = sum.call(made.map(&:first))
      block_given? ? yield(loss) : loss.backward
      average if @open
    end

    # One rank's wait for the averages is interrupted before the others come to backward. Its next forward has the averages.
    def interrupted_round(victim, rounds)
      both_backward([both_forward(rounds.first)]) do |loss|
        interrupt(loss) if @rank == victim
        Distributed.barrier(group: @side)
        loss.backward unless @rank == victim
      end
      both_forward(rounds.last)
    end

    class Interruption < StandardError
    end

    def interrupt(loss)
      when_waiting { |waiting| waiting.raise(Interruption) }
      loss.backward
      sleep LIMIT
    rescue Interruption
      nil
    rescue Torch::Distributed::CanceledError # of backward; what was raised comes later then
      begin
        sleep LIMIT
      rescue Interruption
        nil
      end
    end

    # A rank without a gradient counts as zero.
    def average
      @open = false
      @round += 1
      @used.each do |index|
        all = @copies.map { |copy| parameters(copy)[index] }
        mean = all.map { |parameter| parameter.grad ? dense(parameter.grad) : Torch.zeros_like(parameter) }.reduce(:+) / all.size
        all.each { |parameter| parameter.grad = mean.detach.clone }
      end
      @used.clear
    end

    # Unique, as a tensor of two blocks has one gradient.
    def parameters(net)
      net.parameters.uniq(&:object_id)
    end

    def each_model(&block)
      [@model.module, *@copies].each(&block)
    end

    def each_parameter(&block)
      each_model { |net| parameters(net).each(&block) }
    end

    # An optimizer steps what has a gradient, frozen or not. One that is divided needs gradients that are the same on all ranks.
    def step
      return if @case.optimizer&.first.to_s.start_with?("zero") && (@open || @used.any?)

      @outputs.clear
      @optimizer&.step
      nets = @optimizer ? @copies : [@model.module, *@copies]
      Torch.no_grad do
        nets.flat_map { |net| parameters(net) }.each do |parameter|
          parameter.sub!(dense(parameter.grad) * RATE) if parameter.grad && (@optimizer || parameter.requires_grad)
        end
      end
    end

    def zero
      each_parameter { |parameter| parameter.grad&.zero! }
    end

    def replace
      each_parameter { |parameter| parameter.grad = parameter.grad.clone if parameter.grad }
    end

    def load(seed)
      @outputs.clear
      Torch.manual_seed(seed)
      state = Network.new(@case.kinds).state_dict
      @copies.each { |copy| copy.load_state_dict(state) }
      @model.load_state_dict(state.transform_keys { |key| "module.#{key}" })
    end

    def evaluate
      each_model(&:eval)
      @model.eval
      Torch.no_grad { @model.call(input(@rank, 1), [0]) }
      @model.train
      each_model(&:train)
    end

    # Backward at once, for batch normalisation then reads its buffers.
    def evaluated_round(how)
      each_model(&:eval)
      @model.eval
      both_backward([both_forward(how, training: false)])
    ensure
      @model.train
      each_model(&:train)
    end

    def fail(sync)
      copies_buffers if @buffers_due
      @buffers_due = sync
      call = -> { @model.call(nil, []) }
      sync ? call.call : without_sync(&call)
    rescue ArgumentError => e
      raise unless e.message == "a bad batch"
    end

    # Not while a round is open, and not with usage that the former wrapping has noted.
    def freeze(number)
      return if @open || @used.any?

      @outputs.clear
      index = 2 + number % (parameters(own).size - 2)
      each_model { |net| parameters(net)[index].then { |parameter| parameter.requires_grad!(!parameter.requires_grad) } }
    end

    # As a discriminator while its generator learns: all is frozen, and the input's gradient passes.
    def frozen_round(how)
      return if @open || @used.any?

      @outputs.clear
      trained = [@model.module, *@copies].flat_map { |net| parameters(net) }.select(&:requires_grad)
      trained.each { |parameter| parameter.requires_grad!(false) }
      copies_buffers if @buffers_due
      @buffers_due = how[:sync]
      inputs = [@rank, *ranks].map { |rank| input(rank, how[:seed]).requires_grad!(true) }
      call = -> { CarriedOutputs.tensor_of(@model.call(inputs[0], how[:paths][@rank], form: how[:form])) }
      outputs = [how[:sync] ? call.call : @model.no_sync(&call)] +
        ranks.map { |rank| @copies[rank].call(inputs[rank + 1], how[:paths][rank]) }
      outputs.each { |output| output.pow(2).sum.backward }
      differs(inputs[0].grad, inputs[@rank + 1].grad)&.then { |text| raise "a frozen model's input: #{text}" }
    ensure
      trained&.each { |parameter| parameter.requires_grad!(true) }
    end

    # A child that looks at all tensors after the next action, then writes to them.
    def fork
      return if @pid

      go, @go = IO.pipe
      @child, answer = IO.pipe
      @as_forked = state
      pid = Process.fork do
        [@go, @child].each(&:close)
        go.read
        answer.write(Marshal.dump(state))
        tensors.each { |tensor| Torch.no_grad { tensor.fill!(77) } }
        answer.close
        exit!(0)
      end
      [go, answer].each(&:close)
      @pid = pid
    end

    def child_says
      return unless @pid

      @go.close
      seen = Marshal.load(@child.read)
      Process.wait(@pid)
      @child.close
      @pid = nil
      "a child forked before action saw #{seen}, expected #{@as_forked}" unless seen == @as_forked
    end

    def tensors
      parameters(@model.module).flat_map { |parameter| [parameter, parameter.grad].compact }.select { |tensor| tensor.layout == :strided }.map(&:detach)
    end

    def state
      tensors.map(&:to_a)
    end

    def dense(tensor)
      (tensor.layout == :strided) ? tensor : tensor.to_dense
    end

    # --- comparing ---

    def compare
      names = own.named_parameters.uniq { |_, parameter| parameter.object_id }.map(&:first)
      parameters(@model.module).zip(parameters(own), names).each do |actual, expected, name|
        found = differs(actual.detach, expected.detach) || differs(actual.grad, expected.grad)&.then { |text| "gradient: #{text}" }
        return "#{name}: #{found}" if found
      end
      pair = buffers(@model.module).zip(buffers(own)).find { |actual, expected| differs(actual, expected) }
      pair && "buffer: #{differs(*pair)}"
    end

    def differs(actual, expected)
      return if actual.nil? && expected.nil?
      return "got #{actual.inspect}, expected #{expected.inspect}" if actual.nil? || expected.nil?

      actual, expected = [actual, expected].map { |tensor| dense(tensor) }
      apart = (actual - expected).abs.max.item
      bound = (@case.kinds.include?(:single) ? SINGLE : EXACT) * [1.0, expected.abs.max.item].max
      "got #{actual.to_a.inspect}, expected #{expected.to_a.inspect}" unless apart <= bound
    end
  end

  # Runs cases in worlds of their size, and makes a failing one smaller.
  class Runner
    # That one world runs.
    TOGETHER = 50

    # @param world [#call] runs a block on each rank of a world of so many
    def initialize(world)
      @world = world
    end

    # @param cases [Array<Case>] all of one size
    # @return [String, nil] what failed first, made smaller
    def failure(cases)
      found = cases.each_slice(TOGETHER).lazy.filter_map { |some| first_failure(some) }.first
      return unless found

      smallest, said = shrink(*found)
      "#{said}\nsmallest case found, run it again with TDDP_RANDOM_SEED=#{smallest.seed} TDDP_RANDOM_CASES=1:\n#{smallest}"
    end

    private

    # @return [Array(Case, String), nil]
    def first_failure(cases)
      said = @world.call(cases.first.size) { |rank| run(cases, rank) }
      # What other ranks raise may only follow from what one found.
      index, text = said.compact.min_by { |at, found| [at, found.include?("Error") ? 1 : 0] }
      index && [cases[index], text]
    end

    # Who raised is out of step and leaves, which ends the others.
    def run(cases, rank)
      $stderr.reopen(File::NULL) # gradients that come late are told there
      said = nil
      side = Torch::Distributed.new_group
      cases.each_with_index do |each, index|
        said ||= Trial.new(each, rank, side).difference&.then { |found| [index, "rank #{rank} #{found}"] }
      rescue => e
        return said || [index, "rank #{rank}: #{e.message}"]
      end
      said
    end

    def shrink(failing, said)
      while (smaller = candidates(failing).each_slice(TOGETHER).lazy.filter_map { |some| first_failure(some) }.first)
        failing, said = smaller
      end
      [failing, said]
    end

    # Fewer actions first, by halves; then fewer options.
    def candidates(failing)
      actions = failing.actions
      spans = [actions.size / 2, actions.size / 4, 1].uniq.select(&:positive?)
      shorter = spans.flat_map { |span| (0..actions.size - span).step(span).map { |from| actions[0...from] + actions[from + span..] } }
      # Paths depend on the others.
      fewer = (failing.options.keys - %i[find_unused_parameters static_graph]).map { |key| failing.options.except(key) }
      shorter.map { |list| failing.dup.tap { |made| made.actions = list } } +
        fewer.map { |options| failing.dup.tap { |made| made.options = options } } +
        (failing.hook ? [failing.dup.tap { |made| made.hook = nil }] : []) +
        (failing.optimizer ? [failing.dup.tap { |made| made.optimizer = nil }] : [])
    end
  end
end
