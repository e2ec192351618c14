# frozen_string_literal: true

require_relative "data_parallel_training"

# Models of all shapes: what they return, what of them is frozen, shared, sparse or to be left alone.
class DataParallelModelsTest < Minitest::Test
  include DataParallelTraining

  Result = Struct.new(:loss, :parts)

  class Nesting < Odd
    def forward(x, extra: nil)
      y = super(x)
      y += extra[:bias][0] if extra
      Result.new(y.pow(2).mean, {"logits" => [y, 7], :none => nil, :second => Torch.tanh(y)})
    end
  end

  [{}, {find_unused_parameters: true}, {static_graph: true}].each do |options|
    define_method(:"test_nested_outputs_#{options.keys.first || "plain"}") do
      results = world(2) do
        Torch.manual_seed(1)
        net = Nesting.new
        net.double
        model = DDP.new(net, **options)
        input = Torch.randn(2, 7, dtype: :float64)
        3.times do
          net.zero_grad
          result = model.call(input, extra: {bias: [Torch.ones(3, dtype: :float64)]})
          raise "structure" unless result.is_a?(Result) && result.parts["logits"][1] == 7 && result.parts.key?(:none)

          (result.loss + result.parts["logits"][0].sum + result.parts[:second].sum).backward
        end
        averaged = gradients(net)
        net.zero_grad
        result = net.call(input, extra: {bias: [Torch.ones(3, dtype: :float64)]})
        (result.loss + result.parts["logits"][0].sum + result.parts[:second].sum).backward
        assert_follows(gradients(net), averaged, 1e-10)
        true
      end
      assert_equal [true, true], results
    end
  end

  def test_several_dtypes_and_an_empty_batch
    results = world(2) do |rank|
      Torch.manual_seed(1)
      net = Torch::NN::Sequential.new(Torch::NN::Linear.new(3, 5), Torch::NN::Linear.new(5, 2))
      net[1].double if net.respond_to?(:[])
      second = net.named_children["1"]
      second.double
      net.define_singleton_method(:forward) { |x| second.call(named_children["0"].call(x).double) }
      model = DDP.new(net, bucket_cap_mb: 0.0001)
      input = Torch.arange(6, dtype: :float32).reshape(2, 3)
      2.times do
        net.zero_grad
        model.call(rank.zero? ? input : input.narrow(0, 0, 0)).sum.backward
      end
      averaged = gradients(net)
      net.zero_grad
      (net.call(input).sum / 2).backward
      assert_follows(gradients(net), averaged, 1e-5)
      net.parameters.map { |parameter| parameter.grad.dtype }.tally
    end
    assert_equal [{float32: 2, float64: 2}] * 2, results
  end

  def test_parameters_that_are_frozen_and_thawed
    results = world(2) do |rank|
      Torch.manual_seed(rank)
      net = Odd.new
      second = net.instance_variable_get(:@second)
      second.requires_grad!(requires_grad: false)
      model = DDP.new(net)
      run = lambda do
        net.zero_grad
        2.times { model.call(Torch.full([1, 7], rank + 1.0)).sum.backward }
        gradients(net)
      end
      stages = [run.call]
      second.requires_grad!(requires_grad: true)
      stages << run.call
      net.instance_variable_get(:@first).requires_grad!(requires_grad: false)
      stages << run.call
      [stages, numbers(net)["second.weight"], model.get_ddp_logging_data[:iteration]]
    end
    assert_equal results[0], results[1]
    stages = results[0][0]
    assert_equal [%w[second.weight second.bias], [], []], stages.map { |stage| stage.select { |_, values| values.nil? }.keys }
    assert_equal [%w[first.weight first.bias]], stages.last(2).map { |stage| stage.select { |_, values| values.all?(&:zero?) }.keys }.reject(&:empty?)
    assert_equal 6, results[0][2]
  end

  def test_hooks_and_options_stay_when_parameters_are_tied_anew
    results = world(2) do |rank|
      net = Torch::NN::Sequential.new(Torch::NN::Linear.new(1, 1, bias: false), Torch::NN::Linear.new(1, 1, bias: false))
      net.parameters.each { |parameter| Torch.no_grad { parameter.fill!(1) } }
      net.parameters.last.requires_grad!(requires_grad: false)
      model = DDP.new(net)
      model.register_comm_hook { |_, bucket| Distributed.all_reduce(bucket.buffer, async_op: true) }
      run = lambda do
        net.zero_grad
        model.call(Torch.tensor([[rank + 1.0]])).sum.backward
        net.parameters.map { |parameter| parameter.grad&.sum&.item }
      end
      first = 2.times.map { run.call }
      model.call(Torch.ones(1, 1)) # Prepared, but never used.
      net.parameters.last.requires_grad!(requires_grad: true)
      first + [run.call, run.call]
    end
    assert_equal [[[3.0, nil], [3.0, nil], [3.0, 3.0], [3.0, 3.0]]] * 2, results
  end

  def test_parameters_thawed_on_one_rank_only_are_told_on_both
    said = world(2, timeout: 10) do |rank|
      net = Odd.new
      second = net.instance_variable_get(:@second)
      second.requires_grad!(requires_grad: false)
      model = DDP.new(net)
      2.times { model.call(Torch.ones(1, 7)).sum.backward }
      second.requires_grad!(requires_grad: rank == 1)
      failure { 2.times { model.call(Torch.ones(1, 7)).sum.backward } }
    end
    said.each { |name, text| assert_match(/MismatchError|rank [01]/, "#{name}: #{text}") }
  end

  def test_ignored_parameters_and_buffers
    results = world(2) do |rank|
      Torch.manual_seed(rank)
      net = Torch::NN::Sequential.new(Torch::NN::Linear.new(2, 3), Torch::NN::BatchNorm1d.new(3), Torch::NN::Linear.new(3, 1))
      norm = net.named_children["1"]
      norm.running_mean.fill!(rank + 1.0)
      norm.running_var.fill!(rank + 1.0)
      DDP.set_params_and_buffers_to_ignore_for_model(net, ["0.weight", "1.running_mean"])
      own = net.named_parameters["0.weight"].detach.to_a
      model = DDP.new(net)
      kept = net.named_parameters["0.weight"].detach.to_a == own
      before = [norm.running_mean.to_a.uniq, norm.running_var.to_a.uniq]
      model.call(Torch.randn(4, 2)).pow(2).sum.backward
      [kept, before, gradients(net)]
    end
    assert_equal [[true, [[1.0], [1.0]]], [true, [[2.0], [1.0]]]], results.map { |result| result.first(2) }
    first, second = results.map(&:last)
    assert_equal first.except("0.weight"), second.except("0.weight")
    refute_equal first["0.weight"], second["0.weight"]
    assert_match(/names: expected parameters and buffers of the .*Linear, got "wait"/,
      assert_raises(ArgumentError) { DDP.set_params_and_buffers_to_ignore_for_model(Torch::NN::Linear.new(1, 1), ["wait", "bias"]) }.message)
    alone do
      all = Torch::NN::Linear.new(1, 1)
      DDP.set_params_and_buffers_to_ignore_for_model(all, %w[weight bias])
      assert_match(/requires a gradient and is not to be ignored/, assert_raises(ArgumentError) { DDP.new(all) }.message)
    end
  end

  class Words < Torch::NN::Module
    def initialize(sparse)
      super()
      @words = Torch::NN::Embedding.new(11, 3, sparse: sparse)
      @bags = Torch::NN::EmbeddingBag.new(7, 3, sparse: sparse, mode: "sum")
      @head = Torch::NN::Linear.new(3, 2)
    end

    def forward(ids)
      bags = @bags.call(ids.remainder(7).flatten, offsets: Torch.arange(0, ids.numel, ids.size(1)))
      @head.call(@words.call(ids).sum(1) + bags)
    end
  end

  [{}, {find_unused_parameters: true}, {static_graph: true}, {gradient_as_bucket_view: false}].each_with_index do |options, index|
    define_method(:"test_sparse_embeddings_#{options.keys.first || "plain"}") do
      size = [2, 3, 4, 2][index]
      results = world(size) do |rank|
        exact, averaged = [false, true].map do |sparse|
          Torch.manual_seed(1)
          net = Words.new(sparse)
          net.double
          ids = Torch.tensor(size.times.map { |row| [row, 3, (row * 2 + 1) % 11] })
          if sparse
            model = DDP.new(net, **options)
            3.times do
              net.zero_grad
              model.call(ids.narrow(0, rank, 1)).pow(2).sum.backward
            end
          else
            (net.call(ids).pow(2).sum / size).backward
          end
          [gradients(net), net.parameters.map { |parameter| parameter.grad.layout }.tally]
        end
        assert_follows(exact[0], averaged[0], 1e-10)
        averaged
      end
      assert_equal 1, results.uniq.size
      assert_equal 2, results[0][1].except(:strided).values.sum
    end
  end

  # The other rank comes only after this one has given up, and makes operations that this one does not make.
  def test_sparse_gradients_that_were_interrupted_are_the_end_of_the_model
    gaveup = Event.new
    said = world(2) do |rank|
      model = DDP.new(Torch::NN::Embedding.new(5, 3, sparse: true))
      run = -> { model.call(Torch.tensor([1, 2])).sum.backward }
      3.times { run.call }
      if rank.zero?
        loss = model.call(Torch.tensor([1, 2])).sum
        when_waiting { |waiting| waiting.raise(IOError) }
        error = assert_raises(Distributed::CanceledError, IOError) { loss.backward }
        assert_raises(IOError) { sleep LIMIT } unless error.is_a?(IOError) # which comes later then
        gaveup.set
      else
        gaveup.wait
      end
      failure(&run)
    end
    assert_equal "Torch::Distributed::GroupError", said[0][0]
    assert_match(/sparse gradients of an earlier step were not averaged \(.*interrupted.*\): destroy this process group/, said[0][1])
  end

  # Where a hook in Ruby keeps the lock, other threads of its process still run while the others are waited for.
  def test_waiting_beside_a_hook_in_ruby_keeps_nobody_from_running
    ticked = Event.new
    world(2) do |rank|
      model = DDP.new(Words.new(true), find_unused_parameters: true)
      model.register_comm_hook { |_, bucket| bucket.buffer }
      run = -> { model.call(Torch.tensor([[1, 2]])).sum.backward }
      run.call
      loss = model.call(Torch.tensor([[1, 2]])).sum
      # Rank 1 comes once a thread of rank 0 has run beside the one that waits.
      rank.zero? ? Thread.new { 10.times { sleep 0.001 } and ticked.set } : ticked.wait
      loss.backward
    end
    assert ticked.set?
  end

  def test_a_sparse_gradient_that_was_not_to_be_expected_is_named
    said = world(2) do
      net = Torch::NN::Embedding.new(5, 2)
      net.define_singleton_method(:forward) { |ids| Torch::NN::F.embedding(ids, @weight, sparse: true) }
      model = DDP.new(net)
      failure { 2.times { model.call(Torch.tensor([1, 2])).sum.backward } }
    end
    said.each { |_, text| assert_match(/weight/, text) && assert_match(/sparse/, text) }
  end

  def test_double_backward_is_refused
    said = world(2) do
      model = DDP.new(Odd.new)
      failure { model.call(Torch.ones(1, 7)).pow(2).sum.backward(create_graph: true) }
    end
    said.each { |_, text| assert_match(/create_graph/, text) && assert_match(/"(first|second|third)\.(weight|bias)"|"scale"/, text) }
  end

  def test_models_without_trainable_parameters_are_refused_by_the_constructor
    said = world(2) { failure { DDP.new(Torch::NN::ReLU.new) } }
    said.each { |name, text| assert_match(/ArgumentError no parameter of the .* requires a gradient/, "#{name} #{text}") }
  end

  # A generator, and a discriminator with buffers, whose parameters are all frozen while the generator learns.
  module Adversaries
    Torch::NN::Module.new # torch-rb loads its modules on first use

    module_function

    # @return [Array<Torch::NN::Module>]
    def make
      Torch.manual_seed(3)
      pair = [Torch::NN::Linear.new(2, 3), Torch::NN::Sequential.new(Torch::NN::BatchNorm1d.new(3), Torch::NN::Linear.new(3, 1))]
      pair.each { |net| net.double }
    end

    def noise(rank, step)
      Torch.arange(8, dtype: :float64).reshape(4, 2).sin * (rank + 1) - 0.2 * step
    end

    # Three steps of each; `share` sums up the losses of the ranks that this process has.
    #
    # @yieldparam rank [Integer]
    # @return [Array] all states
    def train(generator, discriminator, ranks, share)
      nets = [generator, discriminator].map { |net| net.respond_to?(:module) ? net.module : net }
      optimizers = nets.map { |net| Torch::Optim::SGD.new(net.parameters, lr: 0.1) }
      3.times do |step|
        [false, true].each do |frozen|
          nets[1].parameters.each { |parameter| parameter.requires_grad!(!frozen) }
          optimizers.each(&:zero_grad)
          ranks.each do |rank|
            made = generator.call(noise(rank, step))
            made = made.detach unless frozen
            (discriminator.call(made).mean * (frozen ? -share : share)).backward
          end
          optimizers[frozen ? 0 : 1].step
        end
      end
      nets.map { |net| net.named_parameters.transform_values(&:to_a) }
    end
  end

  [{}, {find_unused_parameters: true}, {static_graph: true}, {gradient_as_bucket_view: false}].each do |options|
    define_method(:"test_all_parameters_are_frozen_in_turn_#{options.keys.first}") do
      expected = world(1) do
        generator, discriminator = Adversaries.make
        discriminator.eval # statistics are each rank's own
        Adversaries.train(generator, discriminator, [0, 1], 0.5)
      end.first
      results = world(2) do |rank|
        models = Adversaries.make.map { |net| DDP.new(net, **options) }
        models.last.eval
        Adversaries.train(*models, [rank], 1)
      end
      expected.each_with_index do |net, i|
        net.each { |name, values| results.each { |result| assert_close [values].flatten, [result[i][name]].flatten, 1e-10, name } }
      end
    end
  end

  # What a model that is frozen altogether still does: its buffers are rank 0's, gradients of inputs pass, and it trains once thawed.
  def test_a_frozen_model
    results = world(2) do |rank|
      net = Normed.new
      model = DDP.new(net)
      hooked = 0
      model.register_comm_hook { |_, bucket| (hooked += 1) && Distributed.all_reduce(bucket.buffer, op: :avg, async_op: true) }
      net.requires_grad!(requires_grad: false)
      x = (Torch.arange(6, dtype: :float32).reshape(2, 3) * (rank + 1)).requires_grad!(true)
      2.times { model.call(x).pow(3).sum.backward }
      state = [x.grad.abs.sum.item.positive?, net.parameters.map(&:grad), model.bucket_sizes, hooked]
      model.no_sync { model.call(x) }
      model.join { (rank + 1).times { model.call(x).sum.backward } }
      Torch.no_grad { model.call(x) }
      buffers = net.named_modules.values.flat_map { |mod| mod.named_buffers.values.map(&:to_a) }
      net.requires_grad!(requires_grad: true)
      model.call(x).pow(3).sum.backward
      [state, buffers, gradients(net), hooked]
    end
    results.each { |state, *| assert_equal [true, [nil] * 4, [], 0], state }
    assert_equal results[0].drop(2), results[1].drop(2)
    assert_operator results[0][3], :>, 0
  end

  # Anything else than before in the place of a parameter or a layer is trained from the next forward on.
  [{}, {find_unused_parameters: true}, {static_graph: true}].each do |options|
    define_method(:"test_what_replaces_a_parameter_is_averaged_#{options.keys.first}") do
      results = world(2) do |rank|
        net = Torch::NN::Sequential.new(Torch::NN::Linear.new(2, 2, bias: false), Torch::NN::Linear.new(2, 1, bias: false))
        model = DDP.new(net, **options)
        run = lambda do
          net.zero_grad
          net.parameters.each { |each| Torch.no_grad { each.fill!(1) } }
          model.call(Torch.full([1, 2], rank + 1.0)).sum.backward
          net.named_parameters.transform_values { |each| each.grad.to_a.flatten }
        end
        2.times { run.call }
        net.children[1].instance_variable_set(:@weight, Torch::NN::Parameter.new(Torch.ones(1, 2)))
        found = [run.call]
        net.add_module("1", Torch::NN::Linear.new(2, 1, bias: false)) # in the place of the other one
        found << run.call
        net.add_module("2", Torch::NN::Linear.new(1, 1, bias: false))
        found << run.call
        net.children[0].instance_variable_set(:@note, rank) # which is no parameter
        [found << run.call, model.get_ddp_logging_data[:iteration]]
      end
      two = {"0.weight" => [1.5] * 4, "1.weight" => [3.0] * 2}
      three = two.merge("2.weight" => [6.0])
      results.each { |found, rounds| assert_equal [[two, two, three, three], 6], [found, rounds] }
    end
  end

  def test_copies_are_refused_and_those_of_the_module_are_not
    world(1) do
      model = DDP.new(Torch::NN::Linear.new(2, 2))
      outer = Torch::NN::Sequential.new(model)
      [-> { model.dup }, -> { model.clone }, -> { model.deep_dup }, -> { outer.deep_dup }, -> { Marshal.dump(model) }].each do |copy|
        assert_match(/cannot be copied or dumped: copy or save model\.module .*state_dict.*Checkpoint/, assert_raises(TypeError, &copy).message)
      end
      copy = DDP.new(model.module.deep_dup)
      copy.call(Torch.ones(1, 2)).sum.backward
      assert_nil model.module.weight.grad
      assert_equal [[1.0, 1.0]] * 2, copy.module.weight.grad.to_a
    end
  end

  def test_several_accumulations_and_sizes_of_batches
    results = world(3) do |rank|
      Torch.manual_seed(1)
      net = Odd.new
      net.double
      model = DDP.new(net, bucket_cap_mb: 0.0002)
      inputs = Torch.randn(3, 4, 3, 7, dtype: :float64)
      2.times do
        net.zero_grad
        model.no_sync { 3.times { |part| model.call(inputs[rank][part].narrow(0, 0, part)).sum.backward } }
        model.call(inputs[rank][3]).sum.backward
      end
      averaged = gradients(net)
      net.zero_grad
      3.times { |other| 4.times { |part| (net.call(inputs[other][part].narrow(0, 0, part)).sum / 3).backward } }
      assert_follows(gradients(net), averaged, 1e-10)
      averaged
    end
    assert_equal 1, results.uniq.size
  end
end
