# frozen_string_literal: true

require_relative "sharded_training"
require "torch/distributed/pipelining"

# What goes wrong within a backward is raised as the same classes as elsewhere.
class BackwardErrorsTest < Minitest::Test
  include ShardedTraining

  NN = Torch::Distributed::NN
  DDP = Torch::NN::Parallel::DistributedDataParallel

  def leaf(*shape)
    Torch.ones(*shape, dtype: :float64).requires_grad!
  end

  def linear
    make { Torch::NN::Linear.new(4, 4) }
  end

  # Ruby code that communicates in backward.
  class Summed < Torch::Distributed::Function
    def self.forward(ctx, x, group)
      ctx.group = group
      x * 1
    end

    def self.backward(ctx, grad)
      [grad.clone.tap { |sum| Torch::Distributed.all_reduce(sum, group: ctx.group) }, nil]
    end
  end

  # Losses whose backward communicates in the group.
  def losses(group)
    mesh = ->(name) { Torch::Distributed::DeviceMesh.from_group(group, "cpu", mesh_dim_names: [name]) }
    {
      ddp: -> { DDP.new(linear, process_group: group).call(leaf(2, 4)).sum },
      ddp_find_unused: -> { DDP.new(linear, process_group: group, find_unused_parameters: true).call(leaf(2, 4)).sum },
      fsdp: -> { FSDP.fully_shard(linear, mesh: mesh.call("fsdp")).call(leaf(2, 4)).sum },
      collective: -> { NN.all_gather(leaf(2), group: group).sum(&:sum) },
      sync_batch_norm: -> { Torch::NN::SyncBatchNorm.new(4, process_group: group).call(Torch.arange(8).reshape(2, 4).float.requires_grad!).pow(2).sum },
      checkpointed: -> { Torch::Utils::Checkpoint.checkpoint(leaf(2)) { |x| NN.all_reduce(x * 2, group: group) }.sum },
      function: -> { Summed.apply(leaf(2), group).sum },
      tensor_parallel: lambda do
        styles = Torch::Distributed::Tensor::Parallel
        styles.parallelize_module(linear, mesh.call("tp"), {"" => styles::ColwiseParallel.new}).call(leaf(2, 4)).sum
      end
    }
  end

  def test_a_mismatch
    found = world(2) do |rank|
      losses(nil).keys.to_h do |name|
        group = Torch::Distributed.new_group([0, 1], timeout: LIMIT)
        loss = losses(group).fetch(name).call
        error = rank.zero? ? failure { loss.backward } : failure { group.barrier }
        [name, error]
      end
    end
    found[0].each do |name, (kind, text)|
      # Another bucket may be launched when the first one has failed.
      known = (kind == "Torch::Distributed::GroupError" && text.include?("TDDP_MISMATCH")) ? "Torch::Distributed::MismatchError" : kind
      assert_equal "Torch::Distributed::MismatchError", known, "#{name}: #{text}"
      assert_match(/rank 1.*barrier/, text, name.to_s)
    end
    assert_equal ["Torch::Distributed::MismatchError"], found[1].values.map(&:first).uniq
  end

  def test_a_timeout
    done = Event.new
    found = world(2) do |rank|
      group = Torch::Distributed.new_group([0, 1], timeout: 0.3)
      loss = DDP.new(linear, process_group: group).call(leaf(2, 4)).sum
      next done.wait if rank == 1

      error = begin
        loss.backward
      rescue => e
        e
      end
      done.set
      [error.class, error.status, error.is_a?(Torch::Error), error.cause.class]
    end.first
    assert_equal [Torch::Distributed::TimeoutError, :TDDP_TIMEOUT, true], found.first(3)
    assert_includes LIBTORCH_ERRORS, found[3]
  end

  # Scripts rescue this, and start again from a checkpoint.
  def test_a_peer_that_is_lost
    %i[ddp fsdp pipeline].each do |kind|
      found = world(2) do |rank|
        loss = (kind == :pipeline) ? schedule : losses(Torch::Distributed.default_process_group).fetch(kind).call
        next Torch::Distributed.destroy_process_group if rank == 1

        failure { loss.is_a?(Torch::Tensor) ? loss.backward : loss.step(leaf(2, 4), target: leaf(2)) }
      end
      assert_equal "Torch::Distributed::PeerLostError", found[0][0], "#{kind}: #{found[0][1]}"
      assert_match(/rank 1/, found[0][1])
    end
  end

  def schedule
    stage = Torch::Distributed::Pipelining::PipelineStage.new(layers: [linear])
    Torch::Distributed::Pipelining::ScheduleGPipe.new(stage, n_microbatches: 1, loss_fn: ->(out, _) { out.sum })
  end

  # Of whatever class it is, what a function or a segment raises is the cause; what libtorch finds remains what torch-rb makes of it.
  def test_what_others_raise_in_backward
    found = world(1) do
      raising = ->(error) { Torch::Utils::Checkpoint.checkpoint(leaf(2)) { |x| @again ? raise(error) : (@again = true) && x * 2 }.sum }
      kinds = [IOError.new("no more"), Torch::Distributed::StoreError.new("no store")].map do |error|
        @again = false
        loss = raising.call(error)
        begin
          loss.backward
        rescue => e
          [e.class, e.cause.class, e.message]
        end
      end
      handled = begin
        raise Torch::Distributed::PeerLostError, "an older one"
      rescue Torch::Distributed::Error
        begin
          leaf(2).backward
        rescue => e
          e.class
        end
      end
      [kinds, handled]
    end.first
    (own, ours), handled = found
    assert_equal [RuntimeError, IOError], own.first(2)
    assert_match(/a checkpointed segment raised IOError: no more/, own[2])
    assert_equal [Torch::Distributed::StoreError] * 2, ours.first(2)
    assert_match(/a checkpointed segment raised Torch::Distributed::StoreError: no store/, ours[2])
    assert_includes LIBTORCH_ERRORS, handled
  end
end
