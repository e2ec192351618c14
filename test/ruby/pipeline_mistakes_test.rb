# frozen_string_literal: true

require_relative "pipelined_training"

# What does not fit together is an error that names it, on all ranks; and what a step leaves behind: memory, times, traces.
class PipelineMistakesTest < Minitest::Test
  include PipelinedTraining

  # Each with what rank 1 says of itself, and rank 0 of it.
  DIFFERENT = {
    ->(rank, part) { [Pipelining::PipelineStage.new(part), {n_microbatches: 2 + rank}] } =>
      "n_microbatches: 2 on rank 0 of the pipeline, 3 on rank 1",
    ->(rank, part) { [Pipelining::PipelineStage.new(part), {n_microbatches: 2, scale_grads: rank.zero?}] } =>
      "scale_grads: true on rank 0 of the pipeline, false on rank 1",
    ->(_, part) { [Pipelining::PipelineStage.new(part, stage_index: 1, num_stages: 2), {n_microbatches: 2}] } =>
      "stages: expected stage_index 0 on rank 0 of 2, got 1",
    ->(rank, part) { [Pipelining::PipelineStage.new(part, stage_index: rank, num_stages: 3), {n_microbatches: 2}] } =>
      "num_stages: expected a multiple of the group's 2 ranks, got 3",
    ->(rank, part) { [Pipelining::PipelineStage.new(part), {n_microbatches: 2, loss_fn: rank.zero? ? MSE : 5}] } =>
      "loss_fn: expected something that can be called, got 5",
    ->(_, part) { [Pipelining::PipelineStage.new(part), {n_microbatches: 2, tie: [{0 => "0.weight", 1 => "8.bias"}]}] } =>
      "tie: 0: 0.weight and 1: 8.bias are of different forms, float64 [6, 6] and float64 [6]",
    ->(_, part) { [Pipelining::PipelineStage.new(part), {n_microbatches: 2, tie: [{0 => "0.weight", 1 => "9.weight"}]}] } =>
      "tie: stage 1 has no parameter \"9.weight\", but 8.weight, 8.bias, 10.weight, 10.bias, 12.weight, 12.bias, 14.weight, 14.bias",
    lambda do |rank, part|
      stages = Array.new(2) { |i| Pipelining::PipelineStage.new(part, stage_index: rank + 2 * i, num_stages: 4) }
      [stages, {n_microbatches: 2}]
    end => "stages: Schedule1F1B takes one for each of 2 ranks, got 4: use ScheduleInterleaved1F1B"
  }.freeze

  def test_what_does_not_fit_together
    found = world(2) do |rank|
      DIFFERENT.keys.map do |arguments|
        stages, options = arguments.call(rank, Pipelining.split(layers, parts: 2)[rank])
        failure { Pipelining::Schedule1F1B.new(stages, **options) }
      end
    end
    DIFFERENT.values.each_with_index do |text, i|
      found.each { |failures| assert_includes failures[i][1], text }
    end
  end

  def test_replicas_that_look_for_unused_parameters
    found = world(2) do |rank|
      mesh = Torch::Distributed.init_device_mesh(:cpu, [1, 2], mesh_dim_names: %w[dp pp])
      part = Pipelining.split(layers, parts: 2)[rank]
      options = rank.zero? ? {} : {find_unused_parameters: true}
      replica = Torch::NN::Parallel::DistributedDataParallel.new(part, device_mesh: mesh["dp"], **options)
      stage = Pipelining::PipelineStage.new(replica, mesh: mesh["pp"])
      failure { Pipelining::Schedule1F1B.new(stage, n_microbatches: 2) }
    end
    text = "a stage of a pipeline: expected a DistributedDataParallel without find_unused_parameters and static_graph"
    assert_equal %w[MismatchError UnsupportedError], found.map { |kind, _| kind[/\w+\z/] }
    found.each { |_, message| assert_includes message, text }
  end

  def test_what_a_step_refuses
    found = world(2) do |rank|
      stage = Pipelining::PipelineStage.new(Pipelining.split(layers, parts: 2)[rank])
      schedule = Pipelining::Schedule1F1B.new(stage, n_microbatches: 4, loss_fn: MSE)
      x, y = batch(8)
      few = batch(3)
      without_loss = Pipelining::Schedule1F1B.new(stage, n_microbatches: 4)
      [
        failure { Torch.no_grad { schedule.step(x, target: y) } }, failure { schedule.step(few[0], target: few[1]) },
        failure { schedule.step(x, target: y, losses: 3) }, failure { schedule.step(x, target: y, return_outputs: 1) },
        failure { (rank == 1) ? without_loss.step(x, target: y) : schedule.step(target: y) }, failure { schedule.step(x) if rank == 1 },
        # None of this has harmed the schedule.
        [schedule.step(x, target: y, losses: losses = []), losses.size].last
      ]
    end
    assert_equal ["args: expected the first stage's inputs, got none", nil, 4], [found[0][4][1], found[0][5], found[0][6]]
    assert_equal ["step: expected a loss_fn, which this Torch::Distributed::Pipelining::Schedule1F1B has not: give it one, or call eval",
      "target: expected that of the batch where the last stage is, got nil", 4], [found[1][4][1], found[1][5][1], found[1][6]]
    found.each do |no_grad, few, losses, outputs, *|
      assert_equal "step: expected gradients to be enabled, but they are not: call eval for a forward only", no_grad[1]
      assert_equal "args: expected at least n_microbatches = 4 rows to divide, got 3 (shape [3, 6])", few[1]
      assert_equal "losses: expected nil or an Array to fill, got 3", losses[1]
      assert_equal "return_outputs: expected true, false or :all, got 1", outputs[1]
    end
  end

  def test_arguments_of_a_stage
    mod = Torch::NN::Linear.new(2, 2)
    {
      -> { Pipelining::PipelineStage.new } => "submodule, layers: expected one of them, got none",
      -> { Pipelining::PipelineStage.new(mod, layers: [mod]) } => "submodule, layers: expected one of them, got both",
      -> { Pipelining::PipelineStage.new(layers: [mod, 3]) } => "layers: expected a Torch::NN::Module each, got 3",
      -> { Pipelining::PipelineStage.new(mod, stage_index: 2, num_stages: 2) } =>
        "stage_index: expected an Integer from 0 to 1, since num_stages is 2, got 2",
      -> { Pipelining::PipelineStage.new(mod, stage_index: 0) } => "num_stages: expected an Integer from 1 to 1024, got nil",
      -> { Pipelining::PipelineStage.new(mod, mesh: 3) } => "mesh: expected a DeviceMesh, got 3",
      -> { Pipelining::PipelineStage.new(mod, input_args: 3) } => "input_args: expected a Torch::Tensor or an Array of tensors, got 3",
      -> { Pipelining::ScheduleGPipe.new([3], n_microbatches: 1) } => "stages: expected a PipelineStage or an Array of them, got [3]",
      -> { Pipelining::ScheduleGPipe.new(Pipelining::PipelineStage.new(mod, stage_index: 0, num_stages: 2), n_microbatches: 1) } =>
        "there is no process group whose ranks have the others"
    }.each { |call, text| assert_includes assert_raises(ArgumentError, TypeError) { call.call }.message, text }
  end

  # What a module or the loss returns that is no good, where it is; then the schedule says why it can't go on.
  def test_what_modules_and_losses_return
    found = Distributed.fork_world(1) do
      x, y = batch(4)
      run = lambda do |mod, loss|
        schedule = Pipelining::ScheduleGPipe.new(Pipelining::PipelineStage.new(mod, input_args: x), n_microbatches: 2, loss_fn: loss)
        [failure { schedule.step(x, target: y) }, failure { schedule.step(x.narrow(1, 0, 5), target: y) }]
      end
      strings = Torch::NN::Linear.new(6, 6)
      strings.define_singleton_method(:forward) { |_| "text" }
      tanh = Torch::NN::Tanh.new
      failures = [run.call(strings, MSE), run.call(tanh, ->(output, _) { output }), run.call(tanh, ->(*) { 3 })]
      other = Pipelining::ScheduleGPipe.new(Pipelining::PipelineStage.new(tanh, input_args: x), n_microbatches: 2, loss_fn: MSE)
      failures.map { |each| each.map(&:last) } << failure { other.eval(x.narrow(1, 0, 5)) }.last
    end.first
    again = "an earlier step of this schedule failed (%s): its messages may be under way still, make new groups"
    texts = ["stage 0: expected its module to return a Torch::Tensor or an Array of tensors, got String",
      "loss_fn: expected it to return a tensor of one element, or that and a Hash of metrics, got a tensor of shape [2, 6]",
      "loss_fn: expected it to return a tensor of one element, or that and a Hash of metrics, got 3"]
    assert_equal texts.map { |text| [text, format(again, text)] }, found.first(3)
    assert_equal "stage 0: expected inputs like its input_args, float64 [4, 6], got float64 [2, 5]", found.last
  end

  # The memory of activations that wait for backward is that of as many micro-batches as there are stages, however many there are.
  def test_activations_in_flight_do_not_grow_with_the_micro_batches
    found = world(2) do |rank|
      Distributed.synchronize_gc(budget: 1 << 20)
      Distributed.track_memory
      %i[Schedule1F1B ScheduleGPipe].product([4, 16]).map do |name, micro_batches|
        stage = Pipelining::PipelineStage.new(Pipelining.split(layers(width: 64, dtype: :float32), parts: 2)[rank])
        schedule = Pipelining.const_get(name).new(stage, n_microbatches: micro_batches, loss_fn: MSE)
        x, y = batch(512 * micro_batches, width: 64, dtype: :float32)
        schedule.step(x, target: y, return_outputs: false)
        GC.start
        before = Distributed.memory_stats[:current_bytes]
        Distributed.reset_peak_memory_stats
        schedule.step(x, target: y, return_outputs: false)
        Distributed.memory_stats[:peak_bytes] - before
      end
    end
    # A micro-batch of a stage: eight results of 128 KiB.
    found.each do |few, many, few_at_once, many_at_once|
      assert_in_delta few, many, 3 << 20
      assert_operator many_at_once - few_at_once, :>, 4 << 20
    end
  end

  # Two ranks, of which the second takes twice as long.
  def test_the_report_of_given_times
    plan = Pipelining::Orders.one_forward_one_backward(2, 2, 4)
    times = ->(stage, unit) { [[stage, "F", 8, 8 * unit], [stage, "B", 8, 16 * unit]] }
    report = Pipelining::Report.new("Schedule1F1B", plan, [
      {"steps" => 2, "wall" => 0.080, "times" => times.call(0, 0.001)}, {"steps" => 2, "wall" => 0.080, "times" => times.call(1, 0.002)}
    ])
    assert_in_delta 0.040, report.step_time, 1e-12
    assert_in_delta 1 - 0.072 / 0.160, report.bubble, 1e-12
    assert_in_delta 0.2, report.theory, 1e-12
    # The first forward, the second rank's part without a pause, and the last backward: 1 + 24 + 2, of which 12 + 24 of 54 are busy.
    assert_in_delta 1 - 36.0 / 54, report.theory_of_these_stages, 1e-12
    assert_in_delta 4.0 / 3, report.imbalance, 1e-12
    assert_equal <<~TEXT.chomp, report.to_s
      Schedule1F1B, 2 ranks, 4 micro-batches, 2 steps of 40.000 ms
      bubble 55.0 %; in theory 20.0 % for equal stages, 33.3 % for these (the slowest rank takes 1.33 times the mean)
        stage 0: B 2.000 ms, F 1.000 ms
        stage 1: B 4.000 ms, F 2.000 ms
    TEXT
  end

  def test_the_bubble_is_measured
    found = world(2) do |rank|
      schedule = Pipelining::ScheduleInterleavedZeroBubble.new(stages_of(layers, rank, 2), n_microbatches: 4, loss_fn: MSE)
      x, y = batch(8)
      2.times { schedule.step(x, target: y) }
      report = schedule.report
      timeline = schedule.timeline
      [report.bubble, report.steps, report.stage_times.map { |stage, times| [stage, times.keys.sort, times.values.min.positive?] },
        timeline.ranks.map { |row| row.map { |span| span.action.to_s } }, timeline.to_svg("A < B").scan(/<rect x=|A &lt; B/).size,
        failure { schedule.report }.last]
    end
    plan = Pipelining::Orders.one_forward_one_backward(2, 2, 4, split: true).map { |list| list.map(&:to_s) }
    found.each do |bubble, steps, times, ranks, marks, again|
      assert_operator bubble, :>, 0
      assert_operator bubble, :<, 1
      assert_equal [2, [[0, %i[F I W], true], [1, %i[F I W], true]], plan, 25], [steps, times, ranks, marks]
      assert_equal "report: expected a step since the last one, there was none", again
    end
  end

  def test_the_trace_shows_the_schedule
    Dir.mktmpdir do |folder|
      with_env("TDDP_TRACE" => folder) do
        world(2) do |rank|
          schedule = Pipelining::Schedule1F1B.new(stages_of(layers, rank, 2), n_microbatches: 2, loss_fn: MSE)
          x, y = batch(4)
          schedule.step(x, target: y)
          nil
        end
      end
      rows = Dir[File.join(folder, "*.json")].sort.map do |file|
        events = JSON.parse(File.read(file))
        events = events["traceEvents"] if events.is_a?(Hash)
        events.select { |event| event["ph"] == "X" && event.dig("args", "stage") }.sort_by { |event| event["ts"] }
      end
      assert_equal ["F0 F1 B0 B1", "F0 B0 F1 B1"], rows.map { |row| row.map { |event| event["name"] }.join(" ") }
    end
  end
end
