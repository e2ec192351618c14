# frozen_string_literal: true

require_relative "../ruby/random_states"

# TDDP_RANDOM_SEED repeats a run, TDDP_RANDOM_CASES sets how many there are.
class RandomStatesTest < Minitest::Test
  include RandomStates

  SEED = Integer(ENV.fetch("TDDP_RANDOM_SEED", "1000"))
  CASES = Integer(ENV.fetch("TDDP_RANDOM_CASES", "60"))

  def test_a_run_that_is_handed_on_goes_on
    assert_handed_on(SEED...(SEED + CASES), [1, 2, 3, 4])
  end
end
