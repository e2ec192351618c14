# frozen_string_literal: true

# The cases of RandomTraining: what is wrapped how, and what is done with it.
module RandomTraining
  # What is run; made of a seed alone.
  Case = Struct.new(:seed, :size, :kinds, :frozen, :options, :hook, :optimizer, :actions) do
    def to_s
      actions.map(&:inspect).join("\n  ").then do |list|
        "seed #{seed}, #{size} ranks, blocks #{kinds.inspect}, frozen #{frozen.inspect}, #{options.inspect}, hook #{hook.inspect}, " \
          "optimizer #{optimizer.inspect}:\n  #{list}"
      end
    end
  end

  class Generator
    MODES = [{}, {}, {find_unused_parameters: true}, {find_unused_parameters: true, skip_all_reduce_unused_params: true}, {static_graph: true}].freeze
    ACTIONS = {forward: 5, between: 2, backward: 6, step: 2, zero: 2, replace: 1, load: 1, evaluate: 1, evaluated_round: 1, fail: 1, freeze: 1, interrupted_round: 1,
               frozen_round: 1, fork: 1}
      .flat_map { |kind, weight| [kind] * weight }.freeze

    def initialize(seed, size)
      @seed = seed
      @size = size
      @random = Random.new(seed)
    end

    def case
      @kinds = [:linear] + Array.new(@random.rand(1..4)) { pick(%i[linear linear norm shared single sparse]) }
      @options = options
      # The first block always trains, so that every loss depends on something.
      frozen = chance(0.3) ? [1 + @random.rand(@kinds.size - 1)] : []
      @path = path
      @slots = 0
      @hook = pick([nil, nil, nil, :allreduce, :ruby])
      @optimizer = optimizer
      Case.new(@seed, @size, @kinds, frozen, @options, @hook, @optimizer, actions)
    end

    # Which, and whether it is made before the model is wrapped; nil: parameters are written without one.
    def optimizer
      kinds = [nil, :plain, :fused]
      kinds += %i[zero zero_views] unless @kinds.include?(:sparse)
      pick(kinds)&.then { |kind| [kind, pick(%i[before after])] }
    end

    private

    def pick(list)
      list[@random.rand(list.size)]
    end

    def chance(share)
      @random.rand < share
    end

    def options
      chosen = pick(MODES).dup
      chosen[:bucket_cap_mb] = pick([0.0001, 0.0002]) if chance(0.6)
      chosen[:gradient_as_bucket_view] = false if chance(0.3)
      chosen[:broadcast_buffers] = false if chance(0.2)
      chosen[:delayed] = true if chance(0.2)
      chosen
    end

    def find_unused?
      @options[:find_unused_parameters]
    end

    # All blocks, some twice; with the options that allow it some are left out.
    def path
      blocks = (1...@kinds.size).to_a
      blocks = blocks.select { chance(0.6) } if find_unused? || @options[:static_graph]
      blocks += [pick(blocks)] if blocks.any? && chance(0.3)
      [0, *blocks.shuffle(random: @random)]
    end

    # By rank.
    def paths
      find_unused? ? Array.new(@size) { path } : [@path] * @size
    end

    def actions
      made = Array.new(@random.rand(6..16)) { action(pick(ACTIONS)) }
      # Whatever went before, this is averaged.
      made + [[:zero], [:forward, @slots + 1, round(true)], [:backward, [@slots + 1]]]
    end

    def seed
      @random.rand(1 << 20)
    end

    def round(sync)
      {sync: sync, paths: paths, seed: seed, form: chance(0.5) ? @random.rand(1 << 10) : nil}
    end

    def forward(sync)
      [:forward, @slots += 1, round(sync).merge(inner: chance(0.15))]
    end

    def interruptible?
      @size > 1 && !@options[:skip_all_reduce_unused_params] && !@kinds.include?(:sparse)
    end

    def action(kind)
      case kind
      when :forward then forward(true)
      when :between then forward(false)
      when :backward then [:backward, latest]
      # An interrupt in the exchange of what is unused, or of sparse gradients, ends the model.
      when :interrupted_round then interruptible? ? [kind, @random.rand(@size), [true, chance(0.5)].map { |sync| round(sync) }] : [:zero]
      when :evaluated_round then [kind, round(true)]
      when :frozen_round then [kind, round(chance(0.7))]
      when :load then [kind, seed]
      when :fail then [kind, chance(0.5)]
      when :freeze then [kind, @random.rand(1..20)]
      else [kind]
      end
    end

    # Most often the last output.
    def latest
      return [@slots] if chance(0.6)

      [@slots, @slots - 1].sample(@random.rand(1..2), random: @random).sort
    end
  end

  # @return [Array<Case>]
  def self.cases(seed, count, size)
    Array.new(count) { |index| Generator.new(seed + index, size).case }
  end
end
