# frozen_string_literal: true

require_relative "random_sharding"

# A few of the random cases; test/slow/random_sharding_test.rb has many.
class RandomShardingTest < Minitest::Test
  [1, 2, 3].each do |size|
    define_method(:"test_sharded_training_on_#{size}_ranks_is_that_of_one_process") do
      found = RandomSharding.failure(method(:world), RandomSharding.cases(1, 15, size))
      assert_nil found, found
    end
  end
end
