# frozen_string_literal: true

module Torch
  module Distributed
    module Checkpoint
      module Safetensors
        # Fills a model from files: this process's pieces where it is sharded.
        #
        # @api private
        class ModelLoader
          # @param together [Together] all that do it
          # @param names [Hash, #call, nil] from the files' names to the model's
          # @param convert [Boolean] whether floating-point numbers may be of another dtype than the model's
          def initialize(model, path, together, strict:, names:, convert:)
            @model = States.unwrapped(model)
            @path = path
            @together = together
            @strict = strict
            @names = names
            @convert = convert
          end

          # Nothing is changed before all have read everything.
          def load
            read = nil
            doing = "cannot load #{@path}"
            @together.all(doing) do
              parts = Parts.new({"model" => @model})
              own = parts.layout(@model)
              @others = parts.partial?(@model)
              read = Source.open(@path) do |source|
                places = renamed(source.places)
                check(own, places)
                values(own, places)
              end
              nil
            end
            @together.all(doing) do
              Torch.no_grad { read.each { |piece, value| piece.fill(value) } }
              nil
            end
          end

          private

          # @return [Hash{String => Source::Place}] by the model's names
          def renamed(places)
            return places if @names.nil?

            names = places.to_h { |name, _| [name, renamed_to(name)] }.compact
            unknown = @names.is_a?(Hash) ? @names.keys.map(&:to_s) - places.keys : []
            raise ArgumentError, "names: #{@path} has no #{unknown.first(6).join(", ")}" unless unknown.empty? || !@strict

            twice = names.values.tally.find { |_, count| count > 1 }&.first
            raise ArgumentError, "names: #{names.select { |_, name| name == twice }.keys.join(" and ")} all become #{twice}" if twice

            names.to_h { |name, other| [other, places[name]] }
          end

          # @return [String, nil] nil: this tensor is left out
          def renamed_to(name)
            other = if @names.is_a?(Hash)
              [name, name.to_sym].find { |key| @names.key?(key) }.then { |key| key ? @names[key] : name }
            else
              @names.call(name)
            end
            return other&.to_s if other.nil? || other.is_a?(String) || other.is_a?(Symbol)

            raise TypeError, "names: expected a name of the model's or nil for #{name}, got #{other.inspect[0, 80]}"
          end

          def check(own, places)
            faults = @strict ? States.listed("missing", missing(own, places)) : []
            faults += States.listed("not known to the model", places.keys - own.keys) if @strict && !@others
            own = own.slice(*places.keys)
            faults += States.listed("of another shape", States.different(own, places) { |each| each.is_a?(Piece) ? each.shape : each.row.shape })
            faults += States.listed("of another dtype", dtypes(own, places))
            return if faults.empty?

            raise ArgumentError, "#{@path} does not fit this #{@model.class.name}: #{faults.join("; ")}"
          end

          # Of a tensor with several names one suffices.
          def missing(own, places)
            known = {}.compare_by_identity
            named = @model.named_parameters
            own.each_key { |name| known[named[name]] = true if named[name] && places.key?(name) }
            own.keys.reject { |name| places.key?(name) || known[named[name]] }
          end

          def dtypes(own, places)
            own.filter_map do |name, piece|
              row = places[name].row
              mine = Checkpoint.dtype_name(piece.tensor)
              next if row.dtype == mine

              floats = [row.dtype, mine].all? { |each| each.to_s.include?("float") }
              next if floats && @convert

              "#{name} (the model's #{mine}, in the file #{row.word}#{"; convert: true converts" if floats})"
            end
          end

          # @return [Array<Array(Piece, Torch::Tensor)>]
          def values(own, places)
            own.slice(*places.keys).map do |name, piece|
              value = places[name].read(piece.regions)
              dtype = piece.tensor.dtype
              [piece, (value.dtype == dtype) ? value : value.to(piece.tensor.device, dtype: dtype)]
            end
          end
        end

        # Saves a model in files of limited size, as model hubs have them. What ranks divide is gathered unit by unit.
        #
        # @api private
        class ModelSaver
          def initialize(model, folder, limit, metadata, together)
            @model = States.unwrapped(model)
            @folder = folder
            @limit = limit
            @metadata = metadata
            @together = together
            @doing = "cannot save #{folder}"
          end

          # @return [Array<String>] the files, the index last
          def save
            parts = nil
            @together.on_first(@doing) { prepare }
            @together.all(@doing) do
              parts = Parts.new({"model" => @model})
              check(parts)
              nil
            end
            @together.on_first(@doing) { open_files }
            write(parts)
            @together.on_first(@doing) { publish }
          ensure
            @writers&.each(&:discard)
          end

          private

          def prepare
            FileUtils.mkdir_p(@folder)
            nil
          end

          # The first name of each tensor.
          def check(parts)
            if parts.partial?(@model)
              raise ArgumentError, "this #{@model.class.name} has a part of a model's names: gather it by full_state_dict, and save that"
            end

            seen = {}.compare_by_identity
            named = @model.named_parameters
            @tensors = parts.layout(@model).reject do |name, _|
              parameter = named[name]
              parameter && (seen.key?(parameter) || !(seen[parameter] = true))
            end
            @tensors.each { |name, piece| Safetensors.check_tensor(name, piece.tensor) }
          end

          def open_files
            entries = @tensors.map { |name, piece| Tree::Entry.new(name, nil, Checkpoint.dtype_name(piece.tensor), piece.shape) }
            groups = grouped(entries)
            @writers = []
            @writer_of = {}
            groups.each_with_index do |group, i|
              path = File.join(@folder, (groups.size == 1) ? Source::SINGLE : format("model-%05d-of-%05d.safetensors", i + 1, groups.size))
              @writers << (writer = Writer.new(path, group, @metadata))
              group.each { |entry| @writer_of[entry.name] = writer }
            end
            @bytes = entries.sum(&:bytes)
            nil
          end

          # In the model's order; a tensor that is larger than the limit has a file of its own.
          def grouped(entries)
            size = 0
            entries.each_with_object([[]]) do |entry, groups|
              if !groups.last.empty? && size + entry.bytes > @limit
                groups << []
                size = 0
              end
              groups.last << entry
              size += entry.bytes
            end
          end

          # What is divided comes unit by unit; the rest is written by the first.
          def write(parts)
            names = {}.compare_by_identity
            @tensors.each { |name, piece| names[piece.tensor] = name }
            Gathering.each(@model) do |gathered|
              @together.on_first(@doing) do
                gathered.each { |parameter, tensor| @writer_of[names[parameter]].write(names[parameter], tensor) if names[parameter] }
                nil
              end
            end
            @together.on_first(@doing) do
              @tensors.each { |name, piece| @writer_of[name].write(name, piece.tensor) unless parts.piece?(piece.tensor) }
              nil
            end
          end

          # Without its index a set of files is no model: there is none between the first and the last new name.
          def publish
            @writers.each(&:finish)
            index = File.join(@folder, Source::INDEX)
            Folder.delete(index)
            @writers.each(&:publish)
            return @writers.map(&:path) if @writers.size == 1

            publish_index(index)
            Folder.delete(File.join(@folder, Source::SINGLE))
            @writers.map(&:path) << index
          end

          def publish_index(index)
            map = @writer_of.transform_values { |writer| File.basename(writer.path) }
            partial = "#{index}.partial-#{Folder.token}"
            File.open(partial, "wb") do |file|
              file.write(JSON.pretty_generate({"metadata" => {"total_size" => @bytes}, "weight_map" => map}), "\n")
              file.fsync
            end
            File.rename(partial, index)
            Folder.sync(@folder)
          ensure
            Folder.delete(partial) if partial
          end
        end
      end
    end
  end
end
