# frozen_string_literal: true

require "json"

module Torch
  module Distributed
    module Checkpoint
      # A dtype that is saved: bytes of an element, and what safetensors calls it. That format's readers know no complex
      # numbers: they find them as pairs, a dimension of 2 at the end of the shape; the manifest knows better.
      Dtype = Struct.new(:bytes, :word, :pairs)
      private_constant :Dtype

      # @api private
      DTYPES = {
        "bool" => Dtype.new(1, "BOOL"), "uint8" => Dtype.new(1, "U8"), "int8" => Dtype.new(1, "I8"), "int16" => Dtype.new(2, "I16"),
        "int32" => Dtype.new(4, "I32"), "int64" => Dtype.new(8, "I64"), "float16" => Dtype.new(2, "F16"),
        "bfloat16" => Dtype.new(2, "BF16"), "float32" => Dtype.new(4, "F32"), "float64" => Dtype.new(8, "F64"),
        "complex64" => Dtype.new(8, "F32", true), "complex128" => Dtype.new(16, "F64", true)
      }.freeze

      # torch-rb has several words for some.
      DTYPE_NAMES = DTYPES.keys.to_h { |name| [Torch::DTYPE_TO_ENUM.fetch(name.to_sym), name] }.freeze
      private_constant :DTYPE_NAMES

      # @api private
      # @return [String, nil] nil: one that is not saved
      def self.dtype_name(tensor)
        DTYPE_NAMES[tensor._dtype]
      end

      # Fresh memory. torch-rb makes no float16 at once.
      #
      # @api private
      def self.room(dtype, shape)
        return Torch.empty(shape).type(:float16) if dtype == "float16"

        Torch.empty(shape, dtype: dtype.to_sym)
      end

      # How many bytes a checksum of a divided checkpoint covers, so that a range is verified without reading all of its piece.
      #
      # @api private
      BLOCK = 1 << 20

      # Tensors in a file of the safetensors layout: the header's length (8 bytes, little-endian), the header in JSON,
      # filled up with spaces to a multiple of 8, then the elements as they lie in memory, little-endian. Large elements
      # come first, so that each is aligned.
      #
      # @api private
      module DataFile
        module_function

        # Writes a new file and makes it durable; there is none if that fails.
        #
        # @param path [String]
        # @param entries [Array<Tree::Entry>]
        # @param block [Integer, nil] how many bytes a checksum covers; nil: each tensor has one
        # @return [Hash] "file": what the manifest says of it; "tensors": offset and checksum, or list of checksums, of each
        def write(path, entries, block: nil)
          entries = ordered(entries)
          header = header_of(entries)
          file = File.open(path, File::WRONLY | File::CREAT | File::EXCL | File::BINARY)
          file.write(header)
          file.flush
          at = header.bytesize
          tensors = entries.to_h do |entry|
            place = {"offset" => at, "bytes" => entry.bytes, "crc32" => write_tensor(file, entry, at, block)}
            at += entry.bytes
            [entry.name, place]
          end
          file.fsync
          done = true
          {"file" => {"bytes" => at, "header_bytes" => header.bytesize, "header_crc32" => Checkpoint.hex(Distributed._crc32(header))},
           "tensors" => tensors}
        ensure
          file&.close
          File.delete(path) if file && !done
        end

        # @return [Array<Tree::Entry>] those with large elements first, so that each is aligned
        def ordered(entries)
          entries.each_with_index.sort_by { |entry, i| [-DTYPES.fetch(entry.dtype).bytes, i] }.map(&:first)
        end

        # @param metadata [Hash{String => String}]
        def header_of(entries, metadata = {"format" => "pt"})
          at = 0
          rows = entries.to_h do |entry|
            dtype = DTYPES.fetch(entry.dtype)
            shape = dtype.pairs ? entry.shape + [2] : entry.shape
            [entry.name, {"dtype" => dtype.word, "shape" => shape, "data_offsets" => [at, at += entry.bytes]}]
          end
          text = JSON.generate({"__metadata__" => metadata}.merge(rows)).b
          text << " " * (-text.bytesize % 8)
          [text.bytesize].pack("Q<") + text
        end

        def write_tensor(file, entry, offset, block)
          memory = memory_of(entry.tensor)
          return Checkpoint.hex(Distributed._write_tensor(memory, file.fileno, file.path, offset)) unless block

          memory = memory.reshape(-1)
          each_block(memory.numel, DTYPES.fetch(entry.dtype).bytes, block).map do |first, count, at|
            Checkpoint.hex(Distributed._write_tensor(memory.narrow(0, first, count), file.fileno, file.path, offset + at))
          end
        end

        # @return [String] what tells a tensor's values from others
        def checksum(tensor)
          memory = memory_of(tensor).reshape(-1)
          step = BLOCK / DTYPES.fetch(Checkpoint.dtype_name(memory)).bytes
          sums = 0.step(memory.numel - 1, step).map do |at|
            Distributed._crc32(Distributed.send(:_bytes, memory.narrow(0, at, [step, memory.numel - at].min)))
          end
          (sums.size == 1) ? Checkpoint.hex(sums[0]) : Checkpoint.hex(Distributed._crc32(sums.pack("L*")))
        end

        # @return [Torch::Tensor] contiguous, on the CPU; the tensor itself if it is that
        def memory_of(tensor)
          Torch.no_grad do
            plain = tensor.detach.cpu.contiguous
            # A lazy conjugate has no memory of its own.
            Distributed._span(plain) ? plain : Torch.empty_like(plain).copy!(plain)
          end
        end

        # @return [Array<Array(Integer, Integer, Integer)>] of each block the first element, the number of elements, and the offset in bytes
        def each_block(count, bytes, block)
          step = block / bytes
          Array.new((count + step - 1) / step) { |i| [i * step, [step, count - i * step].min, i * step * bytes] }
        end

        # Reads a part of a piece that has a checksum for each block.
        #
        # @param place [Hash] what the manifest says of the piece
        # @param into [Torch::Tensor] of one dimension, contiguous: the elements from `first` on
        # @raise [DamagedError] if a block that the part lies in is not what was written
        def read_part(file, name, place, block, first, into)
          dtype = Checkpoint.dtype_name(into)
          bytes = DTYPES.fetch(dtype).bytes
          last = first + into.numel
          each_block(place["count"], bytes, block).each_with_index do |(start, count, at), i|
            from = [start, first].max
            to = [start + count, last].min
            next if from >= to

            inside = into.narrow(0, from - first, to - from)
            memory = (to - from == count) ? inside : Checkpoint.room(dtype, [count])
            compare(file, name, {"offset" => place["offset"] + at, "bytes" => count * bytes, "crc32" => place["crc32"][i]},
              Distributed._read_tensor(memory, file.fileno, file.path, place["offset"] + at))
            inside.copy!(memory.narrow(0, from - start, to - from)) unless memory.equal?(inside)
          end
        end

        # @param file [File]
        # @param place [Hash] what the manifest says of the tensor
        # @return [Torch::Tensor]
        # @raise [DamagedError] if its bytes are not those that were written
        def read_tensor(file, name, place)
          tensor = Checkpoint.room(place["dtype"], place["shape"])
          compare(file, name, place, Distributed._read_tensor(tensor, file.fileno, file.path, place["offset"]))
          tensor
        end

        # Compares all checksums of a tensor.
        #
        # @param file_of [Proc] opens a file by its name
        # @param block [Integer, nil] how many bytes a checksum covers; nil: the tensor has one
        def check(file_of, name, place, block)
          return check_bytes(file_of.call(place["file"]), name, place) unless block

          bytes = DTYPES.fetch(place["dtype"]).bytes
          place["pieces"].each do |piece|
            each_block(piece["count"], bytes, block).each_with_index do |(_, count, at), i|
              check_bytes(file_of.call(piece["file"]), name,
                {"offset" => piece["offset"] + at, "bytes" => count * bytes, "crc32" => piece["crc32"][i]})
            end
          end
        end

        def check_bytes(file, name, place)
          compare(file, name, place, Distributed._read_checksum(place["bytes"], file.fileno, file.path, place["offset"]))
        end

        def compare(file, name, place, found)
          return if Checkpoint.hex(found) == place["crc32"]

          raise DamagedError, "#{file.path} is damaged: #{name} (#{place["bytes"]} bytes at #{place["offset"]}) should have the " \
            "CRC-32 #{place["crc32"]}, and has #{Checkpoint.hex(found)}"
        end
      end

      # @api private
      def self.hex(checksum)
        format("%08x", checksum)
      end
    end
  end
end
