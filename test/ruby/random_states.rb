# frozen_string_literal: true

require_relative "sharded_checkpoints"

# Random runs that are handed on from one form of model and optimizer to another, by our own calls and torch-rb's, in turn: each begins where the one
# before ended, and all of them together do what one process does that is never interrupted.
module RandomStates
  include ShardedCheckpoints

  FORMS = %i[plain ddp zero units root wrapped].freeze
  STEPS = 2

  # @return [Torch::NN::Module] without the wrapper of DDP
  def inner(run)
    model = run[:model]
    model.is_a?(Torch::NN::Parallel::DistributedDataParallel) ? model.module : model
  end

  def sharded?(run) = !ShardedCheckpoints::FSDP.units_in(inner(run)).empty?

  # Whole states, as plain ones have them; the optimizer's on rank 0.
  def full_states(run)
    fsdp = ShardedCheckpoints::FSDP
    return [fsdp.full_state_dict(run[:model]), fsdp.full_optim_state_dict(run[:model], run[:optimizer])] if sharded?(run)

    run[:optimizer].consolidate_state_dict if run[:optimizer].respond_to?(:consolidate_state_dict)
    [inner(run).state_dict, (run[:optimizer].state_dict if Torch::Distributed.get_rank.zero?)]
  end

  def load_full(run, model, optimizer)
    fsdp = ShardedCheckpoints::FSDP
    if sharded?(run)
      fsdp.load_full_state_dict(run[:model], model)
      return fsdp.load_full_optim_state_dict(run[:model], run[:optimizer], optimizer)
    end
    inner(run).load_state_dict(model)
    run[:optimizer].load_state_dict(optimizer)
  end

  def save_by_torch(run, path)
    model, optimizer = full_states(run)
    Torch.save({"model" => model, "optimizer" => optimizer}, path) if Torch::Distributed.get_rank.zero?
    Torch::Distributed.barrier
  end

  # By name: hand a run on to another one, through files in a folder.
  def ways
    checkpoint = ShardedCheckpoints::Checkpoint
    {
      "save" => ->(from, to, dir) { checkpoint.save(dir, **from) && checkpoint.load(dir, **to) },
      "save in parts" => ->(from, to, dir) { checkpoint.save(dir, **from, sharded: true) && checkpoint.load(dir, **to) },
      "async_save" => ->(from, to, dir) { checkpoint.async_save(dir, **from).wait && checkpoint.load(dir, **to) },
      "a Hash" => lambda do |from, to, dir|
        checkpoint.save(from.transform_keys(&:to_s), checkpoint_id: dir)
        checkpoint.load(to.transform_keys(&:to_s), checkpoint_id: dir)
      end,
      "full states in a Hash" => lambda do |from, to, dir|
        model, optimizer = full_states(from)
        checkpoint.save({"m" => model, "o" => optimizer || {}}, checkpoint_id: dir)
        into = {"m" => model.transform_values { |tensor| Torch.zeros_like(tensor.detach) }, "o" => nil}
        checkpoint.load(into, checkpoint_id: dir)
        load_full(to, into["m"], into["o"])
      end,
      "Torch.save" => ->(from, to, dir) { save_by_torch(from, "#{dir}.pt") || checkpoint.load("#{dir}.pt", **to) },
      "safetensors" => lambda do |from, to, dir|
        checkpoint::Safetensors.save_model(from[:model], dir)
        checkpoint.save("#{dir}-o", **from)
        checkpoint.load("#{dir}-o", **to)
        Torch.no_grad { to[:model].parameters.each { |parameter| parameter.zero! } }
        Torch::Distributed.barrier
        checkpoint::Safetensors.load_into(to[:model], dir)
      end
    }
  end

  # @return [String, nil] what is wrong with the case of a seed
  def fault_of(seed, dir, expected)
    random = Random.new(seed)
    kind = ShardedCheckpoints::OPTIMIZERS.keys.sample(random: random)
    form = FORMS.sample(random: random)
    run = run_of(form, kind, 1)
    said = [form]
    3.times do |hop|
      train(run, (STEPS * hop)...(STEPS * (hop + 1)))
      return "#{kind} #{said.join(" > ")}: the values after #{hop + 1} hops differ" unless near?(expected[kind][hop], values(run))

      form = FORMS.sample(random: random)
      way = ways.keys.sample(random: random)
      said << way << form
      other = run_of(form, kind, 50 + hop)
      before = values(run)
      begin
        ways.fetch(way).call(run, other, File.join(dir, "#{seed}-#{hop}"))
      rescue Torch::Distributed::Error, StandardError => e
        return "#{kind} #{said.join(" > ")}: #{e.class}: #{e.message[0, 300]}"
      end
      return "#{kind} #{said.join(" > ")}: other values" unless values(other) == before

      run = other
    end
    nil
  end

  def near?(expected, got)
    expected.keys == got.keys && expected.all? { |name, numbers| numbers.zip(got[name]).all? { |one, other| (one - other).abs < 1e-5 } }
  end

  def assert_handed_on(seeds, sizes)
    expected = Torch::Distributed.fork_world(1) do
      ShardedCheckpoints::OPTIMIZERS.keys.to_h do |kind|
        run = run_of(:plain, kind, 1)
        [kind, Array.new(3) { |hop| train(run, (STEPS * hop)...(STEPS * (hop + 1))) && values(run) }]
      end
    end.first
    Dir.mktmpdir do |dir|
      sizes.each do |size|
        said = world(size) do
          seeds.map { |seed| fault_of(seed * 10 + size, dir, expected) }
        end
        said.each_with_index do |faults, rank|
          faults.zip(seeds).each { |fault, seed| assert_nil fault, "rank #{rank} of #{size}, TDDP_RANDOM_SEED=#{seed} TDDP_RANDOM_CASES=1" }
        end
      end
    end
  end
end
