# frozen_string_literal: true

require "fileutils"
require "securerandom"

module Torch
  module Distributed
    module Checkpoint
      # Files and folders: which are checkpoints, in which order they were made, and what a writer that was killed left.
      #
      # @api private
      module Folder
        # @return [Regexp] files of tensors: which save, which rank of how many
        DATA = /\Adata-[0-9a-f]{16}-\d+-of-\d+\.safetensors\z/
        LOCK = ".lock"
        OURS = Regexp.union(DATA, /\A#{Regexp.union(Manifest::FILE, Manifest::PARTIAL, LOCK)}\z/)

        module_function

        def data_name(token, rank, size)
          "data-#{token}-#{rank}-of-#{size}.safetensors"
        end

        def token
          SecureRandom.hex(8)
        end

        # @return [Array<String>] the checkpoints within `dir`, in no order
        def checkpoints(dir)
          children(dir).filter_map { |name| File.join(dir, name).then { |folder| folder if Manifest.in?(folder) } }
        end

        # @yieldparam folder [String] one whose manifest cannot be read
        # @yieldparam error [StandardError]
        # @return [Array<Manifest>] those within `dir`, the newest first
        def newest_first(dir)
          manifests = checkpoints(dir).filter_map do |folder|
            Manifest.read(folder)
          rescue Error, SystemCallError => e
            yield folder, e if block_given?
            nil
          end
          manifests.sort_by { |manifest| [-manifest["serial"], manifest.folder] }
        end

        # Removes what unfinished saves left within `dir`.
        def clean(dir)
          children(dir).each do |name|
            folder = File.join(dir, name)
            next unless File.directory?(folder)

            inside = children(folder)
            if !Manifest.in?(folder)
              remove(folder) if !inside.empty? && inside.all? { |each| OURS.match?(each) }
            elsif inside.grep(DATA).map { |each| each[5, 16] }.uniq.size > 1 || inside.include?(Manifest::PARTIAL)
              clean_within(folder)
            end
          end
        end

        # Removes files of other saves than that which the manifest stands for.
        def clean_within(folder)
          kept = Manifest.in?(folder) ? Manifest.read(folder)["files"].keys : []
          stale = children(folder).select { |name| name == Manifest::PARTIAL || (DATA.match?(name) && !kept.include?(name)) }
          stale.each { |name| delete(File.join(folder, name)) }
        rescue DamagedError
          # Which files it needs is unknown.
          nil
        end

        # Removes a checkpoint: from its first step on it is none.
        def remove(folder)
          delete(File.join(folder, Manifest::FILE))
          children(folder).grep(OURS).each { |name| delete(File.join(folder, name)) }
          Dir.rmdir(folder)
        rescue Errno::ENOTEMPTY, Errno::EEXIST, Errno::ENOENT
          # It contains files that are not a checkpoint's.
          nil
        end

        # Makes names in this folder durable.
        def sync(folder)
          File.open(folder, &:fsync)
        rescue Errno::EINVAL
          # Some file systems cannot do that.
          nil
        end

        # Puts a manifest in place: the moment at which the folder becomes a checkpoint, or another one.
        def publish(folder, content)
          partial = File.join(folder, Manifest::PARTIAL)
          sync(folder)
          File.open(partial, "wb") do |file|
            file.write(Manifest.text(content))
            file.fsync
          end
          File.rename(partial, File.join(folder, Manifest::FILE))
          sync(folder)
          sync(File.dirname(folder))
        ensure
          delete(partial)
        end

        # Runs the block while no other process saves into `dir`.
        def lock(dir)
          file = File.open(File.join(dir, LOCK), File::RDWR | File::CREAT)
          unless locked?(file)
            raise CheckpointError, "#{dir}: another process is saving into it; give each run a folder of its own"
          end

          file
        rescue CheckpointError
          file.close
          raise
        end

        def unlock(file)
          file.flock(File::LOCK_UN)
        rescue SystemCallError
          # As above.
          nil
        ensure
          file.close
        end

        def locked?(file)
          file.flock(File::LOCK_EX | File::LOCK_NB)
        rescue Errno::ENOLCK, Errno::ENOTSUP, Errno::EINVAL
          # Some file systems have no locks.
          true
        end

        def children(dir)
          Dir.children(dir)
        rescue Errno::ENOENT, Errno::ENOTDIR
          []
        end

        def delete(path)
          File.delete(path)
        rescue Errno::ENOENT
          nil
        end
      end
    end
  end
end
