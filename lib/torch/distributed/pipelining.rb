# frozen_string_literal: true

require_relative "../distributed"

module Torch
  module Distributed
    # Pipeline parallel training: the layers of a model are divided into stages, on several ranks or several devices of one process,
    # that work on different parts of a batch at the same time.
    #
    #   part = Torch::Distributed::Pipelining.split(model, parts: 2)[rank]
    #   stage = Torch::Distributed::Pipelining::PipelineStage.new(part)
    #   schedule = Torch::Distributed::Pipelining::Schedule1F1B.new(stage, n_microbatches: 8, loss_fn: loss)
    #   schedule.step(x, target: y, losses: losses = [])
    #
    # Ranks exchange activations and gradients by messages between two of them, of the group that the stages were given.
    module Pipelining
    end
  end
end

require_relative "pipelining/orders"
require_relative "pipelining/timeline"
require_relative "pipelining/message_order"
require_relative "pipelining/measurement"
require_relative "pipelining/report"
require_relative "pipelining/splitting"
require_relative "pipelining/micro_batches"
require_relative "pipelining/link"
require_relative "pipelining/gradient_reduction"
require_relative "pipelining/pipeline_stage"
require_relative "pipelining/stage_layout"
require_relative "pipelining/ties"
require_relative "pipelining/execution"
require_relative "pipelining/results"
require_relative "pipelining/split_linear"
require_relative "pipelining/schedules"
