# frozen_string_literal: true

require_relative "test_helper"
require "torch_ddp/flight_trace"

# Files that are no longer what was written, or were made to do harm: they are read exactly or refused by an error of the library's, whatever they
# say of sizes and depths.
class DamagedFilesTest < Minitest::Test
  Checkpoint = Distributed::Checkpoint
  DamagedError = Checkpoint::DamagedError

  # What Python's pickle writes, by hand.
  module Pickle
    module_function

    def text(string) = "X".b + [string.bytesize].pack("L<") + string.b

    def number(value) = "\x8a".b + [8, value].pack("Cq<")

    def global(name) = name.rpartition(".").then { |folder, _, own| "c#{folder}\n#{own}\n" }

    def tuple(*items) = "(#{items.join}t".b

    def list(*items) = "](#{items.join}e".b

    def dict(pairs) = "}(#{pairs.map { |key, value| text(key) + value }.join}u".b

    def storage(key, count, kind: "Float") = tuple(text("storage"), global("torch.#{kind}Storage"), text(key), text("cpu"), number(count)) + "Q"

    def tensor(storage, offset, shape, strides)
      arguments = [storage, number(offset), tuple(*shape.map { |size| number(size) }), tuple(*strides.map { |size| number(size) }), "\x89".b, "}"]
      "#{global("torch._utils._rebuild_tensor_v2")}#{tuple(*arguments)}R".b
    end
  end
  P = Pickle

  def setup
    @dir = Dir.mktmpdir
  end

  def teardown
    FileUtils.rm_rf(@dir)
  end

  # An archive as torch.save writes it, without compression.
  def archive(files, again: {}, count: files.size + again.size)
    body = "".b
    at = files.to_h do |name, bytes|
      start = body.bytesize
      body << ["PK\x03\x04", 0, 0, 0, 0, 0, 0, bytes.bytesize, bytes.bytesize, name.bytesize, 0].pack("a4S<5L<3S<2") << name << bytes
      [name, start]
    end
    rows = files.merge(again.transform_values { |name| files.fetch(name) }).map do |name, bytes|
      ["PK\x01\x02", 0, 0, 0, 0, 0, 0, 0, bytes.bytesize, bytes.bytesize, name.bytesize, 0, 0, 0, 0, 0, at[name] || at[again[name]]].pack("a4S<6L<3S<5L<2") + name
    end.join
    body + rows + ["PK\x05\x06", 0, 0, count, count, rows.bytesize, body.bytesize, 0].pack("a4S<4L<2S<")
  end

  def file(pickle, long: 0, **options)
    path = File.join(@dir, "file.pt")
    files = {"a/data.pkl" => "\x80\x02".b + pickle + ".", "a/data/0" => [1.0, 2.0, 3.0].pack("e3"), "a/long" => "\0" * 4 * long, "a/version" => "3\n"}
    File.binwrite(path, archive(files, **options))
    path
  end

  def read(path) = Timeout.timeout(LIMIT) { Checkpoint::TorchFile.read(path) }

  def refused(text, pickle, **options)
    error = assert_raises(DamagedError, text.inspect) { read(file(pickle.b, **options)) }
    assert_match text, error.message
  end

  W = P.tensor(P.storage("0", 3), 0, [3], [1])

  def test_what_is_shared_is_made_once
    shared = P.dict("w" => W, "two" => "]q\x01#{P.text("x")}a", "one" => P.list("h\x01", "h\x01"))
    found = read(file(shared))
    assert_equal [[1.0, 2.0, 3.0], [["x"], ["x"]], true], [found["w"].to_a, found["one"], found["one"][0].equal?(found["two"])]
  end

  # Each list has the one within it twice: 2^60 values in 60 lists.
  def lists(levels) = levels.zero? ? "]q\x00".b : "]q#{levels.chr}(#{lists(levels - 1)}h#{(levels - 1).chr}e".b

  def dicts(levels) = levels.zero? ? "}q\x00".b : "}q#{levels.chr}(U\x01a#{dicts(levels - 1)}U\x01bh#{(levels - 1).chr}u".b

  def test_lists_and_dicts_that_share_contain_themselves_or_are_deep
    refused(/have \d+ values, and \d{18,} as often/, P.dict("w" => W, "l" => lists(60)))
    refused(/have \d+ values, and \d{18,} as often/, dicts(60))
    refused(/contain themselves/, P.dict("l" => "]q\x00h\x00a"))
    refused(/contain themselves/, "}q\x00U\x01ah\x00s")
    refused(/lie deeper than 200/, "]" * 20_000 + "a" * 19_999)
    # In an order in which each is seen in a shallow place first.
    chain = Array.new(400) { |i| "]r#{[i].pack("L<")}#{"j#{[i - 1].pack("L<")}a" if i.positive?}" }.join
    refused(/lie deeper than 200/, "](#{chain}e")
    assert_equal 150, read(file("]" * 150 + "a" * 149)).to_s.count("[")
  end

  def test_keys_texts_and_calls_that_grow
    refused(/a key that is no number/, "}" + lists(60) + "Ns")
    refused(/a key that is no number/, "}(#{"N" * 80}tNs")
    refused(/keys of a String/, "X\x01\x00\x00\x00aq\x00#{"U\x00h\x00s" * 60}")
    refused(/elements of a String/, "U\x01aq\x00h\x00a")
    refused(/keys of a .*Storage/, P.dict("w" => "#{P.storage("0", 3)}(U\x05count#{P.number(2**40)}u".b))
    refused(/a key in it is a list/, "#{P.global("collections.OrderedDict")}#{P.tuple(P.list(P.list(P.list("N"), "N")))}R")
    refused(/no class, two texts and a number/, P.dict("w" => P.tensor(P.tuple(P.text("storage"), P.global("torch.FloatStorage"), lists(60),
      P.text("cpu"), P.number(3)) + "Q", 0, [3], [1])))
    assert_equal({[1, ["a", nil]] => {}}, read(file("}((#{P.number(1)}(U\x01aNtt}u".b)))
  end

  def test_tensors_that_take_more_than_the_file
    refused(/take far more than its elements do/, P.dict("w" => P.tensor(P.storage("0", 3), 0, [1 << 20, 1 << 20], [0, 0])))
    assert_equal [[1.0, 2.0]] * 2, read(file(P.dict("w" => P.tensor(P.storage("0", 3), 0, [2, 2], [0, 1]))))["w"].to_a
    # Rows of the directory that name the same bytes over and over.
    names = Array.new(300) { |i| "a/data/#{i + 1}" }
    refused(/take more than the whole file/, P.dict(names.to_h { |name| [name, P.tensor(P.storage(name[/\d+/], 3000), 0, [3000], [1])] }),
      again: names.to_h { |name| [name, "a/long"] }, long: 3000)
    refused(/too few for 65000 files/, P.dict("w" => W), count: 65_000)
    refused(/of two dtypes/, P.dict("w" => W, "v" => P.tensor(P.storage("0", 3, kind: "Int"), 0, [3], [1])))
    refused(/no storage and no numbers/, P.dict("w" => P.tensor("N", 0, [3], [1])))
    refused(/no storage and no numbers/, P.dict("w" => P.tensor(P.storage("0", 3), 0, [1] * 65, [1] * 65)))
    refused(/file of torch.save|is damaged/, P.dict("w" => P.tensor(P.storage("0", 3), 0, [0, 2**62], [1, 1])))
  end

  # Any byte of a good file may be another one.
  def test_bytes_that_change
    good = P.dict("w" => W, "column" => P.tensor(P.storage("0", 3), 0, [1, 2], [3, 2]), "n" => P.list(P.number(1), "\x88".b, P.tuple(P.text("a"))))
    bytes = File.binread(file(good.b))
    random = Random.new(5)
    path = File.join(@dir, "changed.pt")
    200.times do |i|
      changed = bytes.dup
      random.rand(1..3).times { changed.setbyte(random.rand(changed.bytesize), random.rand(256)) }
      changed = changed.byteslice(0, random.rand(changed.bytesize)) if (i % 10).zero?
      File.binwrite(path, changed)
      read(path)
    rescue Distributed::Error => e
      assert_kind_of Distributed::CheckpointError, e
    end
  end

  def header(json, data = "")
    path = File.join(@dir, "model.safetensors")
    File.binwrite(path, [json.bytesize].pack("Q<") + json + data)
    path
  end

  def test_headers_of_safetensors
    row = ->(shape, bytes) { %({"w":{"dtype":"F32","shape":#{shape},"data_offsets":[0,#{bytes}]}}) }
    {
      row.call("[#{"1," * 64}1]", 4) => /what it says of "w" cannot be/, row.call("[0,#{2**64}]", 0) => /what it says of "w" cannot be/,
      row.call("[#{"9" * 100_000}]", 4) => /a number of more than 400 digits/, row.call("[1e400]", 4) => /what it says of "w" cannot be/,
      "{\"a\":#{"[" * 100_000}#{"]" * 100_000}}" => /no JSON: nesting of 101 is too deep/, row.call("[-1]", 4) => /cannot be/,
      "{\"a\":#{"{\"a\":" * 100_000}1#{"}" * 100_000}}" => /no JSON: nesting/
    }.each { |json, text| assert_match text, assert_raises(DamagedError) { Checkpoint::Safetensors.load(header(json, "\0" * 4)) }.message }
    index = File.join(@dir, "model.safetensors.index.json")
    ["{\"weight_map\":{\"w\":\"a\\u0000b\"}}", "{\"weight_map\":{\"w\":\"..\"}}", "{\"weight_map\":{\"w\":\"../x\"}}", "{\"weight_map\":[1]}", "[]", "1", "{\"a\":1}",
      "\xff\xfe", "{\"weight_map\":#{"[" * 1000}"].each do |json|
      File.binwrite(index, json)
      assert_raises(DamagedError, json[0, 60]) { Checkpoint::Safetensors.load(index) }
    end
  end

  # Whatever a manifest with a right checksum says, it is refused or read; and others in its folder are found.
  def test_manifests_that_lie
    Checkpoint.save(@dir, extra: {"t" => Torch.ones(3), :s => [1.5, Float::NAN, 2..3], 1 => {"deep" => [Complex(1, 2), "\xff".b]}}, step: 1)
    Checkpoint.save(@dir, extra: {"good" => 1}, name: "good")
    path = File.join(@dir, "step-000000001")
    content = Checkpoint::Manifest.read(path).content
    random = Random.new(3)
    200.times do |i|
      changed = JSON.parse(JSON.generate(content))
      random.rand(1..2).times { damage(changed, random) }
      File.binwrite(File.join(path, "manifest.json"), Checkpoint::Manifest.text(changed))
      begin
        Checkpoint.load(path)
        Checkpoint.verify(path)
      rescue Distributed::Error => e
        assert_kind_of Distributed::CheckpointError, e
      end
      assert_includes Checkpoint.list(@dir), File.join(@dir, "good") if (i % 20).zero?
    end
    nested = %({"crc32":"%s","content":#{"[" * 100_000}#{"]" * 100_000}}\n)
    File.binwrite(File.join(path, "manifest.json"), format(nested, format("%08x", Distributed._crc32("[" * 100_000 + "]" * 100_000))))
    assert_match(/nesting of \d+ is too deep/, assert_raises(DamagedError) { Checkpoint.load(path) }.message)
    assert_equal [File.join(@dir, "good")], Checkpoint.list(@dir)
  end

  # Puts something else somewhere into it.
  def damage(value, random)
    other = [nil, -1, 2**70, 1.5, "x", [], {}, [[]], {"$tensor" => "extra.t"}, {"$map" => 1}, {"$range" => [1, "a", 2]}, {"$symbol" => 1}, true]
    loop do
      keys = value.is_a?(Hash) ? value.keys : (0...value.size).to_a
      return if keys.empty?

      key = keys.sample(random: random)
      inner = value[key]
      next value = inner if (inner.is_a?(Hash) || inner.is_a?(Array)) && !inner.empty? && random.rand(4).positive?

      return (random.rand(5).zero? && value.is_a?(Hash)) ? value.delete(key) : value[key] = other.sample(random: random)
    end
  end

  def test_states_that_are_deep_or_contain_themselves
    deep = 190.times.inject([]) { |inner, _| [inner] }
    Checkpoint.save(@dir, extra: {"deep" => deep, "maps" => 190.times.inject({}) { |inner, _| {1 => inner} }}, name: "deep")
    assert_equal deep, Checkpoint.load(@dir).extra["deep"]
    circle = {}.tap { |hash| hash["self"] = [hash] }
    [circle, 300.times.inject([]) { |inner, _| [inner] }].each do |value|
      assert_match(/extra\.x.*: arrays and hashes lie deeper than 200/,
        assert_raises(Distributed::CheckpointError) { Checkpoint.save(@dir, extra: {"x" => value}) }.message)
    end
  end

  def test_dumps_of_the_flight_recorder
    entry = {"pg_id" => 0, "process_group" => %w[0 default], "collective_seq_id" => 1, "p2p_seq_id" => 0, "is_p2p" => false, "profiling_name" => "tddp:all_reduce",
             "state" => "completed", "input_sizes" => [[4]], "output_sizes" => [[4]], "input_dtypes" => ["float"], "output_dtypes" => ["float"]}
    content = {"version" => "2.10", "rank" => 0, "pg_config" => {"0" => {"name" => "default", "size" => 1, "members" => [0]}},
               "pg_status" => {"0" => {"last_completed_collective" => 1}}, "entries" => [entry, entry.merge("state" => "started", "collective_seq_id" => 2)]}
    random = Random.new(2)
    150.times do
      changed = JSON.parse(JSON.generate(content))
      random.rand(1..3).times { damage(changed, random) }
      File.write(File.join(@dir, "trace_0"), JSON.generate(changed))
      out, err = capture_io { TorchDDP::FlightTrace::Command.new.run([File.join(@dir, "trace_0")]) }
      refute_match(/NoMethodError|TypeError/, out + err)
    end
  end
end
