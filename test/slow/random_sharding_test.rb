# frozen_string_literal: true

require_relative "../ruby/random_sharding"

# Many more of the cases of test/ruby/random_sharding_test.rb, and with four ranks.
class ManyRandomShardingsTest < Minitest::Test
  CASES = Integer(ENV.fetch("TDDP_RANDOM_CASES", "200"))
  SEED = Integer(ENV.fetch("TDDP_RANDOM_SEED", "1000"))

  [2, 3, 4].each do |size|
    define_method(:"test_sharded_training_on_#{size}_ranks_is_that_of_one_process") do
      found = RandomSharding.failure(method(:world), RandomSharding.cases(SEED, CASES, size))
      assert_nil found, found
    end
  end
end
