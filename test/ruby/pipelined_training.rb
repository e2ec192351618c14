# frozen_string_literal: true

require_relative "test_helper"
require "torch/distributed/pipelining"

# Models that are trained in stages, beside one that is trained by one process.
module PipelinedTraining
  Pipelining = Torch::Distributed::Pipelining
  MSE = ->(output, target) { (output - target).pow(2).mean }

  # Eight layers of two modules; the same on all ranks.
  def layers(width: 6, dtype: :float64)
    Torch.manual_seed(1)
    model = Torch::NN::Sequential.new(*Array.new(8) { [Torch::NN::Linear.new(width, width), Torch::NN::Tanh.new] }.flatten)
    (dtype == :float64) ? model.double : model
  end

  # @return [Array(Torch::Tensor, Torch::Tensor)] inputs and targets, the same on all ranks
  def batch(rows, step = 0, width: 6, dtype: :float64)
    values = Torch.arange(0, rows * width, dtype: :float64) * 0.37 + step * 0.91
    [values, values + 0.5].map { |each| each.sin.to(dtype: dtype).view(rows, width) }
  end

  # @return [Array<Pipelining::PipelineStage>] this rank's
  def stages_of(model, rank, size, per_rank: 1, &wrap)
    parts = Pipelining.split(model, parts: size * per_rank)
    (rank...parts.size).step(size).map do |number|
      part = wrap ? wrap.call(parts[number]) : parts[number]
      Pipelining::PipelineStage.new(part, stage_index: number, num_stages: parts.size)
    end
  end

  def adam(stages_or_model)
    modules = stages_or_model.is_a?(Array) ? stages_or_model.map(&:submodule) : [stages_or_model]
    Torch::Optim::Adam.new(modules.flat_map(&:parameters).uniq(&:object_id), lr: 0.01)
  end

  def far(one, other)
    (one.detach - other.detach).abs.max.item
  end

  # Trains some steps beside the plain model.
  #
  # @param rows [Array<Integer>] of the batch of each step
  # @return [Float] the largest difference of losses, gradients, parameters and outputs
  def follow(schedule, plain, rows: [10, 10, 10], loss: MSE)
    optimizers = [adam(plain), adam(schedule.stages)]
    names = plain.named_parameters
    rows.each_with_index.map do |count, step|
      x, y = batch(count, step)
      optimizers.each(&:zero_grad)
      expected_output = plain.call(x)
      expected = loss.call(expected_output, y)
      expected.backward
      output = schedule.step(x, target: y, losses: losses = [])
      own = schedule.stages.flat_map { |stage| stage.submodule.named_parameters.to_a }
      found = own.map { |name, parameter| far(parameter.grad, names[name.delete_prefix("module.")].grad) }
      found << (mean(losses, count) - expected.item).abs
      found << far(output, expected_output) if schedule.stages.last.last?
      optimizers.each(&:step)
      found + own.map { |name, parameter| far(parameter, names[name.delete_prefix("module.")]) }
    end.flatten.max
  end

  # The losses of micro-batches, each as often as it has rows.
  def mean(losses, rows)
    sizes = Array.new(losses.size) { |i| rows / losses.size + ((i < rows % losses.size) ? 1 : 0) }
    losses.zip(sizes).sum { |each, size| each.item * size } / rows
  end
end
