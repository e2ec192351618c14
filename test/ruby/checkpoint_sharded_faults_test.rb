# frozen_string_literal: true

require_relative "sharded_checkpoints"
require "zlib"

# What can be wrong with checkpoints in pieces, and what they hold.
class CheckpointShardedFaultsTest < Minitest::Test
  include ShardedCheckpoints

  def setup
    @dir = Dir.mktmpdir
  end

  def teardown
    FileUtils.rm_rf(@dir)
  end

  def saved_by(size, strategy = :units, kind = :adam)
    dir = @dir
    world(size) do
      run = run_of(strategy, kind, 1)
      train(run, 0...1)
      Checkpoint.save(dir, **run, step: 1)
    end.first
  end

  def test_the_manifest_says_where_elements_are
    folder = saved_by(3)
    manifest = Checkpoint::Manifest.read(folder)
    assert_equal [2, 3], manifest.content.values_at("version", "world_size")
    place = manifest["tensors"]["model.tied.weight"]
    assert_equal [[17, 17], "float32"], place.values_at("shape", "dtype")
    assert_operator place["pieces"].size, :>, 1
    assert_equal 289, place["pieces"].sum { |piece| piece["count"] }
    # Of the weight with two names, and of its states, there is one.
    refute manifest["tensors"].key?("model.again.weight")
    assert_equal({"$tensor" => "model.tied.weight"}, manifest["objects"]["model"]["again.weight"])
    state = manifest["objects"]["optimizer"]["state"]
    names = %w[first.bias first.weight last.bias last.weight norm.bias norm.weight tied.weight].map { |name| "model.#{name}" }
    assert_equal names, state.keys.sort
    assert_equal({"step" => 1, "exp_avg" => {"$tensor" => "optimizer.state.model.last.bias.exp_avg"},
                  "exp_avg_sq" => {"$tensor" => "optimizer.state.model.last.bias.exp_avg_sq"}}, state["model.last.bias"])
    elements = 17 * 5 + 17 + 289 + 51 + 3 + 10
    bytes = manifest["files"].values.map { |file| file["bytes"] - file["header_bytes"] }
    random = manifest["tensors"].select { |name, _| name.start_with?("rng.") }.values.sum { |each| each["shape"][0] }
    assert_equal 3 * 4 * elements + random + 4 * 10 + 8, bytes.sum
    assert_equal({"world_size" => 3}, Checkpoint.verify(folder).slice("world_size"))
    assert_equal File.stat(folder).ino, File.stat(Checkpoint.latest(@dir)).ino
  end

  def checksum(run)
    weight = FSDP.full_state_dict(run[:model])["tied.weight"]
    Zlib.crc32(Distributed.send(:_bytes, weight))
  end

  def bytes_read
    before = File.read("/proc/self/io")[/^rchar: (\d+)/, 1].to_i
    yield
    File.read("/proc/self/io")[/^rchar: (\d+)/, 1].to_i - before
  end

  # Each rank reads its ranges, and not the files: of each piece that it needs a part of at most two blocks more.
  def test_a_rank_reads_its_part
    dir = @dir
    read, expected = world(4) do
      run = run_of(:units, :adam, 1, hidden: 1200)
      train(run, 0...1)
      Checkpoint.save(dir, **run, step: 1, rng: false)
      [bytes_read { Checkpoint.load(dir, **run) }, checksum(run)]
    end.then { |said| [said.map(&:first), said[0][1]] }
    whole = Dir[File.join(dir, "*/data*")].sum { |path| File.size(path) }
    assert_operator whole, :>, 16 << 20
    read.each { |bytes| assert_operator bytes, :<, whole / 4 + 100_000 }
    said = world(3) do
      run = run_of(:units, :adam, 2, hidden: 1200)
      [bytes_read { Checkpoint.load(dir, **run) }, checksum(run)]
    end
    said.each do |bytes, found|
      # Three tensors are large; the ranks of the first save cut them elsewhere.
      assert_operator bytes, :<, whole / 3 + 3 * 2 * Checkpoint::BLOCK
      assert_equal expected, found
    end
  end

  def test_damage_is_found_by_those_who_read_it_and_raised_by_all
    folder = saved_by(4)
    place = Checkpoint::Manifest.read(folder)["tensors"]["model.tied.weight"]["pieces"].last
    path = File.join(folder, place["file"])
    bytes = File.binread(path)
    File.binwrite(path, bytes.dup.tap { |bad| bad.setbyte(place["offset"] + 5, bad.getbyte(place["offset"] + 5) ^ 1) })
    errors = [["model.tied.weight", damaged_errors(folder)]]
    File.binwrite(path, bytes[0..-2])
    errors << ["expected #{bytes.bytesize} bytes", damaged_errors(folder)]
    File.delete(path)
    errors << ["is missing", damaged_errors(folder)]
    errors.each do |text, said|
      assert_equal 1, said.map { |error, _| error }.uniq.size
      said.each do |(kind, message), same|
        assert_equal "Torch::Distributed::Checkpoint::DamagedError", kind
        assert_includes message, text
        assert same
      end
    end
    assert_raises(Checkpoint::DamagedError) { Checkpoint.verify(folder) }
  end

  def damaged_errors(folder)
    world(2) do
      run = run_of(:units, :adam, 5)
      before = values(run)
      [failure { Checkpoint.load(folder, **run) }, before == values(run)]
    end
  end

  def test_a_damaged_one_gives_way_to_the_one_before
    dir = @dir
    saved_by(2)
    world(2) do
      run = run_of(:units, :adam, 2)
      Checkpoint.save(dir, **run, step: 2)
    end
    folder = File.join(dir, "step-000000002")
    place = Checkpoint::Manifest.read(folder)["tensors"]["model.first.weight"]["pieces"].first
    data = File.join(folder, place["file"])
    File.binwrite(data, File.binread(data).tap { |bad| bad.setbyte(place["offset"], bad.getbyte(place["offset"]) ^ 1) })
    said = world(3) do
      $stderr = StringIO.new
      Checkpoint.load(dir, **run_of(:root, :adam, 3)).step
    ensure
      $stderr = STDERR
    end
    assert_equal [1] * 3, said
  end

  def test_manifests_that_lie_are_refused
    folder = saved_by(2)
    content = Checkpoint::Manifest.read(folder).content
    {
      /its pieces reach to element \d+ of 289/ => ->(pieces) { pieces.pop },
      /what it says of model.tied.weight cannot be/ => ->(pieces) { pieces[0]["offset"] = 0 },
      /what it says of model.tied.weight/ => ->(pieces) { pieces[0]["crc32"] = [] },
      /says of model.tied.weight cannot/ => ->(pieces) { pieces[0]["file"] = "other" },
      /of model.tied.weight cannot be/ => ->(pieces) { pieces[0]["start"] = -1 },
      /model.tied.weight cannot be: its pieces/ => ->(pieces) { pieces[0]["start"] += 1 }
    }.each do |text, lie|
      changed = JSON.parse(JSON.generate(content)).tap { |each| lie.call(each["tensors"]["model.tied.weight"]["pieces"]) }
      File.binwrite(File.join(folder, "manifest.json"), Checkpoint::Manifest.text(changed))
      assert_match text, failure { Checkpoint.load(folder, model: Net.new) }.last
    end
    changed = content.merge("block" => 7)
    File.binwrite(File.join(folder, "manifest.json"), Checkpoint::Manifest.text(changed))
    assert_match(/the size of blocks cannot be 7/, failure { Checkpoint.load(folder, model: Net.new) }.last)
  end

  # Each fault is named on all ranks, and nothing is changed.
  def test_what_does_not_fit
    dir = @dir
    saved_by(2)
    said = world(3) do
      faults = {
        shape: -> { run_of(:units, :adam, 3, hidden: 18) },
        plain_shape: -> { run_of(:plain, :adam, 3, hidden: 16) },
        groups: lambda {
          run = run_of(:units, :adam, 3)
          one, *others = run[:model].parameters.uniq(&:object_id)
          run.merge(optimizer: Torch::Optim::Adam.new([{params: [one]}, {params: others}]))
        },
        fewer: lambda {
          run = run_of(:units, :adam, 3)
          run.merge(optimizer: Torch::Optim::Adam.new(run[:model].parameters.uniq(&:object_id).drop(1)))
        },
        dtype: -> { {model: sharded(Net.new.double)} },
        names: -> { {model: sharded(Torch::NN::Sequential.new(Torch::NN::Linear.new(2, 2)))} },
        alone: -> { {optimizer: run_of(:plain, :adam, 3)[:optimizer]} }
      }
      faults.transform_values do |make|
        run = make.call
        before = run[:model] && values(run)
        [failure { Checkpoint.load(dir, **run) }, run[:model].nil? || before == values(run)]
      end
    end
    texts = {
      shape: /model: what was saved does not fit this .*Net: of another shape: first.weight \(the model's \[18, 5\], saved \[17, 5\]\)/,
      plain_shape: /of another shape: first.weight \(the model's \[16, 5\], saved \[17, 5\]\)/,
      groups: /optimizer: what was saved does not fit this Torch::Optim::Adam: it has 2 parameter groups, saved were 1/,
      fewer: /optimizer: what was saved does not fit this Torch::Optim::Adam: not known in group 0: model.first.weight/,
      dtype: /of another dtype: first.weight \(the model's float64, saved float32\)/,
      names: /missing: 0.weight, 0.bias; not known to the model: first.weight, first.bias/,
      alone: /the state of this Torch::Optim::Adam was saved by the names of parameters: load the models/
    }
    said.each do |faults|
      faults.each do |name, (error, same)|
        assert same, name
        assert_match texts[name], error&.last.to_s, name
        assert_equal "Torch::Distributed::CheckpointError", error.first, name
      end
    end
  end

  def sharded(net)
    FSDP.fully_shard(net)
  end

  def test_saves_that_cannot_be
    dir = @dir
    said = world(2) do |rank|
      run = run_of(:units, :adam, 1)
      other = run_of(:plain, :adam, 1)
      zero = run_of(:zero, :adam, 1)
      run[:model].unshard
      gathered = failure { Checkpoint.save(dir, **run) }
      run[:model].reshard
      loss = run[:model].call(Torch.randn(4, 5)).sum
      # Between forward and backward there are pieces as well.
      pending = failure { Checkpoint.save(dir, **run) }
      loss.backward
      errors = [
        failure { Checkpoint.save(dir, **run, sharded: false) },
        failure { Checkpoint.save(dir, model: other[:model], optimizer: zero[:optimizer], sharded: true) },
        failure { Checkpoint.save(dir, model: rank.zero? ? run[:model] : other[:model]) },
        failure { Checkpoint.save(dir, **run, sharded: 1) },
        failure { Checkpoint.save(dir, model: run[:model], extra: {"n" => Torch.zeros(rank + 1)}) },
        gathered, pending
      ]
      run[:optimizer].step
      errors << failure { Checkpoint.save(dir, **run) }
    end
    assert_equal said[0], said[1]
    texts = [
      /sharded: expected true or nil, got false: each rank has a part of the model; full_state_dict gathers it/,
      /the optimizer: a parameter of shape \[\d+.*\] is in none of the models given/,
      /the ranks have different tensors|is on none of these ranks|model.* is float32/,
      /sharded: expected true, false or nil, got 1/,
      /the ranks have different tensors, rank 0 extra.n float32 \[1\] where rank 1 has extra.n float32 \[2\]/,
      /model.tied.weight is gathered now: expected a call after reshard, or outside of summon_full_params/,
      nil, nil
    ]
    said[0].zip(texts) { |error, text| text ? assert_match(text, error&.last.to_s) : assert_nil(error) }
  end

  # Ranks whose optimizers made different steps.
  def test_states_that_differ
    dir = @dir
    said = world(2) do |rank|
      run = run_of(:units, :adam, 1, hidden: 40)
      train(run, 0...1)
      run[:optimizer].step if rank == 1
      failure { Checkpoint.save(dir, **run) }
    end
    assert_equal said[0], said[1]
    assert_equal "Torch::Distributed::MismatchError", said[0][0]
    assert_match(/optimizer: the state of model\..* has step: 1 on rank 0, but step: 2 on rank 1: expected the same steps on all ranks/, said[0][1])
  end

  # A rank is killed when half of its file is there.
  def test_a_rank_that_dies_leaves_the_checkpoint_before
    dir = @dir
    [false, true].each do |async|
      FileUtils.rm_rf(Dir[File.join(dir, "*")])
      error, values = after_a_death(dir, async)
      assert_equal "Torch::Distributed::PeerLostError", error[0]
      assert_match(/rank 1/, error[1])
      assert_equal ["step-000000001"], Checkpoint.list(dir).map { |path| File.basename(path) }
      loaded = world(2) do
        run = run_of(:units, :adam, 7)
        [Checkpoint.load(dir, **run).step, values(run)].tap { Checkpoint.save(dir, **run, step: 3) }
      end
      assert_equal [[1, values]] * 2, loaded
      # The next save removes what was left.
      assert_equal %w[step-000000001 step-000000003], (Dir.children(dir) - [".lock"]).sort
    end
  end

  # @return [Array] the error on rank 0, and what was saved before
  def after_a_death(dir, async)
    port = held_port
    read, write = IO.pipe
    pids = Array.new(2) do |rank|
      fork do
        Distributed.init_process_group(BACKEND, init_method: "tcp://127.0.0.1:#{port}", rank: rank, world_size: 2, timeout: 30)
        run = run_of(:units, :adam, 1)
        Checkpoint.save(dir, **run, step: 1)
        said = values(run)
        die_while_writing if rank == 1
        error = failure { async ? Checkpoint.async_save(dir, **run, step: 2).wait : Checkpoint.save(dir, **run, step: 2) }
        write.write(Marshal.dump([error, said]))
      ensure
        write.close
        exit!
      end
    end
    write.close
    Timeout.timeout(LIMIT) { Marshal.load(read.read) }
  ensure
    pids.each { |pid| Process.wait(pid) }
    read.close
  end

  def die_while_writing
    Checkpoint::DataFile.singleton_class.prepend(Module.new do
      def write(path, entries, **options)
        super
        File.truncate(path, File.size(path) / 2)
        Process.kill(:KILL, Process.pid)
      end
    end)
  end
end
