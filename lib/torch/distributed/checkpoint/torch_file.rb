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

        # How deep lists and dicts may lie within each other.
        DEPTH = 200

        # How many values there may be if those count each time that stand in several places: so many, and so many times those that
        # there are. All that reads a state goes through each place.
        VALUES = 1_000_000
        TIMES = 10

        # How many bytes tensors that share their elements may take if they share none: so many, and so many times those of the file.
        COPIES = 1 << 28
        COPIES_TIMES = 4

        # How many dimensions libtorch's tensors can have.
        DIMENSIONS = 64
        private_constant :SUFFIXES, :STORAGES, :DEPTH, :VALUES, :TIMES, :COPIES, :COPIES_TIMES, :DIMENSIONS

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
        rescue Error, SystemCallError
          raise
        rescue Torch::Error, RuntimeError => e
          raise CheckpointError, "#{path}: torch-rb cannot load it: #{e.message.lines.first.to_s.chomp}"
        rescue => e
          # Numbers of another size than any tensor's, texts that are none, values of another kind.
          raise DamagedError, "#{path} is damaged, or no file of torch.save: #{e.message[0, 200]}"
        end

        def initialize(file, place = nil)
          @file = file
          @place = place
          @path = file.path
          @archive = Archive.new(file)
          @storages = {}
          @bytes_left = file.size
          @copies_left = COPIES + COPIES_TIMES * file.size
        end

        def read
          if @archive.key?("byteorder") && @archive.read("byteorder") != "little"
            raise CheckpointError, "#{@path} was written on a machine of another byte order"
          end

          found = Pickle.new(@archive.read("data.pkl"), @path, method(:build), method(:storage)).load
          @made = {}.compare_by_identity
          plain(found, 0).tap { check_size(_1) }
        end

        private

        # Of Python's names a dtype's means something here. What stands in several places is made once.
        def plain(value, depth)
          case value
          when Hash, Array
            raise damaged("lists or dicts in it contain themselves") if @made[value] == :begun

            @made[value] ||= begin
              raise damaged("lists or dicts in it lie deeper than #{DEPTH} within each other") if depth > DEPTH

              @made[value] = :begun
              value.is_a?(Hash) ? value.to_h { |key, each| [plain(key, depth), plain(each, depth + 1)] } : value.map { |each| plain(each, depth + 1) }
            end
          when Pickle::Global
            word = value.name.delete_prefix("torch.").to_sym
            Torch::DTYPE_TO_ENUM.key?(word) ? word : refuse(value.name)
          else value
          end
        end

        # How many values there are, and how many if each counts as often as it stands somewhere.
        def check_size(value)
          sizes = {}.compare_by_identity
          expanded, height = size_and_height(value, sizes)
          distinct = sizes.each_key.sum(&:size)
          raise damaged("lists or dicts in it lie deeper than #{DEPTH} within each other") if height > DEPTH
          return if expanded <= VALUES + TIMES * distinct

          raise damaged("the lists and dicts in it have #{distinct} values, and #{expanded} as often as they stand in each other")
        end

        # @return [Array(Integer, Integer)]
        def size_and_height(value, known)
          return [1, 0] unless value.is_a?(Hash) || value.is_a?(Array)

          known[value] ||= (value.is_a?(Hash) ? value.values : value).inject([1, 1]) do |(size, height), each|
            more, below = size_and_height(each, known)
            [size + more, [height, below + 1].max]
          end
        end

        def damaged(text)
          DamagedError.new("#{@path} is damaged: #{text}")
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
            arguments.grep(Hash).first || pairs(arguments.grep(Array).first || [])
          # libtorch's own lists and dicts, with their type.
          when /\Atorch\.jit\._pickle\.(restore_type_tag|build_(int|double|bool|tensor)list)\z/ then arguments.first
          when "torch.Size", "builtins.list", "builtins.tuple" then arguments.first.to_a
          when "torch.device" then arguments.grep(String).first.to_s + arguments.grep(Integer).first.then { |index| index ? ":#{index}" : "" }
          when "builtins.complex", "__builtin__.complex" then Complex(*arguments)
          when "_codecs.encode" then arguments.first.encode(Encoding::ISO_8859_1).b
          else refuse(name)
          end
        end

        # A dict that is made of a list of keys and values.
        def pairs(list)
          list.to_h { |key, value| (Array === key) ? raise(damaged("a key in it is a list")) : [key, value] }
        end

        # ("storage", class, key, device, count)
        def storage(id)
          kind, type, key, location, count = id
          unless kind == "storage" && type.is_a?(Pickle::Global) && [key, location].all?(String) && count.is_a?(Integer)
            raise damaged("what it says of a storage is no class, two texts and a number")
          end
          return Storage.new(STORAGES[type.name], key, location, count) if STORAGES.key?(type.name)

          raise CheckpointError, "#{@path} has a tensor of #{type.name}, which is not loaded: expected one of #{STORAGES.keys.join(", ")}"
        end

        def tensor(storage, offset, shape, strides)
          unless storage.is_a?(Storage) && offset.is_a?(Integer) && [shape, strides].all? { |each| each.is_a?(Array) && each.size <= DIMENSIONS && each.all?(Integer) }
            raise damaged("what it says of a tensor is no storage and no numbers")
          end
          flat = @storages[storage.key] ||= placed(elements(storage), storage.location)
          raise damaged("data/#{storage.key} is of two dtypes") unless Checkpoint.dtype_name(flat) == storage.dtype

          offset = 0 if shape.include?(0)
          last = shape.zip(strides).sum(offset) { |size, stride| [size - 1, 0].max * stride }
          if [offset, *shape, *strides].any?(&:negative?) || (!shape.include?(0) && last >= flat.numel)
            raise damaged("a tensor of shape #{shape} and strides #{strides} at #{offset} in #{flat.numel} elements")
          end

          return flat.narrow(0, offset, shape.inject(1, :*)).reshape(shape) if plain?(shape, strides)

          copy(shape, DTYPES.fetch(storage.dtype).bytes)
          flat.index_select(0, indices(offset, shape, strides)).reshape(shape)
        end

        # Elements that stand in several places are made several times.
        def copy(shape, bytes)
          @copies_left -= shape.inject(bytes, :*)
          raise damaged("its tensors take far more than its elements do: one of them has the shape #{shape}") if @copies_left.negative?
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
          raise damaged("data/#{storage.key} should have #{expected} bytes, and has #{size}") unless size == expected
          raise damaged("its elements take more than the whole file") if (@bytes_left -= size).negative?

          Checkpoint.room(storage.dtype, [storage.count]).tap { |flat| Distributed._read_tensor(flat, @file.fileno, @path, at) }
        end
      end
    end
  end
end
