# frozen_string_literal: true

require "digest"
require "fileutils"
require "json"
require "time"

module Torch
  module Distributed
    module Checkpoint
      # One save, on all ranks: rank 0 makes a folder, every rank writes its part, rank 0 publishes the manifest once all
      # of it is on the disk, and then removes what is older.
      #
      # @api private
      class Saver
        # @param path [String] the folder of checkpoints
        # @param name [String, nil] of the new one within it; nil: `path` is the checkpoint itself
        # @param sharded [Boolean, nil] whether every rank writes; nil: if some have tensors that rank 0 has not
        def initialize(path, name, together, sharded:, keep:)
          @path = path
          @folder = name ? File.join(path, name) : path
          @within = !name.nil?
          @together = together
          @sharded = sharded
          @keep = keep
          @doing = "cannot save #{@folder}"
        end

        # @return [String] what is written, for errors' texts and logs
        attr_reader :folder

        # Decides which rank writes what, and prepares the folder. A collective call, as {#save} is.
        #
        # @param contents [Hash] what goes into the manifest beside the rest: epoch, step
        # @param objects [Hash{String => Object}] states, plain data
        # @param extra [Hash]
        # @param rng [Boolean]
        # @param buffers [Array<Torch::Tensor>] those within the states that may differ between ranks, so that rank 0's are saved
        # @return [self]
        def stage(contents, objects, extra, rng, buffers)
          @contents = contents
          @buffers = buffers.to_h { |tensor| [tensor.object_id, true] }
          plan(*pack(objects, extra, rng))
          @token, @serial = @together.on_first(@doing) { prepare }
          @staged = true
          self
        ensure
          abandon unless @staged
        end

        # Copies what this rank writes, so that it may change afterwards, and lets a thread write it.
        #
        # @return [AsyncSave]
        def save_later
          beside = nil
          @together.all(@doing) do
            copy
            beside = @together.beside(@token)
            nil
          end
          copied = true
          AsyncSave.new(self, beside)
        ensure
          abandon unless copied
        end

        # Writes and publishes what was staged. A collective call of those who are in `together`.
        #
        # @return [String] the checkpoint's folder
        def save(together = @together)
          @together = together
          written = write
          @together.on_first(@doing) do
            Folder.publish(@folder, manifest(written))
            tidy
          end
          @whole = true
          @folder
        ensure
          @mine = nil
          discard unless @whole
          release
        end

        # Gives up what was staged.
        def abandon
          discard
          release
        end

        private

        # Also for children that were forked meanwhile, which have the lock's file open.
        def release
          Folder.unlock(@lock) if @lock
          @lock = nil
        end

        def copy
          @mine = @mine&.map { |entry| entry.dup.tap { |own| own.tensor = copied(entry.tensor) } }
          @entries.each_value { |entry| entry.tensor = nil }
        end

        # In host memory that nothing else uses.
        def copied(tensor)
          plain = DataFile.memory_of(tensor)
          (Distributed._span(plain) == Distributed._span(tensor)) ? plain.clone : plain
        end

        # Looks first at what cannot work.
        def prepare
          if @within && Manifest.in?(@path)
            raise ArgumentError, "#{@path} is a checkpoint itself (it has a #{Manifest::FILE}): name the folder that it is in"
          end

          FileUtils.mkdir_p(@path)
          @lock = Folder.lock(@path)
          @within ? Folder.clean(@path) : Folder.clean_within(@folder)
          FileUtils.mkdir_p(@folder)
          [Folder.token, serial]
        end

        def serial
          manifests = @within ? Folder.newest_first(@path) : []
          (manifests.map { |manifest| manifest["serial"] }.max || 0) + 1
        end

        # Where all ranks say the same of everything, that need not be sent around.
        def pack(objects, extra, rng)
          tree = Tree.new
          packed = mine = nil
          said = @together.all(@doing) do
            packed = pack_all(tree, objects, extra)
            mine = [packed["objects"], tree.kinds, Distribution.described(tree.entries.values, @buffers, compare: @together.size > 1)]
            [rng ? [Distributed._rng_state].pack("m0") : nil, Digest::SHA256.hexdigest(JSON.generate(mine, max_nesting: Manifest::NESTING))]
          end
          equal = said.map(&:last).uniq.size == 1
          all = equal ? Array.new(@together.size) { mine } : @together.all(@doing) { mine }
          merge(packed, all, tree, said.map(&:first), rng)
        end

        def pack_all(tree, objects, extra)
          {"objects" => objects.to_h { |name, state| [name, tree.pack(state, name)] }, "extra" => tree.pack(extra, "extra")}
        end

        # @param all [Array<Array>] by rank: states, {Tree#kinds} and what {Distribution.described} gave
        # @param states [Array<String>] of random numbers, by rank
        # @return [Array(Hash, Hash)] for {#plan}
        def merge(packed, all, tree, states, rng)
          packed["objects"] = naming { Merging.new(all.map { |objects, kinds, _| [objects, kinds] }).result }
          packed["rng"] = rng ? packed_rng(tree, states) : nil
          rows = Distribution.described(tree.entries.values.select { |entry| entry.name.start_with?("rng.") }, @buffers, compare: false)
          @distribution = naming { distribution(all.map { |_, _, own| own + rows }) }
          [packed, tree.entries]
        end

        # Rank 0 writes everything, unless it has not everything.
        def distribution(lists)
          found = Distribution.new(lists, spread: @sharded)
          name = found.elsewhere
          return found if @sharded || name.nil?

          if @sharded == false
            raise ArgumentError, "sharded: expected true or nil, got false: rank 0, which writes everything then, has no #{name}"
          end
          @sharded = true
          @together.agree(@doing, "the folder" => File.expand_path(@folder))
          found
        end

        def naming
          yield
        rescue MismatchError, ArgumentError => e
          raise (e.is_a?(MismatchError) ? MismatchError : CheckpointError), "#{@doing}: #{e.message}"
        end

        def packed_rng(tree, states)
          states.each_with_index.map do |state, rank|
            bytes = state.unpack1("m0")
            tree.pack(Distributed.send(:_set_bytes, Torch.empty([bytes.bytesize], dtype: :uint8), bytes), "rng.#{rank}")
          end
        end

        # @param packed [Hash] what stands in the manifest of the states
        # @param entries [Hash{String => Tree::Entry}]
        def plan(packed, entries)
          @packed = packed
          @entries = entries
          @mine = @distribution.part(@together.rank).map { |item| file_entry(item, entries.fetch(item.name)) }
          @mine = nil if @mine.empty? && @together.rank.positive?
        end

        # @return [Tree::Entry] what is written of an item
        def file_entry(_item, entry)
          entry
        end

        # @return [Array<Hash>] by rank, what {DataFile.write} said; nil for a rank that wrote nothing
        def write
          @together.all(@doing) do
            next if @mine.nil?

            @data = File.join(@folder, Folder.data_name(@token, @together.rank, @sharded ? @together.size : 1))
            [File.basename(@data), write_file]
          end
        end

        def write_file
          DataFile.write(@data, @mine)
        end

        def manifest(written)
          {
            "format" => Manifest::FORMAT, "version" => version, "library" => ["torch-ddp", Gem.loaded_specs["torch-ddp"]&.version].compact.join(" "),
            "libtorch" => LIBTORCH_VERSION, "saved_at" => Time.now.utc.iso8601(3), "serial" => @serial,
            "world_size" => @together.size, "sharded" => @sharded ? true : false, **@contents,
            "files" => written.compact.to_h { |name, said| [name, said["file"]] }, "tensors" => tensors(written), **@packed
          }
        end

        def version
          Manifest::VERSION
        end

        def tensors(written)
          places = written.compact.each_with_object({}) do |(name, said), all|
            said["tensors"].each { |tensor, place| all[tensor] = place.merge("file" => name) }
          end
          result = {}
          @distribution.each_tensor { |name, dtype, shape, _| result[name] = {"dtype" => dtype, "shape" => shape}.merge(places.fetch(name)) }
          result
        end

        # What is older goes only now. A fault here is no fault of the new checkpoint.
        def tidy
          Folder.clean_within(@folder)
          return unless @keep && @within

          Folder.newest_first(@path).drop(@keep).each { |manifest| Folder.remove(manifest.folder) unless manifest.folder == @folder }
        rescue SystemCallError => e
          Distributed._warn "torch-ddp: #{@folder} is saved, but older files could not be removed: #{e.message}"
        end

        # After a failure nothing of this save stays.
        def discard
          return if @data && published?

          Folder.delete(@data) if @data
          Folder.remove(@folder) if @lock && @within && !Manifest.in?(@folder)
        rescue SystemCallError
          # The next save cleans up.
          nil
        end

        # It may be, though its maker could not be sure of that.
        def published?
          Manifest.in?(@folder) && Manifest.read(@folder)["files"].key?(File.basename(@data))
        rescue Error, SystemCallError
          true
        end
      end
    end
  end
end
