# frozen_string_literal: true

require_relative "test_helper"

# What is refused before anything is sent: the text names the argument, what it was and what was expected, and the group
# can be used afterwards.
class ArgumentsTest < Minitest::Test
  def self.refused
    one = Torch.ones(3)
    long = Torch.ones(3, dtype: :int64)
    sparse = Torch.eye(2).to_sparse
    folded = Torch.ones(1).expand(3)
    d = Torch::Distributed
    {
      # tensors
      /tensor: expected a Torch::Tensor, got nil \(NilClass\)/ => -> { d.reduce(nil, dst: 0) },
      /tensor: .*sparse.*to_dense/ => -> { d.broadcast(sparse, src: 0) },
      /tensor: .*ComplexHalf/ => -> { d.all_reduce(Torch.zeros(2, dtype: :complex32)) },
      /tensor: expected a tensor that can be written.*shape \[3\], strides \[0\].*clone/ => -> { d.all_reduce(folded) },
      /output: expected a Torch::Tensor, got 1/ => -> { d.all_gather_into_tensor(1, one) },
      /input: .*sparse/ => -> { d.all_gather_into_tensor(one, sparse) },
      /output: .*share their memory/ => -> { d.reduce_scatter_tensor(folded, one) },
      # ranks
      /dst: expected a rank from 0 to 1, got nil/ => -> { d.reduce(one) },
      /dst: expected a rank from 0 to 1, got 2/ => -> { d.gather(one, nil, dst: 2) },
      /group_src: expected a rank within the group, from 0 to 1, got -1/ => -> { d.scatter(one, nil, group_src: -1) },
      /src: expected a rank from 0 to 1, got "0"/ => -> { d.broadcast(one, src: "0") },
      # operations
      /op: expected one of :sum/ => -> { d.reduce(one, dst: 0, op: :mode) },
      /avg.*int64|int64.*avg/ => -> { d.all_reduce(long, op: :avg) },
      /min.*complex64|complex64.*min/ => -> { d.all_reduce(Torch.ones(2).to(:complex64), op: :min) },
      /bor.*float32|float32.*bor/ => -> { d.reduce_scatter(one, [one.clone, one.clone], op: :bor) },
      # lists
      /tensor_list: expected an Array of 2 tensors, one for each rank, got 1 of them/ => -> { d.all_gather([one], one) },
      /tensor_list: expected an Array of 2 tensors, one for each rank, got NilClass/ => -> { d.all_gather(nil, one) },
      /tensor_list\[1\]: expected a Torch::Tensor, got nil/ => -> { d.all_gather([one.clone, nil], one) },
      /tensor_list\[1\]: expected float32 (of shape \[3\] )?like tensor, got int64/ =>
        -> { d.all_gather([one.clone, long], one) },
      /tensor_list\[\d\]: expected float32 of shape \[3\] like tensor, got float32 of shape \[4\]/ =>
        -> { d.all_gather([Torch.ones(4), Torch.ones(4)], one) },
      /tensor_list\[1\]: .*share their memory/ => -> { d.all_gather([one.clone, folded], one) },
      /outputs.*overlap/ => -> { d.all_gather([one, one], Torch.ones(3)) },
      /gather_list: expected an Array of 2 tensors.*got Symbol|gather_list: expected nil on rank 1/ =>
        -> { d.gather(one, (d.get_rank.zero? ? :all : [one, one])) },
      /scatter_list\[\d\]: expected float32 .*like tensor, got float32 of shape \[2\]|scatter_list: expected nil on rank 1.*got 2 tensors/ =>
        -> { d.scatter(one, [Torch.ones(2), Torch.ones(2)]) },
      /output: expected 6 elements, 2 times 3, got 5|output: expected nil on rank 1/ => -> { d.gather_into_tensor(Torch.ones(5), one) },
      /input_list: expected an Array of 2 tensors/ => -> { d.reduce_scatter(one, [one] * 3) },
      /input_list\[\d\]: expected float32.* like output, got int64/ => -> { d.reduce_scatter(one, [long, long]) },
      /output_tensor_lists: expected 2 Arrays, one for each rank, each of 1 tensors/ => -> { d.all_gather_coalesced([[one]], [one]) },
      /output_tensor_list\[\d\]: expected float32.* like input_tensor_list\[\d\], got float64/ =>
        -> { d.all_to_all([one.double, one.double], [one, one]) },
      # sizes
      /output has 3 elements, input 5: expected 2 times as many/ => -> { d.reduce_scatter_tensor(one, Torch.ones(5)) },
      /input: expected dimension 0 to be a multiple of 2, got 3: give input_split_sizes/ => -> { d.all_to_all_single(Torch.ones(4), one) },
      /output_split_sizes: expected a sum of 3, which is dimension 0 of output, got \[1, 1\], together 2/ =>
        -> { d.all_to_all_single(one, Torch.ones(3), [1, 1], [1, 2]) },
      /input_split_sizes: expected 2 sizes, one for each rank, got \[3\]/ => -> { d.all_to_all_single(one, one, [1, 2], [3]) },
      /input_split_sizes: expected 2 sizes, .*got \[4, -1\]/ => -> { d.all_to_all_single(one, one, input_split_sizes: [4, -1], output_split_sizes: [1, 2]) },
      /output: expected a tensor with a dimension to split/ => -> { d.all_to_all_single(Torch.tensor(1.0), one) },
      # the rest
      /group: expected a Torch::Distributed::ProcessGroup or nil, got :all/ => -> { d.all_reduce(one, group: :all) },
      /timeout: expected a positive number of seconds, got -1/ => -> { d.barrier(timeout: -1) }
    }
  end

  def test_wrong_arguments_are_named_and_do_no_harm
    results = world(2) do
      said = self.class.refused.map { |_, call| failure(&call)&.last.to_s }
      [said, Distributed.all_reduce(Torch.ones(2)).to_a]
    end
    results.each do |said, sums|
      self.class.refused.keys.zip(said) { |wanted, text| assert_match wanted, text }
      assert_equal [2.0, 2.0], sums
    end
  end

  def test_without_a_group
    {
      all_reduce: -> { Distributed.all_reduce(Torch.ones(1)) },
      isend: -> { Distributed.isend(Torch.ones(1), dst: 0) },
      all_gather_object: -> { Distributed.all_gather_object(1) },
      coalescing_manager: -> { Distributed.coalescing_manager {} }
    }.each do |name, call|
      error, text = failure(&call)
      assert_equal "Torch::Distributed::GroupError", error, name
      assert_match(/init_process_group/, text, name)
    end
  end

  # All return nil and say so.
  def test_on_a_group_that_one_is_not_in
    results = world(2) do |rank|
      group = Distributed.new_group([0])
      next if rank.zero?

      warned = nil
      returned = capture_io do
        warned = [
          Distributed.all_reduce(1, group: group), Distributed.gather(1, group: group), Distributed.isend(1, group: group),
          Distributed.recv(1, group: group), Distributed.send(1, group: group), Distributed.all_gather_object(1, group: group),
          Distributed.barrier(group: group), Distributed.coalescing_manager(group: group) { Distributed.reduce(1, group: group) },
          Distributed.batch_isend_irecv([Distributed::P2POp.new(:isend, Torch.ones(1), 0, group: group)])
        ]
      end
      [warned, returned.last.scan(/(\w+) on a group that global rank 1 is not in/).flatten]
    end
    assert_equal [[nil] * 8 + [[]], %w[all_reduce gather isend recv send all_gather_object barrier reduce batch_isend_irecv]], results[1]
  end
end
