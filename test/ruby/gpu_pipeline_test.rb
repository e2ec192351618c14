# frozen_string_literal: true

require_relative "on_gpu"
require_relative "pipelined_training"
require_relative "parallel_training"

# Pipelines on a GPU, beside the same model in one process on the same GPU: schedules, what stages send each other, and all
# dimensions of a mesh at once.
class GPUPipelineTest < Minitest::Test
  include OnGPU
  include PipelinedTraining

  TOLERANCE = 1e-9

  # By name: the class, stages of a rank, micro-batches.
  SCHEDULES = {
    gpipe: [:ScheduleGPipe, 1, 4], one_forward_one_backward: [:Schedule1F1B, 1, 4], interleaved: [:ScheduleInterleaved1F1B, 2, 4],
    zero_bubble: [:ScheduleInterleavedZeroBubble, 1, 4], interleaved_zero_bubble: [:ScheduleInterleavedZeroBubble, 2, 4]
  }.freeze

  # The rows of some batches are no multiple of the micro-batches, and change.
  ROWS = [8, 10, 7].freeze

  def layers(**)
    super.to(device)
  end

  def batch(...)
    super.map { |tensor| tensor.to(device) }
  end

  # A module that keeps where its inputs are.
  def watched(part, seen)
    watching = Module.new do
      define_method(:forward) do |x|
        seen << Distributed._device_name(x.device)
        super(x)
      end
    end
    part.tap { part.singleton_class.prepend(watching) }
  end

  def assert_schedules_follow_one_process(worlds)
    worlds.each do |schedules|
      schedules.each do |name, (difference, seen, expected)|
        assert_operator difference, :<, TOLERANCE, name
        assert_equal [expected], seen, name
      end
    end
  end

  def schedules_beside_one_process(rank, size, names = SCHEDULES.keys)
    names.to_h do |name|
      kind, per_rank, micro_batches = SCHEDULES.fetch(name)
      seen = []
      stages = stages_of(layers, rank, size, per_rank: per_rank) { |part| watched(part, seen) }
      schedule = Pipelining.const_get(kind).new(stages, n_microbatches: micro_batches, loss_fn: MSE)
      [name, [follow(schedule, layers, rows: ROWS), seen.uniq, device]]
    end
  end

  def test_schedules_follow_one_process
    assert_schedules_follow_one_process(shared_and_apart(2) { |rank| schedules_beside_one_process(rank, 2) })
  end

  def test_schedules_on_four_ranks
    names = %i[one_forward_one_backward interleaved_zero_bubble]
    assert_schedules_follow_one_process(ranks(4) { |rank| schedules_beside_one_process(rank, 4, names) })
  end

  def test_results_everywhere
    loss = ->(output, target) { [MSE.call(output, target), {largest: output.abs.max, rows: output.size(0)}] }
    found = shared_and_apart(2) do |rank|
      schedule = Pipelining::Schedule1F1B.new(stages_of(layers, rank, 2), n_microbatches: 3, loss_fn: loss)
      x, y = batch(7)
      plain = Torch.no_grad { layers.call(x) }
      own = [0...3, 3...5, 5...7].map { |range| [plain[range], y[range]] }
      expected = own.map { |output, target| [MSE.call(output, target).item, output.abs.max.item] }.flatten
      %i[step eval].map do |call|
        output = schedule.public_send(call, x, target: y, losses: losses = [], metrics: metrics = [], return_outputs: :all)
        got = losses.zip(metrics).flat_map { |each, values| [each.item, values[:largest]] }
        [far(output, plain), got.zip(expected).map { |one, other| (one - other).abs }.max, metrics.map { |each| each[:rows] }]
      end << schedule.timeline.ranks.map(&:size)
    end
    found.each do |*calls, spans|
      calls.each do |output, numbers, rows|
        [output, numbers].each { |difference| assert_operator difference, :<, TOLERANCE }
        assert_equal [3.0, 2.0, 2.0], rows
      end
      assert_equal [6, 6], spans
    end
  end

  # --- several tensors of several dtypes; a weight that two stages have ---

  # Gives its result, the tokens and a mask.
  class Front < Torch::NN::Module
    attr_reader :embedding

    def initialize
      super
      @embedding = Torch::NN::Embedding.new(7, 4)
    end

    def forward(tokens)
      [@embedding.call(tokens), tokens, tokens.gt(3)]
    end
  end

  class Back < Torch::NN::Module
    attr_reader :head

    def initialize
      super
      @linear = Torch::NN::Linear.new(4, 4)
      @head = Torch::NN::Linear.new(4, 7, bias: false)
    end

    def forward(hidden, tokens, mask)
      hidden = Torch.tanh(@linear.call(hidden)).masked_fill(mask.unsqueeze(-1), 0.25)
      @head.call(hidden) * (tokens + 1).unsqueeze(-1).to(dtype: :float64)
    end
  end

  CROSS = ->(output, target) { Torch::NN::F.cross_entropy(output.view(-1, 7), target.reshape(-1)) }

  def parts
    Torch.manual_seed(2)
    [Front.new, Back.new].each { |part| part.double.to(device) }
  end

  # Sequences of another length in each step.
  def test_several_tensors_and_a_weight_of_two_stages
    found = shared_and_apart(2) do |rank|
      plain = parts
      plain[1].head.instance_variable_set(:@weight, plain[0].embedding.weight)
      stage = Pipelining::PipelineStage.new(parts[rank], stage_index: rank, num_stages: 2)
      tie = {0 => "embedding.weight", 1 => "head.weight"}
      schedule = Pipelining::Schedule1F1B.new(stage, n_microbatches: 3, loss_fn: CROSS, tie: [tie])
      parameters = [plain.flat_map(&:parameters).uniq(&:object_id), stage.submodule.parameters]
      optimizers = parameters.map { |list| Torch::Optim::Adam.new(list, lr: 0.01) }
      [3, 5, 4].each_with_index.map do |length, step|
        tokens = ((Torch.arange(0, 6 * length) * 5 + step) % 7).view(6, length).to(device)
        optimizers.each(&:zero_grad)
        expected = CROSS.call(plain[1].call(*plain[0].call(tokens)), tokens)
        expected.backward
        schedule.step(tokens, target: tokens, losses: losses = [])
        names = plain[rank].named_parameters
        gradients = stage.submodule.named_parameters.map { |name, parameter| far(parameter.grad, names[name].grad) }
        optimizers.each(&:step)
        [*gradients, (mean(losses, 6) - expected.item).abs]
      end
    end
    assert_operator found.flatten.max, :<, TOLERANCE
  end

  # --- with the other dimensions of a mesh ---

  FORMS = [
    [{pp: 2, tp: 2}, {}], [{pp: 2, tp: 2}, {tied: true}], [{dp: 2, tp: 2}, {shard: :full_shard}],
    [{pp: 2, dp: 2}, {shard: :full_shard}], [{pp: 2, dp: 2}, {schedule: :interleaved_1f1b, stages: 2}]
  ].freeze

  # Trained, saved, and loaded into a plain model.
  def test_all_dimensions_follow_one_process
    found = in_folder do |folder|
      shared_and_apart(4) do
        ParallelTraining.device = device
        place = folder_of_world(folder)
        FORMS.each_with_index.to_h do |(dims, options), i|
          expected = ParallelTraining.plain(2, :float64, 0.5, tied: options.key?(:tied))
          [FORMS[i], ParallelTraining.difference("#{place}/#{i}", expected, dims, :float64, 2, 0.5, **options)]
        end
      end
    end
    found.each { |forms| forms.each { |form, difference| assert_operator difference, :<, TOLERANCE, form.inspect } }
  end
end
