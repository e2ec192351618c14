# frozen_string_literal: true

require_relative "../ruby/sharded_checkpoints"

# More of the forms of test/ruby/checkpoint_sharded_test.rb.
class ManyShardedCheckpointsTest < Minitest::Test
  include ShardedCheckpoints

  [[3, :zero, :momentum], [2, :wrapped, :momentum], [3, :root, :fused], [1, :units, :adam]].each do |size, strategy, kind|
    define_method(:"test_saved_by_#{size}_with_#{strategy}_goes_on_in_any_form") do
      Dir.mktmpdir { |dir| assert_goes_on_in_any_form(dir, size, strategy, kind) }
    end
  end
end
