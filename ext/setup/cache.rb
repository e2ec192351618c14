# frozen_string_literal: true

require "fileutils"
require "rbconfig"

module Setup
  # What is made once for all checkouts lies under the user's cache folder.
  module Cache
    module_function

    def root
      base = ENV["XDG_CACHE_HOME"].to_s
      base = File.join(Dir.home, ".cache") unless base.start_with?("/")
      File.join(base, "torch-ddp")
    end

    def path(*parts)
      File.join(root, *parts)
    end

    # Holds the lock of a folder in the cache, so that two checkouts do not make it at the same time.
    # The lock ends with the process, however that ends.
    def locked(folder)
      FileUtils.mkdir_p(File.dirname(folder))
      File.open("#{folder}.lock", File::RDWR | File::CREAT) do |file|
        unless file.flock(File::LOCK_EX | File::LOCK_NB)
          Console.say "waiting: another process is making #{folder}"
          file.flock(File::LOCK_EX)
        end
        yield
      end
    end

    # Ruby's ABI and the machine, as folder names show them.
    def ruby_key
      "ruby-#{RbConfig::CONFIG["ruby_version"]}-#{RbConfig::CONFIG["arch"]}"
    end
  end
end
