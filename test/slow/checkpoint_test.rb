# frozen_string_literal: true

require_relative "../ruby/test_helper"
require "torch/distributed/fsdp"

# Writers that are killed at any moment: what was whole before stays, and the next save cleans up.
class CheckpointSlowTest < Minitest::Test
  Checkpoint = Distributed::Checkpoint

  # One checkpoint after the other, until it is killed: each has its number in every element.
  def write_for_ever(rank, port, said, sharded, fixed)
    Distributed.init_process_group("gloo", init_method: "tcp://127.0.0.1:#{port}", rank: rank, world_size: 2, timeout: 20)
    start = Checkpoint.load(@dir, required: false)&.extra&.fetch("n") || 0
    (start + 1..).each do |n|
      tensors = Array.new(6) { |i| Torch.full([20_000 + i], n.to_f) }
      Checkpoint.save(@dir, step: n, name: fixed ? "last" : nil, extra: {"n" => n, "tensors" => tensors}, sharded: sharded, keep: 2)
      said.puts n if rank.zero?
    end
  end

  # The same with a model whose ranks have pieces of it.
  def write_pieces_for_ever(rank, port, said, *)
    Distributed.init_process_group("gloo", init_method: "tcp://127.0.0.1:#{port}", rank: rank, world_size: 2, timeout: 20)
    net = Distributed::FSDP.fully_shard(Torch::NN::Linear.new(300, 200))
    start = Checkpoint.load(@dir, model: net, required: false)&.extra&.fetch("n") || 0
    (start + 1..).each do |n|
      Torch.no_grad { net.parameters.each { |parameter| parameter.fill!(n) } }
      save = n.odd? ? ->(**run) { Checkpoint.async_save(@dir, **run).wait } : ->(**run) { Checkpoint.save(@dir, **run) }
      save.call(step: n, extra: {"n" => n}, model: net, keep: 2)
      said.puts n if rank.zero?
    end
  end

  def setup
    @dir = Dir.mktmpdir
    @random = Random.new(Minitest.seed)
  end

  def teardown
    FileUtils.rm_rf(@dir)
  end

  # Two ranks, one or both of which are killed within a save.
  # @return [Integer] the last checkpoint that was reported whole
  def killed_run(sharded, fixed, writer = :write_for_ever)
    port = held_port
    read, write = IO.pipe
    log = File.join(@dir, "writers.log")
    pids = Array.new(2) do |rank|
      fork do
        read.close
        $stderr.reopen(log, "a")
        __send__(writer, rank, port, write, sharded, fixed)
      rescue => e
        warn e.full_message
      ensure
        exit!
      end
    end
    write.close
    saved = Integer(Timeout.timeout(LIMIT) { read.gets } || flunk("no checkpoint was saved:\n#{File.read(log)}"))
    sleep @random.rand(0.06)
    pids.shuffle(random: @random).each { |pid| Process.kill(:KILL, pid) }
    [saved, *read.read.split.map(&:to_i)].max
  ensure
    pids&.each { |pid| Process.wait(pid) }
    read&.close
  end

  [[false, false], [true, false], [true, true]].each do |sharded, fixed|
    define_method(:"test_kill_while_saving#{"_in_parts" if sharded}#{"_over_the_last" if fixed}") do
      last = 0
      leftovers = 0
      30.times do
        said = killed_run(sharded, fixed)
        assert_operator said, :>, last
        loaded = nil
        _, warned = capture_io { loaded = Checkpoint.load(@dir) }
        assert_empty warned
        # What was reported is there, or a later one.
        last = loaded.extra["n"]
        assert_operator last, :>=, said
        assert_equal last, loaded.step
        loaded.extra["tensors"].each_with_index { |tensor, i| assert_equal [[20_000 + i], last, last], [tensor.shape, tensor.min.item, tensor.max.item] }
        assert_operator Checkpoint.list(@dir).size, :<=, 3
        leftovers += 1 if files.size > named.size
      end
      # The next save removes what they left.
      Checkpoint.save(@dir, name: fixed ? "last" : nil, step: last + 1, extra: {"n" => last + 1}, keep: 2)
      assert_equal named, files
      assert_operator leftovers, :>, 0, "no writer was killed within a save: the test says little"
    end
  end

  def test_kill_while_saving_pieces
    last = 0
    leftovers = 0
    20.times do
      said = killed_run(nil, false, :write_pieces_for_ever)
      assert_operator said, :>, last
      loaded = nil
      net = Torch::NN::Linear.new(300, 200)
      _, warned = capture_io { loaded = Checkpoint.load(@dir, model: net) }
      assert_empty warned
      last = loaded.extra["n"]
      assert_operator last, :>=, said
      net.parameters.each { |parameter| assert_equal [last, last], [parameter.detach.min.item, parameter.detach.max.item] }
      leftovers += 1 if files.size > named.size
    end
    Checkpoint.save(@dir, step: last + 1, extra: {"n" => last + 1}, keep: 2)
    assert_equal named, files
    assert_operator leftovers, :>, 0, "no writer was killed within a save: the test says little"
  end

  # Files of tensors that are there, and those that a manifest names.
  def files
    Dir[File.join(@dir, "*/*")].reject { |path| path.end_with?("/manifest.json") }.sort
  end

  def named
    Checkpoint.list(@dir).flat_map { |folder| Checkpoint::Manifest.read(folder)["files"].keys.map { |name| File.join(folder, name) } }.sort
  end

  # Memory goes to the file and back without a copy of all of it.
  def test_a_large_tensor_takes_no_second_copy_of_it
    bytes = 256 << 20
    out, err, status = ruby(<<~RUBY, @dir)
      tensor = Torch.zeros(#{bytes / 4})
      peak = -> { File.read("/proc/self/status")[/VmHWM:\\s+(\\d+)/, 1].to_i * 1024 }
      before = peak.call
      Torch::Distributed::Checkpoint.save(ARGV[0], extra: {"t" => tensor})
      puts peak.call - before
      Torch::Distributed::Checkpoint.verify(ARGV[0])
      puts peak.call - before
    RUBY
    assert status.success?, err
    grown, verified = out.split.map(&:to_f)
    assert_operator [grown, verified].max, :<, bytes / 8
  end
end
