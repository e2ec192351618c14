# frozen_string_literal: true

require "torch/distributed"

# What a program can call: the public modules that this repository makes, as they are when all of it is loaded, and their methods.
module PublicSurface
  ROOT = File.expand_path("../..", __dir__)
  LIB = "#{File.join(ROOT, "lib")}/"
  # Loaded on demand, or by programs for the gems that they are written for.
  REQUIRED = %w[torch-ddp torch_dl torch/nn/parallel/data_parallel torch/nn/sync_batch_norm torch/utils/data/distributed_data_loader].freeze
  # What every object has is documented where it is changed, if at all.
  COMMON = %i[inspect to_s == eql? hash respond_to_missing? method_missing].freeze
  # Namespaces of torch-rb that have modules of this repository.
  SHARED = %w[Torch::NN Torch::NN::Parallel Torch::NN::Utils Torch::Utils Torch::Utils::Data Torch::Utils::Checkpoint].freeze

  module_function

  # @return [Hash{String => Module}] by their names, all loaded
  def modules
    REQUIRED.each { |name| require name }
    found = {}
    ["Torch::Distributed", "TorchDL", *SHARED].each { |name| collect(Object.const_get(name), found) }
    found
  end

  # @return [Array<String>] "Torch::Distributed::Store#get", "Torch::Distributed::FSDP.fully_shard"
  def methods
    modules.flat_map { |name, mod| own_methods(mod).map { |each| "#{name}#{each}" } }.sort
  end

  # @return [Array<String>] "#get", ".fully_shard"
  def own_methods(mod)
    found = mod.public_instance_methods(false).map { |name| ["#", name, mod.instance_method(name)] }
    found += mod.singleton_methods(false).map { |name| [".", name, mod.method(name)] }
    found.filter_map { |sign, name, method| "#{sign}#{name}" unless skipped?(mod, name, method) }
  end

  # Names with _ are internal. A Struct's members have a reader that is documented; a module of torch-rb has methods of torch-rb's. What a
  # module of this repository puts before such a one is documented where it is defined.
  def skipped?(mod, name, method)
    path = method.source_location&.first # none for what is written in C
    name.start_with?("_") || COMMON.include?(name) || (!here?(mod) && method.owner.name&.start_with?("Torch::Distributed")) ||
      (path ? !path.start_with?(LIB) : !here?(mod)) ||
      (mod < Struct && path.nil? && (method.owner == mod.singleton_class || name.end_with?("=")))
  end

  def here?(mod)
    mod.name.start_with?("Torch::Distributed")
  end

  def collect(mod, found)
    return if found.key?(mod.name) || !(here?(mod) || SHARED.include?(mod.name) || own_methods(mod).any?)

    found[mod.name] = mod
    mod.constants(false).each do |name|
      value = mod.const_get(name)
      collect(value, found) if value.is_a?(Module) && value.name == "#{mod.name}::#{name}"
    end
  end
end
