# frozen_string_literal: true

module Torch
  module Distributed
    module Checkpoint
      # The uncompressed zip archive that torch.save writes: where each of its files lies.
      #
      # @api private
      class Archive
        END_SIZE = 22
        END_MARK = "PK\x05\x06".b
        END64_MARK = "PK\x06\x06".b
        ROW_MARK = "PK\x01\x02".b
        ROW_SIZE = 46
        LOCAL_MARK = "PK\x03\x04".b
        LOCAL_SIZE = 30
        COMMENT_MAX = 0xffff
        WIDE = 0xffffffff
        private_constant :END_SIZE, :END_MARK, :END64_MARK, :ROW_MARK, :ROW_SIZE, :LOCAL_MARK, :LOCAL_SIZE, :COMMENT_MAX, :WIDE

        # One file in it.
        Row = Struct.new(:name, :method, :size, :header)

        def self.in?(file)
          file.pread(4, 0) == LOCAL_MARK
        rescue EOFError
          false
        end

        # @param file [File]
        def initialize(file)
          @file = file
          @size = file.size
          @rows = rows.to_h { |row| [row.name.sub(%r{\A[^/]*/}, ""), row] }
        end

        # @param name [String] without the archive's own first folder
        def key?(name)
          @rows.key?(name)
        end

        # @return [Array(Integer, Integer)] the offset and the size of a file in it
        def place(name)
          row = @rows.fetch(name) { raise damaged("it has no #{name}") }
          raise damaged("#{name} in it is compressed, which torch.save does not do") unless row.method.zero?

          local = bytes(row.header, LOCAL_SIZE)
          raise damaged("there is no #{name} at #{row.header}") unless local.start_with?(LOCAL_MARK)

          at = row.header + LOCAL_SIZE + local.unpack("@26S<2").sum
          raise damaged("#{name} should end at #{at + row.size}, and the file ends at #{@size}") if at + row.size > @size

          [at, row.size]
        end

        # @return [String] the contents of a file in it
        def read(name)
          bytes(*place(name))
        end

        private

        def damaged(text)
          DamagedError.new("#{@file.path} is damaged, or no file of torch.save: #{text}")
        end

        def bytes(offset, size)
          raise damaged("it ends at #{@size}, and #{size} bytes at #{offset} were expected") if offset.negative? || offset + size > @size

          size.zero? ? "".b : @file.pread(size, offset)
        end

        def rows
          count, size, at = directory
          raise damaged("its directory has #{size} bytes, too few for #{count} files") if count * ROW_SIZE > size

          text = bytes(at, size)
          place = 0
          Array.new(count) do
            row = text.byteslice(place..)
            raise damaged("its directory ends early") unless row.start_with?(ROW_MARK) && row.bytesize >= ROW_SIZE

            method, _, _, _, packed, plain, name_size, extra_size, comment_size = row.unpack("@10S<3L<3S<3")
            header = row.unpack1("@42L<")
            place += ROW_SIZE + name_size + extra_size + comment_size
            plain, header = wide(row.byteslice(ROW_SIZE + name_size, extra_size) || "", plain, packed, header)
            Row.new(row.byteslice(ROW_SIZE, name_size), method, plain, header)
          end
        end

        # Numbers that do not fit into 32 bits stand in an extra field, in this order.
        def wide(extra, plain, packed, header)
          until extra.empty?
            id, size = extra.unpack("S<2")
            break if size.nil?

            if id == 1
              numbers = extra.byteslice(4, size).unpack("Q<*")
              plain = numbers.shift || plain if plain == WIDE
              numbers.shift if packed == WIDE
              header = numbers.shift || header if header == WIDE
            end
            extra = extra.byteslice((4 + size)..) || ""
          end
          [plain, header]
        end

        # @return [Array(Integer, Integer, Integer)] how many rows, in how many bytes, where
        def directory
          from = [@size - END_SIZE - COMMENT_MAX, 0].max
          tail = bytes(from, @size - from)
          at = tail.rindex(END_MARK)
          raise damaged("its end is missing") unless at && tail.bytesize - at >= END_SIZE

          count, size, start = tail.unpack("@#{at + 10}S<L<2")
          return [count, size, start] unless [count, size, start].intersect?([0xffff, WIDE])

          locator = bytes(from + at - 20, 20)
          record = bytes(locator.unpack1("@8Q<"), 56)
          raise damaged("its large directory is missing") unless record.start_with?(END64_MARK)

          record.unpack("@32Q<3")
        end
      end
    end
  end
end
