# frozen_string_literal: true

require_relative "test_helper"
require "open3"
require "rbconfig"
require "tmpdir"
require "torch-ddp"

# What scripts written for torch-ddp 0.3 find, whatever version of torch-rb there is.
class TorchDdp03Test < Minitest::Test
  def setup
    @dir = Dir.mktmpdir
    @file = File.join(@dir, "saved.pt")
  end

  def teardown
    FileUtils.remove_entry(@dir)
  end

  def test_items_and_devices
    assert_equal 1, Torch.tensor([[1]]).item
    assert_equal 2.5, Torch.tensor(2.5).item
    assert_equal true, Torch.tensor([true]).item
    assert_raises(Torch::Error) { Torch.tensor([1, 2]).item }
    assert_equal "cpu", Torch.device("cpu").to_s
    assert_equal "cuda:1", Torch.device("cuda:1").to_s
    assert_equal "on cuda", "on #{Torch.device("cuda")}"
  end

  def test_gpus
    assert_nil Torch::CUDA.empty_cache
    error = assert_raises(ArgumentError) { Torch::CUDA.set_device("gpu 1") }
    assert_equal "device: expected a GPU's number or \"cuda:1\", for instance, got \"gpu 1\"", error.message
    assert_raises(ArgumentError) { Torch::CUDA.set_device(-1) }
    if Torch::CUDA.available?
      assert_nil Torch::CUDA.set_device(0)
      assert_equal "cuda:0", Torch.zeros(1, device: "cuda").device.to_s
    else
      assert_raises(Torch::Error) { Torch::CUDA.set_device(0) }
    end
  end

  def test_loading_with_keywords
    model = Torch::NN::Linear.new(2, 1)
    Torch.save(model.state_dict, @file)
    [{}, {weights_only: true}, {map_location: "cpu"}, {map_location: {"cuda:0" => "cpu"}, weights_only: true},
      {map_location: Torch.device("cpu")}, {map_location: ->(tensor, _) { tensor }}, {weights_only: false}].each do |keywords|
      loaded = Torch.load(@file, **keywords)
      assert_equal %w[bias weight], loaded.keys.sort
      assert_equal model.weight.to_a, loaded["weight"].to_a
      other = Torch::NN::Linear.new(2, 1)
      other.load_state_dict(loaded)
      assert_equal model.bias.to_a, other.bias.to_a
    end
  end

  def test_locations_are_asked_about_and_results_used
    Torch.save({"a" => Torch.tensor([1.0, 2.0]), "n" => 3}, @file)
    asked = []
    loaded = Torch.load(@file, map_location: lambda { |tensor, location|
      asked << location
      tensor * 2
    })
    assert_equal ["cpu"], asked
    assert_equal [2.0, 4.0], loaded["a"].to_a
    assert_equal 3, loaded["n"]
    error = assert_raises(Torch::Error) { Torch.load(@file, map_location: ->(_, _) { 1 }) }
    assert_match(/expected a tensor or nil from the call, got Integer/, error.message)
    error = assert_raises(ArgumentError) { Torch.load(@file, map_location: 5) }
    assert_match(/map_location: expected a device, .* got 5/, error.message)
  end

  # As a file that was saved on a machine with a GPU has it.
  def test_tensors_of_a_gpu_where_there_is_none
    Torch.save({"a" => Torch.tensor([1.0, 2.0])}, @file)
    bytes = File.binread(@file)
    # A text of the same size: what is read is no name of a device, and a Hash maps it.
    assert_includes bytes, "X\x03\x00\x00\x00cpu".b
    File.binwrite(@file, bytes.gsub("X\x03\x00\x00\x00cpu".b, "X\x03\x00\x00\x00gpu".b))
    assert_equal [1.0, 2.0], Torch.load(@file, map_location: {"gpu" => "cpu"})["a"].to_a
    assert_equal [1.0, 2.0], Torch.load(@file, map_location: :cpu)["a"].to_a
    return if Torch::CUDA.available?

    error = assert_raises(Torch::Error) { Torch.load(@file, map_location: {"gpu" => "cuda:0"}) }
    assert_match(/has tensors for cuda:0, and there is no GPU: give map_location: "cpu"/, error.message)
  end

  def test_what_is_no_plain_value_is_refused
    File.binwrite(@file, "no archive")
    assert_raises(Torch::Error) { Torch.load(@file, weights_only: true) }
  end

  def test_gradients_by_hooks
    grads = Torch::Distributed.fork_world(3) do |rank, _|
      Torch::Distributed.init_process_group("gloo", rank: rank, world_size: 3)
      layer = Torch::NN::Linear.new(2, 1)
      layer.parameters.each { |parameter| Torch::Distributed.register_ddp_hook(parameter, nil, 3) }
      error = begin
        Torch::Distributed.register_ddp_hook(Torch.ones(1), Torch::Distributed.default_process_group, 3)
      rescue ArgumentError => e
        e.message
      end
      2.times { layer.call(Torch.tensor([[rank + 1.0, 2.0 * rank]])).sum.backward }
      [layer.parameters.map { |parameter| parameter.grad.to_a }, error]
    end
    # Means over the ranks of 1, 2, 3 and of 0, 2, 4; the second backward adds the same again.
    assert_equal [[[[[4.0, 4.0]], [2.0]], "tensor: expected one that requires a gradient"]] * 3, grads
  end

  def test_mistakes_of_hooks_before_anyone_waits
    assert_raises(Torch::Error) { Torch::Distributed.register_ddp_hook(Torch.ones(1, requires_grad: true), nil, 1) }
    Torch::Distributed.init_process_group("gloo", store: Torch::Distributed::HashStore.new, rank: 0, world_size: 1) do
      error = assert_raises(ArgumentError) { Torch::Distributed.register_ddp_hook(Torch.ones(1, requires_grad: true), nil, 0) }
      assert_equal "world_size: expected a whole number from 1, got 0", error.message
      assert_raises(TypeError, ArgumentError) { Torch::Distributed.register_ddp_hook(1, nil, 1) }
    end
  end

  # As that gem's bin/torchrun begins, which may have been copied.
  def test_the_launcher_as_a_library
    code = 'require "torch/torchrun"; Torch::TorchRun.start(["--nproc-per-node=2", "-c", "puts ENV[%q(RANK)]"]); puts "never"'
    out, status = Open3.capture2e(RbConfig.ruby, "-I", File.expand_path("../../lib", __dir__), "-e", code)
    assert_equal %w[0 1], out.lines.map(&:chomp).sort, out
    assert_predicate status, :success?
  end
end
