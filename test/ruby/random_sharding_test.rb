# frozen_string_literal: true

require_relative "random_sharding"

# A few of the random cases; more of them with TDDP_RANDOM_CASES, others with TDDP_RANDOM_SEED. test/slow has many.
class RandomShardingTest < Minitest::Test
  CASES = Integer(ENV.fetch("TDDP_RANDOM_CASES", "5"))
  SEED = Integer(ENV.fetch("TDDP_RANDOM_SEED", "1"))

  [1, 2, 3].each do |size|
    define_method(:"test_sharded_training_on_#{size}_ranks_is_that_of_one_process") do
      found = RandomSharding.failure(method(:world), RandomSharding.cases(SEED, CASES, size))
      assert_nil found, found
    end
  end
end
