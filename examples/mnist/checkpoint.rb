# frozen_string_literal: true

require "fileutils"
require "torch"

# Saves and restores a training run: the model, the optimizer's state and the epoch it had finished.
#
# A checkpoint is written beside its place and renamed into it, so that whoever reads the path finds the
# whole old one or the whole new one, also after a crash or on a full disk.
module Checkpoint
  module_function

  # @param path [String]
  # @param model [Torch::NN::Module] the module itself, not its DDP wrapper
  # @param optimizer [Torch::Optim::Optimizer]
  # @param epoch [Integer] the last finished epoch
  def save(path, model:, optimizer:, epoch:)
    FileUtils.mkdir_p(File.dirname(path))
    partial = "#{path}.#{Process.pid}.partial"
    content = {"epoch" => epoch, "model" => model.state_dict, "optimizer" => optimizer_state(optimizer)}
    Torch.save(content, partial)
    File.open(partial, &:fsync)
    File.rename(partial, path)
    File.open(File.dirname(path), &:fsync)
  ensure
    File.delete(partial) if partial && File.exist?(partial)
  end

  # @return [Integer] the epoch that the checkpoint had finished
  def load(path, model:, optimizer:)
    content = Torch.load(path)
    model.load_state_dict(content.fetch("model"))
    restore_optimizer(optimizer, content.fetch("optimizer"))
    content.fetch("epoch")
  end

  # torch-rb's optimizers keep `{parameter => {name => value}}`; parameters are told apart by their order.
  def optimizer_state(optimizer)
    state = optimizer.instance_variable_get(:@state)
    parameters(optimizer).each_with_index.to_h do |parameter, i|
      [i.to_s, state[parameter].transform_keys(&:to_s)]
    end
  end

  def restore_optimizer(optimizer, saved)
    state = optimizer.instance_variable_get(:@state)
    parameters(optimizer).each_with_index do |parameter, i|
      state[parameter] = saved.fetch(i.to_s).transform_keys(&:to_sym)
    end
  end

  def parameters(optimizer)
    optimizer.param_groups.flat_map { |group| group[:params] }
  end
end
