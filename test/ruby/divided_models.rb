# frozen_string_literal: true

require_relative "test_helper"
require "torch/distributed/fsdp"

# Models that tensor dimensions, FSDP, ZeRO and stages divide, without forwards: gradients are given, so that every form makes the steps of
# the plain model.
module DividedModels
  Distributed = Torch::Distributed
  Checkpoint = Torch::Distributed::Checkpoint
  FSDP = Torch::Distributed::FSDP
  Layout = Torch::Distributed::Tensor::Layout

  # How each parameter is divided; head.weight is embed.weight.
  DIVISIONS = {
    "embed.weight" => {dim: 0}, "up.weight" => {dim: 0}, "up.bias" => {dim: 0}, "down.weight" => {dim: 1}, "qkv.weight" => {dim: 0, blocks: 3},
    "qkv.bias" => {dim: 0, blocks: 3}, "head.weight" => {dim: 0}, "head.bias" => {dim: 0}
  }.freeze

  # A model of which other ranks have the other layers.
  class Stage < Torch::NN::Sequential
    def distributed_state_dict_partial?
      true
    end
  end

  # @!attribute dims
  #   @return [Hash{Symbol => Integer}] sizes of :pp, :zero, :fsdp, :dp and :tp; the ranks are their product
  Form = Struct.new(:name, :dims) do
    def size
      dims.values.inject(1, :*)
    end
  end

  def layers(seed)
    Torch.manual_seed(seed)
    nn = Torch::NN
    made = {"embed" => nn::Embedding.new(8, 6), "up" => nn::Linear.new(6, 8), "down" => nn::Linear.new(8, 6), "norm" => nn::BatchNorm1d.new(6),
            "qkv" => nn::Linear.new(6, 24), "head" => nn::Linear.new(6, 8)}
    made["norm"].running_mean.fill!(Distributed.get_rank)
    made
  end

  def sequential(layers, kind = Torch::NN::Sequential)
    kind.new.tap { |model| layers.each { |name, layer| model.add_module(name, layer) } }
  end

  # A model in a form, and its optimizer.
  class Run
    include DividedModels

    attr_reader :model, :optimizer, :group, :groups

    # @param group [ProcessGroup] of as many ranks as the form has
    # @param groups [Hash{Symbol => ProcessGroup}] this rank's of each dimension
    def initialize(form, group, groups, seed: 1)
      @form = form
      @group = group
      @groups = groups
      @model = build(layers(seed))
      @optimizer = make_optimizer
    end

    def objects
      {model: @model, optimizer: @optimizer}
    end

    # The gradient of all of a parameter, by a formula.
    def self.gradient(name, shape, step)
      name = "embed.weight" if name == "head.weight"
      Torch.sin(Torch.arange(shape.inject(1, :*)).float * (name.sum % 7 + 1) + step).view(*shape)
    end

    def step(number)
      give_gradients(number)
      @optimizer.step
    end

    def give_gradients(number)
      parameters.each { |name, parameter| parameter.grad = local(name, parameter, Run.gradient(name, shapes[name], number)) }
    end

    # What this process has of a tensor in the shape of a parameter.
    def local(name, parameter, whole)
      layout = Torch::Distributed::Tensor.layout(parameter)
      whole = layout.take(whole) if layout
      start, count = places[name]
      start ? whole.reshape(-1).narrow(0, start, count).clone : whole
    end

    # @return [Array<String>] names of parameters in which it differs from all of them
    def differing(expected)
      parameters.reject { |name, parameter| parameter.detach.equal(local(name, parameter, expected.fetch(name))) }.keys
    end

    # @return [Hash{String => Torch::Tensor}]
    def parameters
      @model.named_parameters
    end

    def shapes
      @shapes ||= sequential(layers(0)).named_parameters.transform_values(&:shape)
    end

    private

    def build(layers)
      stage = @groups[:pp]&.rank
      layers["head"].instance_variable_set(:@weight, layers["embed"].weight)
      layers = layers.to_a.each_slice(3).to_a[stage].to_h if stage
      model = sequential(layers, stage ? Stage : Torch::NN::Sequential)
      divide(model) if @groups[:tp]
      shard(model) if @groups[:fsdp]
      model
    end

    def divide(model)
      model.named_parameters.to_a.uniq { |_, parameter| parameter.object_id }.each do |name, parameter|
        Torch::Distributed::Tensor.divide(parameter, Layout.new(@groups[:tp], parameter.shape, **(DIVISIONS[name] || {})))
      end
    end

    def shard(model)
      groups = [@groups[:fsdp], @groups[:dp]]
      model.named_children.each_value { |layer| FSDP.shard(layer, groups: groups) if layer.is_a?(Torch::NN::Linear) }
      FSDP.shard(model, groups: groups)
    end

    def make_optimizer
      parameters = @model.parameters.uniq(&:object_id)
      return Torch::Optim::Adam.new(parameters, lr: 0.01) unless @groups[:zero]

      Torch::Distributed::Optim::ZeroRedundancyOptimizer.new(parameters, optimizer_class: Torch::Optim::Adam, process_group: @groups[:zero],
        lr: 0.01)
    end

    def places
      @places ||= begin
        found = {}.compare_by_identity
        FSDP.units_in(@model).each { |unit| unit.each_piece { |_, parameter, _, start, _, count| found[parameter] = [start, count] } }
        parameters.transform_values { |parameter| found[parameter] }
      end
    end
  end

  # @param dims [Hash{String => Hash}] sizes by the form's name
  # @return [Array<Form>]
  def self.forms(dims)
    dims.map { |name, sizes| Form.new(name, sizes) }
  end

  # @return [Array<Hash>] all of the plain model's parameters after two steps, and after three
  def expected
    @expected ||= begin
      run = Run.new(nil, nil, {})
      copy = -> { run.parameters.transform_values { |parameter| parameter.detach.clone } }
      2.times { |number| run.step(number) }
      [copy.call.tap { run.step(2) }, copy.call]
    end
  end

  # Saves each form, and goes on from pairs of them. A collective call of a world of four.
  #
  # @param pairs [Array<Array(Form, Form)>] what is saved, and into what it is loaded
  # @return [Array<String>] what is not as it should be
  def faults_of(dir, forms, pairs)
    make = runs(forms)
    forms.each do |form|
      run = make[form.name].call(1) or next
      2.times { |number| run.step(number) }
      saving = Checkpoint.async_save(File.join(dir, form.name), **run.objects, step: 2, process_group: run.group)
      # What is saved is a copy.
      run.step(2)
      saving.wait
    end
    Distributed.barrier
    pairs.flat_map do |from, into|
      run = make[into.name].call(9) or next []
      faults_in(run, File.join(dir, from.name), from).map { |fault| "#{from.name} into #{into.name} on #{Distributed.get_rank}: #{fault}" }
    end
  end

  def faults_in(run, path, from)
    step = Checkpoint.load(path, **run.objects, process_group: run.group).step
    restored = run.differing(expected[0])
    run.step(2)
    mean = run.model.named_buffers["norm.running_mean"]&.to_a
    # The first rank that has a buffer says what is saved.
    first = from.dims[:pp] ? from.size / 2 : 0
    [*restored, *run.differing(expected[1]).map { |name| "#{name} after a step" }, *("the buffer #{mean}" unless [nil, [first] * 6].include?(mean)),
      *("step #{step}" unless step == 2)]
  end

  # Runs of forms in a world that is large enough: by name. A collective call of all ranks.
  #
  # @param forms [Array<Form>]
  # @yieldparam seed [Integer]
  # @return [Hash{String => Proc}] what makes a run on the ranks that it has, by a seed; nil on the others
  def runs(forms)
    forms.to_h do |form|
      ranks = (0...form.size).to_a
      group = Distributed.new_group(ranks)
      groups = groups_of(form, ranks)
      [form.name, ->(seed) { Run.new(form, group, groups, seed: seed) if Distributed.get_rank < form.size }]
    end
  end

  # This rank's group along each dimension; the first varies slowest.
  def groups_of(form, ranks)
    sizes = form.dims.values
    form.dims.keys.each_with_index.to_h do |dim, i|
      inner = sizes.drop(i + 1).inject(1, :*)
      lines = ranks.group_by { |rank| [rank / (inner * sizes[i]), rank % inner] }.values
      groups = lines.map { |line| Distributed.new_group(line) }
      [dim, groups.find { |each| each.is_a?(Distributed::ProcessGroup) }]
    end
  end
end
