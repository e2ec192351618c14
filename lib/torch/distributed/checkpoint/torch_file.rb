# frozen_string_literal: true

require_relative "archive"
require_relative "pickle"

module Torch
  module Distributed
    module Checkpoint
      # A file of PyTorch's torch.save or torch-rb's Torch.save: tensors and plain values. What is no archive is left to
      # torch-rb's `Torch.load`, which knows no tuples and not what PyTorch makes of a model's state_dict.
      #
      # @api private
      class TorchFile
        # Names that programs give to the parts of such a file.
        SUFFIXES = ["", "_state_dict", "_state"].freeze

        STORAGES = {
          "Float" => "float32", "Double" => "float64", "Half" => "float16", "BFloat16" => "bfloat16", "Long" => "int64", "Int" => "int32",
          "Short" => "int16", "Char" => "int8", "Byte" => "uint8", "Bool" => "bool", "ComplexFloat" => "complex64",
          "ComplexDouble" => "complex128"
        }.transform_keys { |name| "torch.#{name}Storage" }.freeze
        private_constant :SUFFIXES, :STORAGES

        # Elements that several tensors may lie in.
        Storage = Struct.new(:dtype, :key, :location, :count)
        private_constant :Storage

        # @return [Loader::Content]
        def self.content(path, names, whole)
          value = read(path)
          raise CheckpointError, "#{path}: expected a dict, got #{States.described(value)}" unless value.is_a?(Hash)

          found = whole ? value.keys.to_h { |key| [key.to_s, key] }.slice(*names) : parts(value, names)
          objects = found ? found.transform_values { |key| value[key] } : {names.first => value}
          fields = {"epoch" => "epoch", "step" => value.key?("step") ? "step" : "global_step"}.select { |_, key| value[key].is_a?(Integer) }
          extra = found ? value.except(*found.values, *fields.values) : {}
          Loader::Content.new(path, value.keys, objects, found ? fields.transform_values { |key| value[key] } : {}, extra, nil, nil)
        end

        # @return [Hash, nil] the keys of what is asked for; nil: the file is the one thing that is asked for
        def self.parts(value, names)
          found = names.to_h { |name| [name, SUFFIXES.map { |suffix| name + suffix }.find { |key| value.key?(key) }] }.compact
          found["model"] ||= "state_dict" if names.include?("model") && value["state_dict"].is_a?(Hash)
          state = (value.key?("state") && value.key?("param_groups")) || value.values.all?(Torch::Tensor)
          (found.empty? && names.size == 1 && state) ? nil : found
        end
        private_class_method :parts

        # @param place [#call, nil] `(tensor, location)` puts elements, a flat tensor on the CPU, where they shall be; nil: they
        #   stay there
        # @return [Object] what was saved
        def self.read(path, place = nil)
          File.open(path, "rb") do |file|
            return Torch.load(path) unless Archive.in?(file)

            new(file, place).read
          end
        rescue Torch::Error, RuntimeError => e
          raise e if e.is_a?(Error)

          raise CheckpointError, "#{path}: torch-rb cannot load it: #{e.message.lines.first.to_s.chomp}"
        end

        def initialize(file, place = nil)
          @file = file
          @place = place
          @path = file.path
          @archive = Archive.new(file)
          @storages = {}
        end

        def read
          if @archive.key?("byteorder") && @archive.read("byteorder") != "little"
            raise CheckpointError, "#{@path} was written on a machine of another byte order"
          end

          plain(Pickle.new(@archive.read("data.pkl"), @path, method(:build), method(:storage)).load)
        rescue KeyError, NoMethodError, TypeError => e
          raise DamagedError, "#{@path} is damaged, or no file of torch.save: #{e.message}"
        end

        private

        # Of Python's names a dtype's means something here.
        def plain(value)
          case value
          when Hash then value.to_h { |key, each| [plain(key), plain(each)] }
          when Array then value.map { |each| plain(each) }
          when Pickle::Global
            word = value.name.delete_prefix("torch.").to_sym
            Torch::DTYPE_TO_ENUM.key?(word) ? word : refuse(value.name)
          else value
          end
        end

        def refuse(name)
          raise CheckpointError, "#{@path} has a #{name}, which is no plain value: save tensors, numbers, texts, lists and dicts " \
            "(state_dict() rather than the object)"
        end

        def build(name, arguments)
          case name
          when "torch._utils._rebuild_tensor_v2" then tensor(*arguments.first(4))
          when "torch._utils._rebuild_parameter" then arguments.first
          when "collections.OrderedDict", "collections.Counter", "collections.defaultdict", "builtins.dict", "__builtin__.dict"
            arguments.grep(Hash).first || arguments.grep(Array).first.to_h
          # libtorch's own lists and dicts, with their type.
          when /\Atorch\.jit\._pickle\.(restore_type_tag|build_(int|double|bool|tensor)list)\z/ then arguments.first
          when "torch.Size", "builtins.list", "builtins.tuple" then arguments.first.to_a
          when "torch.device" then arguments.join(":")
          when "builtins.complex", "__builtin__.complex" then Complex(*arguments)
          when "_codecs.encode" then arguments.first.encode(Encoding::ISO_8859_1).b
          else refuse(name)
          end
        end

        # ("storage", class, key, device, count)
        def storage(id)
          kind, type, key, location, count = id
          dtype = STORAGES[type.name] if kind == "storage" && type.is_a?(Pickle::Global)
          return Storage.new(dtype, key, location, count) if dtype

          raise CheckpointError, "#{@path} has a tensor of #{type.is_a?(Pickle::Global) ? type.name : kind.inspect}, which is not loaded: " \
            "expected one of #{STORAGES.keys.join(", ")}"
        end

        def tensor(storage, offset, shape, strides)
          flat = @storages[storage.key] ||= placed(elements(storage), storage.location)
          offset = 0 if shape.include?(0)
          last = shape.zip(strides).sum(offset) { |size, stride| [size - 1, 0].max * stride }
          if [offset, *shape, *strides].any?(&:negative?) || (!shape.include?(0) && last >= flat.numel)
            raise DamagedError, "#{@path} is damaged: a tensor of shape #{shape} and strides #{strides} at #{offset} in #{flat.numel} elements"
          end

          return flat.narrow(0, offset, shape.inject(1, :*)).reshape(shape) if plain?(shape, strides)

          flat.index_select(0, indices(offset, shape, strides)).reshape(shape)
        end

        # Whether the elements follow each other.
        def plain?(shape, strides)
          expected = 1
          shape.zip(strides).reverse.all? do |size, stride|
            fits = size <= 1 || stride == expected
            expected *= size
            fits
          end || shape.include?(0)
        end

        # Where the elements of a tensor lie that has gaps or another order.
        def indices(offset, shape, strides)
          shape.zip(strides).inject(Torch.tensor([offset])) do |places, (size, stride)|
            (places.reshape([-1, 1]) + Torch.arange(size) * stride).reshape([-1])
          end
        end

        def placed(flat, location)
          @place ? @place.call(flat, location) : flat
        end

        def elements(storage)
          at, size = @archive.place("data/#{storage.key}")
          expected = storage.count * DTYPES.fetch(storage.dtype).bytes
          unless size == expected
            raise DamagedError, "#{@path} is damaged: data/#{storage.key} should have #{expected} bytes, and has #{size}"
          end

          Checkpoint.room(storage.dtype, [storage.count]).tap { |flat| Distributed._read_tensor(flat, @file.fileno, @path, at) }
        end
      end
    end
  end
end
