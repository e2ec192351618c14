# frozen_string_literal: true

require_relative "../ruby/random_training"

# Many more of the cases of test/ruby/random_training_test.rb, and with one rank and four.
class ManyRandomTrainingsTest < Minitest::Test
  CASES = Integer(ENV.fetch("TDDP_RANDOM_CASES", "200"))
  SEED = Integer(ENV.fetch("TDDP_RANDOM_SEED", "1000"))

  [1, 2, 3, 4].each do |size|
    define_method(:"test_training_on_#{size}_ranks_is_that_of_one_process") do
      found = RandomTraining::Runner.new(method(:world)).failure(RandomTraining.cases(SEED, CASES, size))
      assert_nil found, found
    end
  end
end
