# frozen_string_literal: true

require_relative "test_helper"
require_relative "documented"
require "torch/nn/parallel/data_parallel"

# The names in README.md and docs, and the Ruby of the pages on PyTorch, strategies and trouble.
class DocsTest < Minitest::Test
  include Worlds
  include Documented

  def test_names_are_there
    named = Documented::PAGES.flat_map { |page| Documented.text(page).scan(/\b(Torch(?:::[A-Z]\w*)+)(?:([.#])([a-z_]\w*[?!]?))?/) }.uniq
    assert_operator named.size, :>=, 60
    missing = named.reject do |path, dot, method|
      found = Object.const_get(path)
      method.nil? || ((dot == "#") ? found.method_defined?(method) : found.respond_to?(method))
    rescue NameError
      false
    end
    assert_empty missing.map(&:join)
  end

  # By the words that tests ask for. What goes into a Gemfile is installed by test/slow and rake test:gem.
  def test_each_block_is_run
    asked = Dir[File.join(__dir__, "docs*_test.rb")].flat_map { |path| File.read(path).scan(/\bcode\("((?:[^"\\]|\\.)+)"\)/).flatten }
    asked = asked.map { |words| words.gsub('\\"', '"').gsub('\\n', "\n") }
    assert_empty(Documented.blocks.grep_v(/\Agem /).reject { |block| asked.any? { |words| block.include?(words) } })
  end

  def test_coming_from_pytorch
    program = code("init_process_group(\"gloo\")\nmodel").gsub("Torch::Distributed.init_process_group(\"gloo\")", "nil")
      .sub("Torch::Distributed.destroy_process_group", "nil")
    found = world(2) do |rank|
      here = binding
      net = Pairs.new
      {net: net, first: Torch.ones(2, 4) * rank, second: Torch.ones(2, 4)}.each { |name, value| here.local_variable_set(name, value) }
      before = net.parameters.map(&:to_a)
      here.eval(program)
      [before == net.parameters.map(&:to_a), net.parameters.map(&:to_a)]
    end
    assert_equal [false, false], found.map(&:first)
    assert_equal found[0], found[1]
  end

  def test_coming_from_torch_ddp
    whole = code("require \"torch-ddp\"").sub(/^Torch::Distributed\.(init|destroy)_process_group$/, "nil").sub("Torch::Distributed.destroy_process_group", "nil")
    part = code("losses = Torch::Distributed.run(2")
    Dir.mktmpdir do |folder|
      Dir.chdir(folder) do
        Torch.manual_seed(1)
        saved = MyModel.new.state_dict
        Torch.save(saved, "model.pt")
        found = world(2) do
          here = binding
          {model: MyModel.new, input: Torch.ones(2, 4)}.each { |name, value| here.local_variable_set(name, value) }
          here.eval(whole)
          here.local_variable_get(:model).state_dict.transform_values(&:to_a)
        end
        assert_equal [saved["layers.0.weight"].to_a] * 2, found.map { |state| state["layers.0.weight"] }
      end
    end
    here = binding
    {model: MyModel.new, input: Torch.ones(2, 4)}.each { |name, value| here.local_variable_set(name, value) }
    here.eval(part)
    losses = here.local_variable_get(:losses)
    assert_equal 2, losses.size
    assert_in_delta losses[0], losses[1], 1e-6
  end

  def test_coming_from_torch_dl
    program = code("dp_model = DataParallel")
    changed = Distributed.fork_world(1) do
      model = Torch::NN::Linear.new(4, 2)
      before = model.weight.to_a
      here = binding
      {model: model, input: Torch.ones(3, 4), target: Torch.ones(3, 2), criterion: Torch::NN::MSELoss.new,
       optimizer: Torch::Optim::SGD.new(model.parameters, lr: 0.1)}.each { |name, value| here.local_variable_set(name, value) }
      here.eval(program)
      before != model.weight.to_a
    end
    assert_equal [true], changed
  end

  def test_by_torch_bridges_names
    program = code("require \"torch_bridge\"")
    parameters = world(2) do
      (here = binding).local_variable_set(:model, MyModel.new)
      here.eval(program)
      wrapped = here.local_variable_get(:wrapped)
      wrapped.call(Torch.randn(5, 4)).sum.backward
      wrapped.parameters.sum { |parameter| parameter.to_local.numel }
    end
    assert_equal [16, 7], parameters
  end

  def test_an_estimate
    program = code("smallest = ")
    smallest = Distributed.fork_world(1) do
      here = binding
      {net: MyModel.new, x: Torch.randn(5, 4)}.each { |name, value| here.local_variable_set(name, value) }
      capture_io { here.eval(program) }
      here.local_variable_get(:smallest)
    end
    assert_includes Distributed::MemoryEstimate::STRATEGIES, smallest.first
  end

  def test_a_report_of_a_pipeline
    program = code("schedule.step(x, target: y)\n")
    Dir.mktmpdir do |folder|
      found = world(2) do |rank|
        Dir.chdir(Dir.mkdir(File.join(folder, rank.to_s)) && File.join(folder, rank.to_s))
        stage = Distributed::Pipelining::PipelineStage.new(Pairs.new.layers[rank])
        here = binding
        {schedule: Distributed::Pipelining::Schedule1F1B.new(stage, n_microbatches: 4, loss_fn: Torch::NN::F.method(:mse_loss)),
         x: Torch.randn(8, 4), y: Torch.randn(8, 4)}.each { |name, value| here.local_variable_set(name, value) }
        out, = capture_io { here.eval(program) }
        report = here.local_variable_get(:report)
        [out.include?("bubble"), report.steps, [report.theory, report.theory_of_these_stages, report.imbalance].all?(Float)]
      end
      assert_equal [[true, 1, true]] * 2, found
      assert_includes File.read(File.join(folder, "0/pipeline.svg")), "</svg>"
    end
  end

  def test_several_ways_at_once
    program = code("model.step(x, target: y)")
    losses = world(4) do
      here = binding
      loss_fn = Torch::NN::F.method(:mse_loss)
      net = Pairs.new
      x, y = Array.new(2) { Torch.randn(8, 4) }
      expected = loss_fn.call(net.call(x), y).item
      {net: net, loss_fn: loss_fn, dataset: dataset, x: x, y: y}.each { |name, value| here.local_variable_set(name, value) }
      here.eval(program)
      [expected, here.local_variable_get(:loss), here.local_variable_get(:sampler).num_samples]
    end
    losses.each do |expected, loss, samples|
      assert_in_delta expected, loss, 1e-6
      assert_equal 48, samples
    end
  end

  def test_trouble
    programs = [code("monitored_barrier(timeout"), code("peak = ")]
    peaks = world(2) do
      @model = MyModel.new
      here = binding
      here.local_variable_set(:batch, Torch.randn(5, 4))
      programs.each { |program| here.eval(program) }
      here.local_variable_get(:peak)
    end
    peaks.each { |peak| assert_operator peak, :>=, 5 * 4 }
  end
end
