# frozen_string_literal: true

require_relative "test_helper"

# States of which ranks have names of their own: all of them are saved, and what several have under one name must be equal.
class CheckpointOwnKeysTest < Minitest::Test
  Checkpoint = Distributed::Checkpoint

  def setup
    @dir = Dir.mktmpdir
  end

  def teardown
    FileUtils.rm_rf(@dir)
  end

  # A tree of values, most of them on some of the ranks only: who has what follows from the seed alone.
  def tree(random, size, depth, path)
    Array.new(random.rand(1..4)) do |i|
      key = random.rand(4).zero? ? [i, :"s#{i}"][i % 2] : "k#{i}"
      owners = random.rand(2).zero? ? (0...size).to_a : (0...size).to_a.sample(random.rand(1..size), random: random)
      value = if depth.positive? && random.rand(2).zero?
        tree(random, size, depth - 1, "#{path}.#{key}")
      else
        number = random.rand(1000)
        [number, "text #{number}", nil, :word, number / 7.0, [1, {"x" => number}], Torch.arange(random.rand(5)) + number,
          Torch.ones(2, 3) * number].sample(random: random)
      end
      [key, owners, value]
    end
  end

  # What a rank has of it, or all of it (nil); nothing of an empty part is left.
  def part(tree, rank)
    tree.each_with_object({}) do |(key, owners, value), own|
      next unless rank.nil? || owners.include?(rank)

      inner = value.is_a?(Array) && value.first.is_a?(Array) && value.first.size == 3
      own[key] = if inner
        part(value, (rank && owners.include?(rank)) ? rank : nil)
      else
        value
      end
    end
  end

  def plain(value)
    case value
    when Torch::Tensor then [:tensor, value.shape, value.to_a]
    when Hash then value.to_h { |key, each| [key.to_s, plain(each)] }
    when Array then value.map { |each| plain(each) }
    else value
    end
  end

  # The same with other values, to be filled.
  def emptied(value)
    case value
    when Torch::Tensor then Torch.full_like(value, -1)
    when Hash then value.transform_values { |each| emptied(each) }
    end
  end

  def test_random_trees_come_back_whole
    dir = @dir
    [2, 3].each do |size|
      trees = Array.new(12) { |i| tree(Random.new(100 * size + i), size, 2, "") }
      said = world(size) do |rank|
        trees.each_with_index.flat_map do |each, i|
          [nil, true].map do |sharded|
            own = part(each, rank)
            path = File.join(dir, "#{size}-#{i}-#{sharded}")
            if i.odd?
              Checkpoint.async_save(own, checkpoint_id: path, sharded: sharded).wait
            else
              Checkpoint.save(own, checkpoint_id: path, sharded: sharded)
            end
            into = emptied(own)
            Checkpoint.load(into, checkpoint_id: path)
            (plain(into) == plain(own)) ? nil : "#{i}, sharded #{sharded.inspect}: #{plain(own)} came back as #{plain(into)}"
          end
        end.compact
      end
      assert_equal [[]] * size, said
      trees.each_with_index do |each, i|
        ranks = Array.new(size) { |rank| part(each, rank) }
        whole = ranks.inject { |one, two| one.merge(two) { |_, a, b| merge(a, b) } }
        [nil, true].each do |sharded|
          into = emptied(whole)
          Checkpoint.load(into, checkpoint_id: File.join(dir, "#{size}-#{i}-#{sharded}"))
          assert_equal plain(whole), plain(into)
          Checkpoint.verify(File.join(dir, "#{size}-#{i}-#{sharded}"))
        end
      end
    end
  end

  def merge(one, two)
    one.is_a?(Hash) ? one.merge(two) { |_, a, b| merge(a, b) } : one
  end

  # A loader's position by rank, a stage of each rank's as a module, and its optimizer.
  class Loader
    attr_accessor :state

    def initialize(rank) = @rank = rank

    def state_dict = {"rank_#{@rank}" => @state}

    def load_state_dict(state) = @state = state.fetch("rank_#{@rank}")
  end

  def test_objects_under_names_of_their_own
    dir = @dir
    said = world(2) do |rank|
      make = lambda do |seed|
        Torch.manual_seed(seed)
        net = Torch::NN::Linear.new(2, 2 + rank)
        [net, Torch::Optim::Adam.new(net.parameters, lr: 0.1 * (rank + 1)), Loader.new(rank)]
      end
      net, optimizer, loader = make.call(rank)
      net.call(Torch.ones(1, 2)).sum.backward
      optimizer.step
      loader.state = 10 + rank
      common = Torch::NN::BatchNorm1d.new(3)
      Torch.no_grad { common.running_mean.fill!(rank) }
      [nil, true].map do |sharded|
        Checkpoint.save(File.join(dir, sharded.inspect), {"stage#{rank}" => net, "optimizer#{rank}" => optimizer, "loader" => loader, "common" => common},
          step: 1, sharded: sharded)
        other, stepped, read = make.call(7)
        Checkpoint.load(File.join(dir, sharded.inspect), {"stage#{rank}" => other, "optimizer#{rank}" => stepped, "loader" => read, "common" => common})
        [other, net].each { |each| each.call(Torch.ones(1, 2)).sum.backward }
        same = [net, other].map { |each| each.state_dict.transform_values(&:to_a) }.uniq.size
        [same, read.state, stepped.param_groups[0][:lr], stepped.state_dict["state"].size, common.running_mean.to_a.uniq]
      end
    end
    assert_equal [[[1, 10, 0.1, 2, [0.0]]] * 2, [[1, 11, 0.2, 2, [0.0]]] * 2], said
  end

  # What is wrong is found on all ranks, before anything is written.
  def test_collisions
    net = ->(out) { Torch::NN::Linear.new(2, out) }
    w = /the ranks have different tensors: w has other values on rank 2 than on rank 0: expected the same on all ranks/
    cases = {
      ->(rank) { {"w" => Torch.ones(2) * (rank / 2)} } => w,
      ->(rank) { {"w" => Torch.ones(300_000).tap { |each| each[299_999] = rank / 2 }} } => w,
      ->(rank) { (rank == 1) ? {} : {"w" => Torch.ones(2) * rank} } => w,
      ->(rank) { {"w" => Torch.ones(2 + rank / 2)} } => /w is float32 \[2\] on rank 0, but float32 \[3\] on rank 2/,
      ->(rank) { {"w" => Torch.ones(2, dtype: rank.zero? ? :float32 : :float64)} } => /w is float32 \[2\] on rank 0, but float64 \[2\] on rank 1/,
      ->(rank) { {"a" => {"b" => 1 + rank / 2}} } => /a\.b: it is 1 on rank 0, but 2 on rank 2: expected the same on all ranks, or a name of its own/,
      ->(rank) { {"a" => {1 => [0, rank]}} } => /a\.1\.1: it is 0 on rank 0, but 1 on rank 1/,
      ->(rank) { {"a" => rank.zero? ? 1.5 : [1.5]} } => /a: it is 1.5 on rank 0, but \[1.5\] on rank 1/,
      ->(rank) { {"a" => rank.zero? ? Torch.ones(1) : {"b" => 1}} } => /a: it is a tensor on rank 0, but a Hash of b on rank 1/,
      ->(rank) { {"m" => net.call(2 + rank)} } => /m\.weight is float32 \[2, 2\] on rank 0, but float32 \[3, 2\] on rank 1/,
      ->(rank) { {"m" => rank.zero? ? net.call(2) : Torch::NN::Sequential.new(net.call(2))} } => /m\.weight is on rank 0 and not on rank 1/,
      ->(rank) { {"o" => Torch::Optim::SGD.new(net.call(2).parameters, lr: 1.0 + rank)} } => /o\.param_groups\.0\.lr: it is 1.0 on rank 0, but 2.0 on rank 1/
    }
    dir = @dir
    said = world(3) do |rank|
      cases.keys.flat_map do |make|
        [nil, true].map { |sharded| failure { Checkpoint.save(make.call(rank), checkpoint_id: File.join(dir, "one"), sharded: sharded) } }
      end << failure { Checkpoint.save({"w#{rank}" => Torch.ones(1)}, checkpoint_id: File.join(dir, "one"), sharded: false) } <<
        failure { Checkpoint.save({"n#{rank}" => rank}, checkpoint_id: File.join(dir, "two"), sharded: false) }
    end
    assert_equal 1, said.uniq.size
    cases.values.each_with_index do |text, i|
      said[0][2 * i, 2].each do |kind, message|
        assert_equal "Torch::Distributed::MismatchError", kind
        assert_match text, message
      end
    end
    assert_match(/sharded: expected true or nil, got false: rank 0, which writes everything then, has no w1/, said[0][-2].last)
    assert_nil said[0][-1]
    assert_equal [["two"], {"n0" => 0, "n2" => 2}],
      [Dir.children(dir), {"n0" => nil, "n2" => nil}.tap { |into| Checkpoint.load(into, checkpoint_id: File.join(dir, "two")) }]
  end
end
