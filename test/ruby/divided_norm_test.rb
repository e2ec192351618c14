# frozen_string_literal: true

require_relative "divided_models"

# The norm of gradients of parameters that layouts, FSDP and stages divide, beside that of the plain model.
class DividedNormTest < Minitest::Test
  include DividedModels

  Utils = Torch::NN::Utils
  FORMS = DividedModels.forms("plain" => {}, "tp4" => {tp: 4}, "fsdp3" => {fsdp: 3}, "fsdp2_tp2" => {fsdp: 2, tp: 2},
    "fsdp2_dp2" => {fsdp: 2, dp: 2}, "pp2" => {pp: 2}, "pp2_tp2" => {pp: 2, tp: 2}, "pp2_fsdp2" => {pp: 2, fsdp: 2})
  COLLECTIVES = {"plain" => 0, "tp4" => 1, "fsdp3" => 1, "fsdp2_tp2" => 2, "fsdp2_dp2" => 1, "pp2" => 1, "pp2_tp2" => 2, "pp2_fsdp2" => 2}.freeze
  ORDERS = [1, 2, 3, Float::INFINITY].freeze

  # What the calls send, which Ruby sees, and which C sees.
  module Counting
    class << self
      attr_accessor :count
    end

    def all_reduce(...)
      Counting.count += 1
      super
    end

    def _clip_grad_norm(*arguments)
      Counting.count += 1 if arguments.last
      super
    end
  end

  def gradients(run, number)
    run.give_gradients(number)
    run.parameters.to_h { |name, parameter| [name, parameter.grad] }
  end

  # Of all gradients, each of them once.
  def norm_of(shapes, order)
    all = Torch.cat(shapes.except("head.weight").map { |name, shape| Run.gradient(name, shape, 3).reshape(-1).double })
    return all.abs.max.item if order.infinite?

    (all.abs**order).sum.item**(1.0 / order)
  end

  def clip(run, max_norm, **options)
    shared = (run.groups[:pp]&.rank == 1) ? [run.parameters["head.weight"]] : []
    Utils.clip_grad_norm_(run.model.parameters, max_norm, process_group: run.groups[:pp], uncounted: shared, **options)
  end

  def test_norms_and_what_is_left
    said = world(4) do
      Distributed.singleton_class.prepend(Counting)
      runs(FORMS).map do |name, make|
        run = make.call(1) or next
        ORDERS.map do |order|
          before = gradients(run, 3).transform_values(&:clone)
          Counting.count = 0
          norm = clip(run, 0.5, norm_type: order).item
          count = Counting.count
          factor = 0.5 / (norm_of(run.shapes, order) + 1e-6)
          apart = run.parameters.map { |key, parameter| (parameter.grad - before[key] * factor).abs.sum.item }.max
          [name, order, norm - norm_of(run.shapes, order), apart, count]
        end
      end
    end
    found = said.flatten(1).compact.flatten(1)
    assert_equal 4 * (1 + 4 + 3 + 4 + 4 + 2 + 4 + 4), found.size
    found.each do |name, order, off, apart, count|
      assert_in_delta 0, off, 1e-4, "#{name} #{order}"
      assert_in_delta 0, apart, 1e-5, "#{name} #{order}"
      assert_equal COLLECTIVES[name], count, "#{name} #{order}"
    end
  end

  def test_the_methods_of_sharded_models_and_norms_alone
    said = world(4) do
      make = runs(FORMS.values_at(3, 7))
      run = make["fsdp2_tp2"].call(1)
      run.give_gradients(3)
      staged = make["pp2_fsdp2"].call(1)
      staged.give_gradients(3)
      expected = norm_of(run.shapes, 2)
      twice = Run.gradient("head.weight", [8, 6], 3).pow(2).sum.item
      tensors = run.model.parameters.uniq(&:object_id)
      whole = Distributed.full_state_dict(run.model).except("head.weight").slice(*run.shapes.keys).values.sum { |tensor| tensor.pow(2).sum.item }
      over_stages = staged.model.clip_grad_norm_(1e9, process_group: staged.groups[:pp]).item
      [run.model.clip_grad_norm_(1e9).item - expected, over_stages**2 - expected**2 - twice,
        Utils.get_total_norm(tensors).item**2 - whole, failure { Utils.clip_grad_norm_(tensors, 1, process_group: "all") }.last]
    end
    said.each do |*differences, text|
      differences.each { |each| assert_in_delta 0, each, 1e-3 }
      assert_match(/process_group: expected a ProcessGroup that this process is in, several of them, or nil, got "all"/, text)
    end
  end

  # Gradients of which rank 3 has one that is no number.
  def spoiled(run, rank, value)
    gradients(run, 3).tap { |all| all["qkv.bias"].fill!(value) if rank == 3 }
  end

  def test_all_ranks_learn_that_a_norm_is_not_finite
    said = world(4) do |rank|
      run = runs(FORMS.values_at(6))["pp2_tp2"].call(1)
      [Float::NAN, Float::INFINITY].flat_map do |value|
        before = spoiled(run, rank, value).transform_values(&:clone)
        errors = [2, Float::INFINITY].map { |order| failure { clip(run, 1, norm_type: order, error_if_nonfinite: true) } }
        same = rank == 3 || before.all? { |name, gradient| gradient.equal(run.parameters[name].grad) }
        norms = [2, Float::INFINITY].map { |order| spoiled(run, rank, value) && clip(run, 1, norm_type: order).item.to_s }
        [errors.map { |kind, text| [kind[/\w+\z/], text[/norm of order \S+ is \S+,/]] }, same, norms]
      end
    end
    said.each do |nan, same, norms, infinite, also_same, infinities|
      assert_equal [["InvalidArgumentError", "norm of order 2 is nan,"], ["InvalidArgumentError", "norm of order inf is nan,"]], nan
      assert_equal [["InvalidArgumentError", "norm of order 2 is inf,"], ["InvalidArgumentError", "norm of order inf is inf,"]], infinite
      assert_equal [true, true, %w[NaN NaN], %w[Infinity Infinity]], [same, also_same, norms, infinities]
    end
  end
end
