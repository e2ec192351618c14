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
      # shape, file, offset, size and CRC-32, "objects" and "extra" are {Tree}s.
      #
      # @api private
      class Manifest
        FILE = "manifest.json"
        PARTIAL = "manifest.json.partial"
        FORMAT = "torch-ddp checkpoint"
        VERSION = 1
        START = '{"crc32":"'
        MIDDLE = '","content":'
        CLOSE = "}\n"
        private_constant :START, :MIDDLE, :CLOSE

        # @return [Hash]
        attr_reader :content

        # @return [String] the checkpoint's folder
        attr_reader :folder

        def self.in?(folder)
          File.file?(File.join(folder, FILE))
        end

        def self.text(content)
          json = JSON.generate(content, max_nesting: false)
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

          JSON.parse(json.force_encoding(Encoding::UTF_8), max_nesting: false)
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
          unless @content["version"] == VERSION
            raise CheckpointError, "#{path} has version #{@content["version"].inspect} of the format, and this torch-ddp reads version " \
              "#{VERSION}: load it with the version that wrote it (#{@content["library"]})"
          end

          @content["files"].each_key do |name|
            raise DamagedError, "#{path}: #{name.inspect} is no name of a data file" unless Folder::DATA.match?(name)
          end
          @content["tensors"].each { |name, place| check_place(name, place) }
        end

        private

        def check_place(name, place)
          dtype = DTYPES[place["dtype"]]
          shape = place["shape"]
          file = @content["files"][place["file"]]
          fits = dtype && file && shape.is_a?(Array) && shape.all? { |size| size.is_a?(Integer) && size >= 0 } &&
            place["bytes"] == shape.inject(dtype.bytes, :*) && place["offset"].is_a?(Integer) &&
            place["offset"] >= file["header_bytes"] && place["offset"] + place["bytes"] <= file["bytes"]
          raise DamagedError, "#{path}: what it says of #{name} cannot be: #{place.inspect}" unless fits
        end
      end
    end
  end
end
