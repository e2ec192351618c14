# frozen_string_literal: true

require_relative "random_training"

# The same cases in each run; more of them with TDDP_RANDOM_CASES, others with TDDP_RANDOM_SEED. test/slow has many.
class RandomTrainingTest < Minitest::Test
  CASES = Integer(ENV.fetch("TDDP_RANDOM_CASES", "10"))
  SEED = Integer(ENV.fetch("TDDP_RANDOM_SEED", "1"))

  def runner
    RandomTraining::Runner.new(method(:world))
  end

  [2, 3].each do |size|
    define_method(:"test_training_on_#{size}_ranks_is_that_of_one_process") do
      found = runner.failure(RandomTraining.cases(SEED, CASES, size))
      assert_nil found, found
    end
  end

  # Gradients that are not averaged, to see that this is found and what is told of it.
  def test_a_fault_is_found_and_made_smaller
    cases = RandomTraining.cases(SEED, 1, 2).each { |each| each.hook = :noop }
    found = runner.failure(cases)
    assert_match(/gradient: got .*smallest case found, run it again with TDDP_RANDOM_SEED=\d+ TDDP_RANDOM_CASES=1/m, found)
    assert_equal %w[forward backward], found.scan(/^  \[:(\w+)/).flatten, found
  end
end
