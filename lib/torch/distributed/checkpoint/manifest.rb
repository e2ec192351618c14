# frozen_string_literal: true

require "json"

module Torch
  module Distributed
    module Checkpoint
      # The manifest makes a folder a checkpoint: it is written last, and lists the files with their checksums.
      #
      #   {"crc32":"89abcdef","content":{"format":"torch-ddp checkpoint","version":1,…}}
      #
      # The checksum is that of the bytes of the content. "files" has each file's size, "tensors" each tensor's dtype,
      # shape, file, offset, size and CRC-32, "objects" and "extra" are {Tree}s. Groups of an optimizer's parameters have "param_names"
      # beside the numbers, where the models were saved along with it.
      #
      # In version 2 a tensor has a list of "pieces" instead: first element, number of elements, file, offset, size and a CRC-32 for
      # each "block" of so many bytes. States of optimizers have the names of parameters in the place of numbers.
      #
      # In version 3 a piece may have "width" and "stride" too, and stands for rows then: of columns of a matrix, for instance. Its "count"
      # is a multiple of "width", and its element i is, in the tensor laid out flat, that at start + i / width * stride + i % width
      # (integer division).
      #
      # So a reader in any language makes room for the tensor, reads "bytes" from "offset" on of each piece's file, and copies rows of
      # "width" elements (without it, one of "count") to "start", "start" + "stride" and so on. Pieces cover each tensor. In the files
      # a piece that is not all of its tensor is named after it and its place, "model.down.weight[2...48, 2 of 8]"; places are the
      # manifest's.
      #
      # @api private
      class Manifest
        FILE = "manifest.json"
        PARTIAL = "manifest.json.partial"
        FORMAT = "torch-ddp checkpoint"
        VERSION = 1
        # That of checkpoints whose tensors are divided.
        DIVIDED = 2
        # That of those of which a piece has gaps.
        STRIDED = 3
        START = '{"crc32":"'
        MIDDLE = '","content":'
        CLOSE = "}\n"
        # How deep its JSON may be nested: each Hash of a {Tree} may take three levels.
        NESTING = 3 * Tree::DEPTH + 20
        private_constant :START, :MIDDLE, :CLOSE

        # @return [Hash]
        attr_reader :content

        # @return [String] the checkpoint's folder
        attr_reader :folder

        def self.in?(folder)
          File.file?(File.join(folder, FILE))
        end

        # @param piece [Hash] what the manifest says of a piece
        # @return [Region]
        def self.region(piece)
          Region.new(*piece.values_at("start", "count", "width", "stride"))
        end

        def self.text(content)
          json = JSON.generate(content, max_nesting: NESTING)
          [START, Checkpoint.hex(Distributed._crc32(json)), MIDDLE, json, CLOSE].join
        end

        # @raise [DamagedError] if it is not what was written
        def self.read(folder)
          path = File.join(folder, FILE)
          new(folder, parsed(path, File.binread(path))).tap(&:check)
        end

        def self.parsed(path, text)
          sum = text.byteslice(START.size, 8)
          json = text.byteslice(START.size + 8 + MIDDLE.size...-CLOSE.size)
          unless text.start_with?(START) && text.byteslice(START.size + 8, MIDDLE.size) == MIDDLE && text.end_with?(CLOSE) && json
            raise DamagedError, "#{path} is damaged, or no manifest of a checkpoint: it has not the form #{START}…#{MIDDLE}…#{CLOSE.chomp}"
          end
          found = Checkpoint.hex(Distributed._crc32(json))
          raise DamagedError, "#{path} is damaged: its content should have the CRC-32 #{sum}, and has #{found}" unless found == sum

          JSON.parse(json.force_encoding(Encoding::UTF_8), max_nesting: NESTING)
        rescue JSON::ParserError => e
          raise DamagedError, "#{path} is damaged: #{e.message[0, 200]}"
        end
        private_class_method :parsed

        def initialize(folder, content)
          @folder = folder
          @content = content
        end

        def [](key)
          @content[key]
        end

        def path
          File.join(@folder, FILE)
        end

        # Whether what it says can be true: a place outside of its file, or a file elsewhere, is not looked for.
        def check
          unless @content.is_a?(Hash) && @content["format"] == FORMAT
            raise DamagedError, "#{path}: expected a #{FORMAT}, got #{@content.is_a?(Hash) ? @content["format"].inspect : @content.class}"
          end
          unless [VERSION, DIVIDED, STRIDED].include?(@content["version"])
            raise CheckpointError, "#{path} has version #{@content["version"].inspect} of the format, and this torch-ddp reads versions " \
              "#{VERSION} to #{STRIDED}: load it with the version that wrote it (#{@content["library"]})"
          end

          check_fields
          return @content["tensors"].each { |name, place| check_place(name, place) } unless divided?

          unless block.is_a?(Integer) && block.positive? && (block % 16).zero?
            raise DamagedError, "#{path}: the size of blocks cannot be #{block.inspect}"
          end
          @content["tensors"].each { |name, place| check_pieces(name, place) }
        end

        # @return [Boolean] whether tensors are in pieces
        def divided?
          @content["version"] >= DIVIDED
        end

        # @return [Integer, nil] how many bytes a checksum covers; nil: each tensor has one
        def block
          @content["block"] if divided?
        end

        private

        def check_fields
          kinds = {"files" => Hash, "tensors" => Hash, "objects" => Hash, "extra" => Hash, "serial" => Integer, "world_size" => Integer}
          kinds.each do |name, kind|
            raise DamagedError, "#{path}: expected #{name} to be #{kind.name}, got #{@content[name].class}" unless @content[name].is_a?(kind)
          end
          @content["files"].each do |name, file|
            raise DamagedError, "#{path}: #{name.inspect} is no name of a data file" unless Folder::DATA.match?(name)
            next if file.is_a?(Hash) && file.values_at("bytes", "header_bytes").all? { |number| number.is_a?(Integer) && number >= 0 }

            raise DamagedError, "#{path}: what it says of #{name} cannot be: #{file.inspect[0, 200]}"
          end
          wrong = @content["tensors"].find { |_, place| !place.is_a?(Hash) }
          raise DamagedError, "#{path}: what it says of #{wrong[0]} cannot be: #{wrong[1].inspect[0, 200]}" if wrong
        end

        def check_pieces(name, place)
          dtype = DTYPES[place["dtype"]]
          total = place["shape"].inject(1, :*) if shape?(place["shape"])
          fits = dtype && total && place["pieces"].is_a?(Array) &&
            place["pieces"].all? { |piece| piece.is_a?(Hash) && piece?(piece, dtype.bytes, total) }
          raise DamagedError, "#{path}: what it says of #{name} cannot be: #{place.inspect[0, 400]}" unless fits

          gap = Region.gap(place["pieces"].map { |piece| Manifest.region(piece) }, total)
          return unless gap

          raise DamagedError, "#{path}: what it says of #{name} cannot be: its pieces reach to element #{gap} of #{total}"
        end

        def shape?(shape)
          shape.is_a?(Array) && shape.all? { |size| size.is_a?(Integer) && size >= 0 }
        end

        def piece?(piece, bytes, total)
          file = @content["files"][piece["file"]]
          numbers = piece.values_at("start", "count", "offset")
          file && numbers.all? { |number| number.is_a?(Integer) && number >= 0 } &&
            rows?(*piece.values_at("start", "count", "width", "stride")) &&
            Manifest.region(piece).stop <= total && piece["bytes"] == piece["count"] * bytes &&
            piece["offset"] >= file["header_bytes"] && piece["offset"] + piece["bytes"] <= file["bytes"] &&
            piece["crc32"].is_a?(Array) && piece["crc32"].size == DataFile.each_block(piece["count"], bytes, block).size
        end

        def rows?(start, count, width, stride)
          return true if width.nil? && stride.nil?

          [width, stride].all?(Integer) && width.positive? && width < stride && count > width && (count % width).zero? &&
            start % stride + width <= stride
        end

        def check_place(name, place)
          dtype = DTYPES[place["dtype"]]
          shape = place["shape"]
          file = @content["files"][place["file"]]
          fits = dtype && file && shape?(shape) &&
            place["bytes"] == shape.inject(dtype.bytes, :*) && place["offset"].is_a?(Integer) &&
            place["offset"] >= file["header_bytes"] && place["offset"] + place["bytes"] <= file["bytes"]
          raise DamagedError, "#{path}: what it says of #{name} cannot be: #{place.inspect}" unless fits
        end
      end
    end
  end
end
