# frozen_string_literal: true

require_relative "../ruby/pipelined_training"

# A rank of a pipeline is killed in each phase of each schedule: the others say who it was, at once.
class PipelineLostRanksTest < Minitest::Test
  include PipelinedTraining

  VICTIM = 1
  SCHEDULES = {ScheduleGPipe: 1, Schedule1F1B: 1, ScheduleInterleaved1F1B: 2, ScheduleInterleavedZeroBubble: 1}.freeze
  # More than shared memory sends before it is asked for.
  ROWS = 400

  # A layer that says when it runs.
  class Watched < Torch::NN::Module
    class Passed < Torch::Distributed::Function
      def self.forward(ctx, input, event)
        ctx[:event] = event
        input.clone
      end

      def self.backward(ctx, grad)
        ctx[:event].call
        [grad, nil]
      end
    end

    def initialize(forward, backward)
      super()
      @linear = Torch::NN::Linear.new(64, 64)
      @on_forward = forward
      @on_backward = backward
      @forwards = @backwards = -1
    end

    def forward(input)
      @on_forward.call(@forwards += 1)
      Passed.apply(@linear.call(input), -> { @on_backward.call(@backwards += 1) })
    end
  end

  NOTHING = ->(_) {}

  # What the ranks do on the way: for each the procs that are called with the number of each forward and backward.
  #
  # @param dead [Proc] returns once the victim has been killed
  # @param held [Worlds::Event] which is set when rank 0 holds back a message that the victim waits for
  def events(phase, rank, dead, held)
    die = -> { Process.kill(:KILL, Process.pid) }
    {
      forward: {VICTIM => [->(i) { die.call if i == 1 }, NOTHING]},
      backward: {VICTIM => [NOTHING, ->(i) { die.call if i == 1 }]},
      # Rank 2 does not begin, so what the victim has sent is under way.
      sending: {VICTIM => [->(i) { (held.set || true) && die_when_waiting(held) if i == 1 }, NOTHING], 2 => [NOTHING, NOTHING, dead]},
      waiting: {
        0 => [->(i) { (held.set || true) && dead.call if i == 1 }, NOTHING],
        VICTIM => [->(i) { die_when_waiting(held) if i.zero? }, NOTHING]
      }
    }.fetch(phase).fetch(rank, [NOTHING, NOTHING])
  end

  def die_when_waiting(held)
    main = Thread.current
    Thread.new do
      held.wait
      await_waiting(main)
      Process.kill(:KILL, Process.pid)
    end
  end

  def train(name, rank, (forward, backward, before))
    per_rank = SCHEDULES.fetch(name)
    stages = Array.new(per_rank) do |i|
      Pipelining::PipelineStage.new(Watched.new(forward, backward), stage_index: rank + 3 * i, num_stages: 3 * per_rank)
    end
    schedule = Pipelining.const_get(name).new(stages, n_microbatches: 6, loss_fn: MSE)
    x = Torch.ones(6 * ROWS, 64)
    before&.call
    schedule.step(x, target: x)
  end

  def join(rank)
    Torch::Distributed.init_process_group("gloo", rank: rank, world_size: 3, timeout: LIMIT / 2)
  end

  SCHEDULES.each_key do |name|
    %i[forward backward sending waiting].each do |phase|
      define_method(:"test_#{name}_#{phase}") do
        held = Worlds::Event.new
        died = {0 => Worlds::Event.new, 2 => Worlds::Event.new}
        said = Distributed.fork_world(2) do |half|
          if half.zero?
            dying = fork do
              join(VICTIM)
              train(name, VICTIM, events(phase, VICTIM, nil, held))
            end
            reaper = Thread.new do
              Process.wait(dying)
              at = now
              died.each_value(&:set)
              at
            end
          end
          rank = 2 * half
          join(rank)
          failed = failure { train(name, rank, events(phase, rank, died[rank].method(:wait), held)) }
          [failed, now, dying, reaper&.value]
        ensure
          Distributed.destroy_process_group
        end
        pid, death = said[0].last(2)
        said.each do |(kind, text), at|
          assert_equal "Torch::Distributed::PeerLostError", kind, text
          assert_match(/rank #{VICTIM} \(host .*, pid #{pid}\)/, text)
          assert_operator at - death, :<, FACTOR
        end
      end
    end
  end
end
