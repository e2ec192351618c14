# frozen_string_literal: true

require_relative "test_helper"

# Regions of tensors, beside lists of the elements that they stand for.
class CheckpointRegionTest < Minitest::Test
  Region = Torch::Distributed::Checkpoint::Region

  def elements(region)
    return (region.start...region.start + region.count).to_a unless region.stride

    Array.new(region.count) { |i| region.start + i / region.width * region.stride + i % region.width }
  end

  # A division of a tensor, as layouts have it, and then of each part at any element.
  def division(random)
    parts = random.rand(1..4)
    width = random.rand(1..4)
    stride = parts * width
    rows = random.rand(1..6)
    cuts = [0, *Array.new(random.rand(0..2)) { random.rand(0..rows * width) }.sort, rows * width]
    regions = Array.new(parts) { |part| cuts.each_cons(2).map { |from, to| [part * width, width, stride, from, to - from] } }
    [regions.flatten(1), rows * stride]
  end

  def test_cuts
    random = Random.new(1)
    300.times do
      cuts, total = division(random)
      all = cuts.flat_map do |offset, width, stride, first, count|
        regions = Region.cut(offset, width, stride, first, count)
        assert_operator regions.size, :<=, 3
        expected = Array.new(count) { |i| offset + (first + i) / width * stride + (first + i) % width }
        assert_equal expected, regions.flat_map { |region| elements(region) }
        regions.each { |region| check(region, random) }
        regions
      end
      assert_nil Region.gap(all.shuffle(random: random), total)
      assert_covered(all, total, random)
    end
  end

  def check(region, random)
    own = elements(region)
    assert_equal own.last + 1, region.stop
    at = random.rand(0..region.stop + 2)
    assert_equal own.count { |each| each < at }, region.before(at)
    first = random.rand(0...region.count)
    number = random.rand(0..region.count - first)
    assert_equal own[first, number], region.part(first, number).flat_map { |part| elements(part) }
    assert_equal own, region.take(Torch.arange(region.start, region.stop + 1), region.start).to_a
  end

  # Without one of the regions its first element is missing, unless another has it.
  def assert_covered(regions, total, random)
    left = regions.sample(random.rand(regions.size), random: random)
    missing = (0...total).to_a - left.flat_map { |region| elements(region) }
    missing.empty? ? assert_nil(Region.gap(left, total)) : assert_equal(missing.first, Region.gap(left, total))
  end

  # Regions of one division beside those of another of the same tensor.
  def test_what_two_have_in_common
    random = Random.new(2)
    found = Hash.new(0)
    500.times do
      bands = Array.new(2) do
        stride = [2, 3, 4, 6, 8, 12, 24].sample(random: random)
        width = random.rand(1..stride)
        [random.rand(0..stride - width), width, stride]
      end
      bands[1] = bands[0] if random.rand(2).zero?
      one, other = bands.map do |band|
        own = 24 / band[2] * band[1]
        first = random.rand(0...own)
        Region.cut(*band, first, random.rand(1..own - first)).sample(random: random)
      end
      shared = elements(one) & elements(other)
      range = one.common(other)
      assert range == other.common(one)
      # A range without a shared element costs a needless look; one that is left out would be lost.
      shared.each { |element| assert element.between?(range[0], range[1] - 1) } unless shared.empty?
      next unless range && one.aligned?(other)

      found[one.stride ? :strided : :contiguous] += 1
      assert_equal shared, [one, other].map { |each| elements(each)[each.before(range[0])...each.before(range[1])] }.uniq.flatten
    end
    assert_equal %i[contiguous strided], found.keys.sort
  end
end
