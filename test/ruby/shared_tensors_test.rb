# frozen_string_literal: true

require_relative "test_helper"

# Tensors in the memory of a group. Where ranks share no memory they are like others, so all but the accounts of shared
# memory holds either way.
class SharedTensorsTest < Minitest::Test
  DTYPES = %i[uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128 bool].freeze

  def shared_kilobytes
    File.read("/proc/self/status")[/^RssShmem:\s+(\d+)/, 1].to_i
  end

  # Whether the group has shared memory: then memory that was touched counts as shared.
  def shares?
    before = shared_kilobytes
    tensor = Distributed.empty_shared(1 << 20)
    tensor.fill!(1)
    shared_kilobytes - before >= 4000 && !tensor.nil?
  end

  def test_it_is_zero_and_has_the_size_and_dtype_that_were_asked_for
    alone do
      DTYPES.each do |dtype|
        tensor = Distributed.empty_shared(3, 5, dtype: dtype)
        assert_equal [[3, 5], dtype, true], [tensor.shape, tensor.dtype, tensor.contiguous?]
        assert_equal [0], tensor.to(:complex128).abs.to(:float64).to_a.flatten.uniq unless %i[float16 bfloat16].include?(dtype)
      end
      assert_equal [[2, 3], :float32], Distributed.empty_shared([2, 3]).then { |tensor| [tensor.shape, tensor.dtype] }
      assert_equal :float64, Distributed.empty_shared(2, dtype: :double).dtype
      assert_equal :float16, Distributed.empty_shared(2, dtype: "half").dtype
      assert_equal [], Distributed.empty_shared([]).shape
      assert_equal [0, 3], Distributed.empty_shared(0, 3, device: "cpu").shape
      refute_predicate Distributed.empty_shared(2), :requires_grad
      assert_equal 0, Distributed._span(Distributed.empty_shared(3, dtype: :uint8)).first % 64
    end
  end

  def test_what_cannot_be_made_is_refused
    assert_match(/init_process_group/, assert_raises(Distributed::GroupError) { Distributed.empty_shared(2) }.message)
    alone do
      {[-1] => /size\[0\].*-1/, [2, -3] => /size\[1\].*-3/, [2**63] => /size\[0\]/, [2**40, 2**40] => /2\^63/, [] => /empty_shared\(\[\]\)/}.each do |size, text|
        error = assert_raises(ArgumentError, Distributed::InvalidArgumentError) { Distributed.empty_shared(*size) }
        assert_match text, error.message
      end
      assert_match(/2.5/, assert_raises(TypeError) { Distributed.empty_shared(2.5) }.message)
      assert_match(/:float31/, assert_raises(ArgumentError) { Distributed.empty_shared(2, dtype: :float31) }.message)
      assert_match(/7/, assert_raises(ArgumentError) { Distributed.empty_shared(2, dtype: 7) }.message)
      assert_match(/qint8/, assert_raises(ArgumentError) { Distributed.empty_shared(2, dtype: :qint8) }.message)
      assert_match(/cuda:0/, assert_raises(ArgumentError) { Distributed.empty_shared(2, device: "cuda:0") }.message)
      assert_match(/not in the group/, assert_raises(Distributed::GroupError) do
        Distributed.empty_shared(2, group: Distributed::GroupMember::NON_GROUP_MEMBER)
      end.message)
      assert_match(/:world/, assert_raises(TypeError) { Distributed.empty_shared(2, group: :world) }.message)
      assert_equal "Torch::Distributed::Error", failure { Distributed.empty_shared(2**45, 2**10, dtype: :uint8) }[0].sub(/::\w+Error\z/, "::Error")
    end
  end

  # Each operation on whole tensors, on parts of them at odd places, and where only some ranks have theirs shared.
  KINDS = %i[whole part mixed plain].freeze

  # A tensor of these values.
  def operand(kind, rank, values)
    return values.clone if kind == :plain || (kind == :mixed && rank.odd?)

    count = values.numel
    return Distributed.empty_shared(count, dtype: :float64).copy!(values) unless kind == :part

    Distributed.empty_shared(count + 7, dtype: :float64).fill!(-1).narrow(0, 3, count).copy!(values)
  end

  def results(kind, rank, ranks, count)
    own = Torch.arange(1, count + 1, dtype: :float64) * (rank + 1)
    many = Torch.cat([own] * ranks)
    make = ->(values) { operand(kind, rank, values) }
    zeros = ->(number) { make.call(Torch.zeros(number, dtype: :float64)) }
    answers = {}
    answers[:all_reduce] = make.call(own).tap { |tensor| Distributed.all_reduce(tensor) }
    answers[:average] = make.call(own).tap { |tensor| Distributed.all_reduce(tensor, op: :avg) }
    answers[:reduce] = make.call(own).tap { |tensor| Distributed.reduce(tensor, dst: ranks - 1, op: :max) }
    answers[:broadcast] = make.call(own).tap { |tensor| Distributed.broadcast(tensor, src: ranks - 1) }
    answers[:all_gather] = zeros.call(count * ranks).tap { |tensor| Distributed.all_gather_into_tensor(tensor, make.call(own)) }
    answers[:reduce_scatter] = zeros.call(count).tap { |tensor| Distributed.reduce_scatter_tensor(tensor, make.call(many)) }
    answers[:all_to_all] = zeros.call(count * ranks).tap { |tensor| Distributed.all_to_all_single(tensor, make.call(many)) }
    answers[:gather] = Array.new(ranks) { zeros.call(count) } if rank.zero?
    Distributed.gather(make.call(own), answers[:gather], dst: 0)
    answers[:scatter] = zeros.call(count)
    Distributed.scatter(answers[:scatter], (Array.new(ranks) { |to| make.call(own + to) } if rank.zero?), src: 0)
    answers[:sent] = zeros.call(count)
    if ranks > 1
      sending = Distributed.isend(make.call(own), dst: (rank + 1) % ranks)
      Distributed.recv(answers[:sent], src: (rank - 1) % ranks)
      sending.wait
    end
    answers[:together] = Array.new(3) { make.call(own) }
    Distributed.all_reduce_coalesced(answers[:together])
    answers.transform_values { |answer| answer.is_a?(Array) ? answer : [answer] }
  end

  # The names of the answers that differ between two kinds of tensors.
  def differing(one, other)
    raise "other operations: #{one.keys - other.keys}" unless one.keys == other.keys

    one.keys.reject { |name| one[name].size == other[name].size && one[name].zip(other[name]).all? { |a, b| Torch.equal(a, b) } }
  end

  def test_operations_have_the_same_results_as_on_other_tensors
    [[1, 5], [2, 1], [2, 70_001], [3, 1021]].each do |ranks, count|
      said = world(ranks) do |rank|
        by_kind = KINDS.to_h { |kind| [kind, results(kind, rank, ranks, count)] }
        sum = Torch.arange(1, count + 1, dtype: :float64) * (ranks * (ranks + 1) / 2)
        [by_kind.transform_values { |answers| differing(answers, by_kind[:plain]) }, Torch.equal(sum, by_kind[:whole][:all_reduce][0])]
      end
      assert_equal [[KINDS.to_h { |kind| [kind, []] }, true]] * ranks, said, "#{count} on #{ranks} ranks"
    end
  end

  # What lies beside a part is not touched.
  def test_a_part_leaves_its_surroundings_alone
    said = world(2) do |rank|
      whole = Distributed.empty_shared(100_003).fill!(rank + 1)
      Distributed.all_reduce(whole.narrow(0, 1, 100_001))
      [whole[0].item, whole[1].item, whole[100_001].item, whole[100_002].item]
    end
    assert_equal [[1, 3, 3, 1], [2, 3, 3, 2]], said
  end

  def test_it_works_on_when_its_group_is_destroyed
    said = Distributed.fork_world(2) do |rank|
      Distributed.init_process_group("gloo", timeout: 30)
      part = Distributed.empty_shared(50_000).fill!(rank + 1).then do |tensor|
        Distributed.all_reduce(tensor)
        Distributed.destroy_process_group
        tensor.mul!(2).narrow(0, 17, 5)
      end
      3.times { GC.start }
      part.to_a
    end
    assert_equal [[6.0] * 5] * 2, said
  end

  def test_another_group_takes_it_as_well
    said = world(3) do |rank|
      pair = Distributed.new_group([0, 2])
      tensor = Distributed.empty_shared(3000).fill!(rank + 1)
      Distributed.all_reduce(tensor, group: pair) unless rank == 1
      own = Distributed.empty_shared(3000, group: pair).fill!(rank + 1) unless rank == 1
      Distributed.all_reduce(own || Torch.ones(3000).mul!(2))
      [tensor.sum.item, own&.sum&.item]
    end
    assert_equal [[12_000, 18_000], [6000, nil], [12_000, 18_000]], said
  end

  def test_memory_goes_back_when_tensors_are_collected
    grown = world(2) do |rank|
      next :apart unless shares?

      3.times { GC.start }
      before = shared_kilobytes
      60.times do |i|
        Distributed.empty_shared(1 << 20).fill!(i)
        GC.start if i % 10 == 9
      end
      # What only this thread's stack still refers to goes with its frames.
      Thread.new { 3.times { GC.start } }.join
      shared_kilobytes - before
    end
    skip "ranks share no memory here" if grown.include?(:apart)
    grown.each { |kilobytes| assert_operator kilobytes, :<=, 20 * 4096 }
  end

  def test_a_forked_child_leaves_the_memory_to_its_parent
    said = world(2) do |rank|
      tensor = Distributed.empty_shared(5000).fill!(7)
      reader, writer = IO.pipe
      child = fork do
        copy = tensor.clone
        refused = failure { Distributed.empty_shared(3) }
        writer.write(Marshal.dump([copy.sum.item, refused[0]]))
        tensor = nil
        GC.start
        exit!(0)
      end
      Process.wait(child)
      writer.close
      Distributed.all_reduce(tensor)
      [*Marshal.load(reader.read), tensor.sum.item]
    end
    assert_equal [[35_000, "Torch::Distributed::GroupError", 70_000]] * 2, said
  end

  # Gradients lie once in memory, and there they are reduced.
  def test_gradients_lie_in_memory_of_the_group_once
    said = world(2) do |rank|
      next :apart unless shares?

      net = Torch::NN::Linear.new(2048, 2048)
      model = Torch::NN::Parallel::DistributedDataParallel.new(net)
      before = shared_kilobytes
      3.times do
        net.parameters.each { |parameter| parameter.grad&.zero! }
        model.call(Torch.ones(1, 2048)).sum.backward
      end
      grown = shared_kilobytes - before
      gradient = net.parameters.first.grad
      model = nil
      Distributed.destroy_process_group
      3.times { GC.start }
      [grown, gradient.sum.item]
    end
    skip "ranks share no memory here" if said.include?(:apart)
    once = 2048 * 2048 * 4 / 1024
    said.each { |grown, _| assert_includes 0.9 * once..2 * once * 1.2, grown }
    assert_equal [2048.0 * 2048] * 2, said.map(&:last)
  end
end
