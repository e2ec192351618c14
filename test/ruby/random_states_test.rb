# frozen_string_literal: true

require_relative "random_states"

# The same cases in each run; more of them with TDDP_RANDOM_CASES, others with TDDP_RANDOM_SEED. test/slow has many.
class RandomStatesTest < Minitest::Test
  include RandomStates

  SEED = Integer(ENV.fetch("TDDP_RANDOM_SEED", "1"))
  CASES = Integer(ENV.fetch("TDDP_RANDOM_CASES", "3"))

  def test_a_run_that_is_handed_on_goes_on
    assert_handed_on(SEED...(SEED + CASES), [1, 2, 3])
  end
end
