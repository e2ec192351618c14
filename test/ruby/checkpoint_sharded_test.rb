# frozen_string_literal: true

require_relative "sharded_checkpoints"

# Checkpoints of models and optimizers that ranks divide.
class CheckpointShardedTest < Minitest::Test
  include ShardedCheckpoints

  def setup
    @dir = Dir.mktmpdir
  end

  def teardown
    FileUtils.rm_rf(@dir)
  end

  # Saved by `size` ranks in one form, continued by others in all forms, beside the run that was not interrupted.
  [[4, :units, :adam], [3, :zero, :momentum], [2, :wrapped, :momentum], [3, :root, :fused], [1, :units, :adam], [2, :zero, :fused]].each do |size, strategy, kind|
    define_method(:"test_saved_by_#{size}_with_#{strategy}_goes_on_in_any_form") do
      dir = @dir
      before, after = world(size) do |rank|
        run = run_of(strategy, kind, 1)
        train(run, 0...3)
        Checkpoint.save(dir, **run, step: 3)
        before = values(run)
        train(run, 3...6)
        [before, values(run)]
      end.first
      {units: 4, root: 2, zero: 3, wrapped: 1, ddp: 2}.each do |other, ranks|
        world(ranks) do |rank|
          run = run_of(other, kind, 50)
          loaded = Checkpoint.load(dir, **run)
          [loaded.step, values(run)].tap { train(run, 3...6) } << values(run)
        end.each do |step, restored, went_on|
          assert_equal 3, step
          assert_equal before, restored
          assert_close after, went_on
        end
      end
      run = Distributed.fork_world(1) do
        run = run_of(:plain, kind, 60)
        Checkpoint.load(dir, **run)
        [values(run)].tap { train(run, 3...6) } << values(run)
      end.first
      assert_equal before, run[0]
      assert_close after, run[1]
    end
  end

  # The other way round: what one process saved, by numbers.
  def test_a_plain_checkpoint_goes_into_sharded_models
    dir = @dir
    before, after = Distributed.fork_world(1) do
      run = run_of(:plain, :adam, 1)
      train(run, 0...3)
      Checkpoint.save(dir, **run, step: 3)
      Torch.save({"model" => run[:model].state_dict, "optimizer" => run[:optimizer].state_dict}, File.join(dir, "old.pt"))
      [values(run)].tap { train(run, 3...6) } << values(run)
    end.first
    {units: 3, zero: 2, wrapped: 4}.each do |strategy, ranks|
      [dir, File.join(dir, "old.pt")].each do |path|
        world(ranks) do
          run = run_of(strategy, :adam, 9)
          Checkpoint.load(path, **run)
          [values(run)].tap { train(run, 3...6) } << values(run)
        end.each do |restored, went_on|
          assert_equal before, restored
          assert_close after, went_on
        end
      end
    end
  end
end
