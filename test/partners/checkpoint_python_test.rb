# frozen_string_literal: true

require_relative "../ruby/divided_models"
require_relative "partner"

# What PyTorch's torch.save wrote is loaded here, and what was saved here is read in Python by its documented layout.
class CheckpointPythonTest < Minitest::Test
  include Partner

  Checkpoint = Distributed::Checkpoint
  SCRIPT = File.join(__dir__, "checkpoint_partner.py")

  # As in the script.
  OPTIMIZERS = {
    "Adadelta" => {lr: 0.5}, "Adagrad" => {lr: 0.05}, "Adam" => {lr: 0.01}, "Adamax" => {lr: 0.02}, "AdamW" => {lr: 0.01, amsgrad: true},
    "ASGD" => {lr: 0.05}, "RMSprop" => {lr: 0.01, momentum: 0.9, centered: true}, "Rprop" => {lr: 0.01},
    "SGD" => {lr: 0.1, momentum: 0.9, nesterov: true}
  }.freeze

  def python(*arguments)
    out, err, status = run_python(SCRIPT, *arguments, limit: 120)
    assert status.success?, err
    out
  end

  # One run of Python serves all the tests.
  def written
    @@written ||= Dir.mktmpdir.tap do |dir|
      python("write", dir)
      Minitest.after_run { FileUtils.rm_rf(dir) }
    end
  end

  def net
    Torch::NN::Sequential.new(Torch::NN::Linear.new(3, 4), Torch::NN::BatchNorm1d.new(4), Torch::NN::Linear.new(4, 2))
  end

  def train(model, optimizer, steps)
    steps.each do |step|
      model.parameters.each_with_index do |parameter, i|
        numbers = Torch.arange(parameter.numel).float
        parameter.grad = Torch.sin(numbers * (i + 1) + step).reshape(parameter.shape)
      end
      optimizer.step
    end
  end

  OPTIMIZERS.each do |name, options|
    define_method(:"test_a_run_with_#{name}_goes_on_here") do
      model = net
      optimizer = Torch::Optim.const_get(name).new(model.parameters, **options)
      loaded = Checkpoint.load(File.join(written, "#{name}.pt"), model: model, optimizer: optimizer)
      assert_equal [2, 30, {"loss" => 0.25, "note" => ["é", nil, true]}, nil, false],
        [loaded.epoch, loaded.step, loaded.extra, loaded.world_size, loaded.rng_restored]
      train(model, optimizer, 3...6)
      after = net
      Checkpoint.load(File.join(written, "#{name}.after.pt"), model: after)
      # torch-rb's formulas round otherwise here and there.
      after.state_dict.each do |key, tensor|
        assert Torch.allclose(tensor.detach.double, model.state_dict[key].detach.double, rtol: 1e-4, atol: 1e-6), "#{name}: #{key}"
      end
    end
  end

  def test_tensors_of_every_kind
    loaded = Checkpoint.load(File.join(written, "tensors.pt")).extra
    base = (0...24).each_slice(6).map { |row| row.map(&:to_f) }
    assert_equal base.transpose, loaded["turned"].to_a
    assert_equal base.drop(1).map { |row| row.values_at(0, 2, 4) }, loaded["gaps"].to_a
    assert_equal [[1.0, 2.0]] * 3, loaded["folded"].to_a
    assert_equal [[], 5, [0, 3], [1.0, 1.0]],
      [loaded["scalar"].shape, loaded["scalar"].item, loaded["empty"].shape, loaded["parameter"].to_a]
    assert_equal [[4, 6], 1 << 70, -5, [1, [2.5, {"a" => "\x00\xff".b}]]], loaded.values_at("size", "large", "negative", "list")
    numbers = [0, 2, 4, 1, 3, 0]
    %w[uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128].each do |dtype|
      assert_equal [dtype.to_sym, numbers], [loaded[dtype].dtype, (dtype.start_with?("complex") ? Torch.real(loaded[dtype]) : loaded[dtype].float).to_a]
    end
    assert_equal [:bool, numbers.map { |number| number != 0 }], [loaded["bool"].dtype, loaded["bool"].to_a]

    into = {"turned" => Torch.zeros(6, 4), "list" => nil}
    Checkpoint.load(into, checkpoint_id: File.join(written, "tensors.pt"))
    assert_equal [base.transpose, [1, [2.5, {"a" => "\x00\xff".b}]]], [into["turned"].to_a, into["list"]]
  end

  def test_what_is_no_plain_value_is_refused
    {
      "function.pt" => /has a posixpath.join, which is no plain value/, "module.pt" => /pickle code "\\x81"/, "bare.pt" => /expected a dict, got a tensor/,
      "old.pt" => /torch-rb cannot load it/, "missing.pt" => /there is no checkpoint/
    }.each do |file, text|
      assert_match text, failure { Checkpoint.load(File.join(written, file), model: net) }.last
    end
    good = File.binread(File.join(written, "Adam.pt"))
    Dir.mktmpdir do |dir|
      path = File.join(dir, "cut.pt")
      [good.bytesize / 2, good.bytesize - 10, 100].each do |size|
        File.binwrite(path, good[0, size])
        assert_match(/#{path} is damaged, or no file of torch.save/, failure { Checkpoint.load(path, model: net) }.last)
      end
    end
  end

  def test_python_reads_what_is_saved_here
    Dir.mktmpdir do |dir|
      model = net
      extra = {
        "bool" => Torch.tensor([true, false]), "half" => Torch.tensor([0.5, -2.0]).type(:float16), "bfloat16" => Torch.tensor([1.5]).type(:bfloat16),
        "int8" => Torch.tensor([-3], dtype: :int8), "complex" => Torch.tensor([Complex(1, -2)]), "scalar" => Torch.tensor(7),
        "empty" => Torch.zeros(0, 2)
      }
      results = world(2) do
        Checkpoint.save(dir, model: model, extra: extra, sharded: true)
      end
      found = JSON.parse(python("read", results[0]))
      model.state_dict.each { |key, tensor| assert_equal tensor.detach.double.to_a, tensor.shape.empty? ? [found["model.#{key}"][1]] : found["model.#{key}"][1] }
      assert_equal({"bool" => ["bool", [1, 0]], "half" => ["float16", [0.5, -2]], "bfloat16" => ["bfloat16", [1.5]], "int8" => ["int8", [-3]],
                    "complex" => ["complex64", [[1, -2]]], "scalar" => ["int64", 7], "empty" => ["float32", []]},
        extra.keys.to_h { |key| [key, found["extra.#{key}"]] })
      assert_equal %w[rng.0 rng.1], found.keys.grep(/\Arng/).sort
    end
  end

  # Pieces of rows, and parts of rows, are added up there: what is written twice would be seen.
  def test_python_reads_what_layouts_divide
    Dir.mktmpdir do |dir|
      folder, expected = world(4) do
        run = DividedModels::Run.new(nil, nil, {})
        divided = DividedRuns.new.run
        [run, divided].each { |each| each.step(0) }
        folder = Checkpoint.save(dir, **divided.objects, rng: false)
        [folder, run.model.state_dict.transform_values { |tensor| tensor.detach.double.reshape(-1).to_a }]
      end.first
      assert_equal 3, Checkpoint::Manifest.read(folder)["version"]
      found = JSON.parse(python("pieces", folder))
      expected.except("head.weight").each { |name, numbers| assert_equal numbers, [found["model.#{name}"]].flatten, name }
      refute_includes found, "model.head.weight"
    end
  end

  # FSDP over rows and columns.
  class DividedRuns
    include DividedModels

    def run
      runs(DividedModels.forms("fsdp2_tp2" => {fsdp: 2, tp: 2}))["fsdp2_tp2"].call(1)
    end
  end
end
