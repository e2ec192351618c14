# frozen_string_literal: true

require_relative "divided_models"

# Checkpoints of models that tensor dimensions and stages divide, alone and along with FSDP and ZeRO.
class CheckpointLayoutsTest < Minitest::Test
  include DividedModels

  FORMS = DividedModels.forms("plain" => {}, "tp4" => {tp: 4}, "fsdp3" => {fsdp: 3}, "fsdp2_tp2" => {fsdp: 2, tp: 2},
    "zero2_tp2" => {zero: 2, tp: 2}, "pp2_tp2" => {pp: 2, tp: 2})

  def setup
    @dir = Dir.mktmpdir
  end

  def teardown
    FileUtils.rm_rf(@dir)
  end

  # test/slow/checkpoint_layouts_test.rb has all pairs of more forms.
  def test_a_run_goes_on_in_another_form
    pairs = FORMS.zip(FORMS.rotate) + FORMS.flat_map { |form| [[form, FORMS[0]], [FORMS[0], form]] }
    dir = @dir
    faults = world(4) { faults_of(dir, FORMS, pairs.uniq) }
    assert_equal [], faults.flatten
    versions = FORMS.to_h { |form| [form.name, Checkpoint::Manifest.read(Checkpoint.latest(File.join(dir, form.name)))["version"]] }
    assert_equal [1, 3, 2, 3, 3, 3], versions.values
  end

  # The elements of tensors that have gaps are written once, and a rank that has the same ones again reads no others.
  def test_what_is_written_and_read
    dir = @dir
    said = world(4) do
      make = runs(FORMS.values_at(1, 3))
      make.map do |name, form|
        run = form.call(1)
        run.step(0)
        folder = Checkpoint.save(File.join(dir, name), **run.objects, rng: false)
        own = run.parameters.values.uniq(&:object_id).sum { |parameter| Distributed::LocalPiece.numel(parameter) * 4 }
        [folder, own, bytes_read { Checkpoint.load(folder, **run.objects) }]
      end
    end
    elements = 8 * 6 + 8 * 6 + 8 + 6 * 8 + 6 + 2 * 6 + 24 * 6 + 24 + 8
    said.first.each do |folder, _, _|
      manifest = Checkpoint::Manifest.read(folder)
      assert_equal 3, manifest["version"]
      assert_equal 3 * 4 * elements + 12 * 4 + 8, manifest["files"].values.sum { |file| file["bytes"] - file["header_bytes"] }
    end
    place = Checkpoint::Manifest.read(said[0][0][0])["tensors"]["model.down.weight"]
    expected = [0, 2, 4, 6].map { |start| {"start" => start, "count" => 12, "width" => 2, "stride" => 8} }
    assert_equal expected, place["pieces"].map { |piece| piece.slice("start", "count", "width", "stride") }
    # The buffers are 56 bytes.
    said.flatten(1).each { |_, own, read| assert_equal 3 * own + 56, read }
  end

  # Counts the bytes of tensors that are read.
  module Counting
    class << self
      attr_accessor :bytes
    end

    def _read_tensor(tensor, *place)
      Counting.bytes += tensor.numel * tensor.element_size
      super
    end
  end

  def bytes_read
    Counting.bytes = 0
    Distributed.singleton_class.prepend(Counting)
    yield
    Counting.bytes
  end

  # What does not fit, and how all ranks are told. In the second stage of two: the norm, qkv and the head.
  def test_what_does_not_fit
    dir = @dir
    said = world(4) do |rank|
      make = runs(FORMS.values_at(0, 1, 5))
      make["plain"].call(1)&.then do |run|
        run.step(0)
        Checkpoint.save(File.join(dir, "plain"), **run.objects, process_group: run.group)
        run.model.add_module("more", Torch::NN::Linear.new(1, 1))
        Checkpoint.save(File.join(dir, "more"), **run.objects, process_group: run.group)
        Torch.save({"model" => run.model.state_dict, "optimizer" => run.optimizer.state_dict}, File.join(dir, "numbers.pt"))
        less = Torch::NN::Sequential.new.tap { |model| model.add_module("embed", Torch::NN::Embedding.new(8, 6)) }
        Checkpoint.save(File.join(dir, "less"), model: less, process_group: run.group)
      end
      Distributed.barrier
      divided, staged = make.values_at("tp4", "pp2_tp2").map { |form| form.call(2) }
      before = staged.parameters.transform_values { |tensor| tensor.detach.clone }
      errors = [
        make["plain"].call(1)&.then { |alone| failure { Checkpoint.save(dir, model: divided.model, process_group: alone.group) } },
        failure { Checkpoint.load(File.join(dir, "more"), model: staged.model) },
        failure { Checkpoint.load(File.join(dir, "less"), model: staged.model) },
        failure { Checkpoint.load(File.join(dir, "numbers.pt"), **staged.objects, strict: false) },
        failure { Checkpoint.save(dir, **divided.objects, sharded: false) },
        failure { Checkpoint.save(dir, model: rank.zero? ? divided.model : staged.model) },
        failure { Checkpoint.load(File.join(dir, "plain"), model: smaller(divided.groups[:tp])) }
      ]
      same = before.all? { |name, tensor| tensor.equal(staged.parameters[name].detach) }
      Checkpoint.load(File.join(dir, "more"), model: staged.model, strict: false)
      [errors, same, before.none? { |name, tensor| tensor.equal(staged.parameters[name].detach) }]
    end
    texts = [
      nil, /model: what was saved does not fit: not known to any rank: more.weight, more.bias/, /rank 2: model: .* missing: norm.weight/,
      /rank 0: optimizer: what was saved does not fit this Torch::Optim::Adam: it was saved by numbers without names/,
      /sharded: expected true or nil, got false: each rank has a part of the model/, /the ranks have different tensors/,
      /of another shape: up.weight \(the model's \[4, 6\], saved \[8, 6\]\)/
    ]
    assert_equal [true], said.flat_map { |each| each.drop(1) }.uniq
    assert_match(/model.embed.weight: element 12 of 48 is on none of these ranks/, said[0][0][0]&.last.to_s)
    said.each { |errors, _| texts.zip(errors).drop(1).each { |text, error| assert_match text, error&.last.to_s } }
  end

  def smaller(group)
    Torch::NN::Sequential.new.tap do |model|
      model.add_module("up", up = Torch::NN::Linear.new(6, 4))
      Distributed::Tensor.divide(up.weight, DividedModels::Layout.new(group, [4, 6], dim: 0))
    end
  end

  def test_manifests_that_lie_of_rows
    folder = world(2) { Checkpoint.save(@dir, model: runs(DividedModels.forms("tp2" => {tp: 2}))["tp2"].call(1).model) }.first
    content = Checkpoint::Manifest.read(folder).content
    cannot = /what it says of model.down.weight cannot be/
    [
      [/its pieces reach to element 4 of 48/, ->(pieces) { pieces.pop }], [cannot, ->(pieces) { pieces[0]["stride"] = 4 }],
      [cannot, ->(pieces) { pieces[0]["width"] = 5 }], [cannot, ->(pieces) { pieces[1]["start"] = 5 }],
      [cannot, ->(pieces) { pieces[1].delete("width") }]
    ].each do |text, lie|
      changed = JSON.parse(JSON.generate(content)).tap { |each| lie.call(each["tensors"]["model.down.weight"]["pieces"]) }
      File.binwrite(File.join(folder, "manifest.json"), Checkpoint::Manifest.text(changed))
      assert_match text, failure { Checkpoint.load(folder) }&.last.to_s
    end
  end
end
