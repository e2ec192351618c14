# frozen_string_literal: true

require_relative "test_helper"
require "digest"

# Checkpoints of several ranks; test/ruby/checkpoint_test.rb has what a single process sees as well.
class CheckpointRanksTest < Minitest::Test
  Checkpoint = Distributed::Checkpoint

  # A run whose numbers depend on the seed and on how often it stepped.
  class Run
    attr_reader :model, :optimizer, :scheduler, :sampler

    def initialize(seed, wrapped: true)
      Torch.manual_seed(seed)
      @net = Torch::NN::Sequential.new(Torch::NN::Linear.new(6, 8), Torch::NN::ReLU.new, Torch::NN::BatchNorm1d.new(8), Torch::NN::Linear.new(8, 3))
      @model = wrapped ? Torch::NN::Parallel::DistributedDataParallel.new(@net) : @net
      @optimizer = Torch::Optim::AdamW.new(@net.parameters, lr: 0.01)
      @scheduler = Torch::Optim::LRScheduler::StepLR.new(@optimizer, step_size: 2, gamma: 0.5)
    end

    def objects
      {model: @model, optimizer: @optimizer, scheduler: @scheduler}
    end

    # The same data on all ranks, so that any number of them does the same.
    def train(steps)
      steps.each do |step|
        Torch.manual_seed(1000 + step)
        input = Torch.randn(5, 6)
        @optimizer.zero_grad
        @model.call(input).sum.backward
        @optimizer.step
        @scheduler.step
      end
    end

    # All bits of the parameters and the learning rate, in short.
    def values
      Digest::SHA256.hexdigest(Marshal.dump([@net.state_dict.transform_values { |tensor| tensor.detach.to_a }, @optimizer.param_groups[0][:lr]]))
    end
  end

  def setup
    @dir = Dir.mktmpdir
  end

  def teardown
    FileUtils.rm_rf(@dir)
  end

  # How many ranks save, and whether each of them writes.
  FORMS = [[1, nil], [2, nil], [2, true], [3, true], [4, true]].freeze

  def folder_of(form) = File.join(@dir, form.join("-"))

  # Every tensor is written by one rank, and the run goes on with any number of them.
  def test_saved_by_any_number_goes_on_with_any_number
    saved = FORMS.group_by(&:first).flat_map { |size, forms| forms.zip(world(size) { |rank| forms.map { |form| saved_in(form, rank) } }.transpose) }.to_h
    saved.each do |(size, sharded), said|
      folder = File.join(folder_of([size, sharded]), "step-000000003")
      assert_equal [[folder, *said[0][1, 2]]], said.map { |each| each.first(3) }.uniq
      files = Dir[File.join(folder, "data-*")].map { |path| File.basename(path)[/\d+-of-\d+/] }.sort
      assert_equal sharded ? Array.new(size) { |rank| "#{rank}-of-#{size}" } : ["0-of-1"], files
    end
    [1, 2, 3].each do |other|
      loaded = world(other) { |rank| FORMS.map { |form| loaded_from(form, rank) } }.transpose
      FORMS.zip(loaded) { |form, said| assert_goes_on(form[0], saved[form], other, said) }
    end
  end

  def saved_in(form, rank)
    run = Run.new(rank + 1)
    run.train(0...3)
    folder = Checkpoint.save(folder_of(form), **run.objects, step: 3, sharded: form[1], extra: {"rank" => rank})
    numbers = Torch.rand(3).to_a
    before = run.values
    run.train(3...6)
    [folder, before, run.values, numbers]
  end

  def loaded_from(form, rank)
    run = Run.new(rank + 50)
    loaded = Checkpoint.load(folder_of(form), **run.objects)
    numbers = Torch.rand(3).to_a
    before = run.values
    run.train(3...6)
    [loaded.step, loaded.extra, loaded.world_size, loaded.rng_restored, loaded.rng_restored && numbers, before, run.values]
  end

  def assert_goes_on(size, saved, other, loaded)
    loaded.each_with_index do |said, rank|
      assert_equal [3, {"rank" => 0}, size, other == size, other == size && saved[rank][3], saved[0][1]], said.first(6)
      # The mean of three equal gradients is rounded.
      assert_equal saved[0][2], said[6] if other == size || [other, size].none?(3)
    end
  end

  def test_a_single_process_takes_over_what_ranks_saved_and_gives_it_back
    dir = @dir
    expected = world(2) do |rank|
      run = Run.new(rank)
      run.train(0...2)
      Checkpoint.save(dir, **run.objects, epoch: 1, sharded: true)
      run.values
    end
    between = world(1) do
      Distributed.destroy_process_group
      run = Run.new(9, wrapped: false)
      Checkpoint.load(dir, **run.objects)
      Checkpoint.save(dir, **run.objects, epoch: 2)
      run.values
    end
    last = world(2) do |rank|
      run = Run.new(rank + 3)
      [Checkpoint.load(dir, **run.objects).epoch, run.values]
    end
    assert_equal [expected[0]], (expected + between).uniq
    assert_equal [[2, expected[0]]] * 2, last
  end

  # Batch normalisation counts other batches on each rank, and rank 0's are what training goes on with.
  def test_in_parts_buffers_and_extra_are_rank_zeros
    dir = @dir
    saved = world(3) do |rank|
      run = Run.new(1)
      norm = run.model.module.named_children.values[2]
      Torch.no_grad { norm.named_buffers.each_value { |buffer| buffer.fill!(rank + 2) } }
      Checkpoint.save(dir, **run.objects, models: {list: [norm]}, sharded: true, extra: {"seen" => Torch.full([3000], rank + 5), "rank" => rank})
      run.values
    end
    loaded = world(1) do
      run = Run.new(2, wrapped: false)
      [Checkpoint.load(dir, **run.objects).extra.then { |extra| [extra["seen"].to_a.uniq, extra["rank"]] }, run.values]
    end.first
    assert_equal 3, saved.uniq.size
    assert_equal [[[5], 0], saved[0]], loaded
    assert_equal 3, Dir[File.join(dir, "*", "data-*")].size
  end

  def test_parts_are_balanced
    dir = @dir
    world(3) do
      Checkpoint.save(dir, extra: {"tensors" => Array.new(10) { |i| Torch.zeros(1000 * (i + 1)) }}, sharded: true, rng: false)
    end
    sizes = Checkpoint.verify(dir)["files"].values.map { |file| file["bytes"] - file["header_bytes"] }
    assert_equal 55 * 4000, sizes.sum
    assert_operator sizes.max - sizes.min, :<=, 4000
  end

  # A file system that one rank does not see, or that is full there.
  def test_an_error_on_one_rank_is_an_error_on_all
    dir = @dir
    [false, true].each do |sharded|
      said = world(3) do |rank|
        run = Run.new(rank)
        run.train(0...1)
        Checkpoint.save(dir, **run.objects, epoch: 1, sharded: sharded)
        before = run.values
        culprit = sharded ? 2 : 0
        if rank == culprit
          trap("XFSZ", "IGNORE")
          Process.setrlimit(:FSIZE, 3000, Process.getrlimit(:FSIZE)[1])
        end
        error = failure { Checkpoint.save(dir, **run.objects, epoch: 2, extra: {"t" => Array.new(5) { Torch.zeros(1000) }}, sharded: sharded, keep: 1) }
        Process.setrlimit(:FSIZE, Process.getrlimit(:FSIZE)[1])
        run.train(1...2)
        loaded = Checkpoint.load(dir, **run.objects)
        [error, loaded.epoch, run.values == before]
      end
      assert_equal 1, said.uniq.size
      (kind, text), epoch, same = said[0]
      assert_equal "Torch::Distributed::CheckpointError", kind
      assert_match(/cannot save .*epoch-000002: rank #{sharded ? 2 : 0}: cannot write .*data-.*: File too large, after/, text)
      assert_equal [1, true], [epoch, same]
      assert_equal ["epoch-000001"], Dir.children(dir) - [".lock"]
    end
  end

  def test_a_full_disk_leaves_the_old_one
    skip "only root can mount a small tmpfs" unless Process.uid.zero?
    mount = File.join(@dir, "small")
    FileUtils.mkdir(mount)
    skip "no tmpfs can be mounted here" unless system("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", mount, err: File::NULL)

    begin
      said = world(2) do |rank|
        Checkpoint.save(mount, extra: {"t" => Torch.ones(1000)}, epoch: 1)
        error = failure { Checkpoint.save(mount, extra: {"t" => Torch.zeros(400_000)}, epoch: 2, sharded: true) }
        [error, Checkpoint.load(mount).extra["t"].sum.item]
      end
      assert_equal [1, 1000.0], [said.uniq.size, said[0][1]]
      assert_match(/epoch-000002: rank 0: cannot write .*: No space left on device, after \d+ of 1600000 bytes/, said[0][0][1])
      assert_equal ["epoch-000001"], Dir.children(mount) - [".lock"]
      # There is room for it again.
      world(1) { Checkpoint.save(mount, extra: {"t" => Torch.zeros(200_000)}, epoch: 3) }
      assert_equal 3, Checkpoint.load(mount).epoch
    ensure
      system("umount", mount)
    end
  end

  def test_ranks_take_the_same_one_if_the_newest_is_damaged_for_one
    dirs = Array.new(2) { |i| File.join(@dir, i.to_s).tap { |each| FileUtils.mkdir(each) } }
    FileUtils.mkdir(joint = File.join(@dir, "joint"))
    2.times { |epoch| Checkpoint.save(dirs[0], extra: {"e" => Torch.full([9], epoch)}, epoch: epoch, rng: false) }
    FileUtils.rm_rf(dirs[1])
    FileUtils.cp_r(dirs[0], dirs[1])
    data = Dir[File.join(dirs[1], "epoch-000001/data*")].first
    File.binwrite(data, File.binread(data).tap { |bad| bad.setbyte(-1, 77) })
    said = world(2) do |rank|
      Dir.chdir(dirs[rank])
      error = failure { Checkpoint.load("epoch-000001") }
      warned = StringIO.new
      $stderr = warned
      loaded = Checkpoint.load(".")
      $stderr = STDERR
      [error, loaded.epoch, loaded.extra["e"].to_a, warned.string]
    end
    assert_equal [[0, [0] * 9]], said.map { |each| each[1, 2] }.uniq
    assert_match(%r{left out: rank 1: data|left out: rank 1: \./epoch-000001/data.* is damaged}, said[0][3])
    assert_empty said[1][3]
    said.each { |each| assert_match(%r{\Acannot load epoch-000001: rank 1: epoch-000001/data.*should have the CRC-32}, each[0][1]) }
    assert_equal [["Torch::Distributed::Checkpoint::DamagedError"]], said.map { |each| [each[0][0]] }.uniq
    assert_empty Dir.children(joint)
  end

  # By the rank that fails; the others learn the class from it.
  def test_errors_are_of_one_class_on_all_ranks
    errors = {"damaged" => "Checkpoint::DamagedError", "missing" => "NotFoundError", "of_another_kind" => "CheckpointError"}
    dirs = Array.new(2) { |i| File.join(@dir, i.to_s).tap { |each| FileUtils.mkdir(each) } }
    dirs.each_with_index do |dir, rank|
      errors.each_key do |name|
        next if name == "missing" && rank == 1

        # In a folder of two, what is said is of both.
        2.times { |epoch| Checkpoint.save(File.join(dir, "several_#{name}"), extra: {"e" => Torch.ones(3)}, epoch: epoch, rng: false) }
        Torch.save({"model" => Torch::NN::Linear.new(2, 2).state_dict}, File.join(dir, name))
      end
    end
    Dir[File.join(dirs[1], "several_damaged/*/data*")].each { |data| File.truncate(data, 1) }
    Dir[File.join(dirs[1], "several_of_another_kind/*/manifest.json")].each do |manifest|
      content = Checkpoint::Manifest.read(File.dirname(manifest)).content
      File.write(manifest, Checkpoint::Manifest.text(content.merge("version" => 99)))
    end
    said = world(2) do |rank|
      Dir.chdir(dirs[rank])
      $stderr = StringIO.new
      result = errors.keys.map { |name| failure { Checkpoint.load("several_#{name}") } + failure { Checkpoint.load("several_#{name}/epoch-000001") } }
      result << failure { Checkpoint.load("missing", model: Torch::NN::Linear.new(2, 2)) }
      $stderr = STDERR
      result
    end
    assert_equal said[0], said[1]
    assert_equal [*errors.values.map { |kind| [kind] * 2 }, ["NotFoundError"]], said[0].map { |each| each.each_slice(2).map { |kind, _| kind.delete_prefix("Torch::Distributed::") } }
    said[0].flatten.each_slice(2) { |_, text| assert_match(/cannot load .*: rank 1: /, text) }
  end

  def test_what_one_rank_cannot_take_is_told_to_all
    dir = @dir
    said = world(2) do |rank|
      Checkpoint.save(dir, extra: {}, model: Torch::NN::Linear.new(2, 2))
      model = Torch::NN::Linear.new(2, 2 + rank)
      before = model.weight.detach.to_a
      errors = [failure { Checkpoint.load(dir, model: model) }, failure { Checkpoint.save(dir, extra: {"x" => (rank == 1) ? Object.new : 1}) },
        failure { Checkpoint.save(dir, extra: {"x" => Torch.zeros(2 + rank)}, sharded: true) },
        failure { Checkpoint.load(File.join(dir, "none")) }]
      [errors, model.weight.detach.to_a == before]
    end
    assert_equal [true, true], said.map(&:last)
    assert_equal said[0][0], said[1][0]
    texts = said[0][0].map(&:last)
    assert_match(/cannot load .*: rank 1: model: what was saved does not fit this Torch::NN::Linear: of another shape: weight \(the model's \[3, 2\]/, texts[0])
    assert_match(/cannot save .*: rank 1: extra.x: expected tensors, .* got Object/, texts[1])
    assert_match(/rank 0 extra.x float32 \[2\] where rank 1 has extra.x float32 \[3\]: with sharded: true all must save the same/, texts[2])
    assert_match(/none: there is no checkpoint/, texts[3])
    assert_equal 1, (Dir.children(dir) - [".lock"]).size
  end

  def test_ranks_that_mean_different_things_are_told_so
    dir = @dir
    {
      {sharded: [true, false]} => /sharded is true on rank 0, but false on rank 1/,
      {step: [1, 2]} => /the checkpoint's name is "step-000000001" on rank 0, but "step-000000002" on rank 1/,
      {path: [dir, "#{dir}/other"], sharded: [true, true]} => /the folder is "#{dir}" on rank 0, but "#{dir}.other" on rank 1/
    }.each do |options, expected|
      said = world(2) do |rank|
        own = options.transform_values { |values| values[rank] }
        failure { Checkpoint.save(own.delete(:path) || dir, model: Torch::NN::Linear.new(2, 2), **own) }
      end
      said.each do |name, message|
        assert_equal "Torch::Distributed::MismatchError", name
        assert_match expected, message
      end
    end
    said = world(2) do |rank|
      model = Torch::NN::Linear.new(2, 2)
      failure { rank.zero? ? Checkpoint.save(dir, model: model) : Checkpoint.load(dir, model: model) }
    end
    assert_equal [["Torch::Distributed::MismatchError", "rank 0 is in Checkpoint.save, rank 1 in Checkpoint.load: all ranks must make the same " \
      "calls in the same order"]] * 2, said
    assert_empty Checkpoint.list(dir)
  end

  def test_in_a_group_of_some_ranks
    dir = @dir
    said = world(3) do |rank|
      group = Distributed.new_group([0, 2])
      saved = capture { Checkpoint.save(dir, extra: {"t" => Torch.ones(2)}, process_group: group, sharded: true) }
      loaded = capture { Checkpoint.load(dir, process_group: group) } unless rank == 1
      [saved && File.basename(saved), loaded&.world_size, loaded&.rng_restored]
    end
    assert_equal [["save-000001", 2, true], [nil, nil, nil], ["save-000001", 2, true]], said
  end

  # What a rank that is not in the group is warned of is not wanted here.
  def capture
    $stderr = StringIO.new
    yield
  ensure
    $stderr = STDERR
  end
end
