# frozen_string_literal: true

require "json"

module Torch
  module Distributed
    module Checkpoint
      # States as JSON: tensors are replaced by their names, `{"$tensor": "model.fc.weight"}`. What JSON has no
      # word for is tagged in the same way, so that everything comes back as it was: symbols, keys that are no text, numbers
      # that are not finite, bytes that are no UTF-8. Nothing else is taken, and nothing that is read runs code.
      #
      # @api private
      class Tree
        # What is kept of a tensor. Of one that ranks divide it is this rank's piece: `shape` is that of the piece then, `whole`
        # that of all of the tensor, and `regions` which elements of it the piece has.
        # `compared`: whether its values must be the same on all ranks, as those of tensors that are no model's and no optimizer's.
        Entry = Struct.new(:name, :tensor, :dtype, :shape, :whole, :regions, :compared) do
          # @return [Integer]
          def bytes
            shape.inject(DTYPES.fetch(dtype).bytes, :*)
          end
        end

        # How deep arrays and hashes may lie within each other. What contains itself has no end.
        DEPTH = 200

        # @return [Hash{String => Entry}] the tensors that were taken out
        attr_reader :entries

        # @return [Hash{String => String}] of states within what was packed: by their place, what {Merging} calls them
        attr_reader :kinds

        def initialize
          @entries = {}
          @kinds = {}
          @names = {}
          @within = nil
          @depth = 0
        end

        # @param value [Object] tensors within nested hashes and arrays
        # @param name [String] where it stands, for texts and for the names of tensors
        # @return [Object] what JSON can say
        def pack(value, name)
          case value
          when nil, true, false, Integer then value
          when Float then value.finite? ? value : {"$float" => value.to_s}
          when String then packed_text(value)
          when Symbol then {"$symbol" => value.to_s}
          when Torch::Tensor
            LocalPiece.refuse(name, value)
            {"$tensor" => take(value, name)}
          when Piece then {"$tensor" => take(value.tensor, name, value)}
          when NamedState then packed_state(value.state, name, Merging::NAMED)
          when PartialState then packed_state(value.state, name, Merging::PART)
          when WholeState then packed_state(value.state, name, Merging::MODEL)
          when Array then nested(name) { value.each_with_index.map { |each, i| pack(each, "#{name}.#{i}") } }
          when Hash then nested(name) { packed_hash(value, name) }
          when Complex then {"$complex" => [pack(value.real, name), pack(value.imaginary, name)]}
          when Range then {"$range" => [pack(value.begin, name), pack(value.end, name), value.exclude_end?]}
          else
            raise TypeError, "#{name}: expected tensors, numbers, texts, true, false, nil, arrays and hashes of them, got #{value.class}"
          end
        end

        # @param value [Object] what {#pack} gave
        # @yieldparam name [String] a tensor's
        # @yieldreturn [Torch::Tensor]
        # @return [Object] what it was
        # @raise [DamagedError] if {#pack} cannot have given it
        def self.read(value, &tensor)
          unpack(value, &tensor)
        rescue KeyError, NoMethodError, TypeError, ArgumentError, RangeError => e
          raise DamagedError, "the manifest has a value that cannot be: #{e.message[0, 200]}"
        end

        # {.read}, of what was just packed.
        def self.unpack(value, &tensor)
          case value
          when Array then value.map { |each| unpack(each, &tensor) }
          when Hash
            tag, content = value.first
            return untagged(tag, content, &tensor) if value.size == 1 && tag.start_with?("$")

            value.transform_values { |each| unpack(each, &tensor) }
          else value
          end
        end

        # @return [Array<String>] the names of the tensors in it
        def self.names(value)
          [].tap { |names| unpack(value) { |name| names << name } }.uniq
        end

        def self.untagged(tag, content, &tensor)
          case tag
          when "$tensor" then tensor.call(content)
          when "$symbol" then content.to_sym
          when "$float" then {"NaN" => Float::NAN, "Infinity" => Float::INFINITY, "-Infinity" => -Float::INFINITY}.fetch(content)
          when "$bytes" then content.unpack1("m0")
          when "$map" then content.to_h { |key, each| [unpack(key, &tensor), unpack(each, &tensor)] }
          when "$complex" then Complex(*content.map { |part| unpack(part, &tensor) })
          when "$range" then Range.new(*content.map { |part| unpack(part, &tensor) })
          else raise DamagedError, "the manifest has #{tag.inspect}, which this version does not know"
          end
        end
        private_class_method :untagged

        class << self
          # @param value [Object] what {#pack} gave
          # @return [Boolean] whether it was a Hash
          def pairs?(value)
            value.is_a?(Hash) && (value.size != 1 || !value.keys.first.start_with?("$") || value.key?("$map"))
          end

          # @return [Array<Array(Object, Object)>] keys and values, both packed
          def pairs(value)
            value.key?("$map") ? value["$map"] : value.to_a
          end

          # @return [Object] what {#pack} makes of a Hash with these keys and values
          def of_pairs(pairs)
            plain?(pairs.map(&:first)) ? pairs.to_h : {"$map" => pairs}
          end

          # @return [Boolean] whether keys can be those of a JSON object
          def plain?(keys)
            keys.all? { |key| key.is_a?(String) && key.encoding != Encoding::BINARY && key.valid_encoding? && !key.start_with?("$") }
          end

          # @param key [Object] packed
          # @return [String] what it is called in the names of tensors
          def text(key)
            key.is_a?(String) ? key : unpack(key).to_s
          end

          # @return [String] a packed value, for errors
          def shown(value)
            return "a tensor" if value.is_a?(Hash) && value.key?("$tensor")
            return "a Hash of #{pairs(value).first(6).map { |key, _| text(key) }.join(", ")}" if pairs?(value)

            (value.is_a?(Hash) ? unpack(value) { nil } : value).inspect[0, 80]
          end
        end

        private

        def nested(name)
          if (@depth += 1) > DEPTH
            raise ArgumentError, "#{name[0, 200]}: arrays and hashes lie deeper than #{DEPTH} within each other, or contain themselves"
          end

          yield
        ensure
          @depth -= 1
        end

        # A tensor in a model's state or an optimizer's is taken to be the same on all ranks, and buffers need not be.
        def packed_state(state, name, kind)
          @kinds[name] = kind
          outer = @within
          @within = kind
          pack(state, name)
        ensure
          @within = outer
        end

        def packed_text(text)
          utf8 = (text.encoding == Encoding::BINARY) ? text.dup.force_encoding(Encoding::UTF_8) : text.encode(Encoding::UTF_8)
          return {"$bytes" => [text].pack("m0")} if text.encoding == Encoding::BINARY && !utf8.ascii_only?

          utf8.valid_encoding? ? utf8 : {"$bytes" => [text].pack("m0")}
        rescue EncodingError
          {"$bytes" => [text].pack("m0")}
        end

        def packed_hash(hash, name)
          return hash.to_h { |key, value| [key.encode(Encoding::UTF_8), pack(value, "#{name}.#{key}")] } if Tree.plain?(hash.keys)

          {"$map" => hash.map { |key, value| [pack(key, name), pack(value, "#{name}.#{key}")] }}
        end

        # Two names of one memory are kept once.
        def take(tensor, name, piece = nil)
          check(tensor, name)
          dtype = Checkpoint.dtype_name(tensor)
          @names[identity(tensor, dtype, piece)] ||= unused(name).tap do |free|
            local = piece ? piece.local : tensor
            @entries[free] = Entry.new(free, local, dtype, piece ? [local.numel] : local.shape, piece&.shape, piece&.regions, piece.nil? && @within.nil?)
          end
        end

        # Pieces may be empty on one rank and not on another, and must be found the same on both.
        def identity(tensor, dtype, piece)
          span = Distributed._span(tensor) unless piece
          (span && span[1].positive?) ? [span, dtype, tensor.shape, Distributed._device_name(tensor.device)] : tensor.object_id
        end

        def check(tensor, name)
          unless tensor.layout == :strided
            raise ArgumentError, "#{name}: expected a dense tensor, got a #{tensor.layout} one: save its to_dense, or its indices and values"
          end
          return if Checkpoint.dtype_name(tensor)

          raise ArgumentError, "#{name}: tensors of this dtype are not saved, expected one of #{DTYPES.keys.join(", ")}: convert it " \
            "(dequantize, for instance)"
        end

        def unused(name)
          name = name.encode(Encoding::UTF_8, invalid: :replace, undef: :replace)
          return name unless @entries.key?(name) || name == "__metadata__"

          (2..).each { |number| return "#{name}##{number}" unless @entries.key?("#{name}##{number}") }
        end
      end
    end
  end
end
