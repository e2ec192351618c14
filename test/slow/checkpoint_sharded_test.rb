# frozen_string_literal: true

require_relative "../ruby/sharded_checkpoints"

# More of the forms of test/ruby/checkpoint_sharded_test.rb.
class ManyShardedCheckpointsTest < Minitest::Test
  include ShardedCheckpoints

  def test_a_saved_run_goes_on_in_any_form
    cases = [[3, :zero, :momentum], [2, :wrapped, :momentum], [3, :root, :fused], [1, :units, :adam]]
    Dir.mktmpdir { |dir| assert_goes_on_in_any_form(dir, cases) }
  end
end
