# frozen_string_literal: true

require_relative "test_helper"

# Tensors that are written behind autograd's back: a backward that needs what they were before is refused, and one that needs what
# they are now is right.
class WrittenTensorsTest < Minitest::Test
  include Worlds

  # Each writes 2 ones to rank 0's first tensor, or what it becomes by that.
  OPERATIONS = {
    all_reduce: ->(t, _) { Distributed.all_reduce(t) },
    all_reduce_async: ->(t, _) { Distributed.all_reduce(t, async_op: true).wait },
    all_reduce_coalesced: ->(t, _) { Distributed.coalescing_manager { Distributed.all_reduce(t) } },
    reduce: ->(t, _) { Distributed.reduce(t, dst: 0) },
    broadcast: ->(t, _) { Distributed.broadcast(t, src: 1) },
    all_gather: ->(t, rank) { Distributed.all_gather_into_tensor(t, Torch.ones(1) * rank) },
    all_gather_list: ->(t, rank) { Distributed.all_gather([t, Torch.zeros(2)], Torch.ones(2) * rank) },
    gather: ->(t, rank) { Distributed.gather(Torch.ones(2), rank.zero? ? [t, Torch.zeros(2)] : nil, dst: 0) },
    scatter: ->(t, rank) { Distributed.scatter(t, (rank == 1) ? [Torch.ones(2), Torch.ones(2)] : nil, src: 1) },
    reduce_scatter: ->(t, _) { Distributed.reduce_scatter_tensor(t, Torch.ones(4)) },
    all_to_all: ->(t, _) { Distributed.all_to_all_single(t, Torch.ones(2)) },
    recv: ->(t, rank) { rank.zero? ? Distributed.recv(t, src: 1) : Distributed.send(Torch.ones(2), dst: 0) },
    batch: lambda { |t, rank|
      operation = rank.zero? ? Distributed::P2POp.new(:irecv, t, 1) : Distributed::P2POp.new(:isend, Torch.ones(2), 0)
      Distributed.batch_isend_irecv([operation]).each(&:wait)
    }
  }.freeze

  # @return [Array] what backward says if the operation comes between forward and backward, and the gradient if it comes before
  def around(operation, rank)
    leaf, result = Array.new(2) { Torch.tensor([2.0, 3.0]).requires_grad!(true) }
    saved = leaf * 1
    square = saved * saved
    Torch.no_grad { operation.call(saved.detach, rank) }
    said = failure { square.sum.backward }
    Torch.no_grad { operation.call(result.detach, rank) }
    (result * result).sum.backward
    [said, result.grad.to_a, result.to_a.map { |value| value * 2 }]
  end

  OPERATIONS.each do |name, operation|
    define_method(:"test_#{name}") do
      said, gradient, doubled = world(2) { |rank| around(operation, rank) }.first
      assert_match(/modified by an inplace operation/, said.to_s)
      assert_equal doubled, gradient
    end
  end

  # Of a broadcast the sender's tensor stays as it is, and so do those that are only read.
  def test_what_is_only_read
    said = world(2) do |rank|
      leaf = Torch.tensor([2.0, 3.0]).requires_grad!(true)
      saved = leaf * 1
      square = saved * saved
      read = saved.detach
      Distributed.broadcast(read.clone, src: 1) if rank.zero?
      Distributed.broadcast(read, src: 1) if rank == 1
      Distributed.all_gather_into_tensor(Torch.zeros(4), read)
      Distributed.reduce_scatter_tensor(Torch.zeros(1), read)
      Distributed.all_gather_object(read.to_a)
      square.sum.backward
      leaf.grad.to_a
    end
    assert_equal [[4.0, 6.0]] * 2, said
  end

  # What an optimizer writes, a step between a forward and its backward.
  def test_optimizers
    zero = Distributed::Optim::ZeroRedundancyOptimizer
    said = world(2) do
      [->(params) { Torch::Optim::SGD.new(params, lr: 0.1, fused: true) }, ->(params) { Torch::Optim::Adam.new(params, lr: 0.1, fused: true) },
        ->(params) { zero.new(params, optimizer_class: Torch::Optim::SGD, lr: 0.1) },
        ->(params) { zero.new(params, optimizer_class: Torch::Optim::AdamW, lr: 0.1, parameters_as_bucket_view: true) }].map do |make|
        net = Torch::NN::Linear.new(3, 3)
        optimizer = make.call(net.parameters)
        x = Torch.ones(1, 3).requires_grad!(true)
        net.call(x).sum.backward
        later = net.call(x).sum
        optimizer.step
        failure { later.backward }
      end
    end
    said.flatten(1).each { |each| assert_match(/modified by an inplace operation/, each.to_s) }
  end

  # A checkpoint that is loaded between a forward and its backward.
  def test_a_checkpoint
    said = Dir.mktmpdir do |folder|
      world(2) do
        net = Torch::NN::Linear.new(3, 3)
        Distributed::Checkpoint.save(folder, model: net)
        later = net.call(Torch.ones(1, 3).requires_grad!(true)).sum
        Distributed::Checkpoint.load(folder, model: net)
        failure { later.backward }
      end
    end
    said.each { |each| assert_match(/modified by an inplace operation/, each.to_s) }
  end

  # Gradients in buckets, which a learned optimizer computes with.
  def test_gradients
    said = world(2) do
      net = Torch::NN::Linear.new(3, 1, bias: false)
      model = Torch::NN::Parallel::DistributedDataParallel.new(net)
      model.call(Torch.ones(1, 3)).sum.backward
      scale = Torch.ones(3).requires_grad!(true)
      later = (net.weight.grad * scale).sum
      net.zero_grad(set_to_none: true)
      model.call(Torch.full([1, 3], 2.0)).sum.backward
      failure { later.backward }
    rescue ArgumentError # torch-rb 0.12 has no set_to_none
      net.zero_grad
      failure { later.backward }
    end
    said.each { |each| assert_match(/modified by an inplace operation/, each.to_s) }
  end
end
