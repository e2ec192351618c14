# frozen_string_literal: true

require_relative "sharded_checkpoints"

# Saves that go on while the program does.
class CheckpointAsyncTest < Minitest::Test
  include ShardedCheckpoints

  def setup
    @dir = Dir.mktmpdir
  end

  def teardown
    FileUtils.rm_rf(@dir)
  end

  # Holds a save in its thread until the test says so.
  class Gate
    def initialize(&before)
      @queue = Queue.new
      @before = before
      @original = original = Checkpoint::DataFile.method(:write)
      queue = @queue
      Checkpoint::DataFile.define_singleton_method(:write) do |path, entries, **options|
        queue.pop
        before&.call(path)
        original.call(path, entries, **options)
      end
    end

    def open
      @queue << true
    end

    def remove
      Checkpoint::DataFile.define_singleton_method(:write, @original)
    end

    Checkpoint = Torch::Distributed::Checkpoint
  end

  # What is saved is what was there at the call, though the optimizer steps, and the group is used, before a byte is written.
  {units: 3, zero: 2, ddp: 2}.each do |strategy, size|
    define_method(:"test_steps_while_#{strategy}_is_saved") do
      dir = @dir
      before, after = world(size) do
        run = run_of(strategy, :adam, 1)
        train(run, 0...2)
        gate = Gate.new
        saving = Checkpoint.async_save(dir, **run, step: 2, extra: {"t" => (t = Torch.ones(3))})
        t.fill!(7)
        before = values(run)
        train(run, 2...5)
        flags = [saving.done?, Checkpoint.list(dir).size]
        Torch::Distributed.barrier # a rank that has nothing to write needs no gate to be open
        gate.open
        gate.open
        [flags, saving.wait, saving.done?].then { |said| raise said.inspect unless said == [[false, 0], File.join(dir, "step-000000002"), true] }
        gate.remove
        [before, values(run)]
      end.first
      loaded = world(2) do
        run = run_of(:units, :adam, 4)
        found = Checkpoint.load(dir, **run)
        [found.extra["t"].to_a, values(run)].tap { train(run, 2...5) } << values(run)
      end
      loaded.each do |extra, restored, went_on|
        assert_equal [1.0] * 3, extra
        assert_equal before, restored
        assert_close after, went_on
      end
    end
  end

  def test_a_second_save_waits_for_the_first
    dir = @dir
    said = world(2) do |rank|
      run = run_of(:units, :momentum, 1)
      gate = Gate.new
      first = Checkpoint.async_save(dir, **run, step: 1)
      waiting = when_waiting { gate.open }
      4.times { gate.open } if rank.zero?
      second = Checkpoint.async_save(dir, **run, step: 2)
      done = first.done?
      waiting.join
      4.times { gate.open }
      second.wait
      gate.remove
      third = Checkpoint.async_save(dir, **run, step: 3)
      Checkpoint.save(dir, **run, step: 4)
      [done, third.done?, third.wait(0), Checkpoint.list(dir).map { |path| File.basename(path)[/[1-9]/].to_i }]
    end
    said.each { |each| assert_equal [true, true, File.join(dir, "step-000000003"), [4, 3, 2, 1]], each }
  end

  def test_an_error_comes_at_wait_or_with_the_next_save
    dir = @dir
    said = world(2) do |rank|
      run = run_of(:units, :momentum, 1)
      Checkpoint.save(dir, **run, step: 1)
      gate = Gate.new { |path| raise Errno::ENOSPC, path if rank == 1 }
      3.times { gate.open }
      first = Checkpoint.async_save(dir, **run, step: 2)
      at_wait = [failure { first.wait }, failure { first.wait }]
      Checkpoint.async_save(dir, **run, step: 3)
      at_next = failure { Checkpoint.async_save(dir, **run, step: 4) }
      gate.remove
      [at_wait, at_next, Checkpoint.save(dir, **run, step: 5)]
    end
    said.each do |at_wait, at_next, saved|
      assert_equal 1, at_wait.uniq.size
      assert_equal "Torch::Distributed::CheckpointError", at_wait[0][0]
      assert_match(/cannot save .*step-000000002: rank 1: No space left on device/, at_wait[0][1])
      assert_match(/cannot save .*step-000000003: rank 1: No space left/, at_next[1])
      assert_equal File.join(dir, "step-000000005"), saved
    end
    assert_equal %w[step-000000001 step-000000005], (Dir.children(dir) - [".lock"]).sort
  end

  def test_in_one_process
    out, err, status = ruby(<<~RUBY, @dir)
      model = Torch::NN::Linear.new(3, 2)
      saving = Torch::Distributed::Checkpoint.async_save(ARGV[0], model: model, epoch: 1)
      Torch.no_grad { model.weight.fill!(9) }
      puts saving.wait, saving.inspect
      begin
        saving.wait(-1)
      rescue ArgumentError => e
        puts e.message
      end
      Torch::Distributed::Checkpoint.async_save(ARGV[0], model: model, epoch: 2)
    RUBY
    assert status.success?, err
    folder = File.join(@dir, "epoch-000001")
    assert_equal [folder, "#<Torch::Distributed::Checkpoint::AsyncSave #{folder} done>", "timeout: expected seconds or nil, got -1"], out.lines(chomp: true)
    # The end of the process waits for it.
    assert_equal 2, Checkpoint.load(@dir, model: model = Torch::NN::Linear.new(3, 2)).epoch
    assert_equal [9.0] * 6, model.weight.detach.reshape(-1).to_a
    Checkpoint.load(folder, model: model)
    assert_operator model.weight.detach.abs.max.item, :<, 1
  end

  # Nothing stays in the store, however often there was a save.
  def test_it_leaves_no_keys
    dir = @dir
    counts = world(2) do
      model = Torch::NN::Linear.new(2, 2)
      Distributed.barrier
      store = Distributed.default_process_group._store
      before = store.num_keys
      3.times do |i|
        Distributed.barrier # all have counted
        Checkpoint.async_save(dir, model: model, epoch: i).wait
        Distributed.barrier
        await("the keys of save #{i} to be gone") { store.num_keys == before }
      end
      Distributed.barrier # a rank that leaves writes keys of its own
      store.close
      before
    end
    assert_equal 1, counts.uniq.size, counts.inspect
  end

  # In parts, under keys of each rank's own; the short records of other steps and ranks lie together.
  def test_long_records
    dir = @dir
    said = world(2) do
      {MOST_TOGETHER: 60, MOST_AT_ONCE: 7}.each do |name, bytes|
        Checkpoint::TogetherInStore.send(:remove_const, name)
        Checkpoint::TogetherInStore.const_set(name, bytes)
      end
      fetched = []
      Checkpoint::TogetherInStore.prepend(Module.new do
        define_method(:fetch) { |rank, parts| super(rank, parts).tap { |text| fetched << [rank, parts, text.bytesize] } }
      end)
      run = run_of(:units, :adam, 1)
      train(run, 0...2)
      store = Distributed.default_process_group._store
      before = store.num_keys
      Distributed.barrier # all have counted
      Checkpoint.async_save(dir, **run, step: 2).wait
      expected = values(run)
      Distributed.barrier
      await("the keys to be gone") { store.num_keys == before }
      Checkpoint.load(dir, **(found = run_of(:units, :adam, 4)))
      [expected, values(found), fetched].tap do
        Distributed.barrier # a rank that leaves writes keys of its own
        store.close
      end
    end
    said.each do |expected, found, fetched|
      assert_equal expected, found
      assert_equal [0, 1], fetched.map(&:first).uniq
      fetched.each { |_, parts, bytes| assert_equal (bytes / 7.0).ceil, parts }
      assert_operator fetched.map(&:last).max, :>, 60
    end
  end

  # The others do not wait for it, and no keys stay.
  def test_a_rank_that_fails_before_it_has_given_its_record
    dir = @dir
    said = world(2) do |rank|
      run = run_of(:units, :momentum, 1)
      store = Distributed.default_process_group._store
      before = store.num_keys
      Distributed.barrier # all have counted
      write = Checkpoint::DataFile.method(:write)
      # JSON has no such number.
      Checkpoint::DataFile.define_singleton_method(:write) { |*args, **options| write.call(*args, **options).merge("file" => Float::NAN) } if rank == 1
      saving = Checkpoint.async_save(dir, **run, step: 1)
      failed = failure { saving.wait }
      Distributed.barrier
      await("the keys to be gone") { store.num_keys == before }
      Distributed.barrier # a rank that leaves writes keys of its own
      store.close
      failed
    end
    assert_equal "JSON::GeneratorError", said[1][0]
    assert_equal "Torch::Distributed::PeerLostError", said[0][0]
    assert_match(/\Aasync_save: rank 1 failed: .*NaN.* \(JSON::GeneratorError\)\z/, said[0][1])
  end

  # The group may be destroyed before the save is done.
  def test_the_group_is_destroyed_meanwhile
    dir = @dir
    opened = Event.new
    said = Distributed.fork_world(2) do |rank|
      Distributed.init_process_group(BACKEND, timeout: 30)
      run = run_of(:units, :adam, 1)
      gate = Gate.new
      saving = Checkpoint.async_save(dir, **run, step: 1)
      expected = values(run)
      Distributed.destroy_process_group
      # Rank 0's goes on first.
      opened.wait if rank == 1
      gate.open
      opened.set if rank.zero?
      [failure { saving.wait }, expected]
    end
    assert_equal [nil, nil], said.map(&:first)
    run = run_of(:plain, :adam, 2)
    Checkpoint.load(dir, **run)
    assert_equal said[0][1], values(run)
  end

  # One rank has seen the error, the other not: the next save is no rank's alone.
  def test_an_error_that_one_rank_has_seen
    dir = @dir
    said = world(2) do |rank|
      run = run_of(:units, :momentum, 1)
      gate = Gate.new { |path| raise Errno::ENOSPC, path if rank == 1 }
      gate.open
      saving = Checkpoint.async_save(dir, **run, step: 2)
      seen = failure { saving.wait } if rank.zero?
      gate.remove
      [seen, failure { Checkpoint.save(dir, **run, step: 3) }, failure { Checkpoint.save(dir, **run, step: 4) }]
    end
    assert_equal [said[0][0]] * 2, said.map { |each| each[1] }
    assert_equal [nil, nil], said.map(&:last)
  end

  # A child that was forked while the save went on does not keep others from saving.
  def test_a_child_of_a_save
    dir = @dir
    said = Distributed.fork_world(1) do
      model = Torch::NN::Linear.new(2, 2)
      gate = Gate.new
      saving = Checkpoint.async_save(dir, model: model, epoch: 1)
      child = fork { sleep }
      inherited = value_or_failure { Distributed.fork_world(1) { failure { saving.wait } } }
      gate.open
      saving.wait
      gate.remove
      [inherited, File.basename(Checkpoint.save(dir, model: model, epoch: 2))]
    ensure
      Process.kill(:KILL, child)
      Process.wait(child)
    end
    assert_match(/it goes on in process \d+, from which this one was forked/, said[0][0][0][1])
    assert_equal "epoch-000002", said[0][1]
  end
end
