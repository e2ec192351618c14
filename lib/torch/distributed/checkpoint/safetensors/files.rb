# frozen_string_literal: true

module Torch
  module Distributed
    module Checkpoint
      module Safetensors
        # A new file, whose tensors are written one by one, and which gets its name when it is whole.
        #
        # @api private
        class Writer
          # @return [String]
          attr_reader :path

          # @param path [String]
          # @param entries [Array<Tree::Entry>] names, dtypes and shapes of what will be written
          # @param metadata [Hash{String => String}]
          def initialize(path, entries, metadata)
            @path = path
            @partial = "#{path}.partial-#{Folder.token}"
            entries = DataFile.ordered(entries)
            header = DataFile.header_of(entries, metadata)
            at = header.bytesize
            @places = entries.to_h { |entry| [entry.name, at.tap { at += entry.bytes }] }
            @file = File.open(@partial, File::WRONLY | File::CREAT | File::EXCL | File::BINARY)
            @file.write(header)
            @file.flush
          rescue SystemCallError
            discard if @file
            raise
          end

          def write(name, tensor)
            Distributed._write_tensor(DataFile.memory_of(tensor), @file.fileno, @partial, @places.fetch(name))
          end

          # Makes durable what was written.
          def finish
            @file.fsync
            @file.close
          end

          def publish
            File.rename(@partial, @path)
            @published = true
            Folder.sync(File.dirname(@path))
          end

          # Removes what was not published.
          def discard
            @file.close
            Folder.delete(@partial) unless @published
          end
        end

        # The tensors of a file, of several with an index, or of a folder with either.
        #
        # @api private
        class Source
          INDEX = "model.safetensors.index.json"
          SINGLE = "model.safetensors"

          # Where a tensor is: its file, and what that says of it.
          Place = Struct.new(:file, :header, :row) do
            # Regions with gaps are read along with these.
            #
            # @param regions [Array<Region>]
            # @return [Torch::Tensor] of one dimension
            def read(regions)
              return range(0, 0) if regions.empty?

              from = regions.first.start
              all = range(from, regions.last.stop - from)
              (regions.size == 1 && regions.first.contiguous?) ? all : Torch.cat(regions.map { |region| region.take(all, from) })
            end

            # @return [Torch::Tensor] of one dimension: elements from `start` on
            def range(start, count)
              room = Checkpoint.room(row.dtype, [count])
              Distributed._read_tensor(room, file.fileno, file.path, header.start + row.first + start * Header::BYTES.fetch(row.word))
              room
            end
          end

          # @return [String, nil] what {#initialize} reads in a folder
          def self.in_folder(path)
            [INDEX, SINGLE].map { |name| File.join(path, name) }.find { |file| File.file?(file) }
          end

          # @return [Hash{String => Place}]
          attr_reader :places

          # @yieldparam source [Source] whose files are open while the block runs
          def self.open(path)
            source = new(path)
            yield source
          rescue Errno::ENOENT, Errno::ENOTDIR => e
            raise NotFoundError, e.message
          ensure
            source&.close
          end

          def initialize(path)
            @files = []
            path = self.class.in_folder(path) || File.join(path, SINGLE) if File.directory?(path)
            @places = path.end_with?(".json") ? indexed(path) : places_of(path)
          rescue
            close
            raise
          end

          def close
            @files.each(&:close)
          end

          private

          def file_name?(name)
            name.is_a?(String) && !["", ".", ".."].include?(name) && !name.match?(%r{[/\0]})
          end

          def places_of(path)
            @files << (file = File.open(path, "rb"))
            header = Header.new(file)
            header.rows.transform_values { |row| Place.new(file, header, row) }
          end

          def indexed(path)
            map = begin
              raise TypeError, "it has #{File.size(path)} bytes, more than #{Header::LIMIT}" if File.size(path) > Header::LIMIT

              JSON.parse(File.binread(path).force_encoding(Encoding::UTF_8)).fetch("weight_map")
            rescue JSON::JSONError, EncodingError, TypeError, NoMethodError, IndexError => e
              raise DamagedError, "#{path} is damaged, or no index of safetensors: #{e.message[0, 120]}"
            end
            unless map.is_a?(Hash) && map.values.all? { |name| file_name?(name) }
              raise DamagedError, "#{path} is damaged, or no index of safetensors: it has no weight_map of names and files beside it"
            end

            files = map.values.uniq.to_h { |name| [name, places_of(File.join(File.dirname(path), name))] }
            map.to_h do |name, file|
              [name, files[file].fetch(name) { raise DamagedError, "#{path} is damaged: it says that #{name.inspect} is in #{file}, which has none" }]
            end
          end
        end
      end
    end
  end
end
