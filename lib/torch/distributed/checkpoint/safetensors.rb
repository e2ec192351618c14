# frozen_string_literal: true

require "torch/distributed/checkpoint"
require "fileutils"
require "json"

module Torch
  module Distributed
    module Checkpoint
      # Files of the format https://github.com/huggingface/safetensors, in which models are exchanged: names, dtypes and shapes in
      # JSON, and then the elements. Reading checks all of it and runs no code; a file that is written gets its name when it is
      # whole.
      #
      #   Safetensors = Torch::Distributed::Checkpoint::Safetensors
      #   Safetensors.save("weights.safetensors", {"weight" => tensor}, metadata: {"source" => "here"})
      #   Safetensors.load("weights.safetensors")["weight"]
      #   Safetensors.load_into(model, "folder")
      #   Safetensors.save_model(model, "folder", max_shard_size: "2GB")
      module Safetensors
        UNITS = {"" => 1, "KB" => 10**3, "MB" => 10**6, "GB" => 10**9, "KIB" => 2**10, "MIB" => 2**20, "GIB" => 2**30}.freeze
        private_constant :UNITS

        class << self
          # Writes tensors to a file; one of that name is replaced once the new one is whole.
          #
          # @param path [String]
          # @param tensors [Hash{String => Torch::Tensor}] dense, of the dtypes of the format, which has no complex ones
          # @param metadata [Hash{String => String}]
          # @return [void]
          def save(path, tensors, metadata: {})
            path = file_path("path", path)
            raise TypeError, "tensors: expected a Hash of names and tensors, got #{tensors.inspect[0, 80]}" unless tensors.is_a?(Hash)

            tensors = tensors.transform_keys { |name| name.is_a?(Symbol) ? name.to_s : name }
            tensors.each { |name, tensor| check_tensor(name, tensor) }
            LocalPiece.refuse("Safetensors.save", tensors)
            entries = tensors.map { |name, tensor| Tree::Entry.new(name, tensor, Checkpoint.dtype_name(tensor), tensor.shape) }
            writer = Writer.new(path, entries, check_metadata(metadata))
            tensors.each { |name, tensor| writer.write(name, tensor) }
            writer.finish
            writer.publish
          ensure
            writer&.discard
          end

          # @param path [String] a file, an index of several, or a folder with `model.safetensors` or its index
          # @return [Hash{String => Torch::Tensor}]
          # @raise [NotFoundError] if there is none
          # @raise [DamagedError] if it is none of safetensors, or a part of it is missing
          # @raise [CheckpointError] if it has tensors of a dtype that libtorch has not
          def load(path)
            Source.open(file_path("path", path)) do |source|
              source.places.each { |name, place| check_dtype(place.file.path, name, place.row) }
              source.places.to_h { |name, place| [name, place.range(0, place.row.shape.inject(1, :*)).reshape(place.row.shape)] }
            end
          end

          # @param path [String] a file
          # @return [Hash{String => String}] its metadata
          def metadata(path)
            File.open(file_path("path", path), "rb") { |file| Header.new(file).metadata }
          rescue Errno::ENOENT => e
            raise NotFoundError, e.message
          end

          # Fills a model's parameters and buffers. Of a sharded model each process reads its ranges; all of the group call it then, and
          # nothing is changed before all have read theirs. {Checkpoint.load} takes such files as well.
          #
          # @param model [Torch::NN::Module] also one within a DistributedDataParallel or a FullyShardedDataParallel
          # @param path [String] a file, an index of several, or a folder with `model.safetensors` or its index
          # @param strict [Boolean] whether names that the model has too many or too few are errors
          # @param names [Hash{String => String, nil}, #call, nil] the model's name for a name in the files, nil for a tensor that is left
          #   out; what is not in the Hash has the same name
          # @param convert [Boolean] whether floating-point numbers of another dtype are converted to the model's; false: they are errors
          # @param process_group [ProcessGroup, nil] for a sharded model; nil: the default group
          # @return [void]
          # @raise [CheckpointError] naming what does not fit; of a sharded model on all processes
          def load_into(model, path, strict: true, names: nil, convert: false, process_group: nil)
            path = file_path("path", path)
            check_model(model)
            check_names(names)
            together = together(model, process_group, "Safetensors.load_into") or return
            ModelLoader.new(model, path, together, strict: strict, names: names, convert: convert).load
            nil
          end

          # Saves a model as model hubs have it: `model.safetensors`, or several files and `model.safetensors.index.json`. A weight with
          # two names is saved by the first. A sharded model is gathered unit by unit and written by rank 0; all of the group call it.
          #
          # @param model [Torch::NN::Module] also one within a DistributedDataParallel or a FullyShardedDataParallel
          # @param folder [String] made if it is not there
          # @param max_shard_size [Integer, String] bytes of a file at most, or "500MB", "5GB"; a larger tensor has a file of its own
          # @param metadata [Hash{String => String}] of each file
          # @param process_group [ProcessGroup, nil] for a sharded model; nil: the default group
          # @return [Array<String>] the files, the index last
          # @raise [CheckpointError] of a sharded model on all processes
          def save_model(model, folder, max_shard_size: "5GB", metadata: {"format" => "pt"}, process_group: nil)
            folder = file_path("folder", folder)
            check_model(model)
            limit = bytes(max_shard_size)
            check_metadata(metadata)
            together = together(model, process_group, "Safetensors.save_model") or return
            ModelSaver.new(model, folder, limit, metadata, together).save
          end

          # @api private
          def check_names(names)
            return if names.nil? || names.is_a?(Hash) || names.respond_to?(:call)

            raise TypeError, "names: expected a Hash of names, something with a method `call`, or nil, got #{names.inspect[0, 80]}"
          end

          # @api private
          def check_tensor(name, tensor)
            unless name.is_a?(String) && name != "__metadata__" && name.encode(Encoding::UTF_8).valid_encoding?
              raise ArgumentError, "tensors: expected names in UTF-8 other than __metadata__, got #{name.inspect}"
            end
            raise TypeError, "#{name}: expected a Torch::Tensor, got #{tensor.class}" unless tensor.is_a?(Torch::Tensor)
            raise ArgumentError, "#{name}: expected a dense tensor, got a #{tensor.layout} one" unless tensor.layout == :strided
            return if Header::DTYPE_OF.value?(Checkpoint.dtype_name(tensor))

            raise ArgumentError, "#{name}: expected a dtype of the format (#{Header::DTYPE_OF.values.join(", ")}), got #{tensor.dtype}"
          end

          private

          def check_dtype(path, name, row)
            return if row.dtype

            raise CheckpointError, "#{path}: #{name} is #{row.word}, which libtorch has no tensors of here: expected one of " +
              Header::DTYPE_OF.keys.join(", ")
          end

          def check_model(model)
            raise TypeError, "model: expected a Torch::NN::Module, got #{model.inspect[0, 80]}" unless model.is_a?(Torch::NN::Module)
          end

          def check_metadata(metadata)
            return metadata if metadata.is_a?(Hash) && metadata.all? { |name, value| name.is_a?(String) && value.is_a?(String) }

            raise TypeError, "metadata: expected a Hash of texts, got #{metadata.inspect[0, 80]}"
          end

          def file_path(name, path)
            return File.path(path) if path.respond_to?(:to_path) || (path.is_a?(String) && !path.empty?)

            raise TypeError, "#{name}: expected a file's name, got #{path.inspect}"
          end

          def bytes(size)
            return size if size.is_a?(Integer) && size.positive?

            number, unit = size[/\A\d+\s*[KMG]?i?B\z/i] && size.scan(/\d+|[A-Z]+/i) if size.is_a?(String)
            factor = UNITS[unit.upcase.then { |each| (each == "B") ? "" : each }] if unit
            return number.to_i * factor if factor && number.to_i.positive?

            raise ArgumentError, "max_shard_size: expected a number of bytes, or one with a unit such as \"5GB\", got #{size.inspect}"
          end

          # Of a model that is not sharded each process has all.
          def together(model, process_group, operation)
            return Together.new(nil, operation) unless Distributed.initialized? && Parts.divides?(model)

            group = Distributed.send(:member_group, process_group, operation)
            group && Together.new(group, operation)
          end
        end
      end
    end
  end
end

require_relative "safetensors/header"
require_relative "safetensors/files"
require_relative "safetensors/models"
