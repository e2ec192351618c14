# frozen_string_literal: true

require_relative "on_gpu"
require_relative "sharded_training"

# Sharded models on a GPU, beside one that is trained by one process on the same GPU.
module ShardedOnGPU
  include OnGPU
  include ShardedTraining

  def tower(**)
    super.to(device)
  end

  def batch(...)
    super.map { |tensor| tensor.to(device) }
  end

  # What is loaded and gathered is on the CPU.
  def difference(plain, full)
    plain.state_dict.map do |name, tensor|
      (tensor.detach.cpu - full.fetch(name)).abs.max.item / tensor.detach.abs.max.item
    end.max
  end
end
