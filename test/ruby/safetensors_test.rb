# frozen_string_literal: true

require_relative "sharded_checkpoints"

class SafetensorsTest < Minitest::Test
  include ShardedCheckpoints

  Safetensors = Torch::Distributed::Checkpoint::Safetensors
  DamagedError = Torch::Distributed::Checkpoint::DamagedError

  def setup
    @dir = Dir.mktmpdir
    @path = File.join(@dir, "a.safetensors")
  end

  def teardown
    FileUtils.rm_rf(@dir)
  end

  def plain(tensors)
    tensors.transform_values { |tensor| [tensor.dtype, tensor.shape, tensor.detach.to(dtype: :float64).reshape(-1).to_a] }
  end

  def sample
    Torch.manual_seed(3)
    dtypes = %i[float64 float32 bfloat16 int64 int32 int16 int8 uint8]
    tensors = dtypes.to_h { |dtype| [dtype.to_s, (Torch.randn(3, 5) * 20).abs.to(dtype: dtype)] }
    tensors.merge("float16" => Torch.randn(7).type(:float16), "bool" => Torch.tensor([true, false, true]), "none" => Torch.zeros(0, 4),
      "number" => Torch.tensor(2.5), "turned" => Torch.arange(6).reshape([2, 3]).t, "é" => Torch.ones(1))
  end

  def test_tensors_come_back
    tensors = sample
    Safetensors.save(@path, tensors, metadata: {"format" => "pt", "by" => "é"})
    loaded = Safetensors.load(@path)
    assert_equal plain(tensors).sort, plain(loaded).sort
    assert_equal({"format" => "pt", "by" => "é"}, Safetensors.metadata(@path))
    assert_equal %w[a.safetensors], Dir.children(@dir)
    bytes = File.binread(@path)
    size = bytes.unpack1("Q<")
    assert_equal 0, size % 8
    assert_equal({"dtype" => "F64", "shape" => [3, 5], "data_offsets" => [0, 120]}, JSON.parse(bytes[8, size])["float64"])
    assert_equal tensors["float64"].to_a.flatten, bytes[8 + size, 120].unpack("E*")
  end

  def file_of(header, data, length: nil)
    header = JSON.generate(header) unless header.is_a?(String)
    File.binwrite(@path, [length || header.bytesize].pack("Q<") + header.b + data.b)
  end

  # As other tools write it: no metadata, no spaces, names and fields in any order, elements not aligned.
  def test_bytes_of_other_tools
    file_of('{"b":{"data_offsets":[3,11],"shape":[2],"dtype":"F32"},"a":{"dtype":"BOOL","shape":[3,1],"data_offsets":[0,3]},' \
      '"e":{"dtype":"I64","shape":[0],"data_offsets":[3,3]},"s":{"dtype":"BF16","shape":[],"data_offsets":[11,13]}}',
      [1, 0, 1].pack("C*") + [1.5, -2.0].pack("e*") + [0x3fc0].pack("S<"))
    loaded = Safetensors.load(@path)
    assert_equal [[1.5, -2.0], [[true], [false], [true]], [], 1.5], loaded.values_at("b", "a", "e").map(&:to_a) + [loaded["s"].to(dtype: :float32).item]
    assert_equal [%i[float32 bool int64 bfloat16], [[2], [3, 1], [0], []]], [loaded.values.map(&:dtype), loaded.values_at("b", "a", "e", "s").map(&:shape)]
    assert_empty Safetensors.metadata(@path)
  end

  def row(first, last, dtype: "U8", shape: [last - first])
    {"dtype" => dtype, "shape" => shape, "data_offsets" => [first, last]}
  end

  def test_headers_that_cannot_be
    four = "abcd"
    {
      /has 2 bytes, fewer than the header's length takes/ => -> { File.binwrite(@path, "ab") },
      /its header has 100000001 bytes, more than 100000000/ => -> { file_of("{}", "", length: 100_000_001) },
      /its header should have 90 bytes, and the file has 10/ => -> { file_of("{}", "", length: 90) },
      /its header is empty/ => -> { file_of("", "") },
      /does not begin with \{/ => -> { file_of(" {}", "") },
      /no UTF-8/ => -> { file_of("{\"\xff\":1}", "") },
      /its header is no JSON/ => -> { file_of("{\"a\":}", "") },
      /it has two entries "a"/ => -> { file_of("{\"a\":#{row(0, 2).to_json},\"a\":#{row(2, 4).to_json}}", four) },
      /it has two entries "dtype"/ => -> { file_of('{"a":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}', four) },
      /__metadata__ is no object of texts/ => -> { file_of({"__metadata__" => {"a" => 1}}, "") },
      /what it says of "a" cannot be: 5/ => -> { file_of({"a" => 5}, "") },
      /says of "a" cannot be/ => -> { file_of({"a" => row(0, 4, shape: [-4])}, four) },
      /of "a" cannot be/ => -> { file_of({"a" => row(4, 0)}, four) },
      /"a" cannot be/ => -> { file_of({"a" => row(0, 4, shape: [1.5])}, four) },
      /"a", F32 \[2\], should have 8 bytes, and has 4/ => -> { file_of({"a" => row(0, 4, dtype: "F32", shape: [2])}, four) },
      /"a", U8 \[1000000000000, 1000000000000\], should have 1#{"0" * 24} bytes/ => -> { file_of({"a" => row(0, 4, shape: [10**12, 10**12])}, four) },
      /"b" begins at 1, within the tensor before, which ends at 2/ => -> { file_of({"a" => row(0, 2), "b" => row(1, 4)}, four) },
      /nothing stands between 2 and 3, where "b" begins/ => -> { file_of({"a" => row(0, 2), "b" => row(3, 4)}, four) },
      /nothing stands between 0 and 1, where "a" begins/ => -> { file_of({"a" => row(1, 4)}, four) },
      /"a" ends at 5, and the data at 4/ => -> { file_of({"a" => row(0, 5)}, four) },
      /its tensors end at 3, and the data at 4/ => -> { file_of({"a" => row(0, 3)}, four) }
    }.each do |text, write|
      write.call
      error = assert_raises(DamagedError, text.inspect) { Safetensors.load(@path) }
      assert_match text, error.message
      assert_match(/\A#{Regexp.escape(@path)} is damaged, or no file of safetensors: /, error.message)
    end
    file_of({"a" => row(0, 4, dtype: "F8_E4M3")}, four)
    assert_match(/a is F8_E4M3, which libtorch has no tensors of here/, failure { Safetensors.load(@path) }.last)
  end

  def test_arguments
    Safetensors.save(@path, {"a" => Torch.ones(1)})
    before = File.binread(@path)
    {
      /complex64/ => -> { Safetensors.save(@path, {"b" => Torch.tensor([Complex(1, 2)]).type(:complex64)}) },
      /b: expected a Torch::Tensor, got Integer/ => -> { Safetensors.save(@path, {"b" => 5}) },
      /expected names in UTF-8 other than __metadata__/ => -> { Safetensors.save(@path, {"__metadata__" => Torch.ones(1)}) },
      /metadata: expected a Hash of texts/ => -> { Safetensors.save(@path, {}, metadata: {"a" => 1}) },
      /tensors: expected a Hash/ => -> { Safetensors.save(@path, [Torch.ones(1)]) },
      /path: expected a file's name, got nil/ => -> { Safetensors.load(nil) },
      /No such file/ => -> { Safetensors.load(File.join(@dir, "none")) },
      /model: expected a Torch::NN::Module, got 5/ => -> { Safetensors.load_into(5, @path) },
      /max_shard_size: expected a number of bytes.*got "5 cows"/ => -> { Safetensors.save_model(Torch::NN::Linear.new(1, 1), @dir, max_shard_size: "5 cows") },
      /max_shard_size: .* got 0/ => -> { Safetensors.save_model(Torch::NN::Linear.new(1, 1), @dir, max_shard_size: 0) }
    }.each { |text, call| assert_match text, failure(&call)&.last.to_s, text.inspect }
    assert_equal before, File.binread(@path)
    assert_equal %w[a.safetensors], Dir.children(@dir)
    Safetensors.save(@path, {a: Torch.zeros(2)})
    assert_equal [0.0, 0.0], Safetensors.load(@path)["a"].to_a
  end

  # A model's files, sharded or not, are the same, and go into any form.
  {nil => %w[model.safetensors], 700 => %w[model-00001-of-00003.safetensors model-00002-of-00003.safetensors model-00003-of-00003.safetensors
    model.safetensors.index.json]}.each do |limit, names|
    define_method(:"test_a_model_in_#{names.size}_files") do
      dir = @dir
      options = {max_shard_size: limit}.compact
      net = run_of(:plain, :adam, 1)[:model]
      files = Safetensors.save_model(net, File.join(dir, "plain"), **options)
      assert_equal names.sort, files.map { |path| File.basename(path) }.sort
      %i[units wrapped].each do |strategy|
        said = world(3) { Safetensors.save_model(run_of(strategy, :adam, 1)[:model], File.join(dir, strategy.to_s), **options) }
        assert_equal [names], said.map { |paths| paths.map { |path| File.basename(path) }.sort }.uniq
        names.each { |name| assert_equal File.binread(File.join(dir, "plain", name)), File.binread(File.join(dir, strategy.to_s, name)) }
        assert_equal names.sort, Dir.children(File.join(dir, strategy.to_s)).sort
      end
      expected = values({model: net})
      Safetensors.load(File.join(dir, "plain")).each { |name, tensor| assert_equal expected[name], tensor.reshape(-1).to_a }
      {units: 4, wrapped: 2, ddp: 2}.each do |strategy, size|
        loaded = world(size) do
          run = run_of(strategy, :adam, 5)
          Safetensors.load_into(run[:model], (size == 4) ? File.join(dir, "plain") : files.last)
          values(run)
        end
        assert_equal [expected] * size, loaded
      end
      other = run_of(:plain, :adam, 6)
      Safetensors.load_into(other[:model], files.last)
      assert_equal expected, values(other)
    end
  end

  def test_files_that_are_there_are_replaced
    net = Net.new
    Safetensors.save_model(net, @dir, max_shard_size: "1KB")
    several = Dir.children(@dir).sort
    assert_includes several, "model.safetensors.index.json"
    assert_equal({"total_size" => 4 * (17 * 5 + 17 + 289 + 51 + 3 + 20) + 8}, JSON.parse(File.read(File.join(@dir, several.last)))["metadata"])
    Safetensors.save_model(net, @dir)
    assert_equal (several - ["model.safetensors.index.json"] + ["model.safetensors"]).sort, Dir.children(@dir).sort
    assert_equal net.norm.running_var.to_a, Safetensors.load(@dir)["norm.running_var"].to_a
    Safetensors.save_model(net, @dir, max_shard_size: "1KiB")
    refute File.exist?(File.join(@dir, "model.safetensors"))
  end

  # Half precision goes into a model of single precision, and the other way round.
  def test_precisions
    weights = {"weight" => Torch.randn(30, 20).to(dtype: :bfloat16), "bias" => Torch.randn(30).to(dtype: :float64)}
    Safetensors.save(@path, weights)
    path = @path
    loaded = world(2) do
      net = FSDP.fully_shard(Torch::NN::Linear.new(20, 30))
      Safetensors.load_into(net, path, convert: true)
      FSDP.full_state_dict(net).transform_values { |tensor| tensor.reshape(-1).to_a }
    end
    expected = weights.transform_values { |tensor| tensor.to(dtype: :float32).reshape(-1).to_a }
    assert_equal [expected] * 2, loaded
  end

  def test_what_does_not_fit
    Safetensors.save(@path, {"weight" => Torch.zeros(3, 2), "bias" => Torch.zeros(3)})
    numbers = File.join(@dir, "numbers")
    Safetensors.save(numbers, {"weight" => Torch.zeros(3, 2), "bias" => Torch.zeros([3], dtype: :int64)})
    path = @path
    said = world(2) do
      nets = [Torch::NN::Linear.new(3, 3), Torch::NN::Linear.new(2, 3, bias: false), Torch::NN::Sequential.new(Torch::NN::Linear.new(2, 3)),
        Torch::NN::Linear.new(2, 3)]
      nets.each { |net| FSDP.fully_shard(net) }
      before = nets.map { |net| values({model: net}) }
      errors = nets.map { |net| failure { Safetensors.load_into(net, (net == nets.last) ? numbers : path) } }
      same = before == nets.map { |net| values({model: net}) }
      Safetensors.load_into(nets[1], path, strict: false)
      [errors, same, nets[1].weight.abs.sum.item]
    end
    texts = [
      /cannot load .*a.safetensors: .*does not fit this Torch::NN::Linear: of another shape: weight \(the model's \[3, 3\], saved \[3, 2\]\)/,
      /not known to the model: bias/, /missing: 0.weight, 0.bias; not known to the model: weight, bias/,
      /of another dtype: bias \(the model's float32, in the file I64\)/
    ]
    said.each do |errors, same, sum|
      assert same
      assert_equal 0.0, sum
      errors.zip(texts) { |(kind, message), text| assert_equal "Torch::Distributed::CheckpointError", kind and assert_match(text, message) }
    end
  end

  Checkpoint = Torch::Distributed::Checkpoint

  # As in a folder of a hub: the file of some other program.
  def hub_files(header_metadata: {"format" => "pt"})
    tensors = {"model.a.weight" => Torch.arange(6, dtype: :float32).reshape([3, 2]), "model.a.bias" => Torch.tensor([0.5, 1.5, 2.5])}
    Safetensors.save(File.join(@dir, "model.safetensors"), tensors, metadata: header_metadata)
    tensors
  end

  def pair
    Torch::NN::Sequential.new(Torch::NN::Linear.new(2, 3))
  end

  def test_checkpoint_load_takes_them
    net = Net.new
    [nil, 700].each_with_index do |limit, i|
      folder = File.join(@dir, i.to_s)
      files = Safetensors.save_model(net, folder, **{max_shard_size: limit}.compact)
      [folder, files.last].each do |path|
        other = Net.new
        loaded = Checkpoint.load(path, model: other, rng: false)
        assert_equal values({model: net}), values({model: other})
        assert_equal [files.last, nil, nil, {}, nil, false], loaded.to_a
      end
      sharded = world(2) do
        run = run_of(:units, :adam, 5)
        Checkpoint.load(folder, {weights: run[:model]})
        values(run)
      end
      assert_equal [values({model: net})] * 2, sharded
    end
    assert_nil Checkpoint.load(File.join(@dir, "none.safetensors"), model: net, required: false)
    # What the library itself saved comes first.
    Safetensors.save_model(net, @dir)
    Checkpoint.save(@dir, model: other = Net.new)
    Checkpoint.load(@dir, model: third = Net.new)
    assert_equal values({model: other}), values({model: third})
  end

  def test_names_of_others
    tensors = hub_files
    hash = {"model.a.weight" => "0.weight", "model.a.bias" => "0.bias"}
    [hash, hash.to_h { |from, to| [from.to_sym, to.to_sym] }, ->(name) { name.sub("model.a", "0") }].each do |names|
      Checkpoint.load(@dir, model: net = pair, names: names)
      assert_equal tensors.values.map(&:to_a), net.parameters.map { |each| each.detach.to_a }
      Safetensors.load_into(net = pair, @dir, names: names)
      assert_equal tensors.values.map(&:to_a), net.parameters.map { |each| each.detach.to_a }
    end
    bare = Torch::NN::Sequential.new(Torch::NN::Linear.new(2, 3, bias: false))
    Checkpoint.load(@dir, model: bare, names: hash.merge("model.a.bias" => nil))
    assert_equal tensors["model.a.weight"].to_a, bare.parameters.first.detach.to_a
    {
      /missing: 0.weight, 0.bias; not known to the model: model.a.weight, model.a.bias/ => nil,
      /missing: 0.bias; not known to the model: model.a.bias/ => {"model.a.weight" => "0.weight"},
      /names: .*model.safetensors has no b/ => hash.merge("b" => "c"), /model.a.weight and model.a.bias all become x/ => ->(_) { "x" },
      /expected a name of the model's or nil for model.a.weight, got 5/ => ->(_) { 5 }, /names: expected a Hash of names.* got 5/ => 5
    }.each do |text, names|
      before = (net = pair).parameters.map { |each| each.detach.to_a }
      assert_match text, failure { Checkpoint.load(@dir, model: net, names: names) }&.last.to_s
      assert_equal before, net.parameters.map { |each| each.detach.to_a }
    end
  end

  def test_dtypes_are_converted_only_where_that_is_asked_for
    weights = Torch.tensor([[0.1, 2.0], [-3.3, 1e-3]])
    %i[bfloat16 float16 float64].each do |dtype|
      Safetensors.save(@path, {"weight" => weights.to(dtype: dtype)}, metadata: {"format" => "pt"})
      net = Torch::NN::Linear.new(2, 2, bias: false)
      before = net.weight.to_a
      kind, text = failure { Checkpoint.load(@path, model: net) }
      assert_match(/of another dtype: weight \(the model's float32, in the file \w+; convert: true converts\)/, text)
      assert_equal ["Torch::Distributed::CheckpointError", before], [kind, net.weight.to_a]
      Checkpoint.load(@path, model: net, convert: true)
      assert_equal [weights.to(dtype: dtype).to(dtype: :float32).to_a, :float32], [net.weight.detach.to_a, net.weight.dtype]
    end
    Safetensors.save(@path, {"weight" => weights})
    half = Torch::NN::Linear.new(2, 2, bias: false).to(:bfloat16)
    assert_match(/the model's bfloat16, in the file F32/, failure { Checkpoint.load(@path, model: half) }.last)
    Checkpoint.load(@path, model: half, convert: true)
    assert_equal weights.to(dtype: :bfloat16).to(dtype: :float32).to_a, half.weight.detach.to(dtype: :float32).to_a
    Safetensors.save(@path, {"weight" => weights.to(dtype: :int64)})
    assert_match(/weight \(the model's bfloat16, in the file I64\)/, failure { Checkpoint.load(@path, model: half, convert: true) }.last)
  end

  def test_what_checkpoint_load_refuses
    hub_files
    net = pair
    optimizer = Torch::Optim::SGD.new(net.parameters, lr: 1)
    {
      /holds one model: expected one Torch::NN::Module, under any name, got none/ => -> { Checkpoint.load(@dir) },
      /got optimizer \(Torch::Optim::SGD\)/ => -> { Checkpoint.load(@dir, optimizer: optimizer) },
      /got model \(.*\), optimizer/ => -> { Checkpoint.load(@dir, model: net, optimizer: optimizer) },
      /there is no checkpoint, expected .* or one of safetensors/ => -> { Checkpoint.load(File.join(@dir, "x.safetensors"), model: net) }
    }.each { |text, call| assert_match text, failure(&call)&.last.to_s }
    Checkpoint.save(File.join(@dir, "own"), model: net)
    {names: {}, convert: true}.each do |name, value|
      text = failure { Checkpoint.load(File.join(@dir, "own"), {model: net}, name => value) }.last
      assert_match(/#{name}: expected files of safetensors, which it is for, got .*own/, text)
    end
    File.binwrite(@path, "ab")
    kind, text = failure { Checkpoint.load(@path, model: net) }
    assert_equal DamagedError.name, kind
    assert_match(/is damaged, or no file of safetensors/, text)
    index = {"weight_map" => {"0.weight" => "none.safetensors", "0.bias" => "none.safetensors"}}
    File.write(File.join(@dir, "x.safetensors.index.json"), JSON.generate(index))
    said = world(2) do |rank|
      [failure { Checkpoint.load(@dir, model: pair) }, failure { Checkpoint.load(File.join(@dir, "x.safetensors.index.json"), model: pair) },
        failure { Checkpoint.load(rank.zero? ? @dir : @path, model: pair) }]
    end
    said.each do |misfit, missing, _|
      assert_equal ["Torch::Distributed::CheckpointError", "Torch::Distributed::NotFoundError"], [misfit[0], missing[0]]
      assert_match(/rank 0: .*missing: 0.weight, 0.bias.*rank 1/, misfit[1])
    end
    assert_equal said[0][2], said[1][2]
  end

  def test_an_index_that_cannot_be
    files = Safetensors.save_model(Net.new, @dir, max_shard_size: 700)
    content = JSON.parse(File.read(files.last))
    {
      /no index of safetensors: it has no weight_map of names and files beside it/ => ->(index) { index["weight_map"]["last.bias"] = "../x" },
      /it says that "other" is in model-00001-of-00003.safetensors, which has none/ => lambda { |index|
        index["weight_map"]["other"] = "model-00001-of-00003.safetensors"
      },
      /has no weight_map/ => ->(index) { index["weight_map"] = nil },
      /No such file/ => ->(index) { index["weight_map"]["last.bias"] = "gone.safetensors" }
    }.each do |text, change|
      File.write(files.last, JSON.generate(JSON.parse(JSON.generate(content)).tap(&change)))
      assert_match text, failure { Safetensors.load(@dir) }&.last.to_s
    end
    File.write(files.last, "[1]")
    assert_match(/is damaged, or no index of safetensors/, failure { Safetensors.load(@dir) }.last)
  end

  # What a writer that was killed leaves has another name.
  def test_a_file_is_whole_or_not_there
    Safetensors.save(@path, {"a" => Torch.ones(3)})
    pid = fork do
      trap("XFSZ", "SYSTEM_DEFAULT")
      Process.setrlimit(:FSIZE, 4000)
      Safetensors.save(@path, {"a" => Torch.zeros(3000)})
    ensure
      exit!(0)
    end
    assert_equal Signal.list["XFSZ"], Process.wait2(pid)[1].termsig
    assert_equal [1.0] * 3, Safetensors.load(@path)["a"].to_a
  end
end
