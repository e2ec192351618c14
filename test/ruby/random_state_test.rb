# frozen_string_literal: true

require_relative "test_helper"
require "zlib"

class RandomStateTest < Minitest::Test
  def test_numbers_come_again
    Torch.manual_seed(3)
    Torch.randn(5)
    state = Distributed.get_rng_state
    first = Torch.randn(700).to_a
    Distributed.set_rng_state(state)
    assert_equal first, Torch.randn(700).to_a
    refute_equal first, Torch.randn(700).to_a
    Torch.set_rng_state(state)
    assert_equal first, Torch.randn(700).to_a
    assert_equal Distributed.rng_state.to_a, Torch.get_rng_state.to_a
  end

  def test_fork_rng
    Torch.manual_seed(1)
    expected = [Torch.rand(3).to_a, Torch.rand(3).to_a]
    Torch.manual_seed(1)
    first = Torch.rand(3).to_a
    assert_equal 7, Distributed.fork_rng { Torch.rand(100) && 7 }
    assert_equal expected, [first, Torch.rand(3).to_a]
  end

  def test_what_is_no_state_is_refused
    before = Distributed.get_rng_state
    assert_match(/a state of 3 bytes, but this libtorch's generator has one of #{before.numel}/,
      failure { Distributed.set_rng_state(Torch.zeros([3], dtype: :uint8)) }.last)
    assert_equal "Torch::Distributed::InvalidArgumentError",
      failure { Distributed.set_rng_state(Torch.ones([before.numel], dtype: :uint8)) }.first
    assert_match(/state: expected a Torch::Tensor of uint8, got float32/, failure { Distributed.set_rng_state(Torch.zeros(3)) }.last)
    assert_equal before.to_a, Distributed.get_rng_state.to_a
  end
end
