# frozen_string_literal: true

require "set"

module Torch
  module Distributed
    module Checkpoint
      # One load, on all ranks: rank 0 chooses the checkpoint, every rank reads it and compares its checksums, and only when
      # that went well on all is anything changed. If the newest is damaged they go on to the one before together. Files of
      # safetensors, which others may have written, hold one model.
      #
      # @api private
      class Loader
        # What was read of a checkpoint.
        Content = Struct.new(:path, :names, :objects, :fields, :extra, :rng, :world_size, :divided)

        # How the names of files of safetensors end, and of their indexes.
        SAFETENSORS = [".safetensors", ".safetensors.index.json"].freeze

        # How often to look again at what changes while it is read.
        RETRIES = 3

        # What is raised where no checkpoint can be read; of several the first.
        KINDS = [DamagedError, CheckpointError, NotFoundError].freeze
        private_constant :SAFETENSORS, :RETRIES, :KINDS

        def initialize(path, together, strict:, names: nil, convert: false)
          @path = path
          @together = together
          @strict = strict
          @names = names
          @convert = convert
          @skipped = Set.new
        end

        # @param objects [Hash] by name
        # @param whole [Boolean] whether the objects are a state dict as a whole
        # @return [Loaded, nil] nil: there is no checkpoint
        def load(objects, rng, whole: false)
          @objects = objects
          offered = offer
          file = offered.first&.first if offered.first&.first&.end_with?(*SAFETENSORS)
          @together.all("cannot load #{@path}") { prepare(file) }
          return load_safetensors(file) if file

          content = whole_content(offered, objects.keys.map(&:to_s), rng, whole)
          return unless content

          doing = "cannot load #{content.path}"
          @terms = States::Terms.new(@strict, content.divided || @parts.divided?, @parts, {})
          check_elsewhere(doing, @together.all(doing) { check(objects, content) })
          @together.all(doing) { restore(objects, content, whole) }
          restored = rng && restore_rng(doing, content)
          epoch, step = content.fields.values_at("epoch", "step")
          Loaded.new(path: content.path, epoch: epoch, step: step, extra: content.extra, world_size: content.world_size,
            rng_restored: restored ? true : false)
        end

        private

        def prepare(file)
          if file && (@objects.size != 1 || !@objects.values.first.is_a?(Torch::NN::Module))
            raise ArgumentError, "#{file} holds one model: expected one Torch::NN::Module, under any name, got " \
              "#{@objects.map { |name, object| "#{name} (#{object.class})" }.join(", ").then { |text| text.empty? ? "none" : text }}"
          end
          if !file && (@names || @convert)
            raise ArgumentError, "#{@names ? "names" : "convert"}: expected files of safetensors, which it is for, got #{@path}"
          end

          @parts = Parts.new(@objects)
          nil
        end

        def load_safetensors(file)
          Safetensors::ModelLoader.new(@objects.values.first, file, @together, strict: @strict, names: @names, convert: @convert).load
          Loaded.new(path: file, extra: {}, rng_restored: false)
        rescue CheckpointError => e
          # It is raised on all ranks, with a cause on those that failed.
          kinds = @together.all("cannot load #{file}") { KINDS.index { |kind| kind === e.cause } }
          raise KINDS[kinds.compact.first || KINDS.index(CheckpointError)], e.message, cause: e.cause
        end

        # A run that goes on saving may replace and remove what is being read: then what is there now is looked at.
        def whole_content(offered, names, rng, whole)
          RETRIES.times do
            return first_good(offered.map(&:first), names, rng, whole)
          rescue CheckpointError, NotFoundError
            now = offer
            raise if now == offered

            offered = now
          end
          first_good(offered.map(&:first), names, rng, whole)
        end

        def offer
          @together.on_first("cannot load #{@path}") { candidates.map { |path| [path, stamp(path)] } }
        end

        # Paths, the newest first; one that was asked for by name stands alone.
        def candidates
          return [@path] if File.file?(@path) || Manifest.in?(@path)

          folders = Folder.newest_first(@path) { |folder, error| skip(folder, error.message) }.map(&:folder)
          folders.empty? ? [Safetensors::Source.in_folder(@path)].compact : folders
        end

        # Distinguishes one save from the next.
        def stamp(path)
          stat = File.stat(File.directory?(path) ? File.join(path, Manifest::FILE) : path)
          [stat.ino, stat.size, stat.mtime.to_r.to_s]
        rescue Errno::ENOENT
          nil
        end

        def skip(folder, reason)
          Distributed._warn "torch-ddp: the checkpoint #{folder} is left out: #{reason}" if @skipped.add?(folder)
        end

        # @return [Content, nil] nil: there is none at all
        def first_good(candidates, names, rng, whole)
          return if candidates.empty?

          reasons = []
          kinds = []
          candidates.each do |candidate|
            content = nil
            outcomes, error = @together.outcomes do
              content = read(candidate, names, rng, whole)
              nil
            end
            rank = outcomes.index(&:error)
            return content unless rank

            reasons << "#{"rank #{rank}: " if @together.size > 1}#{outcomes[rank].error}"
            kinds << kind_of(error, rank)
            raise kinds.last, "cannot load #{candidate}: #{reasons.last}", cause: error if candidates.size == 1

            skip(candidate, reasons.last) if @together.rank.zero?
          end
          raise kinds.min_by { |kind| KINDS.index(kind) }, "cannot load #{@path}: none of its #{candidates.size} checkpoints is good: #{reasons.join("; ")}"
        end

        # What all ranks raise: what fits the error of that one.
        def kind_of(error, rank)
          kinds = @together.all("cannot load #{@path}") { KINDS.index { |kind| kind === error } }
          KINDS[kinds[rank] || KINDS.index(CheckpointError)]
        end

        def read(path, names, rng, whole)
          return read_file(path, names, whole) if File.file?(path)

          manifest = Manifest.read(path)
          state = (rng && manifest["world_size"] == @together.size) ? manifest["rng"]&.at(@together.rank) : nil
          Checkpoint.with_tensors(manifest) do |tensor|
            objects = manifest["objects"].slice(*names).transform_values { |each| Tree.read(each, &tensor) }
            extra, state = [manifest["extra"], state].map { |each| Reading.whole(Tree.read(each, &tensor)) }
            Content.new(path, manifest["objects"].keys, Reading.objects(@objects, objects, @parts), manifest.content.slice("epoch", "step"),
              extra, state, manifest["world_size"], manifest.divided?)
          end
        rescue Errno::ENOENT => e
          raise NotFoundError, e.message
        end

        def read_file(path, names, whole)
          TorchFile.content(path, names, whole).tap { |content| content.objects = Reading.objects(@objects, content.objects, @parts) }
        end

        def check(objects, content)
          objects.each do |name, object|
            unless content.objects.key?(name.to_s)
              raise ArgumentError, "#{name}: it was not saved, there is #{content.names.first(8).join(", ")}" \
                "#{", ... (#{content.names.size} in all)" if content.names.size > 8}"
            end

            States.check_fit(name.to_s, object, content.objects[name.to_s], @terms)
          end
          @terms.elsewhere
        end

        # @param said [Array<Hash>] by rank, the names of each object that this rank has not
        def check_elsewhere(doing, said)
          said.first.each_key do |name|
            lost = said.map { |each| each.fetch(name, []) }.inject(:&)
            next if lost.empty?

            raise CheckpointError, "#{doing}: #{name}: what was saved does not fit: #{States.listed("not known to any rank", lost).first}"
          end
        end

        def restore(objects, content, whole)
          objects.each do |name, object|
            value = States.restore(name.to_s, object, content.objects[name.to_s], @terms)
            objects[name] = value if whole
          end
          nil
        end

        def restore_rng(doing, content)
          @together.all(doing) do
            next false unless content.rng

            Distributed.set_rng_state(content.rng)
            true
          end.all?
        end
      end
    end
  end
end
