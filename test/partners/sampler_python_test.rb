# frozen_string_literal: true

require "minitest/autorun"
require "json"
require "open3"
require "torch/distributed"
require_relative "partner"

# Our DistributedSampler beside PyTorch's: the same parts of the same data, in the same order.
class SamplerPythonTest < Minitest::Test
  include Partner

  SCRIPT = <<~PYTHON
    import json, sys
    from torch.utils.data.distributed import DistributedSampler

    parts = []
    for size, replicas, shuffle, drop_last, seed, epoch in json.load(sys.stdin):
        for rank in range(replicas):
            sampler = DistributedSampler(range(size), replicas, rank, shuffle, seed, drop_last)
            sampler.set_epoch(epoch)
            parts.append([len(sampler), sampler.total_size, list(sampler)])
    json.dump(parts, sys.stdout)
  PYTHON

  def test_parts_are_the_same
    cases = [1, 2, 9, 10, 64, 1001].product([1, 2, 3, 4, 7], [true, false], [true, false], [[0, 0], [3, 4], [12_345, 1]])
      .map { |size, replicas, shuffle, drop_last, (seed, epoch)| [size, replicas, shuffle, drop_last, seed, epoch] }
    # PyTorch has no answer where fewer examples than processes leave nothing to each.
    cases.reject! { |size, replicas, _, drop_last| drop_last && size < replicas }
    out, err, status = run_python("-c", SCRIPT, stdin_data: JSON.generate(cases))
    assert status.success?, err
    ours = cases.flat_map do |size, replicas, shuffle, drop_last, seed, epoch|
      Array.new(replicas) do |rank|
        sampler = Torch::Utils::Data::DistributedSampler.new(size, num_replicas: replicas, rank: rank, shuffle: shuffle, seed: seed, drop_last: drop_last)
        sampler.set_epoch(epoch)
        [sampler.size, sampler.total_size, sampler.to_a]
      end
    end
    theirs = JSON.parse(out)
    assert_equal theirs.size, ours.size
    theirs.zip(ours) { |expected, got| assert_equal expected, got }
  end
end
