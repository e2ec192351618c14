# frozen_string_literal: true

require "json"

module Torch
  module Distributed
    module Checkpoint
      module Safetensors
        # What a file of safetensors says of its tensors, checked: everything lies within the file, one tensor after the other.
        #
        # @api private
        class Header
          # Bytes of a header at most, as in the format's own library.
          LIMIT = 100_000_000

          # Digits of a number at most, and dimensions of a tensor: Ruby's numbers have no end, and libtorch's tensors no more than these.
          DIGITS = 400
          DIMENSIONS = 64
          LARGEST = 2**63 - 1
          private_constant :DIGITS, :DIMENSIONS, :LARGEST

          # Bytes of an element of dtypes that libtorch has, and of others.
          DTYPE_OF = DTYPES.reject { |_, dtype| dtype.pairs }.to_h { |name, dtype| [dtype.word, name] }.freeze
          BYTES = DTYPE_OF.transform_values { |name| DTYPES.fetch(name).bytes }
            .merge("U16" => 2, "U32" => 4, "U64" => 8, "F8_E4M3" => 1, "F8_E5M2" => 1, "F8_E8M0" => 1, "C64" => 8).freeze

          # A tensor: what the format calls its dtype, and the bytes [first, last) of the data.
          Row = Struct.new(:word, :shape, :first, :last) do
            # @return [String, nil] nil: tensors of this dtype cannot be made
            def dtype
              DTYPE_OF[word]
            end
          end

          # A JSON object in which no name stands twice.
          class Names < Hash
            def []=(name, value)
              raise DamagedError, "it has two entries #{name.inspect}" if key?(name)

              super
            end
          end
          private_constant :Names

          # @return [Hash{String => Row}]
          attr_reader :rows

          # @return [Hash{String => String}]
          attr_reader :metadata

          # @return [Integer] where the data begins in the file
          attr_reader :start

          # @param file [File]
          # @raise [DamagedError] if the file is none of safetensors
          def initialize(file)
            @size = file.size
            content = parsed(text(file))
            @metadata = content.delete("__metadata__") || {}
            unless @metadata.is_a?(Hash) && @metadata.all? { |name, value| name.is_a?(String) && value.is_a?(String) }
              raise DamagedError, "its __metadata__ is no object of texts"
            end

            @rows = content.to_h { |name, row| [name, row_of(name, row)] }
            check_order
          rescue DamagedError => e
            raise DamagedError, "#{file.path} is damaged, or no file of safetensors: #{e.message}"
          end

          private

          def text(file)
            raise DamagedError, "it has #{@size} bytes, fewer than the header's length takes" if @size < 8

            length = file.pread(8, 0).unpack1("Q<")
            raise DamagedError, "its header has #{length} bytes, more than #{LIMIT}" if length > LIMIT
            raise DamagedError, "its header should have #{length} bytes, and the file has #{@size}" if 8 + length > @size
            raise DamagedError, "its header is empty" if length.zero?

            @start = 8 + length
            file.pread(length, 8).force_encoding(Encoding::UTF_8)
          end

          def parsed(text)
            raise DamagedError, "its header is no UTF-8" unless text.valid_encoding?
            raise DamagedError, "its header does not begin with {" unless text.start_with?("{")

            raise DamagedError, "its header has a number of more than #{DIGITS} digits" if text.match?(/\d{#{DIGITS}}/o)

            content = JSON.parse(text, object_class: Names)
            content.is_a?(Names) ? content : raise(DamagedError, "its header is no object")
          rescue JSON::ParserError => e
            raise DamagedError, "its header is no JSON: #{e.message[0, 120]}"
          end

          def row_of(name, row)
            word, shape, offsets = row.values_at("dtype", "shape", "data_offsets") if row.is_a?(Hash)
            unless word.is_a?(String) && numbers?(shape) && numbers?(offsets) && offsets.size == 2 && offsets[0] <= offsets[1]
              raise DamagedError, "what it says of #{name.inspect} cannot be: #{row.inspect[0, 200]}"
            end

            expected = BYTES[word] && shape.inject(BYTES[word], :*)
            found = offsets[1] - offsets[0]
            return Row.new(word, shape, *offsets) if expected.nil? || expected == found

            raise DamagedError, "#{name.inspect}, #{word} #{shape}, should have #{expected} bytes, and has #{found}"
          end

          def numbers?(values)
            values.is_a?(Array) && values.size <= DIMENSIONS && values.all? { |value| value.is_a?(Integer) && value.between?(0, LARGEST) }
          end

          def check_order
            data = @size - @start
            reached = @rows.sort_by { |_, row| [row.first, row.last] }.inject(0) do |at, (name, row)|
              raise DamagedError, "#{name.inspect} begins at #{row.first}, within the tensor before, which ends at #{at}" if row.first < at
              raise DamagedError, "nothing stands between #{at} and #{row.first}, where #{name.inspect} begins" if row.first > at
              raise DamagedError, "#{name.inspect} ends at #{row.last}, and the data at #{data}" if row.last > data

              row.last
            end
            raise DamagedError, "its tensors end at #{reached}, and the data at #{data}" unless reached == data
          end
        end
      end
    end
  end
end
