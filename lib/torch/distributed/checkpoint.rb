# frozen_string_literal: true

require "torch/distributed"

module Torch
  module Distributed
    # A checkpoint could not be saved or loaded. Raised on all ranks: the text names the rank on which it failed.
    class CheckpointError < Error; end

    # Saves and restores a training run: models, optimizers, schedulers, samplers, random numbers and what else belongs to
    # it. With a process group all ranks call it; without one it serves a single process.
    #
    #   Checkpoint = Torch::Distributed::Checkpoint
    #   run = {model: model, optimizer: optimizer, scheduler: scheduler, sampler: sampler}
    #   loaded = Checkpoint.load("checkpoints", **run, required: false)
    #   (loaded ? loaded.epoch + 1 : 0).upto(9) do |epoch|
    #     train(epoch)
    #     Checkpoint.save("checkpoints", **run, epoch: epoch, extra: {"best" => best}, keep: 3)
    #   end
    #
    # Objects have the names that their keywords give them. One whose name is an option of the call (`keep`, `name`, `step`) is given
    # in a Hash instead: `Checkpoint.save(path, {model: model, keep: counter}, keep: 3)`; then keywords are options alone.
    #
    # **A checkpoint is a folder.** `manifest.json`, written last, makes it one: it has the numbers and texts, and for each
    # tensor its dtype, shape, file, place and CRC-32. The tensors lie in files of the safetensors layout, which other
    # languages read as well. Nothing that is loaded can run code. A reader of the folder finds the whole old
    # checkpoint or the whole new one, also after a crash, `kill -9` or on a full disk; what an interrupted save left is
    # removed by the next one.
    #
    # **Names.** A model in a {Torch::NN::Parallel::DistributedDataParallel} is saved as the model itself, and goes back
    # into either; so a checkpoint moves between numbers of ranks.
    #
    # **What ranks divide**, models of {FSDP}, parameters with a {Tensor::Layout}, stages of a pipeline and the state of
    # {Optim::ZeroRedundancyOptimizer}, also several of these at once, is saved in pieces: each rank writes its own, once, and the manifest
    # says by name which elements of which tensor lie where. Any number of ranks, in any form of the model and the optimizer, reads the
    # ranges that it needs. The states of optimizers have parameters' names then, so an optimizer is saved and loaded along with its model.
    #
    # **Stages** have different names of a model on different ranks. Their module says so by a method `distributed_state_dict_partial?` that
    # returns true: then a rank saves and loads the names that it has. All ranks must know the others between them.
    #
    # **Names that only some ranks have**, a loader's `{"rank_1" => position}` or the layers of a stage, are all saved, and each rank loads those that it
    # asks for. What several ranks have under one name must be equal, numbers and tensors alike; otherwise the save fails on all ranks. Models and
    # optimizers are taken to be the same on all ranks if their names and shapes are, and rank 0's values are saved.
    #
    # **Random numbers** are those of libtorch on the CPU, each rank its own; they are restored where as many ranks load as
    # saved. Ruby's (`rand`) and those of GPUs are not part of it.
    module Checkpoint
      autoload :Safetensors, "torch/distributed/checkpoint/safetensors"

      # What was written is not what is there: sizes or checksums differ.
      class DamagedError < CheckpointError; end

      # What {Checkpoint.load} found beside the states.
      #
      # @!attribute path
      #   @return [String] the checkpoint that was loaded
      # @!attribute epoch
      #   @return [Integer, nil]
      # @!attribute step
      #   @return [Integer, nil]
      # @!attribute extra
      #   @return [Hash]
      # @!attribute world_size
      #   @return [Integer, nil] how many ranks saved it
      # @!attribute rng_restored
      #   @return [Boolean] whether all ranks' random numbers go on where they were
      Loaded = Struct.new(:path, :epoch, :step, :extra, :world_size, :rng_restored, keyword_init: true)

      class << self
        # @overload save(path, objects = nil, epoch: nil, step: nil, name: nil, extra: {}, rng: true, sharded: nil, keep: nil,
        #   process_group: nil, **objects)
        #   Adds a checkpoint to the folder `path`, as `step-000000100`, else `epoch-000003`, else `save-000001`; one of that
        #   name is replaced.
        #   @param path [String] a folder of checkpoints, made if it is not there
        #   @param objects [Hash{Symbol, String => #state_dict, Hash, Array}] under any names, as keywords or in a Hash:
        #     `model: net, optimizer: optimizer`; several models as `model: {generator: a, critic: b}`
        #   @param epoch [Integer, nil] given back by {.load}
        #   @param step [Integer, nil] given back by {.load}
        #   @param name [String, nil] of the new checkpoint's folder within `path`
        #   @param extra [Hash] what else there is: numbers, texts, tensors in arrays and hashes; rank 0's is saved
        #   @param rng [Boolean] whether to save every rank's random numbers
        #   @param sharded [Boolean, nil] whether every rank writes a part of the tensors, rather than rank 0 all of them: on a file
        #     system that all ranks see. Models' buffers and `extra` are rank 0's even so, or those of the first rank that has them; what
        #     is not divided must be the same on all ranks. nil: where ranks have parts of a model, or an optimizer's state is divided
        #     ({Optim::ZeroRedundancyOptimizer}) and was not gathered, or where some have tensors under names that rank 0 has not
        #   @param keep [Integer, nil] how many checkpoints stay; older ones are removed once this one is whole
        #   @param process_group [ProcessGroup, nil] nil: the default group if there is one
        # @overload save(state_dict, checkpoint_id:, sharded: nil, process_group: nil)
        #   Saves a Hash as PyTorch's `torch.distributed.checkpoint.save` does.
        #   @param state_dict [Hash] tensors, plain values, and objects that have a state_dict
        #   @param checkpoint_id [String] the checkpoint's own folder; what it holds is replaced
        #   @param sharded [Boolean, nil] as above
        #   @param process_group [ProcessGroup, nil] as above
        # @return [String] the checkpoint's folder
        # @raise [ArgumentError, TypeError] naming the argument; also if an option is an object that has a state
        # @raise [CheckpointError] on all ranks, if it fails on one; what was saved before is as it was
        def save(path, objects = nil, **options)
          stage(path, objects, **options)&.save
        end

        # Like {.save}, but returns once this rank's part of the states is copied; a thread writes it while training goes on. Only the
        # group's store is used then, no collective: the program may use the group as it likes. The next save waits for this one.
        #
        #   saving = Checkpoint.async_save("checkpoints", model: model, optimizer: optimizer, step: step)
        #   train
        #   saving.wait
        #
        # @return [AsyncSave, nil] nil for a process that is not in the group
        # @raise [CheckpointError] on all ranks, if it cannot begin, or the save before failed without a wait
        def async_save(path, objects = nil, **options)
          stage(path, objects, **options)&.save_later
        end

        # @overload load(path, objects = nil, rng: true, strict: true, names: nil, convert: false, required: true, process_group: nil,
        #   **objects)
        #   Restores what {.save} wrote, or what PyTorch's `torch.save` did, or a model from files of safetensors. Nothing is changed
        #   before the checkpoint was read and found good on all ranks.
        #   @param path [String] a folder of checkpoints, of which the newest good one is taken (those that are damaged are
        #     left out with a warning); or one checkpoint's own folder; or a file of PyTorch's (`.pt`); or what model hubs have: a file
        #     `*.safetensors`, an index `*.safetensors.index.json`, a folder with `model.safetensors` or its index
        #   @param objects [Hash{Symbol, String => #load_state_dict, Hash, Array}] as they were saved; those left out are not read
        #   @param rng [Boolean] whether to restore the random numbers, if as many ranks load as saved
        #   @param strict [Boolean] whether names that a model has too many or too few are errors
        #   @param names [Hash{String => String, nil}, #call, nil] for safetensors: the model's name for a name in the files, nil for a
        #     tensor that is left out; what is not in the Hash has the same name
        #   @param convert [Boolean] for safetensors: whether floating-point numbers of another dtype, such as bfloat16, are
        #     converted to the model's; false: they are errors
        #   @param required [Boolean] whether it is an error that there is no checkpoint
        # @overload load(state_dict, checkpoint_id:, strict: true, process_group: nil)
        #   Fills a Hash in place: tensors get their values, objects their state, and plain values are replaced.
        #   @param state_dict [Hash]
        #   @param checkpoint_id [String]
        # @return [Loaded, nil] nil: there is none, and none is required
        # @raise [NotFoundError] if there is no checkpoint
        # @raise [DamagedError] if the one that was asked for is damaged, or all are
        # @raise [CheckpointError] on all ranks, if loading fails on one
        def load(path, objects = nil, checkpoint_id: nil, rng: !path.is_a?(Hash), strict: true, names: nil, convert: false, required: true,
          process_group: nil, **keywords)
          whole = path.is_a?(Hash)
          check_options("load", rng: rng, strict: strict, names: names, convert: convert, required: required, checkpoint_id: checkpoint_id,
            process_group: process_group)
          Safetensors.check_names(names)
          objects, target = given_objects(path, checkpoint_id, objects, keywords, "load_state_dict")
          return unless (together = together(process_group, "load"))

          loader = Loader.new(target, together, strict: strict, names: names, convert: convert)
          loaded = loader.load(objects, rng, whole: whole)
          return loaded if loaded || !required

          raise NotFoundError, "#{target}: there is no checkpoint, expected a folder with a #{Manifest::FILE}, one with such folders in " \
            "it, a file of PyTorch's, or one of safetensors"
        end

        # The newest checkpoint of a folder, according to its manifest; {.load} reads the newest whose data are good too.
        # Looks at this process's files alone: no other rank need call it.
        #
        # @param dir [String]
        # @return [String, nil] its folder
        def latest(dir)
          list(dir).first
        end

        # @param dir [String]
        # @return [Array<String>] the folders of its checkpoints, the newest first
        def list(dir)
          Folder.newest_first(dir).map(&:folder)
        end

        # Reads a checkpoint and compares all its checksums. Looks at this process's files alone.
        #
        # @param path [String] a checkpoint's folder, or a folder of checkpoints, whose newest is meant
        # @return [Hash] what the manifest says of it, without the states
        # @raise [DamagedError]
        # @raise [NotFoundError]
        def verify(path)
          folder = Manifest.in?(path) ? path : latest(path)
          raise NotFoundError, "#{path}: there is no checkpoint" unless folder

          manifest = Manifest.read(folder)
          with_files(manifest) { |file_of| manifest["tensors"].each { |name, place| DataFile.check(file_of, name, place, manifest.block) } }
          manifest.content.except("objects", "extra", "rng", "tensors")
        end

        # Yields what gives a tensor by its name, to be read while the block runs.
        #
        # @api private
        # @yieldparam stored [Proc] returns a {Stored} by its name
        def with_tensors(manifest)
          known = {}
          with_files(manifest) do |file_of|
            yield lambda { |name|
              known[name] ||= begin
                place = manifest["tensors"].fetch(name) { raise DamagedError, "#{manifest.path}: it says nothing of the tensor #{name}" }
                Stored.new(name, place, manifest.block, file_of)
              end
            }
          end
        end

        private

        # Opens a checkpoint's files as they are needed, and looks at their sizes first.
        def with_files(manifest)
          files = {}
          yield ->(name) { files[name] ||= opened(manifest, name) }
        ensure
          files.each_value(&:close)
        end

        def opened(manifest, name)
          path = File.join(manifest.folder, name)
          expected = manifest["files"][name]["bytes"]
          file = File.open(path, "rb")
          return file if file.size == expected

          found = file.size
          file.close
          raise DamagedError, "#{path} is damaged: expected #{expected} bytes, found #{found}"
        rescue Errno::ENOENT
          raise DamagedError, "#{path} is missing: expected a file of #{expected} bytes"
        end

        # What both kinds of saves begin with: all ranks know what each writes.
        #
        # @return [Saver, nil]
        def stage(path, objects, checkpoint_id: nil, epoch: nil, step: nil, name: nil, extra: {}, rng: !path.is_a?(Hash), sharded: nil,
          keep: nil, process_group: nil, **keywords)
          check_options("save", epoch: epoch, step: step, name: name, extra: extra, rng: rng, sharded: sharded, keep: keep,
            checkpoint_id: checkpoint_id, process_group: process_group)
          objects, target = given_objects(path, checkpoint_id, objects, keywords, "state_dict")
          name = path.is_a?(Hash) ? nil : name || default_name(step, epoch)
          check_save(epoch, step, extra, keep, sharded)
          return unless (together = together(process_group, "save"))

          finish_earlier(together, target)
          parts, divided = agreed_parts(together, objects, target, name, sharded)
          name = together.on_first("cannot save into #{target}") { next_name(target) } if name == :next
          saver = (divided ? ShardedSaver : Saver).new(target, name, together, sharded: divided || sharded, keep: keep)
          states = nil
          together.all("cannot save #{saver.folder}") do
            states = objects.to_h { |key, object| [key.to_s, States.of(object, parts, divided)] }
            nil
          end
          saver.stage({"epoch" => epoch, "step" => step}, states, extra, rng, States.buffers(objects))
        end

        # An error of the save before is raised on all ranks, whichever have seen it.
        def finish_earlier(together, target)
          error = nil
          texts = together.all("cannot save into #{target}") do
            error = AsyncSave.finish
            error&.message
          end
          raise error if error
          raise CheckpointError, texts.compact.first if texts.any?
        end

        # @return [Array(Parts, Boolean)] what ranks divide, and whether that is written in pieces
        def agreed_parts(together, objects, target, name, sharded)
          doing = "cannot save into #{target}"
          parts = nil
          divided = together.all(doing) do
            parts = Parts.new(objects)
            if sharded == false && parts.sharded?
              raise ArgumentError, "sharded: expected true or nil, got false: each rank has a part of the model; full_state_dict gathers it"
            end
            parts.divided?(consolidated: sharded == true) && sharded != false
          end
          together.agree(doing, "sharded" => sharded, "the checkpoint's name" => name.to_s,
            **((sharded || divided.any?) ? {"the folder" => File.expand_path(target)} : {}))
          [parts, divided.any?]
        end

        # The forms of arguments: what is saved as a Hash with its folder, or a path with objects in a Hash or as keywords.
        #
        # @return [Array(Hash, String)] the objects by name, and the path
        def given_objects(path, checkpoint_id, objects, keywords, method)
          if path.is_a?(Hash)
            raise ArgumentError, "checkpoint_id: expected the checkpoint's folder, got #{checkpoint_id.inspect}" unless path?(checkpoint_id)
            raise ArgumentError, "#{keywords.keys.first}: expected it within the state_dict" unless keywords.empty?
            raise ArgumentError, "objects: expected them within the state_dict, got #{objects.class} beside it" unless objects.nil?

            return [path, File.path(checkpoint_id)]
          end
          raise ArgumentError, "checkpoint_id: it goes with a state_dict, got the path #{path.inspect} as well" unless checkpoint_id.nil?
          raise TypeError, "path: expected a folder's name, got #{path.inspect}" unless path?(path)

          objects = objects.nil? ? keywords : objects_by_name(objects, keywords)
          States.check(objects, method)
          [objects, File.path(path)]
        end

        def objects_by_name(objects, keywords)
          raise TypeError, "objects: expected a Hash of names and objects, got #{objects.class}: {model: model}" unless objects.is_a?(Hash)
          unless keywords.empty?
            raise ArgumentError, "#{keywords.keys.first}: expected an option, or an object within the Hash of objects that is given"
          end

          wrong = objects.keys.find { |name| !(name.is_a?(Symbol) || name.is_a?(String)) }
          raise TypeError, "objects: expected names that are Symbols or Strings, got #{wrong.inspect}" if wrong

          objects.to_h { |name, object| [name.to_sym, object] }.tap do |named|
            next if named.size == objects.size

            twice = objects.keys.map(&:to_s).tally.key(2)
            raise ArgumentError, "objects: expected each name once, got #{twice} as a Symbol and as a String"
          end
        end

        # Objects that were meant to be saved or loaded under the name of an option.
        def check_options(operation, **options)
          options.each do |name, value|
            next unless value.respond_to?(:state_dict)

            raise ArgumentError, "#{name}: is an option of #{operation}, got an object that has a state (#{value.class}): to give it under " \
              "this name pass a Hash, Checkpoint.#{operation}(path, {#{name}: object})"
          end
        end

        def path?(path)
          path.respond_to?(:to_path) || (path.is_a?(String) && !path.empty?)
        end

        def check_save(epoch, step, extra, keep, sharded)
          raise TypeError, "sharded: expected true, false or nil, got #{sharded.inspect}" unless [true, false, nil].include?(sharded)

          {epoch: epoch, step: step}.compact.each do |name, number|
            next if number.is_a?(Integer) && number >= 0

            raise TypeError, "#{name}: expected an Integer of 0 or more, got #{number.inspect}"
          end
          raise TypeError, "extra: expected a Hash, got #{extra.inspect}" unless extra.is_a?(Hash)
          return if keep.nil? || (keep.is_a?(Integer) && keep.positive?)

          raise ArgumentError, "keep: expected how many checkpoints stay, 1 or more, got #{keep.inspect}"
        end

        def default_name(step, epoch)
          return format("step-%09d", step) if step.is_a?(Integer)

          epoch.is_a?(Integer) ? format("epoch-%06d", epoch) : :next
        end

        def next_name(dir)
          numbers = Folder.children(dir).filter_map { |name| name[/\Asave-(\d+)\z/, 1]&.to_i }
          format("save-%06d", (numbers.max || 0) + 1)
        end

        def together(process_group, operation)
          return Together.new(nil, operation) if process_group.nil? && !Distributed.initialized?

          group = Distributed.send(:member_group, process_group, "Checkpoint.#{operation}")
          group && Together.new(group, operation)
        end
      end
    end
  end
end

require_relative "checkpoint/data_file"
require_relative "checkpoint/region"
require_relative "checkpoint/piece"
require_relative "checkpoint/optimizer_parts"
require_relative "checkpoint/parts"
require_relative "checkpoint/gathering"
require_relative "checkpoint/tree"
require_relative "checkpoint/merging"
require_relative "checkpoint/manifest"
require_relative "checkpoint/folder"
require_relative "checkpoint/ranks"
require_relative "checkpoint/states"
require_relative "checkpoint/reading"
require_relative "checkpoint/distribution"
require_relative "checkpoint/saver"
require_relative "checkpoint/sharded_saver"
require_relative "checkpoint/async_save"
require_relative "checkpoint/torch_file"
require_relative "checkpoint/loader"
