# frozen_string_literal: true

require_relative "test_helper"
require "zlib"

# One process; test/ruby/checkpoint_ranks_test.rb has several.
class CheckpointTest < Minitest::Test
  Checkpoint = Distributed::Checkpoint

  def setup
    @dir = Dir.mktmpdir
  end

  def teardown
    FileUtils.rm_rf(@dir)
  end

  def net(seed = 1)
    Torch.manual_seed(seed)
    Torch::NN::Sequential.new(Torch::NN::Linear.new(3, 4), Torch::NN::BatchNorm1d.new(4), Torch::NN::Dropout.new(p: 0.5),
      Torch::NN::Linear.new(4, 2))
  end

  # All that a run consists of, after some steps.
  def run_of(model, steps = 0)
    optimizer = Torch::Optim::Adam.new(model.parameters, lr: 0.01)
    scheduler = Torch::Optim::LRScheduler::ExponentialLR.new(optimizer, 0.9)
    {model: model, optimizer: optimizer, scheduler: scheduler}.tap { |run| train(run, steps) }
  end

  # Gradients that need no backward, of random numbers.
  def train(run, steps)
    steps.times do
      Torch.no_grad { run[:model].call(Torch.randn(5, 3)) }
      run[:model].parameters.each { |param| param.grad = Torch.randn(param.shape) }
      run[:optimizer].step
      run[:scheduler].step
    end
  end

  def values(model)
    model.state_dict.transform_values { |tensor| tensor.detach.to_a }
  end

  def only_file
    Dir[File.join(@dir, "**/*.safetensors")].tap { |files| assert_equal 1, files.size }.first
  end

  def test_a_run_goes_on_as_if_it_had_never_stopped
    run = run_of(net, 3)
    folder = Checkpoint.save(@dir, **run, epoch: 2, step: 300, extra: {"best" => 0.1 + 0.2, :when => :now})
    assert_equal File.join(@dir, "step-000000300"), folder
    train(run, 4)
    other = run_of(net(2))
    loaded = Checkpoint.load(@dir, **other)
    assert_equal [folder, 2, 300, {"best" => 0.1 + 0.2, :when => :now}, 1, true], loaded.to_a
    train(other, 4)
    assert_equal values(run[:model]), values(other[:model])
    assert_equal run[:optimizer].param_groups[0][:lr], other[:optimizer].param_groups[0][:lr]
  end

  DTYPES = %i[bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128].freeze

  # A few elements that use all bits.
  def sample(dtype, shape)
    numbers = Torch.arange(shape.inject(1, :*) * 2).reshape(shape + [2]) * 37 % 101 - 50
    return Torch.complex(*[0, 1].map { |i| numbers.double.select(-1, i) * 0.37 }).type(dtype) if dtype.start_with?("complex")
    return numbers.select(-1, 0).gt(0) if dtype == :bool

    (numbers.double.select(-1, 0) * (dtype.to_s.include?("float") ? 0.37 : 1)).type(dtype)
  end

  def bytes(tensor)
    Distributed.send(:_bytes, tensor.contiguous)
  end

  def test_every_dtype_and_shape
    tensors = DTYPES.product([[], [3], [2, 3], [0, 4]]).to_h { |dtype, shape| ["#{dtype} #{shape}", sample(dtype, shape)] }
    tensors["turned"] = Torch.arange(6).reshape([2, 3]).t
    tensors["gaps"] = Torch.arange(20).reshape([4, 5]).narrow(1, 1, 2)
    tensors["folded"] = Torch.tensor([1.0, 2.0]).unsqueeze(1).expand([2, 3])
    tensors["grad"] = Torch.tensor([1.5, 2.5], requires_grad: true)
    expected = tensors.transform_values { |tensor| [tensor.dtype, tensor.shape, bytes(tensor.detach)] }
    Checkpoint.save(@dir, extra: {tensors: tensors})
    loaded = Checkpoint.load(@dir).extra[:tensors]
    assert_equal expected, loaded.transform_values { |tensor| [tensor.dtype, tensor.shape, bytes(tensor)] }
    refute loaded["grad"].requires_grad

    target = tensors.transform_values { |tensor| Torch.zeros(tensor.shape).type(tensor.dtype) }
    Checkpoint.save(tensors, checkpoint_id: File.join(@dir, "plain"))
    Checkpoint.load(target, checkpoint_id: File.join(@dir, "plain"))
    assert_equal expected, target.transform_values { |tensor| [tensor.dtype, tensor.shape, bytes(tensor)] }
  end

  def test_plain_values_come_back_as_they_were
    values = {
      "nil" => nil, "yes" => true, "large" => 2**90, "float" => [0.1, -0.0, 1e300, 5e-324, 1.0], "text" => "é\n\"", "bytes" => "\xff\x00".b,
      :symbol => :value, 3 => {4.5 => "x"}, "$tensor" => "no tensor", "range" => 1...3, "complex" => Complex(1, 2.5), "deep" => {"a" => [{}, [], [[]]]},
      "infinite" => [Float::INFINITY, -Float::INFINITY], "$a" => {"$b" => 1}
    }
    Checkpoint.save(@dir, extra: values)
    back = Checkpoint.load(@dir).extra
    assert_equal values, back
    assert_equal values.inspect, back.inspect
    Checkpoint.save(@dir, extra: {nan: Float::NAN})
    assert_predicate Checkpoint.load(@dir).extra[:nan], :nan?
  end

  # What counts: its state is a number.
  class Counter
    attr_accessor :count

    def initialize(count = 0) = @count = count

    def state_dict = {"count" => @count}

    def load_state_dict(state) = @count = state["count"]
  end

  OPTIONS = {save: %i[keep name step epoch extra rng sharded process_group checkpoint_id], load: %i[rng strict names convert required process_group]}.freeze

  def test_objects_may_have_the_names_of_options
    names = OPTIONS.values.flatten.uniq
    given = names.each_with_index.to_h { |name, i| [name, Counter.new(i + 1)] }.merge("model" => first = net)
    3.times { |i| Checkpoint.save(@dir, given, step: i, keep: 2) }
    Checkpoint.async_save(@dir, given, step: 3, keep: 2, extra: {"a" => 1}).wait
    assert_equal %w[step-000000003 step-000000002], Checkpoint.list(@dir).map { |folder| File.basename(folder) }
    others = names.to_h { |name| [name.to_s, Counter.new] }
    loaded = Checkpoint.load(@dir, {model: second = net(2), **others.transform_keys(&:to_sym)}, rng: false)
    assert_equal [3, {"a" => 1}, false], [loaded.step, loaded.extra, loaded.rng_restored]
    assert_equal (1..names.size).to_a, others.values.map(&:count)
    assert_equal values(first), values(second)
    Checkpoint.load(@dir, {"keep" => counter = Counter.new})
    assert_equal 1, counter.count
    # Keywords and a Hash are the same checkpoint.
    Checkpoint.save(@dir, counter: Counter.new(7), step: 4)
    Checkpoint.load(@dir, {counter: counter})
    assert_equal 7, counter.count
  end

  def test_an_object_as_an_option_is_an_error
    OPTIONS.each do |operation, names|
      names.each do |name|
        text = /#{name}: is an option of #{operation}, .*CheckpointTest::Counter.*Checkpoint.#{operation}\(path, \{#{name}: object\}\)/
        assert_match text, failure { Checkpoint.public_send(operation, @dir, name => Counter.new) }.last
      end
    end
    counter = Counter.new
    {
      /other: expected an option, or an object within the Hash/ => -> { Checkpoint.save(@dir, {counter: counter}, other: counter) },
      /objects: expected a Hash of names and objects, got CheckpointTest::Counter/ => -> { Checkpoint.save(@dir, counter) },
      /names that are Symbols or Strings, got 5/ => -> { Checkpoint.load(@dir, {5 => counter}) },
      /each name once, got a as/ => -> { Checkpoint.save(@dir, {:a => counter, "a" => counter}) },
      /b: expected an object with state_dict/ => -> { Checkpoint.save(@dir, {b: 5}) },
      /objects: expected them within the state_dict/ => -> { Checkpoint.save({}, {a: counter}, checkpoint_id: @dir) }
    }.each { |text, call| assert_match text, failure(&call)&.last.to_s }
    assert_empty Dir.children(@dir)
  end

  def test_what_cannot_be_saved_is_named
    sparse = Torch.sparse_coo_tensor(Torch.tensor([[0, 1], [1, 0]]), Torch.tensor([1.0, 2.0]), [2, 2])
    {
      /extra.a.0: expected tensors, numbers.* got Object/ => -> { Checkpoint.save(@dir, extra: {"a" => [Object.new]}) },
      /extra.s: expected a dense tensor, got a sparse one/ => -> { Checkpoint.save(@dir, extra: {"s" => sparse}) },
      /extra.c: tensors of this dtype are not saved/ => -> { Checkpoint.save(@dir, extra: {"c" => Torch.empty([1], dtype: :complex_half)}) },
      /model: expected an object with state_dict.* got 5/ => -> { Checkpoint.save(@dir, model: 5) },
      /epoch: expected an Integer of 0 or more, got -1/ => -> { Checkpoint.save(@dir, epoch: -1) },
      /keep: expected how many checkpoints stay, 1 or more, got 0/ => -> { Checkpoint.save(@dir, keep: 0) },
      /extra: expected a Hash, got 4/ => -> { Checkpoint.save(@dir, extra: 4) },
      /path: expected a folder's name, got nil/ => -> { Checkpoint.save(nil) },
      /checkpoint_id: expected the checkpoint's folder, got nil/ => -> { Checkpoint.save({}) },
      /there is no checkpoint, expected a folder/ => -> { Checkpoint.load(@dir) }
    }.each do |text, call|
      capture_io { assert_match text, failure(&call)&.last.to_s }
      assert_empty Dir[File.join(@dir, "*")]
    end
    assert_nil Checkpoint.load(File.join(@dir, "none"), required: false)
    assert_equal "Torch::Distributed::NotFoundError", failure { Checkpoint.load(@dir) }.first
  end

  def test_several_models_and_other_objects
    counter = Class.new do
      attr_accessor :at

      def state_dict = {"at" => @at}

      def load_state_dict(state) = @at = state.fetch("at")
    end
    save = {model: {generator: net(1), critic: [net(2), net(3)]}, sampler: counter.new.tap { |each| each.at = 7 }}
    Checkpoint.save(@dir, **save)
    load = {sampler: counter.new, model: {"generator" => net(4), "critic" => [net(5), net(6)]}}
    Checkpoint.load(@dir, **load)
    assert_equal 7, load[:sampler].at
    assert_equal values(save[:model][:generator]), values(load[:model]["generator"])
    assert_equal save[:model][:critic].map { |each| values(each) }, load[:model]["critic"].map { |each| values(each) }
    assert_match(/scheduler: it was not saved, there is model, sampler/, failure { Checkpoint.load(@dir, scheduler: counter.new) }.last)
    assert_match(/model.third: it was not saved/, failure { Checkpoint.load(@dir, model: {third: net}) }.last)
  end

  def test_a_sampler_goes_on_within_its_epoch
    make = -> { Torch::Utils::Data::DistributedSampler.new(20, num_replicas: 2, rank: 1, seed: 5) }
    sampler = make.call
    sampler.set_epoch(3)
    whole = sampler.to_a
    sampler.each.with_index(1) do |_, count|
      next if count < 4

      Checkpoint.save(@dir, sampler: sampler, step: 4)
      break
    end
    Checkpoint.load(@dir, sampler: other = make.call)
    assert_equal [3, whole.drop(4)], [other.epoch, other.to_a]
  end

  class Tied < Torch::NN::Module
    def initialize
      super
      @first = Torch::NN::Linear.new(3, 3, bias: false)
      @second = Torch::NN::Linear.new(3, 3, bias: false)
      @second.instance_variable_set(:@weight, @first.weight)
    end
  end

  def test_a_shared_parameter_is_kept_once_under_both_names
    Checkpoint.save(@dir, model: model = Tied.new)
    manifest = Checkpoint::Manifest.read(Checkpoint.latest(@dir))
    assert_equal({"first.weight" => {"$tensor" => "model.first.weight"}, "second.weight" => {"$tensor" => "model.first.weight"}},
      manifest["objects"]["model"])
    assert_equal 9 * 4, manifest["tensors"]["model.first.weight"]["bytes"]
    Checkpoint.load(@dir, model: other = Tied.new)
    assert_equal values(model), values(other)
  end

  def test_a_model_that_differs_is_told_and_left_alone
    Checkpoint.save(@dir, model: net)
    other = Torch::NN::Sequential.new(Torch::NN::Linear.new(3, 5), Torch::NN::BatchNorm1d.new(4), Torch::NN::Identity.new,
      Torch::NN::Identity.new, Torch::NN::Linear.new(1, 1))
    before = values(other)
    kind, text = failure { Checkpoint.load(@dir, model: other) }
    assert_equal "Torch::Distributed::CheckpointError", kind
    assert_match(/missing: 4.weight, 4.bias; not known to the model: 3.weight, 3.bias; of another shape: 0.weight \(the model's \[5, 3\], saved \[4, 3\]\)/, text)
    assert_equal before, values(other)

    part = Torch::NN::Sequential.new(Torch::NN::Linear.new(3, 4))
    Checkpoint.load(@dir, model: part, strict: false)
    assert_equal values(net)["0.weight"], values(part)["0.weight"]
  end

  # As DistributedDataParallel names them, and PyTorch's programs save them.
  def test_names_with_and_without_a_wrapper
    wrapped = net(3).state_dict.transform_keys { |key| "module.#{key}" }
    Checkpoint.save({"model" => wrapped}, checkpoint_id: @dir)
    Checkpoint.load(@dir, model: other = net(4))
    assert_equal values(net(3)), values(other)
  end

  def test_a_state_dict_is_filled_in_place
    run = run_of(net, 2)
    state = {"model" => run[:model].state_dict, "optimizer" => run[:optimizer], "epoch" => 3, :list => [Torch.tensor([1]), "x"]}
    assert_equal @dir, Checkpoint.save(state, checkpoint_id: @dir)
    other = run_of(net(2))
    weight = other[:model].state_dict["0.weight"]
    into = {"model" => other[:model].state_dict, "optimizer" => other[:optimizer], "epoch" => nil, :list => [list = Torch.tensor([0]), ""]}
    Checkpoint.load(into, checkpoint_id: @dir)
    assert_equal values(run[:model]), values(other[:model])
    assert_equal run[:model].state_dict["0.weight"].to_a, weight.to_a
    assert_equal [3, "x", [1]], [into["epoch"], into[:list][1], list.to_a]
    assert_equal run[:optimizer].state_dict["state"][0]["step"], other[:optimizer].state_dict["state"][0]["step"]
    assert_match(/more: it was not saved/, failure { Checkpoint.load({"more" => 1}, checkpoint_id: @dir) }.last)
    assert_match(/list.0: expected a tensor of shape \[2\], got a tensor of shape \[1\]/,
      failure { Checkpoint.load({list: [Torch.zeros(2), ""]}, checkpoint_id: @dir) }.last)
  end

  def test_names_and_how_many_stay
    3.times { |i| Checkpoint.save(@dir, extra: {"i" => i}, keep: 2) }
    assert_equal %w[save-000003 save-000002], Checkpoint.list(@dir).map { |each| File.basename(each) }
    Checkpoint.save(@dir, epoch: 4, extra: {"i" => 4})
    Checkpoint.save(@dir, name: "best", extra: {"i" => 5})
    assert_equal %w[best epoch-000004 save-000003 save-000002], Checkpoint.list(@dir).map { |each| File.basename(each) }
    # The newest is the one that was written last, whatever its name and number.
    Checkpoint.save(@dir, epoch: 1, extra: {"i" => 6}, keep: 1)
    assert_equal [6, 1], Checkpoint.load(@dir).then { |loaded| [loaded.extra["i"], loaded.epoch] }
    assert_equal %w[epoch-000001], Dir.children(@dir) - [".lock"]
    Checkpoint.save(@dir, epoch: 1, extra: {"i" => 7, "t" => Torch.ones(3)})
    assert_equal 7, Checkpoint.load(@dir).extra["i"]
    only_file
    assert_match(/is a checkpoint itself/, failure { Checkpoint.save(Checkpoint.latest(@dir), epoch: 2) }.last)
  end

  # Bytes that are changed are noticed, or change nothing that is loaded: all of the data, many of the manifest.
  def test_damaged_bytes_are_noticed
    Checkpoint.save(@dir, epoch: 1, extra: {"t" => Torch.arange(6), "u" => Torch.ones(2, dtype: :float64)}, rng: false)
    expected = {"t" => (0..5).to_a, "u" => [1.0, 1.0]}
    folder = Checkpoint.latest(@dir)
    header = File.binread(only_file, 8).unpack1("Q<") + 8
    [only_file, File.join(folder, "manifest.json")].each do |path|
      good = File.binread(path)
      (0...good.bytesize).each do |at|
        next if (path == only_file) ? at.between?(9, header - 2) : at.between?(40, good.bytesize - 10) && at % 9 > 0

        File.binwrite(path, good.dup.tap { |bad| bad.setbyte(at, bad.getbyte(at) ^ 0x10) })
        kind, text = failure do
          assert_equal expected, Checkpoint.load(folder).extra.transform_values(&:to_a)
        end
        next if path == only_file && at < header

        assert_equal "Torch::Distributed::Checkpoint::DamagedError", kind, "byte #{at} of #{path}"
        assert_includes text, "#{path} is damaged"
      end
      File.binwrite(path, good)
    end
    assert_equal expected, Checkpoint.load(folder).extra.transform_values(&:to_a)
    assert_equal 1, Checkpoint.verify(folder)["epoch"]
  end

  def test_damage_is_told_with_what_was_expected_and_found
    Checkpoint.save(@dir, epoch: 1, extra: {"t" => Torch.arange(6)}, rng: false)
    data = only_file
    good = File.binread(data)
    File.binwrite(data, good[0...-5])
    assert_match(/#{data} is damaged: expected #{good.bytesize} bytes, found #{good.bytesize - 5}/, failure { Checkpoint.verify(@dir) }.last)
    File.binwrite(data, good.dup.tap { |bad| bad.setbyte(-1, 1) })
    sum = format("%08x", Zlib.crc32(good[-48..]))
    assert_match(/#{data} is damaged: extra.t \(48 bytes at \d+\) should have the CRC-32 #{sum}, and has \h{8}/, failure { Checkpoint.verify(@dir) }.last)
    File.delete(data)
    assert_match(/#{data} is missing: expected a file of #{good.bytesize} bytes/, failure { Checkpoint.load(@dir) }.last)
  end

  def test_the_newest_good_one_is_found
    4.times { |i| Checkpoint.save(@dir, epoch: i, extra: {"t" => Torch.full([4], i)}) }
    newest = Checkpoint.list(@dir)
    data = Dir[File.join(newest[0], "data*")].first
    File.binwrite(data, File.binread(data).tap { |bad| bad.setbyte(-1, 9) })
    File.truncate(File.join(newest[1], "manifest.json"), 40)
    FileUtils.mkdir(File.join(@dir, "unfinished"))
    loaded = nil
    _, said = capture_io { loaded = Checkpoint.load(@dir) }
    assert_equal [newest[2], 1, [1] * 4], [loaded.path, loaded.epoch, loaded.extra["t"].to_a]
    assert_match(/checkpoint #{newest[0]} is left out: .*should have the CRC-32/, said)
    assert_match(/checkpoint #{newest[1]} is left out: .*manifest.json is damaged/, said)
    newest.drop(2).each { |folder| FileUtils.rm(Dir[File.join(folder, "data*")]) }
    capture_io { assert_match(/none of its 3 checkpoints is good: .*; .* is missing/, failure { Checkpoint.load(@dir) }.last) }
  end

  def test_a_manifest_that_lies_is_refused
    Checkpoint.save(@dir, extra: {"t" => Torch.arange(6)}, rng: false)
    folder = Checkpoint.latest(@dir)
    content = Checkpoint::Manifest.read(folder).content
    change = ->(&block) { File.binwrite(File.join(folder, "manifest.json"), Checkpoint::Manifest.text(JSON.parse(JSON.generate(content)).tap(&block))) }
    {
      /is no name of a data file/ => ->(lie) { lie["files"] = {"../../x" => lie["files"].values.first} },
      /what it says of extra.t cannot be/ => ->(lie) { lie["tensors"]["extra.t"]["offset"] = 1 << 40 },
      /says of extra.t cannot/ => ->(lie) { lie["tensors"]["extra.t"]["shape"] = [-2, -3] },
      /has version 4 of the format, and this torch-ddp reads versions 1 to 3/ => ->(lie) { lie["version"] = 4 },
      /has "\$eval", which this version does not know/ => ->(lie) { lie["extra"] = {"$eval" => "1"} },
      /says nothing of the tensor other/ => ->(lie) { lie["extra"] = {"$tensor" => "other"} }
    }.each do |text, lie|
      change.call(&lie)
      assert_match text, failure { Checkpoint.load(folder) }&.last.to_s
    end
  end

  def test_leftovers_of_a_killed_writer_go_with_the_next_save
    Checkpoint.save(@dir, epoch: 1)
    half = File.join(@dir, "epoch-000002")
    FileUtils.mkdir(half)
    File.write(File.join(half, Checkpoint::Folder.data_name("0" * 16, 0, 1)), "half")
    File.write(File.join(half, "manifest.json.partial"), "{")
    File.write(File.join(@dir, "epoch-000001", Checkpoint::Folder.data_name("1" * 16, 0, 1)), "half")
    FileUtils.mkdir(File.join(@dir, "notes"))
    File.write(File.join(@dir, "notes", "mine.txt"), "stays")
    assert_equal 1, Checkpoint.load(@dir).epoch
    Checkpoint.save(@dir, epoch: 3)
    assert_equal %w[epoch-000001 epoch-000003 notes], (Dir.children(@dir) - [".lock"]).sort
    assert_equal 2, Dir.children(File.join(@dir, "epoch-000001")).size
  end

  def test_another_run_in_the_same_folder_is_refused
    Checkpoint.save(@dir, epoch: 1)
    held = Checkpoint::Folder.lock(@dir)
    assert_match(/another process is saving into it/, failure { Checkpoint.save(@dir, epoch: 2) }.last)
    held.close
    assert_equal %w[epoch-000001], Dir.children(@dir) - [".lock"]
    Checkpoint.save(@dir, epoch: 2)
  end

  # As programs saved themselves before; test/partners has what PyTorch wrote.
  def test_a_file_of_torch_save
    run = run_of(net, 2)
    path = File.join(@dir, "old.pt")
    rest = {"none" => nil, "lists" => [[1, 2], [1.5], [true], ["a"], []], "deep" => {"a" => {"b" => 1}}, "n" => 2.5}
    Torch.save({"epoch" => 3, "model" => run[:model].state_dict, "optimizer" => run[:optimizer].state_dict, "t" => Torch.arange(3)}.merge(rest), path)
    other = run_of(net(2))
    loaded = Checkpoint.load(path, **other.except(:scheduler))
    assert_equal [3, rest, [0, 1, 2]], [loaded.epoch, loaded.extra.except("t"), loaded.extra["t"].to_a]
    assert_equal values(run[:model]), values(other[:model])
    assert_equal 2, other[:optimizer].state_dict["state"][0]["step"]
    Torch.save(run[:model].state_dict, path)
    Checkpoint.load(path, model: third = net(3))
    assert_equal values(run[:model]), values(third)
    assert_match(/model: it was not saved, there is 0.weight, .*\.\.\. \(9 in all\)/, failure { Checkpoint.load(path, **other) }.last)
  end

  # The folder that is being read may be replaced or removed by the run that saves.
  def test_what_is_replaced_while_it_is_read_is_looked_for_again
    Checkpoint.save(@dir, name: "last", extra: {"t" => Torch.zeros(4)}, rng: false)
    folder = File.join(@dir, "last")
    newer = -> { Checkpoint.save(@dir, name: "last", extra: {"t" => Torch.ones(4)}, rng: false) }
    found = nil
    original = Checkpoint.method(:with_tensors)
    # Between the manifest and the data.
    Checkpoint.define_singleton_method(:with_tensors) do |manifest, &block|
      newer&.call
      newer = nil
      original.call(manifest, &block)
    end
    _, warned = capture_io { found = Checkpoint.load(folder).extra["t"].to_a }
    assert_empty warned
    assert_equal [1.0] * 4, found
  ensure
    Checkpoint.define_singleton_method(:with_tensors, original) if original
  end

  # Whoever reads it knows where a tensor lies.
  def test_the_file_is_of_the_documented_layout
    Checkpoint.save(@dir, extra: {"a" => Torch.tensor([1, 2], dtype: :int16), "b" => Torch.tensor(Complex(1, 2)), "c" => Torch.tensor([0.5])}, rng: false)
    bytes = File.binread(only_file)
    size = bytes.unpack1("Q<")
    header = JSON.parse(bytes[8, size])
    assert_equal 0, size % 8
    assert_equal({"__metadata__" => {"format" => "pt"}, "extra.b" => {"dtype" => "F32", "shape" => [2], "data_offsets" => [0, 8]},
                  "extra.c" => {"dtype" => "F32", "shape" => [1], "data_offsets" => [8, 12]},
                  "extra.a" => {"dtype" => "I16", "shape" => [2], "data_offsets" => [12, 16]}}, header)
    assert_equal [1.0, 2.0, 0.5, 1, 2], bytes[(8 + size)..].unpack("e3s<2")
    assert_equal 8 + size + 16, bytes.bytesize
    manifest = File.read(File.join(Checkpoint.latest(@dir), "manifest.json"))
    assert_equal manifest[10, 8], format("%08x", Zlib.crc32(manifest[30..-3]))
  end
end
